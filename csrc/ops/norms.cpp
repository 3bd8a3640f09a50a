// Norms of rows; the order of every sum depends only on the width.
#include "ops/row_op.h"

namespace octavo::OCTAVO_ISA {
namespace {

/// Each of the `groups` equal parts of a row alone: out = x / sqrt(mean(x^2) + eps) * weight; out may be x.
struct RmsNorm {
  View x, out;
  const float* weight;
  float eps;
  int64_t groups, width;
};
constexpr Field kRmsNorm[] = {OCTAVO_FIELD(RmsNorm, x),   OCTAVO_FIELD(RmsNorm, out),    OCTAVO_FIELD(RmsNorm, weight),
                              OCTAVO_FIELD(RmsNorm, eps), OCTAVO_FIELD(RmsNorm, groups), OCTAVO_FIELD(RmsNorm, width)};

void rms_norm(const RmsNorm& args, const Step&, int64_t first, int64_t last) {
  const int64_t width = args.width / args.groups;
  const float* weight = args.weight;
  for (int64_t row = first; row < last; row++) {
    for (int64_t at = 0; at < args.width; at += width) {
      const float* x = args.x.row(row) + at;
      const f32x16 factor = splat(norm_factor(x, width, args.eps));
      map_row(args.out.row(row) + at, width, [=](int64_t i, int64_t n) __attribute__((always_inline)) {
        return load_lanes(x + i, n) * factor * load_lanes(weight + i, n);
      });
    }
  }
}

/// out = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias (null: none); out may be x.
struct LayerNorm {
  View x, out;
  const float *weight, *bias;
  float eps;
  int64_t width;
};
constexpr Field kLayerNorm[] = {OCTAVO_FIELD(LayerNorm, x),      OCTAVO_FIELD(LayerNorm, out),
                                OCTAVO_FIELD(LayerNorm, weight), OCTAVO_FIELD(LayerNorm, bias),
                                OCTAVO_FIELD(LayerNorm, eps),    OCTAVO_FIELD(LayerNorm, width)};

/// The sum of f(i, lanes) over a row, whose lanes beyond the width must be zero.
template <class Function>
OCTAVO_INLINE float sum_row(int64_t width, Function f) {
  f32x16 total = {};
  for (int64_t i = 0; i < width; i += kLanes) total += f(i, width - i);
  return sum(total);
}

/// The first n lanes of x, zeros elsewhere.
OCTAVO_INLINE f32x16 first_lanes(f32x16 x, int64_t n) {
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lane < static_cast<int32_t>(n < kLanes ? n : kLanes) ? x : f32x16{};
}

void layer_norm(const LayerNorm& args, const Step&, int64_t first, int64_t last) {
  const float *weight = args.weight, *bias = args.bias;
  for (int64_t row = first; row < last; row++) {
    const float* x = args.x.row(row);
    const float mean = sum_row(args.width, [=](int64_t i, int64_t n) { return load_lanes(x + i, n); }) /
                       static_cast<float>(args.width);
    const float squares = sum_row(args.width, [=](int64_t i, int64_t n) {
      const f32x16 apart = first_lanes(load_lanes(x + i, n) - mean, n);
      return apart * apart;
    });
    const f32x16 factor = splat(1.0f / sqrtf(squares / static_cast<float>(args.width) + args.eps));
    map_row(args.out.row(row), args.width, [=](int64_t i, int64_t n) __attribute__((always_inline)) {
      const f32x16 y = (load_lanes(x + i, n) - mean) * factor * load_lanes(weight + i, n);
      return bias == nullptr ? y : y + load_lanes(bias + i, n);
    });
  }
}

constexpr RowOp kOps[] = {row_op<RmsNorm, rms_norm>("rms_norm", kRmsNorm),
                          row_op<LayerNorm, layer_norm>("layer_norm", kLayerNorm)};

}  // namespace

const RowOps norms_ops = row_ops(kOps);

}  // namespace octavo::OCTAVO_ISA

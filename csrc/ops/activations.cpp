// Functions of single numbers, and gates made of them.
#include "ops/row_op.h"

namespace octavo::OCTAVO_ISA {
namespace {

/// x = [gate | up] -> out [width] = activation(gate) * up.
struct Gated {
  View x, out;
  int64_t width;
};
constexpr Field kGated[] = {OCTAVO_FIELD(Gated, x), OCTAVO_FIELD(Gated, out), OCTAVO_FIELD(Gated, width)};

template <class Activation>
OCTAVO_INLINE void gate_rows(const Gated& args, int64_t first, int64_t last, Activation activation) {
  for (int64_t row = first; row < last; row++) {
    const float *gate = args.x.row(row), *up = gate + args.width;
    map_row(args.out.row(row), args.width, [=](int64_t i, int64_t n) __attribute__((always_inline)) {
      return activation(load_lanes(gate + i, n)) * load_lanes(up + i, n);
    });
  }
}

void silu_mul(const Gated& args, const Step&, int64_t first, int64_t last) {
  gate_rows(args, first, last, [](f32x16 x) __attribute__((always_inline)) { return silu(x); });
}

void gelu_mul(const Gated& args, const Step&, int64_t first, int64_t last) {
  gate_rows(args, first, last, [](f32x16 x) __attribute__((always_inline)) { return gelu(x); });
}

template <class Activation>
OCTAVO_INLINE void map_rows(View x, View out, int64_t width, int64_t first, int64_t last, Activation activation) {
  for (int64_t row = first; row < last; row++) {
    const float* from = x.row(row);
    map_row(out.row(row), width, [=](int64_t i, int64_t n) __attribute__((always_inline)) {
      return activation(load_lanes(from + i, n));
    });
  }
}

/// out = gelu(x), exactly or by its approximation with tanh; out may be x.
struct Gelu {
  View x, out;
  bool tanh;
  int64_t width;
};
constexpr Field kGelu[] = {OCTAVO_FIELD(Gelu, x), OCTAVO_FIELD(Gelu, out), OCTAVO_FIELD(Gelu, tanh),
                           OCTAVO_FIELD(Gelu, width)};

OCTAVO_INLINE f32x16 magnitude(f32x16 x) { return (f32x16)((u32x16)x & 0x7fffffffu); }

/// x * (1 + erf(x / sqrt(2))) / 2. erfc(z) = t exp(-z^2 + p(t)) for z >= 0, with t = 1 / (1 + z / 2); relative error
/// 1.2e-7 (Press et al., Numerical Recipes, 2nd edition, 6.2).
OCTAVO_INLINE f32x16 exact_gelu(f32x16 x) {
  constexpr float kTerms[] = {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f,
                              0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
  const f32x16 z = magnitude(x) * 0.70710678118654752f, t = 1.0f / (1.0f + 0.5f * z);
  f32x16 p = splat(0.17087277f);
  for (float term : kTerms) p = multiply_add(p, t, splat(term));
  const f32x16 half = 0.5f * t * exponential(p - z * z);
  return x * (x < 0.0f ? half : 1.0f - half);
}

void gelu_rows(const Gelu& args, const Step&, int64_t first, int64_t last) {
  if (args.tanh) {
    map_rows(args.x, args.out, args.width, first, last, [](f32x16 x) __attribute__((always_inline)) { return gelu(x); });
  } else {
    map_rows(args.x, args.out, args.width, first, last,
             [](f32x16 x) __attribute__((always_inline)) { return exact_gelu(x); });
  }
}

/// out = cap * tanh(x / cap); out may be x.
struct SoftCap {
  View x, out;
  float cap;
  int64_t width;
};
constexpr Field kSoftCap[] = {OCTAVO_FIELD(SoftCap, x), OCTAVO_FIELD(SoftCap, out), OCTAVO_FIELD(SoftCap, cap),
                              OCTAVO_FIELD(SoftCap, width)};

/// tanh: its series up to 1/4, (1 - e) / (1 + e) with e = exp(-2 |z|) beyond.
OCTAVO_INLINE f32x16 hyperbolic_tangent(f32x16 z) {
  const f32x16 size = magnitude(z), square = z * z;
  const f32x16 series =
      z * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315 + square * (62.0f / 2835)))));
  const f32x16 e = exponential(-2.0f * size), far = (1.0f - e) / (1.0f + e);
  return size < 0.25f ? series : (z < 0.0f ? -far : far);
}

void soft_cap(const SoftCap& args, const Step&, int64_t first, int64_t last) {
  const float cap = args.cap;
  map_rows(args.x, args.out, args.width, first, last,
           [=](f32x16 x) __attribute__((always_inline)) { return cap * hyperbolic_tangent(x / cap); });
}

constexpr RowOp kOps[] = {row_op<Gated, silu_mul>("silu_mul", kGated), row_op<Gated, gelu_mul>("gelu_mul", kGated),
                          row_op<Gelu, gelu_rows>("gelu", kGelu), row_op<SoftCap, soft_cap>("soft_cap", kSoftCap)};

}  // namespace

const RowOps activations_ops = row_ops(kOps);

}  // namespace octavo::OCTAVO_ISA

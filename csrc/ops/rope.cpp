// Rotary embedding of rows whose cosines and sines are there.
#include "ops/row_op.h"

namespace octavo::OCTAVO_ISA {
namespace {

/// Half-split rotary embedding of all heads of a row; a row of `table` is `pairs` cosines and as many sines. out may be x.
struct Rope {
  View x, out, table;
  int64_t heads, head_dim, pairs;
};
constexpr Field kRope[] = {OCTAVO_FIELD(Rope, x),     OCTAVO_FIELD(Rope, out),      OCTAVO_FIELD(Rope, table),
                           OCTAVO_FIELD(Rope, heads), OCTAVO_FIELD(Rope, head_dim), OCTAVO_FIELD(Rope, pairs)};

/// Turns n <= 16 pairs (x[i], x[pairs + i]) by the angles whose cosines and sines are given.
OCTAVO_INLINE void turn_pairs(const float* x, int64_t pairs, const float* cosine, const float* sine, float* y,
                              int64_t n) {
  const f32x16 a = load_lanes(x, n), b = load_lanes(x + pairs, n);
  const f32x16 c = load_lanes(cosine, n), s = load_lanes(sine, n);
  store_lanes(y, a * c - b * s, n);
  store_lanes(y + pairs, b * c + a * s, n);
}

OCTAVO_INLINE void rope_head(const float* x, int64_t head_dim, int64_t pairs, const float* cosine, const float* sine,
                             float* y) {
  int64_t j = 0;
  for (; j + kLanes <= pairs; j += kLanes) turn_pairs(x + j, pairs, cosine + j, sine + j, y + j, kLanes);
  if (j < pairs) turn_pairs(x + j, pairs, cosine + j, sine + j, y + j, pairs - j);
  if (x != y && 2 * pairs < head_dim) memcpy(y + 2 * pairs, x + 2 * pairs, (head_dim - 2 * pairs) * sizeof(float));
}

void rope(const Rope& args, const Step&, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; row++) {
    const float *x = args.x.row(row), *table = args.table.row(row);
    float* y = args.out.row(row);
    for (int64_t head = 0; head < args.heads; head++) {
      const int64_t at = head * args.head_dim;
      rope_head(x + at, args.head_dim, args.pairs, table, table + args.pairs, y + at);
    }
  }
}

constexpr RowOp kOps[] = {row_op<Rope, rope>("rope", kRope)};

}  // namespace

const RowOps rope_ops = row_ops(kOps);

}  // namespace octavo::OCTAVO_ISA

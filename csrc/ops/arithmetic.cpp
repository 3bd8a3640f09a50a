// Sums, multiples and choices of rows.
#include "ops/row_op.h"

namespace octavo::OCTAVO_ISA {
namespace {

/// out = a + b; out may be a or b.
struct Add {
  View a, b, out;
  int64_t width;
};
constexpr Field kAdd[] = {OCTAVO_FIELD(Add, a), OCTAVO_FIELD(Add, b), OCTAVO_FIELD(Add, out),
                          OCTAVO_FIELD(Add, width)};

void add(const Add& args, const Step&, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; row++) {
    const float *a = args.a.row(row), *b = args.b.row(row);
    map_row(args.out.row(row), args.width, [=](int64_t i, int64_t n) __attribute__((always_inline)) {
      return load_lanes(a + i, n) + load_lanes(b + i, n);
    });
  }
}

/// out = x * factor; out may be x.
struct Scale {
  View x, out;
  float factor;
  int64_t width;
};
constexpr Field kScale[] = {OCTAVO_FIELD(Scale, x), OCTAVO_FIELD(Scale, out), OCTAVO_FIELD(Scale, factor),
                            OCTAVO_FIELD(Scale, width)};

void scale(const Scale& args, const Step&, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; row++) {
    const float* x = args.x.row(row);
    map_row(args.out.row(row), args.width, [=](int64_t i, int64_t n) __attribute__((always_inline)) {
      return load_lanes(x + i, n) * splat(args.factor);
    });
  }
}

/// Rows of x picked by the step's logit_rows.
struct Rows {
  View x, out;
  int64_t width;
};
constexpr Field kRows[] = {OCTAVO_FIELD(Rows, x), OCTAVO_FIELD(Rows, out), OCTAVO_FIELD(Rows, width)};

void rows(const Rows& args, const Step& step, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; row++) {
    memcpy(args.out.row(row), args.x.row(step.logit_rows[row]), args.width * sizeof(float));
  }
}

constexpr RowOp kOps[] = {row_op<Add, add>("add", kAdd), row_op<Scale, scale>("scale", kScale),
                          row_op<Rows, rows>("rows", kRows)};

}  // namespace

const RowOps arithmetic_ops = row_ops(kOps);

}  // namespace octavo::OCTAVO_ISA

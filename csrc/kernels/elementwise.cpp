// Row-wise kernels; the order of every sum depends only on the width.
#include "kernels/exports.h"
#include "kernels/row_math.h"

namespace octavo::OCTAVO_ISA {

/// y[i ..] = f(i, lanes) over a row; the last call has fewer than 16 lanes when the width is ragged.
template <class Function>
OCTAVO_INLINE void map_row(float* y, int64_t width, Function f) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) store(y + i, f(i, kLanes));
  if (i < width) store_partial(y + i, f(i, width - i), width - i);
}

static void rms_norm(const float* x, int64_t ldx, const float* weight, float eps, float* y, int64_t ldy, int64_t rows,
                     int64_t width) {
  for (int64_t row = 0; row < rows; row++, x += ldx, y += ldy) {
    const f32x16 factor = splat(norm_factor(x, width, eps));
    map_row(y, width, [=](int64_t i, int64_t n) __attribute__((always_inline)) {
      return load_lanes(x + i, n) * factor * load_lanes(weight + i, n);
    });
  }
}

static void add(const float* a, int64_t lda, const float* b, int64_t ldb, float* y, int64_t ldy, int64_t rows,
                int64_t width) {
  for (int64_t row = 0; row < rows; row++, a += lda, b += ldb, y += ldy) {
    map_row(y, width, [=](int64_t i, int64_t n) __attribute__((always_inline)) {
      return load_lanes(a + i, n) + load_lanes(b + i, n);
    });
  }
}

static void silu_mul(const float* x, int64_t ldx, float* y, int64_t ldy, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; row++, x += ldx, y += ldy) {
    map_row(y, width, [=](int64_t i, int64_t n) __attribute__((always_inline)) {
      return silu(load_lanes(x + i, n)) * load_lanes(x + width + i, n);
    });
  }
}

static void gelu_mul(const float* x, int64_t ldx, float* y, int64_t ldy, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; row++, x += ldx, y += ldy) {
    map_row(y, width, [=](int64_t i, int64_t n) __attribute__((always_inline)) {
      return gelu(load_lanes(x + i, n)) * load_lanes(x + width + i, n);
    });
  }
}

static void scale(float* x, int64_t ldx, float factor, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; row++, x += ldx) {
    map_row(x, width, [=](int64_t i, int64_t n) __attribute__((always_inline)) {
      return load_lanes(x + i, n) * splat(factor);
    });
  }
}

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

static void rope(const float* x, int64_t heads, int64_t head_dim, int64_t pairs, const float* cosine,
                 const float* sine, float* y) {
  for (int64_t head = 0; head < heads; head++) {
    rope_head(x + head * head_dim, head_dim, pairs, cosine, sine, y + head * head_dim);
  }
}

const ElementwiseKernels kElementwiseKernels = {rms_norm, add, silu_mul, gelu_mul, scale, rope};

}  // namespace octavo::OCTAVO_ISA

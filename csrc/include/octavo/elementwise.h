// Row-wise operations. Every function works on the rows it is given and treats each alone.
#pragma once

#include <cstdint>

namespace octavo {

struct ElementwiseKernels {
  /// y = x / sqrt(mean(x^2) + eps) * weight
  void (*rms_norm)(const float* x, int64_t ldx, const float* weight, float eps, float* y, int64_t ldy, int64_t rows,
                   int64_t width);

  /// y = a + b; y may be a or b.
  void (*add)(const float* a, int64_t lda, const float* b, int64_t ldb, float* y, int64_t ldy, int64_t rows,
              int64_t width);

  /// y = silu(x[:, :width]) * x[:, width:]
  void (*silu_mul)(const float* x, int64_t ldx, float* y, int64_t ldy, int64_t rows, int64_t width);

  /// y = gelu(x[:, :width]) * x[:, width:], gelu by its approximation with tanh
  void (*gelu_mul)(const float* x, int64_t ldx, float* y, int64_t ldy, int64_t rows, int64_t width);

  /// x = x * factor
  void (*scale)(float* x, int64_t ldx, float factor, int64_t rows, int64_t width);

  /// Half-split rotary embedding of all heads of one row; cosine and sine have `pairs` entries. y may be x.
  void (*rope)(const float* x, int64_t heads, int64_t head_dim, int64_t pairs, const float* cosine, const float* sine,
               float* y);
};

}  // namespace octavo

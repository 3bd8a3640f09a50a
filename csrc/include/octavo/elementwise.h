// Row-wise operations. Every function works on the rows it is given and treats each alone.
#pragma once

#include <cstdint>

namespace octavo {

struct ElementwiseKernels {
  /// y = x / sqrt(mean(x^2) + eps) * weight (+ 1 on the weight is the model's business). In place is allowed.
  void (*rms_norm)(const float* x, int64_t ldx, const float* weight, float eps, float* y, int64_t ldy, int64_t rows,
                   int64_t width);

  /// y = a + b
  void (*add)(const float* a, int64_t lda, const float* b, int64_t ldb, float* y, int64_t ldy, int64_t rows,
              int64_t width);

  /// y = silu(x[:, :width]) * x[:, width:]
  void (*silu_mul)(const float* x, int64_t ldx, float* y, int64_t ldy, int64_t rows, int64_t width);

  /// Half-split rotary embedding of `heads` heads of one row; cosine and sine have rotary_dim / 2 entries.
  /// Dimensions beyond rotary_dim are copied.
  void (*rope)(const float* x, int64_t heads, int64_t head_dim, int64_t rotary_dim, const float* cosine,
               const float* sine, float* y);

  /// Lowest index of the greatest value of x[0 .. n); NaN never wins.
  int64_t (*argmax)(const float* x, int64_t n);
};

}  // namespace octavo

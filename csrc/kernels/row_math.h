// What a row goes through on its way into a linear or out of it, wherever that is done: the same arithmetic everywhere.
#pragma once

#include <math.h>

#include "kernels/simd.h"

namespace octavo::OCTAVO_ISA {

OCTAVO_INLINE float sum_of_squares(const float* x, int64_t width) {
  f32x16 sums[2] = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
    const f32x16 a = load(x + i), b = load(x + i + kLanes);
    sums[0] = multiply_add(a, a, sums[0]);
    sums[1] = multiply_add(b, b, sums[1]);
  }
  for (; i < width; i += kLanes) {
    const f32x16 a = load_lanes(x + i, width - i);
    sums[0] = multiply_add(a, a, sums[0]);
  }
  return sum(sums[0] + sums[1]);
}

/// What rms_norm multiplies a row by, before its weights: 1 / sqrt(mean(x^2) + eps).
OCTAVO_INLINE float norm_factor(const float* x, int64_t width, float eps) {
  return 1.0f / sqrtf(sum_of_squares(x, width) / static_cast<float>(width) + eps);
}

/// x / (1 + exp(-x))
OCTAVO_INLINE f32x16 silu(f32x16 x) { return x / (1.0f + exponential(-x)); }

/// x / 2 * (1 + tanh(z)) with z = sqrt(2 / pi) * (x + 0.044715 x^3), which is x / (1 + exp(-2z)).
OCTAVO_INLINE f32x16 gelu(f32x16 x) {
  return x / (1.0f + exponential(-1.5957691216057308f * (x + 0.044715f * (x * x * x))));
}

}  // namespace octavo::OCTAVO_ISA

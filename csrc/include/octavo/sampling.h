// What the sampler needs of a row of logits, as one pass each.
#pragma once

#include <cstdint>

#include "octavo/maxima.h"

namespace octavo {

inline constexpr int64_t kChunkLogits = 256;  // of one partial sum

struct SamplingKernels {
  /// The maxima of a row (octavo/maxima.h). False if a value is NaN or infinite; after NaN maxima are undefined.
  bool (*scan)(const float* x, int64_t n, float* maxima);

  /// The greatest of n numbers, n > 0 and no NaN among them.
  float (*greatest_of)(const float* x, int64_t n);

  /// y[i] = e^((x[i] - top) / temperature), 0 below e^-87. No x may exceed top; -infinity gives 0.
  void (*weights)(const float* x, int64_t n, float top, float temperature, float* y);

  /// sums[c] = the sum of those weights of x[256 c .. 256 c + 255]; the order of additions depends on n only.
  void (*chunk_sums)(const float* x, int64_t n, float top, float temperature, float* sums);

  /// Indices i, ascending, of x[i] >= bound; returns their number. `indices` has room for n + 16.
  int64_t (*at_least)(const float* x, int64_t n, float bound, int32_t* indices);

  /// How many of x[0 .. n) are greater than bound.
  int64_t (*count_above)(const float* x, int64_t n, float bound);
};

}  // namespace octavo

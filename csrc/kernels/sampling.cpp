// Passes over a row of logits; the order of every sum depends only on the width.
#include "octavo/sampling.h"

#include <math.h>

#include "kernels/exports.h"
#include "kernels/simd.h"

namespace octavo::OCTAVO_ISA {

/// The lanes from p[0] on, of which n exist; the others are -infinity.
OCTAVO_INLINE f32x16 load_or_least(const float* p, int64_t n) {
  if (n >= kLanes) return load(p);
  f32x16 v = splat(-INFINITY);
  memcpy(&v, p, n * sizeof(float));
  return v;
}

static bool scan(const float* x, int64_t n, float* maxima) {
  f32x16 zeros = {};  // becomes NaN where a value is not finite
  for (int64_t start = 0; start < n; start += kGroupLogits, maxima += kGroupLanes) {
    const int64_t end = n - start < kGroupLogits ? n : start + kGroupLogits;
    f32x16 top = splat(-INFINITY);
    int64_t i = start;
    for (; i + kLanes <= end; i += kLanes) {
      const f32x16 v = load(x + i);
      top = maximum(v, top);
      zeros += v * 0.0f;
    }
    if (i < end) {
      top = maximum(load_or_least(x + i, end - i), top);
      zeros += load_partial(x + i, end - i) * 0.0f;
    }
    store(maxima, top);
  }
  return sum(zeros) == 0.0f;
}

static float greatest_of(const float* x, int64_t n) {
  f32x16 top = splat(-INFINITY);
  for (int64_t i = 0; i < n; i += kLanes) top = maximum(load_or_least(x + i, n - i), top);
  return greatest(top);
}

OCTAVO_INLINE f32x16 weight(f32x16 x, float top, float temperature) {
  const f32x16 power = (x - top) / temperature;
  return power < -87.0f ? f32x16{} : exponential(power);
}

static void weights(const float* x, int64_t n, float top, float temperature, float* y) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(y + i, weight(load(x + i), top, temperature));
  if (i < n) store_partial(y + i, weight(load_or_least(x + i, n - i), top, temperature), n - i);
}

static void chunk_sums(const float* x, int64_t n, float top, float temperature, float* sums) {
  for (int64_t start = 0; start < n; start += kChunkLogits) {
    const int64_t size = n - start < kChunkLogits ? n - start : kChunkLogits;
    f32x16 total[2] = {};
    int64_t i = 0;
    for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
      total[0] += weight(load(x + start + i), top, temperature);
      total[1] += weight(load(x + start + i + kLanes), top, temperature);
    }
    for (; i < size; i += kLanes) total[0] += weight(load_or_least(x + start + i, size - i), top, temperature);
    *sums++ = sum(total[0] + total[1]);
  }
}

static int64_t at_least(const float* x, int64_t n, float bound, int32_t* indices) {
  int64_t count = 0, i = 0;
#if defined(__AVX512F__)
  const __m512 least = _mm512_set1_ps(bound);
  __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; i + kLanes <= n; i += kLanes) {
    const __mmask16 kept = _mm512_cmp_ps_mask(_mm512_loadu_ps(x + i), least, _CMP_GE_OQ);
    if (kept) {  // compressing into a register: into memory it is slow on Zen
      _mm512_storeu_si512(indices + count, _mm512_maskz_compress_epi32(kept, lanes));
      count += __builtin_popcount(kept);
    }
    lanes = _mm512_add_epi32(lanes, _mm512_set1_epi32(kLanes));
  }
#endif
  for (; i < n; i++) {
    indices[count] = static_cast<int32_t>(i);
    count += x[i] >= bound;
  }
  return count;
}

static int64_t count_above(const float* x, int64_t n, float bound) {
  i32x16 counts = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) counts -= load(x + i) > bound;
  int64_t count = 0;
  for (int lane = 0; lane < kLanes; lane++) count += counts[lane];
  for (; i < n; i++) count += x[i] > bound;
  return count;
}

const SamplingKernels kSamplingKernels = {scan, greatest_of, weights, chunk_sums, at_least, count_above};

}  // namespace octavo::OCTAVO_ISA

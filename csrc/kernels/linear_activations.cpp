// Activations as the tiles want them: float, bfloat16 pairs, or int16 with one scale a row.

#include "kernels/half.h"
#include "kernels/linear.h"
#include "kernels/simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr float kGreatestCode = 32767.0f;

// Below this kGreatestCode / max would overflow; such groups are zero to any purpose, and their codes are 0.
constexpr float kSmallestMaximum = 1e-33f;

// Greatest |x| as the bits of a float. Compared as integers, NaN ranks above infinity, so that both reach the scale.
// code = nearest integer of x * inverse, in the order of ActivationGroup; sums of the first and the last 16 codes.
#if defined(__AVX512BW__) && defined(__AVX512VL__)

inline uint32_t greatest_magnitude(const float* x) {
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  const __m512i low = _mm512_and_si512(_mm512_loadu_si512(x), mask);
  const __m512i high = _mm512_and_si512(_mm512_loadu_si512(x + kLanes), mask);
  return _mm512_reduce_max_epu32(_mm512_max_epu32(low, high));
}

inline void round_to_codes(const float* x, float inverse, int16_t* codes, int32_t sums[2]) {
  const __m512 factor = _mm512_set1_ps(inverse);
  for (int i = 0; i < 2; ++i) {
    const __m512i wide = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i * kLanes), factor));
    sums[i] = _mm512_reduce_add_epi32(wide);
    __m256i narrow = _mm512_cvtepi32_epi16(wide);
    narrow = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(narrow, 0xd8), 0xd8);  // 0 2 1 3
    _mm256_store_si256(reinterpret_cast<__m256i*>(codes) + i, narrow);
  }
}

#else

// Adding 1.5 * 2^23 leaves the nearest integer (ties to even) of a small float in its lowest bits.
constexpr float kRoundToInteger = 12582912.0f;

inline uint32_t greatest_magnitude(const float* x) {
  uint32_t most = 0;
  for (int i = 0; i < kBlockInputs; ++i) {
    const uint32_t magnitude = float_bits(x[i]) & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

inline void round_to_codes(const float* x, float inverse, int16_t* codes, int32_t sums[2]) {
  constexpr int kOrder[4] = {0, 2, 1, 3};
  for (int i = 0; i < 2; ++i) {
    int32_t values[kLanes], sum = 0;
    for (int j = 0; j < kLanes; ++j) {
      values[j] = int32_t(float_bits(x[i * kLanes + j] * inverse + kRoundToInteger) << 16) >> 16;
    }
    for (int j = 0; j < kLanes; ++j) sum += values[j];
    for (int j = 0; j < kLanes; ++j) codes[i * kLanes + j] = int16_t(values[j / 4 * 4 + kOrder[j % 4]]);
    sums[i] = sum;
  }
}

#endif

inline void quantize_group(const float* x, float inverse, ActivationGroup& group) {
  int32_t sums[3];
  round_to_codes(x, inverse, group.codes, sums);
  sums[2] = sums[0] + sums[1];
  for (int i = 0; i < 3; ++i) {
    group.offset[i] = -128 * sums[i];
    group.sum[i] = float(sums[i]);
  }
}

void quantize_row(const float* x, int64_t k, int64_t stride, ActivationGroup* out, float* scale) {
  float tail[kBlockInputs] = {};
  const int64_t whole = k / kBlockInputs * kBlockInputs;
  std::memcpy(tail, x + whole, (k - whole) * sizeof(float));
  uint32_t most = greatest_magnitude(tail);
  for (int64_t i = 0; i < whole; i += kBlockInputs) {
    const uint32_t magnitude = greatest_magnitude(x + i);
    most = magnitude > most ? magnitude : most;
  }
  const float maximum = bits_float(most);
  const float inverse = maximum >= kSmallestMaximum ? kGreatestCode / maximum : 0.0f;
  *scale = maximum / kGreatestCode;
  for (int64_t i = 0; i < whole; i += kBlockInputs, out += stride) quantize_group(x + i, inverse, *out);
  if (whole < k) quantize_group(tail, inverse, *out);
}

void bf16_row(const float* x, int64_t k, int64_t stride, uint32_t* out) {
  constexpr int64_t kChunk = 64;
  for (int64_t i = 0; i < k; i += kChunk) {
    const int64_t count = min_of(kChunk, k - i);
    uint16_t values[kChunk] = {};
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) store_bf16(values + j, load(x + i + j));
    if (j < count) store_bf16(values + j, load_partial(x + i + j, count - j));
    for (j = 0; j < count; j += 2, out += stride) std::memcpy(out, values + j, sizeof *out);
  }
}

void f32_row(const float* x, int64_t k, int64_t stride, float* out) {
  for (int64_t i = 0; i < k; ++i) out[i * stride] = x[i];
}

}  // namespace

void convert_rows(ActivationKind kind, const float* x, int64_t ldx, int64_t k, Range rows, int64_t tile_rows,
                  void* tiles) {
  const int64_t row_bytes = activation_row_bytes(kind, k);
  for (int64_t m = rows.first; m < rows.last; ++m) {
    char* tile = static_cast<char*>(tiles) + m / tile_rows * tile_rows * row_bytes;
    const float* row = x + m * ldx;
    const int64_t r = m % tile_rows;
    if (kind == ActivationKind::f32) {
      f32_row(row, k, tile_rows, reinterpret_cast<float*>(tile) + r);
    } else if (kind == ActivationKind::bf16) {
      bf16_row(row, k, tile_rows, reinterpret_cast<uint32_t*>(tile) + r);
    } else {
      quantize_row(row, k, tile_rows, reinterpret_cast<ActivationGroup*>(tile) + r, row_scales(tile, k, tile_rows) + r);
    }
  }
}

}  // namespace octavo::OCTAVO_ISA

// Activations as the tiles want them: float, bfloat16 pairs, or int16 with one scale a row; normed before, if so wished.

#include "kernels/half.h"
#include "kernels/linear.h"
#include "kernels/row_math.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr float kGreatestCode = 32767.0f;

// Below this kGreatestCode / max would overflow; such rows are zero to any purpose, and their codes are 0.
constexpr float kSmallestMaximum = 1e-33f;

// What a row is converted from: at(i, n) are its numbers from i on, of which n exist, and zeros.
struct PlainRow {
  const float* x;
  __attribute__((always_inline)) f32x16 at(int64_t i, int64_t n) const { return load_lanes(x + i, n); }
};

struct NormedRow {  // the arithmetic of ElementwiseKernels::rms_norm
  const float *x, *weight;
  float factor;
  __attribute__((always_inline)) f32x16 at(int64_t i, int64_t n) const {
    return load_lanes(x + i, n) * factor * load_lanes(weight + i, n);
  }
};

// Greatest |x| as the bits of a float. Compared as integers, NaN ranks above infinity, so that both reach the scale.
OCTAVO_INLINE u32x16 magnitude(f32x16 v) { return (u32x16)v & 0x7fffffffu; }

template <class Row>
OCTAVO_INLINE float greatest_magnitude(const Row& row, int64_t k) {
  u32x16 most[2] = {};
  int64_t i = 0;
  const auto take = [](u32x16& most, u32x16 v) { most = v > most ? v : most; };
  for (; i + 2 * kLanes <= k; i += 2 * kLanes) {
    take(most[0], magnitude(row.at(i, kLanes)));
    take(most[1], magnitude(row.at(i + kLanes, kLanes)));
  }
  for (; i < k; i += kLanes) take(most[0], magnitude(row.at(i, k - i)));
  take(most[0], most[1]);
  uint32_t top = 0;
  for (int lane = 0; lane < kLanes; ++lane) top = most[0][lane] > top ? most[0][lane] : top;
  return bits_float(top);
}

// code = nearest integer of x * inverse, in the order of ActivationGroup, and what goes with the codes.
#if defined(__AVX512BW__)

OCTAVO_INLINE void quantize_group(f32x16 low, f32x16 high, float inverse, ActivationGroup& group) {
  const __m512i a = _mm512_cvtps_epi32((__m512)(low * inverse)), b = _mm512_cvtps_epi32((__m512)(high * inverse));
  const __m512i order = _mm512_set_epi16(62, 58, 60, 56, 54, 50, 52, 48, 46, 42, 44, 40, 38, 34, 36, 32,  //
                                         30, 26, 28, 24, 22, 18, 20, 16, 14, 10, 12, 8, 6, 2, 4, 0);
  const __m512i codes = _mm512_permutex2var_epi16(a, order, b);
  _mm512_storeu_si512(group.codes, codes);
  __m512i sums = _mm512_madd_epi16(codes, _mm512_set1_epi16(1));  // 8 lanes of each half of the inputs
  sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_BADC));
  sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_CDAB));
  sums = _mm512_add_epi32(sums, _mm512_shuffle_i32x4(sums, sums, 0xb1));
  const __m128i first = _mm512_castsi512_si128(sums), second = _mm512_extracti32x4_epi32(sums, 2);
  const __m128i both = _mm_blend_epi32(_mm_blend_epi32(first, second, 2), _mm_add_epi32(first, second), 4);
  int32_t offset[4];
  float sum[4];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(offset), _mm_sub_epi32(_mm_setzero_si128(), _mm_slli_epi32(both, 7)));
  _mm_storeu_ps(sum, _mm_cvtepi32_ps(both));
  std::memcpy(group.offset, offset, sizeof group.offset);
  std::memcpy(group.sum, sum, sizeof group.sum);
}

#else

OCTAVO_INLINE void quantize_group(f32x16 low, f32x16 high, float inverse, ActivationGroup& group) {
  constexpr int kOrder[4] = {0, 2, 1, 3};
  int32_t sums[3] = {};
  for (int i = 0; i < 2; ++i) {
    // bits beyond 16 are those of rows that are not finite
    const i32x16 values = to_int((i == 0 ? low : high) * inverse) << 16 >> 16;
    for (int j = 0; j < kLanes; ++j) sums[i] += values[j];
    for (int j = 0; j < kLanes; ++j) group.codes[i * kLanes + j] = int16_t(values[j / 4 * 4 + kOrder[j % 4]]);
  }
  sums[2] = sums[0] + sums[1];
  for (int i = 0; i < 3; ++i) {
    group.offset[i] = -128 * sums[i];
    group.sum[i] = float(sums[i]);
  }
}

#endif

template <class Row>
OCTAVO_INLINE void quantize_row(const Row& row, int64_t k, int64_t stride, ActivationGroup* out, float* scale) {
  const float maximum = greatest_magnitude(row, k);
  const float inverse = maximum >= kSmallestMaximum ? kGreatestCode / maximum : 0.0f;
  *scale = maximum / kGreatestCode;
  int64_t i = 0;
  for (; i + kBlockInputs <= k; i += kBlockInputs, out += stride) {
    quantize_group(row.at(i, kLanes), row.at(i + kLanes, kLanes), inverse, *out);
  }
  if (i == k) return;
  const f32x16 high = i + kLanes < k ? row.at(i + kLanes, k - i - kLanes) : f32x16{};
  quantize_group(row.at(i, k - i), high, inverse, *out);
}

template <class Row>
OCTAVO_INLINE void bf16_row(const Row& row, int64_t k, int64_t stride, uint32_t* out) {
  for (int64_t i = 0; i < k; i += kLanes) {
    uint32_t pairs[kLanes / 2];
    store_bf16(reinterpret_cast<uint16_t*>(pairs), row.at(i, k - i));
    for (int64_t j = 0; j < kLanes / 2 && i + 2 * j < k; ++j, out += stride) *out = pairs[j];
  }
}

template <class Row>
OCTAVO_INLINE void f32_row(const Row& row, int64_t k, int64_t stride, float* out) {
  for (int64_t i = 0; i < k; i += kLanes) {
    const f32x16 v = row.at(i, k - i);
    for (int64_t j = 0; j < min_of(k - i, kLanes); ++j, out += stride) *out = v[j];
  }
}

template <class Row>
OCTAVO_INLINE void convert_row(ActivationKind kind, const Row& row, int64_t k, int64_t tile_rows, char* tile, int64_t r) {
  if (kind == ActivationKind::f32) {
    f32_row(row, k, tile_rows, reinterpret_cast<float*>(tile) + r);
  } else if (kind == ActivationKind::bf16) {
    bf16_row(row, k, tile_rows, reinterpret_cast<uint32_t*>(tile) + r);
  } else {
    ActivationGroup* groups = reinterpret_cast<ActivationGroup*>(tile);
    quantize_row(row, k, tile_rows, groups + r, row_scales(tile, k, tile_rows) + r);
  }
}

}  // namespace

void convert_rows(ActivationKind kind, const LinearCall& call, Range rows, const Tiling& tiling, char* tiles) {
  const int64_t k = call.linear->k, row_bytes = activation_row_bytes(kind, k);
  for (int64_t m = rows.first; m < rows.last; ++m) {
    const int64_t t = tiling.tile_of(m), first = tiling.first_row(t), height = tiling.rows(t);
    char* tile = tiles + first * row_bytes;
    const float* x = call.x + m * call.ldx;
    if (call.norm == nullptr) {
      convert_row(kind, PlainRow{x}, k, height, tile, m - first);
    } else {
      convert_row(kind, NormedRow{x, call.norm, norm_factor(x, k, call.eps)}, k, height, tile, m - first);
    }
  }
}

}  // namespace octavo::OCTAVO_ISA

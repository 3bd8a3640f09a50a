// Tiles for AVX-512 with VNNI and BF16: a panel is two vectors, 32 registers hold the accumulators of 12 rows (float)
// or the integer and float accumulators of 6 rows (grouped). Included by linear_tiles.cpp.

#include <immintrin.h>

#include "kernels/simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kFloatRows = 12;
constexpr int kGroupRows = 6;

inline __m512i broadcast4(const void* p) {
  int32_t value;
  __builtin_memcpy(&value, p, 4);
  return _mm512_set1_epi32(value);
}

template <int Rows>
void f32_tile(const void* x, int64_t stride, const void* panel, const PanelShape& shape, const Prefetch& ahead,
              float* out) {
  const float* a = static_cast<const float*>(x);
  const float* w = static_cast<const float*>(panel);
  __m512 acc[Rows][2];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
  for (int64_t s = 0; s < shape.steps; ++s, a += stride, w += kPanelOutputs) {
    __m512 w0 = _mm512_load_ps(w), w1 = _mm512_load_ps(w + 16);
    ahead.fetch(w);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      __m512 b = _mm512_set1_ps(a[r]);
      acc[r][0] = _mm512_fmadd_ps(w0, b, acc[r][0]);
      acc[r][1] = _mm512_fmadd_ps(w1, b, acc[r][1]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    _mm512_store_ps(out + r * kPanelOutputs, acc[r][0]);
    _mm512_store_ps(out + r * kPanelOutputs + 16, acc[r][1]);
  }
}

template <int Rows>
void bf16_tile(const void* x, int64_t stride, const void* panel, const PanelShape& shape, const Prefetch& ahead,
               float* out) {
  const uint32_t* a = static_cast<const uint32_t*>(x);
  const uint32_t* w = static_cast<const uint32_t*>(panel);
  __m512 acc[Rows][2];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
  for (int64_t s = 0; s < shape.steps; ++s, a += stride, w += kPanelOutputs) {
    __m512bh w0 = (__m512bh)_mm512_load_si512(w), w1 = (__m512bh)_mm512_load_si512(w + 16);
    ahead.fetch(w);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      __m512bh b = (__m512bh)broadcast4(a + r);
      acc[r][0] = _mm512_dpbf16_ps(acc[r][0], w0, b);
      acc[r][1] = _mm512_dpbf16_ps(acc[r][1], w1, b);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    _mm512_store_ps(out + r * kPanelOutputs, acc[r][0]);
    _mm512_store_ps(out + r * kPanelOutputs + 16, acc[r][1]);
  }
}

inline __m512 load_half(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
}

inline void load_scales(const uint8_t* p, ScaleKind kind, const uint8_t* unit, __m512 out[2]) {
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    if (kind == ScaleKind::f32) {
      out[i] = _mm512_load_ps(p + 64 * i);
    } else if (kind == ScaleKind::f16) {
      out[i] = load_half(p + 32 * i);
    } else {  // the product is exact
      const __m128i counts = _mm_load_si128(reinterpret_cast<const __m128i*>(p) + i);
      out[i] = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(counts)), load_half(unit + 32 * i));
    }
  }
}

// Codes of one pair of inputs of 16 outputs as 16-bit numbers; Pair counts pairs in the order of ActivationGroup.
template <int Bits, int Pair>
inline __m512i load_codes(const uint8_t* w) {
  const __m512i bytes = _mm512_load_si512(w + Pair / (Bits == 8 ? 2 : 4) * 128);
  if constexpr (Bits == 8) {
    return Pair % 2 ? _mm512_srli_epi16(bytes, 8) : _mm512_and_si512(bytes, _mm512_set1_epi16(255));
  }
  constexpr int kShift = Pair % 2 * 8 + Pair / 2 % 2 * 4;
  const __m512i shifted = kShift ? _mm512_srli_epi16(bytes, kShift) : bytes;
  const __m512i low = kShift == 12 ? shifted : _mm512_and_si512(shifted, _mm512_set1_epi16(15));
  if constexpr (Bits == 4) return low;
  constexpr int kHigh = Bits - 4, kRight = kHigh * Pair % 16 - 4;
  const __m512i words = _mm512_load_si512(w + 512 + kHigh * Pair / 16 * 128);
  const __m512i high = kRight > 0 ? _mm512_srli_epi32(words, kRight) : _mm512_slli_epi32(words, -kRight);
  constexpr int kLowOrHighAndMask = 0xf8;
  return _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi16((1 << Bits) - 16), kLowOrHighAndMask);
}

// dot[r] += codes times activations, for pairs Pair .. End - 1 of a block.
template <int Bits, int Rows, int Pair, int End>
OCTAVO_INLINE void dot_pairs(const ActivationGroup* a, const uint8_t* w, __m512i dot[Rows][2]) {
  const __m512i w0 = load_codes<Bits, Pair>(w), w1 = load_codes<Bits, Pair>(w + 64);
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    const __m512i b = broadcast4(a[r].codes + Pair * 2);
    dot[r][0] = _mm512_dpwssd_epi32(dot[r][0], w0, b);
    dot[r][1] = _mm512_dpwssd_epi32(dot[r][1], w1, b);
  }
  if constexpr (Pair + 1 < End) dot_pairs<Bits, Rows, Pair + 1, End>(a, w, dot);
}

// One subgroup of a block. The minima come amid the dots, for which they need not wait.
template <int Bits, int Subgroups, int Rows, int Sub>
OCTAVO_INLINE void group_step(const ActivationGroup* a, const uint8_t* w, const uint8_t* units,
                              const PanelShape& shape, __m512 acc[Rows][2]) {
  constexpr int kPairs = 16 / Subgroups, kFirst = Sub * kPairs, kSums = Subgroups == 1 ? 2 : Sub;
  const uint8_t* scales = w + Bits * 128 + Sub * shape.scale_bytes();
  __m512i dot[Rows][2];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    dot[r][0] = _mm512_setzero_si512();
    if (Bits == 8 || shape.centred) dot[r][0] = _mm512_srai_epi32(broadcast4(a[r].offset + kSums), 8 - Bits);
    dot[r][1] = dot[r][0];
  }
  dot_pairs<Bits, Rows, kFirst, kFirst + kPairs / 2>(a, w, dot);
  if (shape.has_minimum) {
    __m512 minimum[2];
    load_scales(scales + Subgroups * shape.scale_bytes(), shape.scales, units + kUnitBytes, minimum);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      const __m512 sum = _mm512_set1_ps(a[r].sum[kSums]);
      acc[r][0] = _mm512_fmadd_ps(minimum[0], sum, acc[r][0]);
      acc[r][1] = _mm512_fmadd_ps(minimum[1], sum, acc[r][1]);
    }
  }
  dot_pairs<Bits, Rows, kFirst + kPairs / 2, kFirst + kPairs>(a, w, dot);
  __m512 scale[2];
  load_scales(scales, shape.scales, units, scale);
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    acc[r][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r][0]), scale[0], acc[r][0]);
    acc[r][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r][1]), scale[1], acc[r][1]);
  }
}

template <int Bits, int Subgroups, int Rows>
void group_tile(const void* x, int64_t stride, const void* panel, const PanelShape& shape, const Prefetch& ahead,
                float* out) {
  const ActivationGroup* a = static_cast<const ActivationGroup*>(x);
  const uint8_t* w = static_cast<const uint8_t*>(panel);
  __m512 acc[Rows][2];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
  const uint8_t* units = w;
  for (int64_t s = 0; s < shape.steps; ++s, a += stride, w += shape.block_bytes) {
    if (s % kUnitBlocks == 0) {
      ahead.fetch_units(w, shape.unit_bytes);
      units = w;
      w += shape.unit_bytes;
    }
    ahead.fetch(w);
    group_step<Bits, Subgroups, Rows, 0>(a, w, units, shape, acc);
    if (Subgroups == 2) group_step<Bits, Subgroups, Rows, Subgroups - 1>(a, w, units, shape, acc);
  }
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    _mm512_store_ps(out + r * kPanelOutputs, acc[r][0]);
    _mm512_store_ps(out + r * kPanelOutputs + 16, acc[r][1]);
  }
}

// The empty assembly keeps the compiler from leaving out or merging what nobody reads.
template <class Vector, class Step>
inline void repeat_on_registers(int64_t rounds, Vector acc[16], Step step) {
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) {
      acc[j] = step(acc[j]);
      asm volatile("" : "+v"(acc[j]));
    }
  }
}

int64_t register_multiply_adds(WeightFormat format, int64_t rounds) {
  __m512 sums[16] = {};
  __m512i dots[16] = {};
  const __m512i bytes = _mm512_set1_epi8(1);
  if (format == WeightFormat::f32) {
    repeat_on_registers(rounds, sums, [](__m512 a) { return _mm512_fmadd_ps(a, a, a); });
    return rounds * 16 * 16;
  }
  if (format == WeightFormat::bf16) {
    repeat_on_registers(rounds, sums, [=](__m512 a) { return _mm512_dpbf16_ps(a, (__m512bh)bytes, (__m512bh)bytes); });
    return rounds * 16 * 32;
  }
  repeat_on_registers(rounds, dots, [=](__m512i a) { return _mm512_dpwssd_epi32(a, bytes, bytes); });
  return rounds * 16 * 32;
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA

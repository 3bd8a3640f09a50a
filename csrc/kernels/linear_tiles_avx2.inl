// Tiles for AVX2 with FMA and F16C: a panel is taken in two halves of two vectors, so that 4 to 6 rows fit into 16
// registers. Included by linear_tiles.cpp.

#include <immintrin.h>

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kFloatRows = 6;
constexpr int kGroupRows = 4;

inline __m256i broadcast4(const void* p) {
  int32_t value;
  __builtin_memcpy(&value, p, 4);
  return _mm256_set1_epi32(value);
}

inline __m256i load32(const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); }

template <int Rows>
void f32_tile(const void* x, int64_t stride, const void* panel, const PanelShape& shape, const Prefetch& ahead,
              float* out) {
  for (int half = 0; half < 2; ++half) {
    const float* a = static_cast<const float*>(x);
    const float* w = static_cast<const float*>(panel) + half * 16;
    __m256 acc[Rows][2];
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    for (int64_t s = 0; s < shape.steps; ++s, a += stride, w += kPanelOutputs) {
      __m256 w0 = _mm256_load_ps(w), w1 = _mm256_load_ps(w + 8);
      if (half == 0) ahead.fetch(w);
#pragma GCC unroll 6
      for (int r = 0; r < Rows; ++r) {
        __m256 b = _mm256_set1_ps(a[r]);
        acc[r][0] = _mm256_fmadd_ps(w0, b, acc[r][0]);
        acc[r][1] = _mm256_fmadd_ps(w1, b, acc[r][1]);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      _mm256_store_ps(out + r * kPanelOutputs + half * 16, acc[r][0]);
      _mm256_store_ps(out + r * kPanelOutputs + half * 16 + 8, acc[r][1]);
    }
  }
}

// A bf16 pair is two float halves of 32 bits: the even input is the low half.
inline __m256 even_input(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 odd_input(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int32_t(0xffff0000))));
}

template <int Rows>
void bf16_tile(const void* x, int64_t stride, const void* panel, const PanelShape& shape, const Prefetch& ahead,
               float* out) {
  for (int half = 0; half < 2; ++half) {
    const uint32_t* a = static_cast<const uint32_t*>(x);
    const uint32_t* w = static_cast<const uint32_t*>(panel) + half * 16;
    __m256 acc[Rows][2];
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    for (int64_t s = 0; s < shape.steps; ++s, a += stride, w += kPanelOutputs) {
      __m256i w0 = load32(w), w1 = load32(w + 8);
      if (half == 0) ahead.fetch(w);
#pragma GCC unroll 6
      for (int r = 0; r < Rows; ++r) {
        __m256i b = broadcast4(a + r);
        acc[r][0] = _mm256_fmadd_ps(even_input(w0), even_input(b), acc[r][0]);
        acc[r][1] = _mm256_fmadd_ps(even_input(w1), even_input(b), acc[r][1]);
        acc[r][0] = _mm256_fmadd_ps(odd_input(w0), odd_input(b), acc[r][0]);
        acc[r][1] = _mm256_fmadd_ps(odd_input(w1), odd_input(b), acc[r][1]);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      _mm256_store_ps(out + r * kPanelOutputs + half * 16, acc[r][0]);
      _mm256_store_ps(out + r * kPanelOutputs + half * 16 + 8, acc[r][1]);
    }
  }
}

inline __m256 load_half(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
}

// Of outputs first .. first + 15.
inline void load_scales(const uint8_t* p, ScaleKind kind, const uint8_t* unit, int first, __m256 out[2]) {
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const int n = first + i * 8;
    if (kind == ScaleKind::f32) {
      out[i] = _mm256_load_ps(reinterpret_cast<const float*>(p) + n);
    } else if (kind == ScaleKind::f16) {
      out[i] = load_half(p + n * 2);
    } else {  // the product is exact
      const __m128i counts = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + n));
      out[i] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(counts)), load_half(unit + n * 2));
    }
  }
}

// Codes of one pair of inputs of 8 outputs as 16-bit numbers; Pair counts pairs in the order of ActivationGroup.
template <int Bits, int Pair>
inline __m256i load_codes(const uint8_t* w) {
  const __m256i bytes = load32(w + Pair / (Bits == 8 ? 2 : 4) * 128);
  if constexpr (Bits == 8) {
    return Pair % 2 ? _mm256_srli_epi16(bytes, 8) : _mm256_and_si256(bytes, _mm256_set1_epi16(255));
  }
  constexpr int kShift = Pair % 2 * 8 + Pair / 2 % 2 * 4;
  const __m256i shifted = kShift ? _mm256_srli_epi16(bytes, kShift) : bytes;
  const __m256i low = kShift == 12 ? shifted : _mm256_and_si256(shifted, _mm256_set1_epi16(15));
  if constexpr (Bits == 4) return low;
  constexpr int kHigh = Bits - 4, kRight = kHigh * Pair % 16 - 4;
  const __m256i words = load32(w + 512 + kHigh * Pair / 16 * 128);
  const __m256i high = kRight > 0 ? _mm256_srli_epi32(words, kRight) : _mm256_slli_epi32(words, -kRight);
  return _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi16((1 << Bits) - 16)));
}

// dot[r] += codes times activations, for pairs Pair .. End - 1 of a block; w: the first of 16 outputs.
template <int Bits, int Rows, int Pair, int End>
inline void dot_pairs(const ActivationGroup* a, const uint8_t* w, __m256i dot[Rows][2]) {
  const __m256i w0 = load_codes<Bits, Pair>(w), w1 = load_codes<Bits, Pair>(w + 32);
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    const __m256i b = broadcast4(a[r].codes + Pair * 2);
    dot[r][0] = _mm256_add_epi32(dot[r][0], _mm256_madd_epi16(w0, b));
    dot[r][1] = _mm256_add_epi32(dot[r][1], _mm256_madd_epi16(w1, b));
  }
  if constexpr (Pair + 1 < End) dot_pairs<Bits, Rows, Pair + 1, End>(a, w, dot);
}

template <int Bits, int Subgroups, int Rows, int Sub>
inline void group_step(const ActivationGroup* a, const uint8_t* w, const uint8_t* units, const PanelShape& shape,
                       int first, __m256 acc[Rows][2]) {
  const uint8_t* scales = w + Bits * 128 + Sub * shape.scale_bytes();
  constexpr int kPairs = 16 / Subgroups, kSums = Subgroups == 1 ? 2 : Sub;
  __m256i dot[Rows][2];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    dot[r][0] = _mm256_setzero_si256();
    if (Bits == 8 || shape.centred) dot[r][0] = _mm256_srai_epi32(broadcast4(a[r].offset + kSums), 8 - Bits);
    dot[r][1] = dot[r][0];
  }
  dot_pairs<Bits, Rows, Sub * kPairs, (Sub + 1) * kPairs>(a, w + first * 4, dot);
  if (shape.has_minimum) {
    __m256 minimum[2];
    load_scales(scales + Subgroups * shape.scale_bytes(), shape.scales, units + kUnitBytes, first, minimum);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      const __m256 sum = _mm256_set1_ps(a[r].sum[kSums]);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) acc[r][i] = _mm256_fmadd_ps(minimum[i], sum, acc[r][i]);
    }
  }
  __m256 scale[2];
  load_scales(scales, shape.scales, units, first, scale);
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) acc[r][i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[r][i]), scale[i], acc[r][i]);
  }
}

template <int Bits, int Subgroups, int Rows>
void group_tile(const void* x, int64_t stride, const void* panel, const PanelShape& shape, const Prefetch& ahead,
                float* out) {
  for (int first = 0; first < kPanelOutputs; first += 16) {
    const ActivationGroup* a = static_cast<const ActivationGroup*>(x);
    const uint8_t* w = static_cast<const uint8_t*>(panel);
    __m256 acc[Rows][2];
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    const uint8_t* units = w;
    for (int64_t s = 0; s < shape.steps; ++s, a += stride, w += shape.block_bytes) {
      if (s % kUnitBlocks == 0) {
        units = w;
        w += shape.unit_bytes;
      }
      if (first == 0) ahead.fetch(w);
      group_step<Bits, Subgroups, Rows, 0>(a, w, units, shape, first, acc);
      if (Subgroups == 2) group_step<Bits, Subgroups, Rows, Subgroups - 1>(a, w, units, shape, first, acc);
    }
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) _mm256_store_ps(out + r * kPanelOutputs + first + i * 8, acc[r][i]);
    }
  }
}

// The empty assembly keeps the compiler from leaving out or merging what nobody reads.
int64_t register_multiply_adds(WeightFormat format, int64_t rounds) {
  __m256 sums[12] = {};
  __m256i dots[12] = {};
  const __m256i bytes = _mm256_set1_epi8(1);
  const bool floats = activation_kind(format) != ActivationKind::i16;
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) {
      if (floats) {
        sums[j] = _mm256_fmadd_ps(sums[j], sums[j], sums[j]);
        asm volatile("" : "+x"(sums[j]));
      } else {
        __m256i product = _mm256_madd_epi16(bytes, bytes);
        asm volatile("" : "+x"(product));
        dots[j] = _mm256_add_epi32(dots[j], product);
        asm volatile("" : "+x"(dots[j]));
      }
    }
  }
  return rounds * 12 * (floats ? 8 : 16);
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA

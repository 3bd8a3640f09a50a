// Sixteen float lanes on every instruction set, by GCC's and Clang's vector extension; intrinsics only where the
// extension cannot say it. Included once per ISA (see octavo/kernels.h).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define OCTAVO_INLINE static inline __attribute__((always_inline))

namespace octavo::OCTAVO_ISA {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));  // also: sixteen pairs of bfloat16
typedef int16_t i16x32 __attribute__((vector_size(64)));
typedef int8_t i8x32 __attribute__((vector_size(32)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));  // sixteen bfloat16

inline constexpr int64_t kLanes = 16;

OCTAVO_INLINE f32x16 splat(float x) { return x - f32x16{}; }

OCTAVO_INLINE f32x16 load(const float* p) {
  f32x16 v;
  memcpy(&v, p, sizeof v);
  return v;
}

OCTAVO_INLINE void store(float* p, f32x16 v) { memcpy(p, &v, sizeof v); }

/// The first n < 16 lanes from memory, zeros elsewhere.
OCTAVO_INLINE f32x16 load_partial(const float* p, int64_t n) {
  f32x16 v = {};
  memcpy(&v, p, n * sizeof(float));
  return v;
}

OCTAVO_INLINE void store_partial(float* p, f32x16 v, int64_t n) { memcpy(p, &v, n * sizeof(float)); }

/// 16 lanes, or n if there are fewer: zeros elsewhere, and nothing else is written.
OCTAVO_INLINE f32x16 load_lanes(const float* p, int64_t n) { return n >= kLanes ? load(p) : load_partial(p, n); }
OCTAVO_INLINE void store_lanes(float* p, f32x16 v, int64_t n) { n >= kLanes ? store(p, v) : store_partial(p, v, n); }

OCTAVO_INLINE u32x16 load_pairs(const uint16_t* p) {
  u32x16 v;
  memcpy(&v, p, sizeof v);
  return v;
}

/// One pair of bfloat16 in every lane.
OCTAVO_INLINE u32x16 splat_pair(const uint16_t* p) {
  uint32_t pair;
  memcpy(&pair, p, sizeof pair);
  return pair + u32x16{};
}

/// a * b + c, rounded once where the hardware can.
OCTAVO_INLINE f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  __m256 x[2], y[2], z[2];
  memcpy(x, &a, sizeof x), memcpy(y, &b, sizeof y), memcpy(z, &c, sizeof z);
  for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
  memcpy(&c, z, sizeof z);
  return c;
#else
  return a * b + c;
#endif
}

/// max(a, b); NaN in a wins.
OCTAVO_INLINE f32x16 maximum(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_max_ps((__m512)b, (__m512)a);
#else
  return a < b ? b : a;
#endif
}

/// Sum over the lanes as a fixed tree.
OCTAVO_INLINE float sum(f32x16 v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = 8; width; width /= 2) {
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

OCTAVO_INLINE float greatest(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float lanes[kLanes];
  store(lanes, v);
  for (int width = 8; width; width /= 2) {
    for (int i = 0; i < width; i++) lanes[i] = lanes[i] < lanes[i + width] ? lanes[i + width] : lanes[i];
  }
  return lanes[0];
#endif
}

/// Lane i: the greatest lane of v[i].
OCTAVO_INLINE f32x16 greatest_of_each(const f32x16* v) {
#if defined(__AVX512F__)
  // Halves the lanes of pairs of vectors four times: 15 maxima instead of 16 reductions of 4.
  __m512 a[8], b[4], c[2];
  for (int i = 0; i < 8; i++) {
    const __m512 x = (__m512)v[i], y = (__m512)v[i + 8];
    a[i] = _mm512_max_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
  }
  for (int i = 0; i < 4; i++) {
    const __m512 x = a[i], y = a[i + 4];
    b[i] = _mm512_max_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  }
  // Quarter q of b[i] is row i + 4 * (0, 2, 1, 3)[q]: four candidates, to be transposed within quarters.
  for (int i = 0; i < 2; i++) {
    const __m512 x = b[i], y = b[i + 2];
    c[i] = _mm512_max_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
  }
  const __m512 low = _mm512_unpacklo_ps(c[0], c[1]), high = _mm512_unpackhi_ps(c[0], c[1]);
  const __m512 mixed = _mm512_max_ps(low, high);
  return (f32x16)_mm512_shuffle_f32x4(mixed, mixed, 0xd8);
#else
  f32x16 most;
  for (int i = 0; i < kLanes; i++) most[i] = greatest(v[i]);
  return most;
#endif
}

/// Whether no lane is NaN or infinite.
OCTAVO_INLINE bool all_finite(f32x16 v) {
#if defined(__AVX512DQ__)
  return _mm512_fpclass_ps_mask((__m512)v, 0x99) == 0;  // quiet and signalling NaN, both infinities
#else
  return sum(v * 0.0f) == 0.0f;
#endif
}

/// acc + a.low * b.low + a.high * b.high, lane by lane, on pairs of bfloat16.
OCTAVO_INLINE f32x16 dot_pairs(f32x16 acc, u32x16 a, u32x16 b) {
#if defined(__AVX512BF16__)
  return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  const f32x16 low = multiply_add((f32x16)(a << 16), (f32x16)(b << 16), acc);
  return multiply_add((f32x16)(a & 0xffff0000u), (f32x16)(b & 0xffff0000u), low);
#endif
}

/// acc + a.low * b.low + a.high * b.high, lane by lane, on pairs of int16; exact while nothing overflows.
OCTAVO_INLINE i32x16 dot_pairs(i32x16 acc, u32x16 a, u32x16 b) {
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  __m256i x[2], y[2], z[2];
  memcpy(x, &a, sizeof x), memcpy(y, &b, sizeof y), memcpy(z, &acc, sizeof z);
  for (int i = 0; i < 2; i++) z[i] = _mm256_add_epi32(z[i], _mm256_madd_epi16(x[i], y[i]));
  memcpy(&acc, z, sizeof z);
  return acc;
#else
  const i32x16 low = ((i32x16)(a << 16) >> 16) * ((i32x16)(b << 16) >> 16);
  return acc + low + ((i32x16)a >> 16) * ((i32x16)b >> 16);
#endif
}

/// Sixteen pairs of int8 as pairs of int16.
OCTAVO_INLINE u32x16 load_pairs(const int8_t* p) {
  i8x32 v;
  memcpy(&v, p, sizeof v);
  return (u32x16)__builtin_convertvector(v, i16x32);
}

/// Sixteen pairs of int16.
OCTAVO_INLINE u32x16 load_pairs(const int16_t* p) {
  u32x16 v;
  memcpy(&v, p, sizeof v);
  return v;
}

OCTAVO_INLINE f32x16 to_float(f32x16 v) { return v; }

OCTAVO_INLINE f32x16 to_float(i32x16 v) { return __builtin_convertvector(v, f32x16); }

/// Nearest integer, ties to even; |v| < 2^22, anything for NaN.
OCTAVO_INLINE i32x16 to_int(f32x16 v) {
  const f32x16 shifted = v + 12582912.0f;  // 1.5 * 2^23: the integer sits in the low bits of the mantissa
  return (i32x16)shifted - 0x4b400000;
}

/// Nearest bfloat16, ties to even.
OCTAVO_INLINE u16x16 to_bf16(f32x16 v) {
#if defined(__AVX512BF16__)
  return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#else
  const u32x16 bits = (u32x16)v;
  const u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const u32x16 quiet_nan = (bits >> 16) | 0x40u;
  return __builtin_convertvector(v == v ? rounded : quiet_nan, u16x16);
#endif
}

OCTAVO_INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

OCTAVO_INLINE void store_bf16(uint16_t* p, f32x16 v) {
  const u16x16 half = to_bf16(v);
  memcpy(p, &half, sizeof half);
}

/// e^x with a relative error below 2e-7; exactly 1 at 0, about 1e-38 below -87; NaN stays NaN.
OCTAVO_INLINE f32x16 exponential(f32x16 x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  x = x > 88.0f ? splat(88.0f) : x;
  const f32x16 shifted = multiply_add(x, splat(1.44269504f), splat(12582912.0f));  // 1.5 * 2^23: rounds to an integer
  const f32x16 n = shifted - 12582912.0f;
  f32x16 r = multiply_add(n, splat(-0.693359375f), x);
  r = multiply_add(n, splat(2.12194440e-4f), r);
  f32x16 p = splat(1.9875691500e-4f);
  p = multiply_add(p, r, splat(1.3981999507e-3f));
  p = multiply_add(p, r, splat(8.3334519073e-3f));
  p = multiply_add(p, r, splat(4.1665795894e-2f));
  p = multiply_add(p, r, splat(1.6666665459e-1f));
  p = multiply_add(p, r, splat(5.0000001201e-1f));
  p = multiply_add(p, r * r, r) + 1.0f;
  const i32x16 exponent = (i32x16)shifted << 23;  // the integer sits in the low bits of the mantissa
  return (f32x16)((i32x16)p + exponent);
}

/// 2^x for x <= 0 with a relative error below 4e-6; exactly 1 at 0, next to nothing below -126; NaN stays NaN.
OCTAVO_INLINE f32x16 power_of_two(f32x16 x) {
#if defined(__AVX512DQ__)
  const f32x16 r = (f32x16)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
#else
  x = maximum(x, splat(-126.0f));
  const f32x16 shifted = (x - 0.5f) + 12582912.0f;
  const f32x16 r = x - (shifted - 12582912.0f);  // in [0, 1]
#endif
  f32x16 p = splat(1.34266847e-02f);
  p = multiply_add(p, r, splat(5.22424728e-02f));
  p = multiply_add(p, r, splat(2.41280213e-01f));
  p = multiply_add(p, r, splat(6.93044841e-01f));
  p = multiply_add(p, r, splat(1.0f));
#if defined(__AVX512DQ__)
  return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)x);  // times 2^floor(x)
#else
  return (f32x16)((i32x16)p + ((i32x16)shifted << 23));
#endif
}

}  // namespace octavo::OCTAVO_ISA

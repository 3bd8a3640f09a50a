// 8-bit floating point as OCP defines it (OFP8 revision 1.0): codes to bfloat16 and numbers to codes.
//
// E4M3 has no infinity and NaN in codes 0x7f and 0xff only; E5M2 is the upper half of an IEEE float16. Neither
// appears in KV memory: what is written saturates at kMost. So nothing here knows NaN or infinity.
#pragma once

#include "kernels/simd.h"

namespace octavo::OCTAVO_ISA {

struct E4m3 {
  uint8_t code;
  static constexpr int kMantissa = 3, kBias = 7;
  static constexpr float kMost = 448.0f;
};

struct E5m2 {
  uint8_t code;
  static constexpr int kMantissa = 2, kBias = 15;
  static constexpr float kMost = 57344.0f;
};

/// Codes nearest to numbers within +-kMost, ties to even, each in the low byte of its lane.
template <class F>
OCTAVO_INLINE u32x16 encode(f32x16 x) {
  constexpr int kCut = 23 - F::kMantissa;
  const u32x16 sign = ((u32x16)x >> 24) & 0x80u, bits = (u32x16)x & 0x7fffffffu;
  const u32x16 rounded = (bits + ((1u << (kCut - 1)) - 1) + ((bits >> kCut) & 1u)) >> kCut;
  const u32x16 normal = rounded - ((127u - F::kBias) << F::kMantissa);
  // Below 2^(1 - bias) codes count multiples of 2^(1 - bias - mantissa), which is 1.5 * 2^23 times less than `magic`.
  constexpr uint32_t kMagic = ((127u + 1 - F::kBias - F::kMantissa + 23) << 23) | 0x400000u;
  const u32x16 magic = kMagic + u32x16{};
  const u32x16 subnormal = (u32x16)((f32x16)bits + (f32x16)magic) - kMagic;
  return (bits < ((128u - F::kBias) << 23) ? subnormal : normal) | sign;
}

#if !defined(__AVX512BW__)
/// The number of the code in the low byte of each lane, as bits of a float32.
template <class F>
OCTAVO_INLINE u32x16 decode(u32x16 code) {
  const u32x16 magnitude = (code & 0x7fu) << (23 - F::kMantissa);
  // Without an exponent, m stands for 2^(1 - bias) * (1 + m) - 2^(1 - bias).
  const u32x16 subnormal = magnitude < (1u << 23);
  const u32x16 bits = magnitude + ((127u - F::kBias) << 23) + (subnormal & (1u << 23));
  const u32x16 excess = subnormal & ((128u - F::kBias) << 23);
  return (u32x16)((f32x16)bits - (f32x16)excess) | (code & 0x80u) << 24;
}
#endif

/// Sixteen pairs of codes as pairs of bfloat16, which holds them exactly.
template <class F>
OCTAVO_INLINE u32x16 load_fp8_pairs(const F* p) {
#if defined(__AVX512BW__)
  constexpr int kShift = 7 - F::kMantissa, kSubnormal = 127 + 1 - F::kBias - F::kMantissa;  // exponent of the least
  alignas(64) static constexpr uint16_t kSubnormals[32] = {
      0,
      kSubnormal << 7,                  // 1
      (kSubnormal + 1) << 7,            // 1.0 * 2
      ((kSubnormal + 1) << 7) | 0x40,   // 1.5 * 2
      (kSubnormal + 2) << 7,            // 1.0 * 4
      ((kSubnormal + 2) << 7) | 0x20,   // 1.25 * 4
      ((kSubnormal + 2) << 7) | 0x40,   // 1.5 * 4
      ((kSubnormal + 2) << 7) | 0x60};  // 1.75 * 4
  const __m512i code = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const __m512i moved = _mm512_and_si512(_mm512_slli_epi16(code, kShift), _mm512_set1_epi16(0x7f << kShift));
  const __m512i normal = _mm512_add_epi16(moved, _mm512_set1_epi16((127 - F::kBias) << 7));
  const __mmask32 small = _mm512_testn_epi16_mask(code, _mm512_set1_epi16(0x7f & ~((1 << F::kMantissa) - 1)));
  const __m512i both = _mm512_mask_permutexvar_epi16(normal, small, code, _mm512_load_si512(kSubnormals));
  return (u32x16)_mm512_ternarylogic_epi32(both, code, _mm512_set1_epi16(-0x8000), 0xf8);  // the sign, or'ed
#else
  u16x16 pairs;
  memcpy(&pairs, p, sizeof pairs);
  const u32x16 codes = __builtin_convertvector(pairs, u32x16);
  return decode<F>(codes & 0xffu) >> 16 | decode<F>(codes >> 8);
#endif
}

OCTAVO_INLINE u32x16 load_pairs(const E4m3* p) { return load_fp8_pairs(p); }
OCTAVO_INLINE u32x16 load_pairs(const E5m2* p) { return load_fp8_pairs(p); }

}  // namespace octavo::OCTAVO_ISA

// Conversions from and to float16, and from bfloat16, in plain integer arithmetic: the same on every ISA.
#pragma once

#include <cstdint>
#include <cstring>

namespace octavo::OCTAVO_ISA {

static inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

static inline float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

static inline float half_to_float(uint16_t half) {
  uint32_t sign = uint32_t(half & 0x8000) << 16;
  uint32_t exponent = (half >> 10) & 31, mantissa = half & 0x3ff;
  if (exponent == 0) return bits_float(sign | float_bits(float(mantissa) * 0x1p-24f));
  return bits_float(sign | ((exponent == 31 ? 255 : exponent + 112) << 23) | (mantissa << 13));
}

static inline float from_bf16(uint16_t value) { return bits_float(uint32_t(value) << 16); }

}  // namespace octavo::OCTAVO_ISA

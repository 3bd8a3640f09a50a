// Tiles for any machine; loops over the 32 outputs of a panel are left to the compiler's vectoriser.
// Included by linear_tiles.cpp.

#include "kernels/linear_scale.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kFloatRows = 4;
constexpr int kGroupRows = 4;

template <int Rows>
void f32_tile(const void* x, int64_t stride, const void* panel, const PanelShape& shape, const Prefetch&,
              float* out) {
  const float* a = static_cast<const float*>(x);
  const float* w = static_cast<const float*>(panel);
  std::memset(out, 0, Rows * kPanelOutputs * sizeof(float));
  for (int64_t s = 0; s < shape.steps; ++s, a += stride, w += kPanelOutputs) {
    for (int r = 0; r < Rows; ++r) {
      for (int n = 0; n < kPanelOutputs; ++n) out[r * kPanelOutputs + n] += a[r] * w[n];
    }
  }
}

template <int Rows>
void bf16_tile(const void* x, int64_t stride, const void* panel, const PanelShape& shape, const Prefetch&,
               float* out) {
  const uint32_t* a = static_cast<const uint32_t*>(x);
  const uint32_t* w = static_cast<const uint32_t*>(panel);
  std::memset(out, 0, Rows * kPanelOutputs * sizeof(float));
  for (int64_t s = 0; s < shape.steps; ++s, a += stride, w += kPanelOutputs) {
    for (int r = 0; r < Rows; ++r) {
      float even = bits_float(a[r] << 16), odd = bits_float(a[r] & 0xffff0000);
      for (int n = 0; n < kPanelOutputs; ++n) {
        float* y = out + r * kPanelOutputs + n;
        *y += even * bits_float(w[n] << 16);
        *y += odd * bits_float(w[n] & 0xffff0000);
      }
    }
  }
}

inline void load_scales(const uint8_t* p, ScaleKind kind, const uint8_t* unit, float* out) {
  for (int n = 0; n < kPanelOutputs; ++n) out[n] = load_scale(p, n, kind, unit);
}

// Codes of pairs of inputs in the order of ActivationGroup as unsigned 16 bits: [pair][output][2].
template <int Bits>
inline void unpack_codes(const uint8_t* w, int16_t* out) {
  constexpr int kWidth = Bits == 8 ? 8 : 4, kHigh = Bits - kWidth;
  const uint8_t* bytes = w;
  for (int q = 0; q < kWidth; ++q, bytes += 4 * kPanelOutputs) {
    uint16_t words[2 * kPanelOutputs];
    for (int i = 0; i < 2 * kPanelOutputs; ++i) words[i] = uint16_t(bytes[2 * i] | bytes[2 * i + 1] << 8);
    for (int shift = 0; shift < 16; shift += kWidth) {
      const int pair = kWidth == 4 ? q * 4 + shift / 8 + shift % 8 / 2 : q * 2 + shift / 8;
      int16_t* codes = out + pair * 2 * kPanelOutputs;
      for (int i = 0; i < 2 * kPanelOutputs; ++i) codes[i] = int16_t(words[i] >> shift & ((1 << kWidth) - 1));
    }
  }
  for (int pair = 0; kHigh > 0 && pair < kBlockInputs / 2; ++pair, out += 2 * kPanelOutputs) {
    uint16_t words[2 * kPanelOutputs];
    std::memcpy(words, w + 512 + kHigh * pair / 16 * 128, sizeof words);
    const int shift = kHigh * pair % 16;
    for (int i = 0; i < 2 * kPanelOutputs; ++i) out[i] |= int16_t((words[i] >> shift & ((1 << kHigh) - 1)) << 4);
  }
}

// dot[n] = start + codes of output n times the activations, over some pairs.
template <int Pairs>
inline void dot_pairs(const int16_t* codes, const int16_t* a, int32_t start, int32_t* dot) {
#if defined(__SSE2__)  // every x86-64; the compiler does not find this instruction by itself
  for (int n = 0; n < kPanelOutputs; n += 16) {
    __m128i sum[4];
    for (int i = 0; i < 4; ++i) sum[i] = _mm_set1_epi32(start);
#pragma GCC unroll 16
    for (int p = 0; p < Pairs; ++p) {
      int32_t pair;
      std::memcpy(&pair, a + 2 * p, sizeof pair);
      const __m128i* c = reinterpret_cast<const __m128i*>(codes + (p * kPanelOutputs + n) * 2);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sum[i] = _mm_add_epi32(sum[i], _mm_madd_epi16(c[i], _mm_set1_epi32(pair)));
    }
    for (int i = 0; i < 4; ++i) _mm_store_si128(reinterpret_cast<__m128i*>(dot + n) + i, sum[i]);
  }
#else
  for (int n = 0; n < kPanelOutputs; ++n) dot[n] = start;
  for (int p = 0; p < Pairs; ++p, codes += 2 * kPanelOutputs, a += 2) {
    for (int n = 0; n < kPanelOutputs; ++n) dot[n] += codes[2 * n] * a[0] + codes[2 * n + 1] * a[1];
  }
#endif
}

template <int Bits, int Subgroups, int Rows>
void group_tile(const void* x, int64_t stride, const void* panel, const PanelShape& shape, const Prefetch&,
                float* out) {
  constexpr int kPairs = 16 / Subgroups;
  const ActivationGroup* a = static_cast<const ActivationGroup*>(x);
  const uint8_t* w = static_cast<const uint8_t*>(panel);
  std::memset(out, 0, Rows * kPanelOutputs * sizeof(float));
  for (int64_t s = 0; s < shape.steps; ++s, a += stride) {
    const uint8_t *block = w + shape.block_offset(s), *units = w + shape.unit_offset(s);
    alignas(64) int16_t codes[kBlockInputs * kPanelOutputs];
    unpack_codes<Bits>(block, codes);
    for (int sub = 0; sub < Subgroups; ++sub) {
      const uint8_t* scales = block + shape.code_bytes + sub * shape.scale_bytes();
      const int sums = Subgroups == 1 ? 2 : sub;
      float scale[kPanelOutputs], minimum[kPanelOutputs];
      load_scales(scales, shape.scales, units, scale);
      if (shape.has_minimum) {
        load_scales(scales + Subgroups * shape.scale_bytes(), shape.scales, units + kUnitBytes, minimum);
      }
      for (int r = 0; r < Rows; ++r) {
        alignas(64) int32_t dot[kPanelOutputs];
        const int16_t* c = codes + sub * kPairs * 2 * kPanelOutputs;
        const int32_t start = Bits == 8 || shape.centred ? a[r].offset[sums] / (1 << (8 - Bits)) : 0;
        dot_pairs<kPairs>(c, a[r].codes + sub * kPairs * 2, start, dot);
        float* y = out + r * kPanelOutputs;
        for (int n = 0; shape.has_minimum && n < kPanelOutputs; ++n) y[n] += minimum[n] * a[r].sum[sums];
        for (int n = 0; n < kPanelOutputs; ++n) y[n] += float(dot[n]) * scale[n];
      }
    }
  }
}

// One loop for all formats: what the compiler makes of float multiplications and additions.
int64_t register_multiply_adds(WeightFormat, int64_t rounds) {
  float sums[kPanelOutputs] = {};
  for (int64_t i = 0; i < rounds; ++i) {
    for (int n = 0; n < kPanelOutputs; ++n) sums[n] = sums[n] * sums[n] + sums[n];
    asm volatile("" : : "r"(sums) : "memory");
  }
  return rounds * kPanelOutputs;
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA

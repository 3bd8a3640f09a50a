// Tiles for AVX-512 with VNNI and BF16: a panel is two vectors, 32 registers hold the accumulators of 12 rows (float)
// or the integer and float accumulators of 6 rows (grouped). Included by linear_tiles.cpp.

#include <immintrin.h>

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

inline void load_scales(const uint8_t* p, bool half, __m512 out[2]) {
  if (half) {
    out[0] = _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
    out[1] = _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p + 32)));
  } else {
    out[0] = _mm512_load_ps(p);
    out[1] = _mm512_load_ps(p + 64);
  }
}

// dot[r] += codes of 8 inputs (4 low, 4 high) times the activations.
template <int Rows>
inline void dot8(const ActivationGroup* a, int inputs, const __m512i low[2], const __m512i high[2],
                 __m512i dot[Rows][2]) {
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    __m512i b = broadcast4(a[r].codes + inputs);
    dot[r][0] = _mm512_dpbusd_epi32(dot[r][0], low[0], b);
    dot[r][1] = _mm512_dpbusd_epi32(dot[r][1], low[1], b);
    b = broadcast4(a[r].codes + inputs + 4);
    dot[r][0] = _mm512_dpbusd_epi32(dot[r][0], high[0], b);
    dot[r][1] = _mm512_dpbusd_epi32(dot[r][1], high[1], b);
  }
}

template <bool Four>
inline void load_codes(const uint8_t* w, int q, __m512i low[2], __m512i high[2]) {
  if (Four) {
    const __m512i mask = _mm512_set1_epi8(15);
    for (int i = 0; i < 2; ++i) {
      __m512i bytes = _mm512_load_si512(w + q * 128 + i * 64);
      low[i] = _mm512_and_si512(bytes, mask);
      high[i] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask);
    }
  } else {
    for (int i = 0; i < 2; ++i) {
      low[i] = _mm512_load_si512(w + q * 256 + i * 64);
      high[i] = _mm512_load_si512(w + q * 256 + 128 + i * 64);
    }
  }
}

template <bool Four, int Subgroups, int Rows>
void group_tile(const void* x, int64_t stride, const void* panel, const PanelShape& shape, const Prefetch& ahead,
                float* out) {
  const ActivationGroup* a = static_cast<const ActivationGroup*>(x);
  const uint8_t* w = static_cast<const uint8_t*>(panel);
  const bool half = shape.half_scales, minimum = shape.has_minimum;
  const int64_t sub_bytes = half ? 64 : 128, scale_bytes = sub_bytes * Subgroups;
  constexpr int64_t kCodes = Four ? 512 : 1024;
  __m512 acc[Rows][2];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
  for (int64_t s = 0; s < shape.steps; ++s, a += stride, w += shape.block_bytes) {
    ahead.fetch(w);
#pragma GCC unroll 2
    for (int sub = 0; sub < Subgroups; ++sub) {
      const int sums = Subgroups == 1 ? 2 : sub;
      __m512i dot[Rows][2];
#pragma GCC unroll 12
      for (int r = 0; r < Rows; ++r) {
        dot[r][0] = dot[r][1] = Four ? _mm512_setzero_si512() : broadcast4(a[r].offset + sums);
      }
#pragma GCC unroll 4
      for (int q = sub * 2; q < (Subgroups == 1 ? 4 : sub * 2 + 2); ++q) {
        __m512i low[2], high[2];
        load_codes<Four>(w, q, low, high);
        dot8<Rows>(a, q * 8, low, high, dot);
      }
      __m512 scale[2], min[2];
      load_scales(w + kCodes + sub * sub_bytes, half, scale);
#pragma GCC unroll 12
      for (int r = 0; r < Rows; ++r) {
        __m512 row = _mm512_set1_ps(a[r].scale);
        acc[r][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r][0]), _mm512_mul_ps(scale[0], row), acc[r][0]);
        acc[r][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r][1]), _mm512_mul_ps(scale[1], row), acc[r][1]);
      }
      if (minimum) {
        load_scales(w + kCodes + scale_bytes + sub * sub_bytes, half, min);
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) {
          __m512 sum = _mm512_set1_ps(a[r].sum[sums]);
          acc[r][0] = _mm512_fmadd_ps(min[0], sum, acc[r][0]);
          acc[r][1] = _mm512_fmadd_ps(min[1], sum, acc[r][1]);
        }
      }
    }
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
  repeat_on_registers(rounds, dots, [=](__m512i a) { return _mm512_dpbusd_epi32(a, bytes, bytes); });
  return rounds * 16 * 64;
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA

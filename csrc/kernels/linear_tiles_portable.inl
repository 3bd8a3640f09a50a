// Tiles in plain C++, for any machine; loops over the 32 outputs of a panel are left to the compiler's vectoriser.
// Included by linear_tiles.cpp.

#include "kernels/half.h"

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

inline void load_scales(const uint8_t* p, bool half, float* out) {
  if (!half) {
    std::memcpy(out, p, kPanelOutputs * sizeof(float));
    return;
  }
  const uint16_t* values = reinterpret_cast<const uint16_t*>(p);
  for (int n = 0; n < kPanelOutputs; ++n) out[n] = half_to_float(values[n]);
}

// Codes of one subgroup as signed 16 bits: out[k][n].
template <bool Four, int Subgroups>
inline void unpack_codes(const uint8_t* w, int sub, int16_t out[][kPanelOutputs]) {
  constexpr int kInputs = kBlockInputs / Subgroups;
  for (int i = 0; i < kInputs; ++i) {
    const int k = sub * kInputs + i;
    for (int n = 0; n < kPanelOutputs; ++n) {
      if (Four) {
        out[i][n] = int16_t((w[(k / 8) * 128 + n * 4 + k % 4] >> (k % 8 / 4 * 4)) & 15);
      } else {
        out[i][n] = int16_t(w[(k / 4) * 128 + n * 4 + k % 4] - 128);
      }
    }
  }
}

template <bool Four, int Subgroups, int Rows>
void group_tile(const void* x, int64_t stride, const void* panel, const PanelShape& shape, const Prefetch&,
                float* out) {
  constexpr int kInputs = kBlockInputs / Subgroups;
  const ActivationGroup* a = static_cast<const ActivationGroup*>(x);
  const uint8_t* w = static_cast<const uint8_t*>(panel);
  std::memset(out, 0, Rows * kPanelOutputs * sizeof(float));
  for (int64_t s = 0; s < shape.steps; ++s, a += stride, w += shape.block_bytes) {
    for (int sub = 0; sub < Subgroups; ++sub) {
      const uint8_t* scales = w + shape.code_bytes + sub * shape.scale_bytes() / Subgroups;
      const int sums = Subgroups == 1 ? 2 : sub;
      int16_t codes[kInputs][kPanelOutputs];
      float scale[kPanelOutputs], minimum[kPanelOutputs];
      unpack_codes<Four, Subgroups>(w, sub, codes);
      load_scales(scales, shape.half_scales, scale);
      if (shape.has_minimum) load_scales(scales + shape.scale_bytes(), shape.half_scales, minimum);
      for (int r = 0; r < Rows; ++r) {
        int32_t dot[kPanelOutputs] = {};
        for (int i = 0; i < kInputs; ++i) {
          const int16_t b = a[r].codes[sub * kInputs + i];
          for (int n = 0; n < kPanelOutputs; ++n) dot[n] += codes[i][n] * b;
        }
        float* y = out + r * kPanelOutputs;
        for (int n = 0; n < kPanelOutputs; ++n) y[n] += float(dot[n]) * (scale[n] * a[r].scale);
        if (!shape.has_minimum) continue;
        for (int n = 0; n < kPanelOutputs; ++n) y[n] += minimum[n] * a[r].sum[sums];
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

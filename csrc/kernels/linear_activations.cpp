// Activations as the tiles want them: float, bfloat16 pairs, or int8 with one scale per 32 inputs.

#include "half.h"
#include "linear.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Adding 1.5 * 2^23 leaves the nearest integer (ties to even) of a small float in its lowest bits.
constexpr float kRoundToInteger = 12582912.0f;

// Below this 127 / max would overflow; such groups are zero to any purpose, and their codes are 0.
constexpr float kSmallestMaximum = 1e-35f;

// The comparison of magnitudes as integers ranks NaN above infinity, so that both reach the scale.
inline void quantize_group(const float* x, ActivationGroup& group) {
  uint32_t most = 0;
  for (int i = 0; i < kBlockInputs; ++i) {
    uint32_t magnitude = float_bits(x[i]) & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  const float maximum = bits_float(most);
  const float inverse = maximum >= kSmallestMaximum ? 127.0f / maximum : 0.0f;
  int32_t codes[kBlockInputs];
  for (int i = 0; i < kBlockInputs; ++i) {
    codes[i] = int32_t(float_bits(x[i] * inverse + kRoundToInteger) << 24) >> 24;
  }
  int32_t sum[2] = {0, 0};
  for (int i = 0; i < kBlockInputs / 2; ++i) {
    sum[0] += codes[i];
    sum[1] += codes[i + kBlockInputs / 2];
  }
  for (int i = 0; i < kBlockInputs; ++i) group.codes[i] = int8_t(codes[i]);
  group.scale = maximum / 127.0f;
  const int32_t sums[3] = {sum[0], sum[1], sum[0] + sum[1]};
  for (int i = 0; i < 3; ++i) {
    group.offset[i] = -128 * sums[i];
    group.sum[i] = group.scale * float(sums[i]);
  }
}

void quantize_row(const float* x, int64_t k, int64_t stride, ActivationGroup* out) {
  int64_t i = 0;
  for (; i + kBlockInputs <= k; i += kBlockInputs, out += stride) quantize_group(x + i, *out);
  if (i == k) return;
  float tail[kBlockInputs] = {};
  std::memcpy(tail, x + i, (k - i) * sizeof(float));
  quantize_group(tail, *out);
}

void bf16_row(const float* x, int64_t k, int64_t stride, uint32_t* out) {
  constexpr int kChunk = 64;
  for (int64_t i = 0; i < k; i += kChunk) {
    uint32_t values[kChunk] = {};
    const int64_t count = min_of(kChunk, k - i);
    if (count == kChunk) {
      for (int j = 0; j < kChunk; ++j) values[j] = to_bf16(x[i + j]);
    } else {
      for (int64_t j = 0; j < count; ++j) values[j] = to_bf16(x[i + j]);
    }
    for (int64_t j = 0; j < count; j += 2, out += stride) *out = values[j] | (values[j + 1] << 16);
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
      quantize_row(row, k, tile_rows, reinterpret_cast<ActivationGroup*>(tile) + r);
    }
  }
}

}  // namespace octavo::OCTAVO_ISA

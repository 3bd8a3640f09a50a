// K and V of a token into their tiles, and queries into the form that meets them.
#pragma once

#include <string.h>

#include "kernels/attention_tile.h"

namespace octavo::OCTAVO_ISA {

/// max|x| / `most`: the scale of integers up to `most`. NaN where a number is not finite.
OCTAVO_INLINE float scale_of(const float* x, int64_t n, float most) {
  f32x16 top = {}, poison = {};
  for (int64_t d = 0; d < n; d += kLanes) {
    const f32x16 v = load_lanes(x + d, n - d);
    top = maximum(maximum(v, -v), top);
    poison += v - v;  // zero, or NaN
  }
  return greatest(top) / most + sum(poison);
}

/// x / scale, within +-most.
OCTAVO_INLINE f32x16 ratio_lanes(f32x16 x, float scale, float most) {
  f32x16 ratio = x / (scale > 0.0f ? scale : 1.0f);
  ratio = ratio > most ? splat(most) : ratio;
  return ratio < -most ? splat(-most) : ratio;
}

/// One head of q for Rows of a tile; returns what its products with keys are to be multiplied by.
template <class Kv>
OCTAVO_INLINE float load_query(const float* q, int64_t dim, int64_t padded_dim, uint16_t* to) {
  if constexpr (Kv::kInteger) {
    const float scale = scale_of(q, dim, kMostInt16);
    for (int64_t d = 0; d < padded_dim; d += kLanes) {
      const i32x16 whole = to_int(ratio_lanes(load_lanes(q + d, dim - d), scale, kMostInt16));
      const u16x16 half = __builtin_convertvector((u32x16)whole, u16x16);
      memcpy(to + d, &half, sizeof half);
    }
    return scale;
  } else {
    for (int64_t d = 0; d < padded_dim; d += kLanes) store_bf16(to + d, load_lanes(q + d, dim - d));
    return 1.0f;
  }
}

/// A token's place in a tile of keys: pairs of dimensions lie 16 tokens apart.
template <class Number>
OCTAVO_INLINE void scatter_key(const Number* numbers, int64_t d, int64_t token, char* tile) {
  Number* to = reinterpret_cast<Number*>(tile) + 2 * token;
  for (int64_t i = 0; i < kLanes; i += 2) memcpy(to + (d + i) * kSubBlock, numbers + i, 2 * sizeof(Number));
}

/// A token's place in a tile of values: dimensions lie one token apart.
template <class Number>
OCTAVO_INLINE void scatter_value(const Number* numbers, int64_t d, int64_t token, int64_t padded_dim, char* tile) {
  Number* to = reinterpret_cast<Number*>(tile) + token / 2 * 2 * padded_dim + token % 2;
  for (int64_t i = 0; i < kLanes; i++) to[2 * (d + i)] = numbers[i];
}

static void write_head(Bf16Kv, const KvLayer& kv, const float* k, const float* v, int64_t token, char* keys,
                       char* values) {
  alignas(64) uint16_t half[kLanes];
  for (int64_t d = 0; d < kv.key_dim; d += kLanes) {
    store_bf16(half, load_lanes(k + d, kv.key_dim - d));
    scatter_key(half, d, token, keys);
  }
  for (int64_t d = 0; d < kv.value_dim; d += kLanes) {
    store_bf16(half, load_lanes(v + d, kv.value_dim - d));
    scatter_value(half, d, token, padded_dim(kv.value_dim), values);
  }
}

/// The numbers of 8 bits nearest to x / scale; what is not finite becomes anything that is.
OCTAVO_INLINE void quantise(Int8Kv, f32x16 x, float scale, uint8_t* to) {
  const i32x16 whole = to_int(ratio_lanes(x, scale, Int8Kv::kMost));
  for (int64_t i = 0; i < kLanes; i++) to[i] = static_cast<uint8_t>(whole[i]);
}

template <class F>
OCTAVO_INLINE void quantise(Fp8Kv<F>, f32x16 x, float scale, uint8_t* to) {
  const f32x16 ratio = ratio_lanes(x, scale, F::kMost);
  const u32x16 codes = encode<F>(ratio == ratio ? ratio : f32x16{});
  for (int64_t i = 0; i < kLanes; i++) to[i] = static_cast<uint8_t>(codes[i]);
}

/// A token whose K or V is not finite gets NaN as the scale of its key: whoever sees it gets NaN.
template <class Kv>
static void write_head(Kv, const KvLayer& kv, const float* k, const float* v, int64_t token, char* keys,
                       char* values) {
  alignas(64) uint8_t bytes[kLanes];
  const int64_t padded_key = padded_dim(kv.key_dim), padded_value = padded_dim(kv.value_dim);
  const float k_scale = scale_of(k, kv.key_dim, Kv::kMost), v_scale = scale_of(v, kv.value_dim, Kv::kMost);
  for (int64_t d = 0; d < kv.key_dim; d += kLanes) {
    quantise(Kv{}, load_lanes(k + d, kv.key_dim - d), k_scale, bytes);
    scatter_key(bytes, d, token, keys);
  }
  for (int64_t d = 0; d < kv.value_dim; d += kLanes) {
    quantise(Kv{}, load_lanes(v + d, kv.value_dim - d), v_scale, bytes);
    scatter_value(bytes, d, token, padded_value, values);
  }
  reinterpret_cast<float*>(keys + padded_key * kSubBlock)[token] = k_scale + (v_scale - v_scale);
  reinterpret_cast<float*>(values + padded_value * kSubBlock)[token] = v_scale;
}

template <class Kv>
static void write_token(const KvLayer& kv, int64_t slot, const float* k, const float* v) {
  const int64_t block = slot / kv.block_size, in_block = slot % kv.block_size;
  for (int64_t head = 0; head < kv.kv_heads; head++, k += kv.key_dim, v += kv.value_dim) {
    char* keys = kv.keys + tile_offset(kv, kv.key_dim, block, in_block / kSubBlock, head);
    char* values = kv.values + tile_offset(kv, kv.value_dim, block, in_block / kSubBlock, head);
    write_head(Kv{}, kv, k, v, in_block % kSubBlock, keys, values);
  }
}

}  // namespace octavo::OCTAVO_ISA

// The inner loops of attention: a few query rows against one chunk of keys.
//
// A row's arithmetic is the same in every tile: one accumulator per (row, key) for scores, one per (row, dimension)
// for values, both running in order; so decode, prefill and any chunking agree bit for bit. Scores are in units of
// log 2: the softmax is one of powers of two.
#pragma once

#include "kernels/simd.h"
#include "octavo/attention.h"

namespace octavo::OCTAVO_ISA {

inline constexpr int64_t kChunkTiles = kChunk / kSubBlock;
inline constexpr int64_t kBlockRows = 6;  // rows whose accumulators (4 vectors each) fit the registers
inline constexpr float kLowest = -1e30f;  // stands for minus infinity, without its NaNs
inline constexpr float kMostInt16 = 32767.0f;

static_assert(kTileRows % kBlockRows == 0 && kPartition % kChunk == 0);

/// KV in bfloat16: queries and weights are bfloat16, sums float32.
struct Bf16Kv {
  static constexpr KvFormat kFormat = KvFormat::kBf16;
  typedef uint16_t Number;
  typedef f32x16 Sum;
};

/// KV in int8: queries and weights are int16 with a scale per row, sums are exact in int32 (up to head_dim 512).
struct Int8Kv {
  static constexpr KvFormat kFormat = KvFormat::kInt8;
  typedef int8_t Number;
  typedef i32x16 Sum;
};

template <class Kv>
OCTAVO_INLINE const typename Kv::Number* numbers(const char* tile) {
  return reinterpret_cast<const typename Kv::Number*>(tile);
}

/// The scales of an int8 tile's 16 tokens.
OCTAVO_INLINE const float* token_scales(const char* tile, int64_t padded_dim) {
  return reinterpret_cast<const float*>(tile + padded_dim * kSubBlock);
}

/// scores[r][0 .. 63] = scales[r] * (q[r] . keys); the four tiles hold 16 keys each. Fetches the tiles of `next`,
/// unless it is null, line by line as it goes.
template <class Kv, int Rows>
static void score_rows(const uint16_t* q, int64_t dim, int64_t padded_dim, const char* const* tiles,
                       const char* const* next, const float* scales, float* scores) {
  typename Kv::Sum acc[Rows][kChunkTiles] = {};
  for (int64_t d = 0; d < dim; d += 2) {
    u32x16 keys[kChunkTiles];
#pragma GCC unroll 4
    for (int j = 0; j < kChunkTiles; j++) keys[j] = load_pairs(numbers<Kv>(tiles[j]) + d * kSubBlock);
    if (next) {
#pragma GCC unroll 4
      for (int j = 0; j < kChunkTiles; j++) __builtin_prefetch(numbers<Kv>(next[j]) + d * kSubBlock);
    }
#pragma GCC unroll 6
    for (int r = 0; r < Rows; r++) {
      const u32x16 pair = splat_pair(q + r * padded_dim + d);
#pragma GCC unroll 4
      for (int j = 0; j < kChunkTiles; j++) acc[r][j] = dot_pairs(acc[r][j], keys[j], pair);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 4
    for (int j = 0; j < kChunkTiles; j++) {
      f32x16 score;
      if constexpr (Kv::kFormat == KvFormat::kInt8) {
        score = to_float(acc[r][j]) * load(token_scales(tiles[j], padded_dim)) * scales[r];
      } else {
        score = acc[r][j] * scales[r];
      }
      store(scores + r * kChunk + j * kLanes, score);
    }
  }
}

/// sums[r][0 .. 16 * Vectors) = rescale[r] * itself + scales[r] * (weights[r] . values), over `num_tiles` tiles of 16
/// keys; scales are those of int16 weights. Fetches like score_rows.
template <class Kv, int Rows, int Vectors>
static void accumulate_rows(const uint16_t* weights, const char* const* tiles, const char* const* next,
                            int64_t num_tiles, int64_t column, int64_t padded_dim, const float* rescale,
                            const float* scales, float* sums) {
  typename Kv::Sum acc[Rows][Vectors] = {};
  if constexpr (Kv::kFormat == KvFormat::kBf16) {
#pragma GCC unroll 6
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) acc[r][v] = load(sums + r * padded_dim + column + v * kLanes) * rescale[r];
    }
  }
  for (int64_t tile = 0; tile < num_tiles; tile++) {
    const typename Kv::Number* values = numbers<Kv>(tiles[tile]) + 2 * column;
    const typename Kv::Number* ahead = next ? numbers<Kv>(next[tile]) + 2 * column : nullptr;
    for (int64_t pair = 0; pair < kSubBlock / 2; pair++, values += 2 * padded_dim) {
      u32x16 value[Vectors];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) value[v] = load_pairs(values + 2 * v * kLanes);
      if (ahead) {
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) __builtin_prefetch(ahead + 2 * (pair * padded_dim + v * kLanes));
      }
#pragma GCC unroll 6
      for (int r = 0; r < Rows; r++) {
        const u32x16 weight = splat_pair(weights + r * kChunk + tile * kSubBlock + 2 * pair);
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) acc[r][v] = dot_pairs(acc[r][v], value[v], weight);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) {
      float* sum = sums + r * padded_dim + column + v * kLanes;
      if constexpr (Kv::kFormat == KvFormat::kInt8) {
        store(sum, multiply_add(to_float(acc[r][v]), splat(scales[r]), load(sum) * rescale[r]));
      } else {
        store(sum, acc[r][v]);
      }
    }
  }
}

typedef void (*ScoreRows)(const uint16_t*, int64_t, int64_t, const char* const*, const char* const*, const float*,
                          float*);
typedef void (*AccumulateRows)(const uint16_t*, const char* const*, const char* const*, int64_t, int64_t, int64_t,
                               const float*, const float*, float*);

template <class Kv>
inline constexpr ScoreRows kScoreRows[kBlockRows] = {score_rows<Kv, 1>, score_rows<Kv, 2>, score_rows<Kv, 3>,
                                                     score_rows<Kv, 4>, score_rows<Kv, 5>, score_rows<Kv, 6>};

#define OCTAVO_BY_VECTORS(rows)                                                                            \
  {                                                                                                        \
    accumulate_rows<Kv, rows, 1>, accumulate_rows<Kv, rows, 2>, accumulate_rows<Kv, rows, 3>,              \
        accumulate_rows<Kv, rows, 4>                                                                       \
  }
template <class Kv>
inline constexpr AccumulateRows kAccumulateRows[kBlockRows][4] = {
    OCTAVO_BY_VECTORS(1), OCTAVO_BY_VECTORS(2), OCTAVO_BY_VECTORS(3),
    OCTAVO_BY_VECTORS(4), OCTAVO_BY_VECTORS(5), OCTAVO_BY_VECTORS(6),
};
#undef OCTAVO_BY_VECTORS

/// The keys of a chunk that a row sees: first .. end - 1, of 0 .. 63. None: first >= end.
struct Seen {
  int64_t first, end;
  bool all() const { return first == 0 && end == kChunk; }
};

OCTAVO_INLINE i32x16 seen_lanes(int tile, Seen seen) {
  const i32x16 lane = i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + tile * 16;
  return (lane < static_cast<int32_t>(seen.end)) & (lane >= static_cast<int32_t>(seen.first));
}

/// The greatest of the seen scores, kLowest for none; the others become kLowest.
OCTAVO_INLINE float greatest_score(float* scores, Seen seen) {
  f32x16 most = splat(kLowest);
#pragma GCC unroll 4
  for (int j = 0; j < kChunkTiles; j++) {
    f32x16 score = load(scores + j * kLanes);
    if (!seen.all()) {
      score = seen_lanes(j, seen) ? score : splat(kLowest);
      store(scores + j * kLanes, score);
    }
    most = maximum(score, most);
  }
  return greatest(most);
}

/// The greatest scale of the seen tokens of a chunk's int8 values.
OCTAVO_INLINE float greatest_scale(const char* const* values, Seen seen, int64_t padded_dim) {
  f32x16 most = {};
#pragma GCC unroll 4
  for (int j = 0; j < kChunkTiles; j++) {
    const f32x16 scale = load(token_scales(values[j], padded_dim));
    most = maximum(seen_lanes(j, seen) ? scale : f32x16{}, most);
  }
  return greatest(most);
}

/// Weights of a chunk from a row's scores, of which those seen count: added to `lane_sums`, which shrinks by
/// `rescale` before, and written as bf16. A chunk without seen keys changes nothing: its weights are 0.
/// int8: weights are multiplied by their values' scales, then by `inverse`, and written as int16.
template <class Kv>
OCTAVO_INLINE void weigh(const float* scores, Seen seen, float top, float rescale, const char* const* values,
                         int64_t padded_dim, float inverse, float* lane_sums, uint16_t* weights) {
  f32x16 total = load(lane_sums) * rescale;
#pragma GCC unroll 4
  for (int j = 0; j < kChunkTiles; j++) {
    f32x16 weight = power_of_two(load(scores + j * kLanes) - top);
    if (!seen.all()) weight = seen_lanes(j, seen) ? weight : f32x16{};
    total += weight;
    if constexpr (Kv::kFormat == KvFormat::kInt8) {
      f32x16 scale = load(token_scales(values[j], padded_dim)) * inverse;
      if (!seen.all()) scale = seen_lanes(j, seen) ? scale : f32x16{};  // elsewhere, it may be anything
      const u16x16 whole = __builtin_convertvector((u32x16)to_int(weight * scale), u16x16);
      memcpy(weights + j * kSubBlock, &whole, sizeof whole);
    } else {
      store_bf16(weights + j * kSubBlock, weight);
    }
  }
  store(lane_sums, total);
}

}  // namespace octavo::OCTAVO_ISA

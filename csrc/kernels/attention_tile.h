// The inner loops of attention: a few query rows against one chunk of keys.
//
// A row's arithmetic is the same in every tile: one accumulator per (row, key) for scores, one per (row, dimension)
// for values, both running in order; so decode, prefill and any chunking agree bit for bit. Scores are in units of
// log 2: the softmax is one of powers of two.
#pragma once

#include "kernels/fp8.h"
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
  static constexpr bool kScaled = false, kInteger = false;
  typedef uint16_t Number;
  typedef uint16_t Wide;  // what numbers become to meet queries and weights
  typedef f32x16 Sum;
};

/// KV in int8: queries and weights are int16 with a scale per row, sums are exact in int32 (up to head_dim 512).
struct Int8Kv {
  static constexpr bool kScaled = true, kInteger = true;
  static constexpr float kMost = 127.0f;
  typedef int8_t Number;
  typedef int16_t Wide;
  typedef i32x16 Sum;
};

/// KV in fp8: as with bfloat16, which holds its numbers exactly.
template <class F>
struct Fp8Kv {
  static constexpr bool kScaled = true, kInteger = false;
  static constexpr float kMost = F::kMost;
  typedef F Number;
  typedef uint16_t Wide;
  typedef f32x16 Sum;
};

template <class Number>
OCTAVO_INLINE const Number* numbers(const char* tile) {
  return reinterpret_cast<const Number*>(tile);
}

/// The scales of an 8-bit tile's 16 tokens.
OCTAVO_INLINE const float* token_scales(const char* tile, int64_t padded_dim) {
  return reinterpret_cast<const float*>(tile + padded_dim * kSubBlock);
}

/// Copies of 16-bit numbers of a tile of `count`. Fetches the tile at `next`, unless it is null.
template <class Kv>
static void widen_tile(const char* tile, int64_t count, const char* next, uint16_t* to) {
  const typename Kv::Number* from = numbers<typename Kv::Number>(tile);
  for (int64_t i = 0; i < count; i += 2 * kLanes) {
    const u32x16 pairs = load_pairs(from + i);
    memcpy(to + i, &pairs, sizeof pairs);
    if (next) __builtin_prefetch(numbers<typename Kv::Number>(next) + i);
  }
}

/// scores[r][0 .. 16 * Tiles) = q[r] . keys; each tile holds 16 keys, whose scales stand at `scales`, if they have any.
/// `most`[r][0 .. 15]: the greater ones of lanes. Fetches the tiles of `next`, unless it is null, line by line.
template <class Kv, class Number, int Rows, int Tiles = kChunkTiles>
static void score_rows(const uint16_t* q, int64_t dim, int64_t padded_dim, const char* const* tiles,
                       const float* const* scales, const char* const* next, float* scores, float* most) {
  typename Kv::Sum acc[Rows][Tiles] = {};
  for (int64_t d = 0; d < dim; d += 2) {
    u32x16 keys[Tiles];
#pragma GCC unroll 4
    for (int j = 0; j < Tiles; j++) keys[j] = load_pairs(numbers<Number>(tiles[j]) + d * kSubBlock);
    if (next && (sizeof(Number) == 2 || d % 4 == 0)) {
#pragma GCC unroll 4
      for (int j = 0; j < Tiles; j++) __builtin_prefetch(numbers<Number>(next[j]) + d * kSubBlock);
    }
#pragma GCC unroll 6
    for (int r = 0; r < Rows; r++) {
      const u32x16 pair = splat_pair(q + r * padded_dim + d);
#pragma GCC unroll 4
      for (int j = 0; j < Tiles; j++) acc[r][j] = dot_pairs(acc[r][j], keys[j], pair);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; r++) {
    f32x16 greatest;
#pragma GCC unroll 4
    for (int j = 0; j < Tiles; j++) {
      f32x16 score = to_float(acc[r][j]);
      if constexpr (Kv::kScaled) score *= load(scales[j]);
      store(scores + r * kChunk + j * kLanes, score);
      greatest = j == 0 ? score : maximum(greatest, score);
    }
    store(most + r * kLanes, greatest);
  }
}

/// sums[r][0 .. 16 * Vectors) = rescale[r] * itself + scales[r] * (weights[r] . values), over `num_tiles` tiles of 16
/// keys; scales are those of int16 weights, and 1 for others. Fetches like score_rows.
template <class Kv, class Number, int Rows, int Vectors>
static void accumulate_rows(const uint16_t* weights, const char* const* tiles, const char* const* next,
                            int64_t num_tiles, int64_t column, int64_t padded_dim, const float* rescale,
                            const float* scales, float* sums) {
  typename Kv::Sum acc[Rows][Vectors] = {};
  if constexpr (!Kv::kInteger) {
#pragma GCC unroll 6
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) acc[r][v] = load(sums + r * padded_dim + column + v * kLanes) * rescale[r];
    }
  }
  for (int64_t tile = 0; tile < num_tiles; tile++) {
    const Number* values = numbers<Number>(tiles[tile]) + 2 * column;
    const Number* ahead = next ? numbers<Number>(next[tile]) + 2 * column : nullptr;
    for (int64_t pair = 0; pair < kSubBlock / 2; pair++, values += 2 * padded_dim) {
      u32x16 value[Vectors];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) value[v] = load_pairs(values + 2 * v * kLanes);
      if (ahead) {
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v += 2 / sizeof(Number)) __builtin_prefetch(ahead + 2 * (pair * padded_dim + v * kLanes));
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
      if constexpr (Kv::kInteger) {
        store(sum, multiply_add(to_float(acc[r][v]), splat(scales[r]), load(sum) * rescale[r]));
      } else {
        store(sum, acc[r][v]);
      }
    }
  }
}

typedef void (*ScoreRows)(const uint16_t*, int64_t, int64_t, const char* const*, const float* const*,
                          const char* const*, float*, float*);
typedef void (*AccumulateRows)(const uint16_t*, const char* const*, const char* const*, int64_t, int64_t, int64_t,
                               const float*, const float*, float*);

template <class Kv, class Number>
inline constexpr ScoreRows kScoreRows[kBlockRows] = {score_rows<Kv, Number, 1>, score_rows<Kv, Number, 2>,
                                                     score_rows<Kv, Number, 3>, score_rows<Kv, Number, 4>,
                                                     score_rows<Kv, Number, 5>, score_rows<Kv, Number, 6>};

template <class Kv, class Number>  // the score_rows of a whole block of rows, by tiles
inline constexpr ScoreRows kScoreTiles[kChunkTiles] = {score_rows<Kv, Number, 6, 1>, score_rows<Kv, Number, 6, 2>,
                                                       score_rows<Kv, Number, 6, 3>, score_rows<Kv, Number, 6, 4>};

#define OCTAVO_BY_VECTORS(rows)                                                        \
  {                                                                                    \
    accumulate_rows<Kv, Number, rows, 1>, accumulate_rows<Kv, Number, rows, 2>,        \
        accumulate_rows<Kv, Number, rows, 3>, accumulate_rows<Kv, Number, rows, 4>     \
  }
template <class Kv, class Number>
inline constexpr AccumulateRows kAccumulateRows[kBlockRows][4] = {
    OCTAVO_BY_VECTORS(1), OCTAVO_BY_VECTORS(2), OCTAVO_BY_VECTORS(3),
    OCTAVO_BY_VECTORS(4), OCTAVO_BY_VECTORS(5), OCTAVO_BY_VECTORS(6),
};
#undef OCTAVO_BY_VECTORS

}  // namespace octavo::OCTAVO_ISA

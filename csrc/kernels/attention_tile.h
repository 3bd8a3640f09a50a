// The inner loops of attention: a few query rows against one chunk of keys.
//
// A row's arithmetic is the same in every tile: one accumulator per (row, key) for scores, one per (row, dimension)
// for values, both running in order; so decode, prefill and any chunking agree bit for bit.
#pragma once

#include "kernels/simd.h"
#include "octavo/attention.h"

namespace octavo::OCTAVO_ISA {

inline constexpr int64_t kChunkTiles = kChunk / kSubBlock;
inline constexpr int64_t kBlockRows = 6;  // rows whose accumulators (4 vectors each) fit the registers
inline constexpr float kLowest = -1e30f;  // stands for minus infinity, without its NaNs

static_assert(kTileRows % kBlockRows == 0 && kPartition % kChunk == 0);

/// scores[r][0 .. 63] = scale * (q[r] . keys); the four tiles hold 16 keys each.
template <int Rows>
static void score_rows(const uint16_t* q, int64_t dim, int64_t padded_dim, const uint16_t* const* tiles, float scale,
                       float* scores) {
  f32x16 acc[Rows][kChunkTiles] = {};
  for (int64_t d = 0; d < dim; d += 2) {
    u32x16 keys[kChunkTiles];
#pragma GCC unroll 4
    for (int j = 0; j < kChunkTiles; j++) keys[j] = load_pairs(tiles[j] + d * kSubBlock);
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
    for (int j = 0; j < kChunkTiles; j++) store(scores + r * kChunk + j * kLanes, acc[r][j] * scale);
  }
}

/// sums[r][0 .. 16 * Vectors) = rescale[r] * itself + weights[r] . values, over `num_tiles` tiles of 16 keys.
template <int Rows, int Vectors>
static void accumulate_rows(const uint16_t* weights, const uint16_t* const* tiles, int64_t num_tiles, int64_t column,
                            int64_t padded_dim, const float* rescale, float* sums) {
  f32x16 acc[Rows][Vectors];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) acc[r][v] = load(sums + r * padded_dim + column + v * kLanes) * rescale[r];
  }
  for (int64_t tile = 0; tile < num_tiles; tile++) {
    const uint16_t* values = tiles[tile] + 2 * column;
    for (int64_t pair = 0; pair < kSubBlock / 2; pair++, values += 2 * padded_dim) {
      u32x16 value[Vectors];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) value[v] = load_pairs(values + 2 * v * kLanes);
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
    for (int v = 0; v < Vectors; v++) store(sums + r * padded_dim + column + v * kLanes, acc[r][v]);
  }
}

typedef void (*ScoreRows)(const uint16_t*, int64_t, int64_t, const uint16_t* const*, float, float*);
typedef void (*AccumulateRows)(const uint16_t*, const uint16_t* const*, int64_t, int64_t, int64_t, const float*,
                               float*);

inline constexpr ScoreRows kScoreRows[kBlockRows] = {score_rows<1>, score_rows<2>, score_rows<3>,
                                                     score_rows<4>, score_rows<5>, score_rows<6>};

#define OCTAVO_BY_VECTORS(rows) \
  { accumulate_rows<rows, 1>, accumulate_rows<rows, 2>, accumulate_rows<rows, 3>, accumulate_rows<rows, 4> }
inline constexpr AccumulateRows kAccumulateRows[kBlockRows][4] = {
    OCTAVO_BY_VECTORS(1), OCTAVO_BY_VECTORS(2), OCTAVO_BY_VECTORS(3),
    OCTAVO_BY_VECTORS(4), OCTAVO_BY_VECTORS(5), OCTAVO_BY_VECTORS(6),
};
#undef OCTAVO_BY_VECTORS

/// One row's online softmax over a chunk of which the first `visible` (0 .. 64) keys count: turns scores into bf16
/// weights, and returns the factor by which what was summed before shrinks. A chunk without visible keys changes
/// nothing: the factor is exactly 1 and all weights are 0.
OCTAVO_INLINE float soften_row(float* scores, int64_t visible, float* greatest_score, float* lane_sums,
                               uint16_t* weights) {
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const f32x16 lowest = splat(kLowest);
  f32x16 score[kChunkTiles], top = splat(*greatest_score);
#pragma GCC unroll 4
  for (int j = 0; j < kChunkTiles; j++) {
    const i32x16 seen = lane + j * 16 < static_cast<int32_t>(visible);
    score[j] = seen ? load(scores + j * kLanes) : lowest;
    top = maximum(score[j], top);
  }
  const float new_top = greatest(top);
  const float factor = exponential(splat(*greatest_score - new_top))[0];
  f32x16 total = load(lane_sums) * factor;
#pragma GCC unroll 4
  for (int j = 0; j < kChunkTiles; j++) {
    const i32x16 seen = lane + j * 16 < static_cast<int32_t>(visible);
    const f32x16 weight = seen ? exponential(score[j] - new_top) : f32x16{};
    total += weight;
    store_bf16(weights + j * kSubBlock, weight);
  }
  store(lane_sums, total);
  *greatest_score = new_top;
  return factor;
}

}  // namespace octavo::OCTAVO_ISA

// The softmax of attention: scores of rows and a chunk of keys become weights. Scores are in units of log 2.
#pragma once

#include "kernels/attention_tile.h"

namespace octavo::OCTAVO_ISA {

/// The keys of a chunk that a row sees: first .. end - 1, of 0 .. 63. None: first >= end.
struct Seen {
  int64_t first, end;
  bool all() const { return first == 0 && end == kChunk; }
};

OCTAVO_INLINE i32x16 seen_lanes(int64_t tile, Seen seen) {
  const i32x16 lane = i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + static_cast<int32_t>(tile * 16);
  return (lane < static_cast<int32_t>(seen.end)) & (lane >= static_cast<int32_t>(seen.first));
}

/// A row's scores of keys that it does not see become kLowest, in tiles first .. end - 1; `most` as score_rows leaves it.
OCTAVO_INLINE void hide_scores(float* scores, Seen seen, int64_t first, int64_t end, float* most) {
  f32x16 top = splat(kLowest);
  for (int64_t j = first; j < end; j++) {
    const f32x16 score = seen_lanes(j, seen) ? load(scores + j * kLanes) : splat(kLowest);
    store(scores + j * kLanes, score);
    top = maximum(score, top);
  }
  store(most, top);
}

/// The greatest of the scales of a chunk's values that are seen.
OCTAVO_INLINE float greatest_scale(const float* const* scales, Seen seen) {
  f32x16 most = {};
#pragma GCC unroll 4
  for (int j = 0; j < kChunkTiles; j++) {
    const f32x16 scale = load(scales[j]);
    most = maximum(seen_lanes(j, seen) ? scale : f32x16{}, most);
  }
  return greatest(most);
}

/// Weights 2^(score * factor - top) of a chunk from a row's scores in tiles first .. end - 1, of which those seen count:
/// added to `lane_sums`, which shrinks by `rescale` before, and written as bf16. A chunk without seen keys changes
/// nothing: its weights are 0. Values with scales: weights are multiplied by these; int8: then by `inverse`, and written
/// as int16.
template <class Kv>
OCTAVO_INLINE void weigh(const float* scores, Seen seen, int64_t first, int64_t end, float factor, float top,
                         float rescale, const float* const* scales, float inverse, float* lane_sums,
                         uint16_t* weights) {
  f32x16 total = load(lane_sums) * rescale;
#pragma GCC unroll 4
  for (int64_t j = first; j < end; j++) {
    f32x16 exponent;
    if constexpr (Kv::kInteger) {
      exponent = load(scores + j * kLanes) * factor - top;  // never above 0, or int16 would not hold the weight
    } else {
      exponent = multiply_add(load(scores + j * kLanes), splat(factor), splat(-top));
    }
    f32x16 weight = power_of_two(exponent);
    if (!seen.all()) weight = seen_lanes(j, seen) ? weight : f32x16{};
    total += weight;
    if constexpr (Kv::kScaled) {
      f32x16 scale = load(scales[j]);
      if (!seen.all()) scale = seen_lanes(j, seen) ? scale : f32x16{};  // elsewhere, it may be anything
      weight *= Kv::kInteger ? scale * inverse : scale;
    }
    if constexpr (Kv::kInteger) {
      const u16x16 whole = __builtin_convertvector((u32x16)to_int(weight), u16x16);
      memcpy(weights + j * kSubBlock, &whole, sizeof whole);
    } else {
      store_bf16(weights + j * kSubBlock, weight);
    }
  }
  store(lane_sums, total);
}

}  // namespace octavo::OCTAVO_ISA

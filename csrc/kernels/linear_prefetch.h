// Fetching weights ahead of their use: the hardware prefetcher alone does not reach the speed of memory.
#pragma once

#include "kernels/linear_layout.h"

namespace octavo::OCTAVO_ISA {

/// What a tile fetches at each step: bytes begin .. end - 1 of the block that lies `distance` bytes ahead. Panels of a
/// thread are contiguous, so that running past a panel's end fetches the next one.
struct Prefetch {
  int64_t distance, begin, end;

  void fetch(const void* block) const { fetch(block, begin, end); }

  /// The units before a block, as a whole.
  void fetch_units(const void* units, int64_t bytes) const { fetch(units, 0, bytes); }

 private:
  void fetch(const void* from, int64_t first, int64_t last) const {
    const char* line = static_cast<const char*>(from) + distance;
    for (int64_t i = first; i < last; i += 64) __builtin_prefetch(line + i);
  }
};

inline constexpr int64_t kNearBytes = 4096;
inline constexpr int64_t kMostPanelBytes = 128 * 1024;  // two panels of this size fit into the second-level cache

/// Tile `tile` of the `tiles` that go over one panel. The first tile of the first panel fetches just ahead of itself;
/// from then on every tile fetches its share of the next panel, so that memory is never idle while tiles compute.
static inline Prefetch plan_prefetch(const PanelShape& shape, bool first_panel, int64_t tile, int64_t tiles) {
  if (tiles == 1 || (first_panel && tile == 0)) return {kNearBytes, 0, shape.block_bytes};
  if (shape.panel_bytes() > kMostPanelBytes) return {kNearBytes, 0, shape.block_bytes};
  const int64_t lines = shape.block_bytes / 64;
  if (first_panel) --tile, --tiles;
  return {shape.panel_bytes(), lines * tile / tiles * 64, lines * (tile + 1) / tiles * 64};
}

}  // namespace octavo::OCTAVO_ISA

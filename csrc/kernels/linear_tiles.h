// Tiles: the inner loops of a linear, a few rows against one panel. The only part written per instruction set.
//
// Invariance: an output is one float accumulator, started at zero and updated once per step in the order of K
// (twice per bf16 pair; per subgroup for grouped formats: + minimum * sum of activation codes, then + (dot of codes) *
// scale, each a fused multiply-add where the ISA has it). The integer dot of a subgroup is exact. The scales of
// activations are the caller's. Nothing depends on the number of rows of the tile.
#pragma once

#include "kernels/linear_layout.h"
#include "kernels/linear_prefetch.h"

namespace octavo::OCTAVO_ISA {

/// Computes out[r][0 .. 31] for the rows of one tile. Step s, row r of the activations is element s * stride + r of x.
using Tile = void (*)(const void* x, int64_t stride, const void* panel, const PanelShape& shape, const Prefetch& ahead,
                      float* out);

inline constexpr int kMaxTileRows = 12;

/// The most rows a tile of this kind of activations takes.
int most_tile_rows(ActivationKind kind);

/// The tile of exactly `rows` rows.
Tile find_tile(const PanelShape& shape, int64_t rows);

/// See LinearKernels.
int64_t multiply_adds(WeightFormat format, int64_t rounds);

}  // namespace octavo::OCTAVO_ISA

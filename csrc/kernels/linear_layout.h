// The layout of packed panels and of converted activations: one for every row count, thread count and ISA.
//
// A panel holds 32 outputs as `steps` blocks along K; a linear's panels are contiguous, so that a thread reads memory
// as one stream. Inside a block (n: output in the panel, k: input in the block):
//   f32   1 input     float    [32 n]                                                  128 bytes
//   bf16  2 inputs    uint16   [32 n][2 k]                                             128 bytes
//   i8    32 inputs   uint8    [8][32 n][4 k], the code + 128                          1024 bytes, then scales, minima
//   i4    32 inputs   uint8    [4][32 n][4], low nibble k = 8q + j, high 8q + 4 + j    512 bytes, then scales, minima
//   i5    as i4, then bit 4 of the codes, uint32 [32 n]                                640 bytes, then scales, minima
//   i6    as i4, then bits 4 and 5, uint32 [2][32 n]                                   768 bytes, then scales, minima
// Scales and minima are [subgroups][32 n] float, float16 or int8; subgroups is 2 for groups of 16 inputs, else 1 (a
// longer group repeats its scale in each block). Before every 8 blocks with int8 scales lie their units, float16
// [32 n], of scales and then of minima. Codes are unsigned: a mask or a shift then widens them to 16 bits.
//
// The higher bits of i5 and i6 are in the order of the pairs of ActivationGroup: bits of pair p from h * p % 16 on for
// its first input, 16 higher for its second, h being 1 or 2, of word h * p / 16.
//
// Activations are kept by row tile: [tile][step][row of the tile], so that a kernel reads them in order, whatever K.
#pragma once

#include "octavo/linear.h"
#include "octavo/partition.h"

namespace octavo::OCTAVO_ISA {

inline constexpr int64_t kBlockInputs = 32;  // inputs of one grouped block, and of one activation scale
inline constexpr int64_t kUnitBlocks = kUnitInputs / kBlockInputs;
inline constexpr int64_t kUnitBytes = kPanelOutputs * 2;

struct PanelShape {
  WeightFormat format;
  int64_t steps;        // blocks along K
  int64_t block_bytes;  // of one block, a multiple of 64
  int64_t code_bytes;   // of a block, before its scales
  int64_t unit_bytes;   // before every kUnitBlocks blocks, or 0
  int32_t subgroups;
  ScaleKind scales;
  bool centred;
  bool has_minimum;

  int64_t panel_bytes() const { return block_offset(steps - 1) + block_bytes; }
  int64_t block_offset(int64_t step) const { return step * block_bytes + (step / kUnitBlocks + 1) * unit_bytes; }
  int64_t unit_offset(int64_t step) const { return block_offset(step / kUnitBlocks * kUnitBlocks) - unit_bytes; }
  /// Bytes of the scales of one subgroup in a block.
  int64_t scale_bytes() const {
    return kPanelOutputs * (scales == ScaleKind::f32 ? 4 : scales == ScaleKind::f16 ? 2 : 1);
  }
  int64_t minimum_offset() const { return code_bytes + subgroups * scale_bytes(); }
};

static inline bool is_grouped(WeightFormat format) { return format >= WeightFormat::i4_group; }

static inline PanelShape panel_shape(const PartShape& part) {
  PanelShape shape{part.format, part.k, kPanelOutputs * 4, kPanelOutputs * 4, 0, 1, part.scales, false, false};
  if (part.format == WeightFormat::bf16) shape.steps = ceil_div(part.k, 2);
  if (!is_grouped(part.format)) return shape;
  shape.steps = ceil_div(part.k, kBlockInputs);
  shape.code_bytes = kPanelOutputs * kBlockInputs / 8 * int(part.format);
  shape.subgroups = part.group == 16 ? 2 : 1;
  shape.centred = part.centred;
  shape.has_minimum = part.has_minimum;
  const int64_t kinds = part.has_minimum ? 2 : 1;
  if (part.scales == ScaleKind::counted) shape.unit_bytes = kUnitBytes * kinds;
  shape.block_bytes = round_up(shape.code_bytes + shape.subgroups * shape.scale_bytes() * kinds, 64);
  return shape;
}

/// 32 activations of one row as int16, and what the offset (+128) and the minima of the weights need of them.
/// Of each four inputs the even two come first, then the odd two: widening every second byte of the weights' codes
/// gives pairs in this order. Index of the sums: first 16 inputs, last 16, all 32.
struct alignas(32) ActivationGroup {
  int16_t codes[kBlockInputs];  // round(x / scale of the row), -32767 .. 32767; inputs 0 2 1 3, 4 6 5 7, ...
  int32_t offset[3];            // -128 * sum(codes): what dots with codes of 8 bits, stored + 128, start from
  float sum[3];                 // sum(codes)
};
static_assert(sizeof(ActivationGroup) == 96);
static_assert(int64_t{kBlockInputs} * (255 + 128) * 32767 < INT32_MAX, "dots of a block are exact");

/// Activations come in one kind per arithmetic; parts of one linear share them.
enum class ActivationKind { f32, bf16, i16 };
inline constexpr int kActivationKinds = 3;

static inline ActivationKind activation_kind(WeightFormat format) {
  if (format == WeightFormat::f32) return ActivationKind::f32;
  return format == WeightFormat::bf16 ? ActivationKind::bf16 : ActivationKind::i16;
}

/// A tile's groups are followed by the scales of its rows, [row] float: max |x| / 32767 over the row; NaN if any x is,
/// so that the row's outputs are NaN. Room for them, so that tiles stay aligned:
inline constexpr int64_t kScaleBytes = 32;

/// Bytes of one row of converted activations.
static inline int64_t activation_row_bytes(ActivationKind kind, int64_t k) {
  if (kind == ActivationKind::f32) return k * 4;
  if (kind == ActivationKind::bf16) return ceil_div(k, 2) * 4;
  return ceil_div(k, kBlockInputs) * int64_t{sizeof(ActivationGroup)} + kScaleBytes;
}

/// The scales of the rows of a tile of int16 activations.
static inline float* row_scales(char* tile, int64_t k, int64_t tile_rows) {
  return reinterpret_cast<float*>(tile + ceil_div(k, kBlockInputs) * tile_rows * int64_t{sizeof(ActivationGroup)});
}

/// How rows are shared among as few tiles of `most` rows as possible: evenly. The first tiles have `height` rows, the
/// others one less. A tile begins where the rows before it end.
struct Tiling {
  int64_t tiles, height, tall_rows;  // tall_rows: of the tiles of `height`

  Tiling(int64_t rows, int64_t most)
      : tiles(ceil_div(rows, most)), height(ceil_div(rows, tiles)), tall_rows((rows - tiles * (height - 1)) * height) {}

  int64_t first_row(int64_t tile) const { return tile * height - max_of(tile - tall_rows / height, 0); }
  int64_t rows(int64_t tile) const { return tile * height < tall_rows ? height : height - 1; }
  int64_t tile_of(int64_t row) const {
    return row < tall_rows ? row / height : tall_rows / height + (row - tall_rows) / (height - 1);
  }
};

}  // namespace octavo::OCTAVO_ISA

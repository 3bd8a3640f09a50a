// The layout of packed panels and of converted activations: one for every row count, thread count and ISA.
//
// A panel holds 32 outputs as `steps` blocks along K; a linear's panels are contiguous, so that a thread reads memory
// as one stream. Inside a block (n: output in the panel, k: input in the block):
//   f32   1 input     float    [32 n]                                                  128 bytes
//   bf16  2 inputs    uint16   [32 n][2 k]                                             128 bytes
//   i8    32 inputs   uint8    [8][32 n][4 k], the code + 128                          1024 bytes, then scales, minima
//   i4    32 inputs   uint8    [4][32 n][4], low nibble k = 8q + j, high 8q + 4 + j    512 bytes, then scales, minima
// Scales and minima are [subgroups][32 n] float or float16; subgroups is 2 for groups of 16 inputs, else 1 (a longer
// group repeats its scale in each block). Codes are unsigned: a mask or a shift then widens them to 16 bits.
//
// Activations are kept by row tile: [tile][step][row of the tile], so that a kernel reads them in order, whatever K.
#pragma once

#include "octavo/linear.h"
#include "octavo/partition.h"

namespace octavo::OCTAVO_ISA {

inline constexpr int64_t kBlockInputs = 32;  // inputs of one block of i8 and i4, and of one activation scale

struct PanelShape {
  WeightFormat format;
  int64_t steps;        // blocks along K
  int64_t block_bytes;  // of one block, a multiple of 64
  int64_t code_bytes;   // of a block, before its scales
  int32_t subgroups;
  bool half_scales;
  bool has_minimum;

  int64_t panel_bytes() const { return steps * block_bytes; }
  int64_t scale_bytes() const { return subgroups * kPanelOutputs * (half_scales ? 2 : 4); }
};

static inline bool is_grouped(WeightFormat format) {
  return format == WeightFormat::i8_group || format == WeightFormat::i4_group;
}

static inline PanelShape panel_shape(WeightFormat format, int64_t k, int32_t group, bool has_minimum,
                                     bool half_scales) {
  if (format == WeightFormat::f32) return {format, k, kPanelOutputs * 4, kPanelOutputs * 4, 1, false, false};
  if (format == WeightFormat::bf16) {
    return {format, ceil_div(k, 2), kPanelOutputs * 4, kPanelOutputs * 4, 1, false, false};
  }
  int64_t codes = kPanelOutputs * kBlockInputs / (format == WeightFormat::i4_group ? 2 : 1);
  PanelShape shape{format, ceil_div(k, kBlockInputs), 0, codes, group == 16 ? 2 : 1, half_scales, has_minimum};
  shape.block_bytes = codes + shape.scale_bytes() * (has_minimum ? 2 : 1);
  return shape;
}

static inline PanelShape panel_shape(const LinearPart& part) {
  return panel_shape(part.format, part.k, part.group, part.has_minimum, part.half_scales);
}

/// 32 activations of one row as int16, and what the offset (+128) and the minima of the weights need of them.
/// Of each four inputs the even two come first, then the odd two: widening every second byte of the weights' codes
/// gives pairs in this order. Index of the sums: first 16 inputs, last 16, all 32.
struct alignas(32) ActivationGroup {
  int16_t codes[kBlockInputs];  // round(x / scale), -32767 .. 32767; inputs 0 2 1 3, 4 6 5 7, ...
  float scale;                  // max |x| / 32767; NaN if any x is NaN, so that the row's outputs are NaN
  int32_t offset[3];            // -128 * sum(codes)
  float sum[3];                 // scale * sum(codes)
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

/// Bytes of one row of converted activations.
static inline int64_t activation_row_bytes(ActivationKind kind, int64_t k) {
  if (kind == ActivationKind::f32) return k * 4;
  if (kind == ActivationKind::bf16) return ceil_div(k, 2) * 4;
  return ceil_div(k, kBlockInputs) * int64_t{sizeof(ActivationGroup)};
}

/// Rows of a full tile: as even as the register file of the ISA allows; the last tile may have fewer.
static inline int64_t tile_rows(int64_t rows, int64_t most) { return ceil_div(rows, ceil_div(rows, most)); }

}  // namespace octavo::OCTAVO_ISA

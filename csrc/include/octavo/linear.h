// Linear layers and embedding tables: what the program and the kernels tell each other.
//
// A linear y[M, N] = x[M, K] . W[N, K]^T (+ bias) (+ residual) is a list of parts stacked along N; each part has its
// own format, because checkpoints mix them inside one fused matrix. Weights are packed once into panels of
// kPanelOutputs outputs; the layout inside a panel belongs to kernels/linear_*.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

/// Grouped formats are numbered by the bits of their codes.
enum class WeightFormat : int32_t { f32 = 0, bf16 = 1, i4_group = 4, i5_group = 5, i6_group = 6, i8_group = 8 };

/// What scales and minima are: numbers, or int8 counts of a float16 unit that kUnitInputs inputs share (K-quants).
enum class ScaleKind : int32_t { f32 = 0, f16 = 1, counted = 2 };
inline constexpr int64_t kUnitInputs = 256;

/// Outputs in one packed panel: the unit of packing and of the division among threads.
inline constexpr int64_t kPanelOutputs = 32;

/// What the numbers of a part are: value = scale * (code - zero) + minimum for grouped formats.
struct PartShape {
  WeightFormat format;
  int64_t n, k;      // outputs, inputs
  int32_t group;     // inputs that share a scale: 16 or a multiple of 32; 0 for f32 and bf16
  bool centred;      // zero is 2^(bits - 1), else 0; always true for i8, whose codes are stored + 128
  bool has_minimum;  // else it is 0
  ScaleKind scales;
};

/// Weights as they come from Python (`octavo.quantization.base.Weight`), row-major.
struct LinearSource : PartShape {
  const void* data;     // f32 float | bf16 uint16 | i8 int8 | i6, i5 uint8 [n, k] | i4 [n, k / 2] (low nibble first)
  const void* scale;    // [n, k / group] float, float16 or int8; null for f32 and bf16
  const void* minimum;  // the same or null
  const uint16_t* scale_unit;    // [n, k / 256] float16 where scales are counted, else null
  const uint16_t* minimum_unit;  // the same, null without minimum
};

/// One packed part. `panels` is 64-byte aligned, `packed_bytes` long; the caller owns it.
struct LinearPart : PartShape {
  const void* panels;
};

struct Linear {
  int64_t n, k;  // n: sum over the parts
  int32_t num_parts;
  const LinearPart* parts;
  const float* bias;  // [n] or null
};

/// One use of a linear, y = W x (+ bias) (+ residual). Rows of x, y and residual are `ld*` floats apart; y may be the residual itself.
/// What becomes of a gate and what it lets through: y = silu(gate) * other, or gelu(gate) * other.
enum class Gate : int32_t { none, silu, gelu };

struct LinearCall {
  const Linear* linear;
  int64_t rows;  // M
  const float* x;
  int64_t ldx;
  float* y;
  int64_t ldy;
  const float* residual;  // null: none
  int64_t ldr;
  void* scratch;  // linear_scratch_bytes(linear, rows), 64-byte aligned: activations as the formats want them
  float* maxima;  // null: none; else of the rows of y, as octavo/maxima.h says, `ldm` apart; infinite in some lane
  int64_t ldm;    // where an output of the row is not finite. Only for linears of one part
  const float* norm;  // null: none; else the weights [k] of an rms_norm that x goes through before
  float eps;
  Gate gate;  // if not none, 16 outputs of a gate and 16 that it gates alternate: y has n / 2 outputs. Only for linears
              // of one part, whose panels are full, without bias, residual and maxima
};

/// The linear entries of a KernelTable. Every function is row-independent: row m of y depends on row m of x alone and
/// is bit-identical for every `rows`, row range, `thread` and `threads`.
struct LinearKernels {
  /// Bytes of the packed panels of a part.
  size_t (*packed_bytes)(const PartShape& shape);

  /// Packs panels first .. last - 1 (of ceil(n / 32)); disjoint ranges may run on different threads.
  void (*pack)(const LinearSource& source, void* panels, int64_t first, int64_t last);

  /// Scratch for converted activations of up to `rows` rows.
  size_t (*scratch_bytes)(const Linear& linear, int64_t rows);

  /// Phase 1: convert activations of rows first .. last - 1 into scratch (nothing / bf16 / int16 per group with sums).
  /// Called for disjoint row ranges on several threads, straight after the op that made those rows.
  void (*prepare)(const LinearCall& call, int64_t first, int64_t last);

  /// Phase 2, after a barrier: this thread's share of the panels of all parts, all rows.
  void (*columns)(const LinearCall& call, int thread, int threads);

  /// out[i] = row ids[i] of the table as float32 (exact dequantisation), i < count. Ids are valid.
  void (*embed_rows)(const Linear& table, const int32_t* ids, int64_t count, float* out, int64_t ldo);

  /// The ceiling of `columns`: runs the format's innermost instruction on registers alone, `rounds` times, and returns
  /// how many multiply-adds that was. For measurements.
  int64_t (*multiply_adds)(WeightFormat format, int64_t rounds);
};

}  // namespace octavo

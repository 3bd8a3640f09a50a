// Rows of a packed matrix as float32: an embedding table that is tied to the output layer is stored once.

#include "kernels/linear.h"
#include "kernels/linear_scale.h"

namespace octavo::OCTAVO_ISA {
namespace {

void f32_row(const char* panel, const PanelShape& shape, int64_t n, float* out) {
  const float* w = reinterpret_cast<const float*>(panel) + n;
  for (int64_t s = 0; s < shape.steps; ++s) out[s] = w[s * kPanelOutputs];
}

void bf16_row(const char* panel, int64_t n, int64_t k, float* out) {
  const uint16_t* w = reinterpret_cast<const uint16_t*>(panel) + n * 2;
  for (int64_t i = 0; i < k; ++i) out[i] = from_bf16(w[i / 2 * kPanelOutputs * 2 + i % 2]);
}

// The code of one input of a block; codes: of the output, in the block.
inline int32_t load_code(const uint8_t* codes, int bits, int64_t input) {
  constexpr int64_t kRow = kPanelOutputs * 4;
  if (bits == 8) return codes[input / 4 * kRow + input % 4];
  const int32_t low = (codes[input / 8 * kRow + input % 4] >> (input % 8 / 4 * 4)) & 15;
  if (bits == 4) return low;
  const int high = bits - 4;
  const int64_t at = high * (input / 4 * 2 + input % 2);  // of the pair of inputs, see linear_layout.h
  uint32_t word;
  std::memcpy(&word, codes + 512 + at / 16 * kRow, sizeof word);
  return low | int32_t(word >> (at % 16 + input % 4 / 2 * 16) & ((1u << high) - 1)) << 4;
}

// Two roundings, of scale * code and of + minimum, as Weight.dequantize does.
void grouped_row(const char* panel, const PanelShape& shape, int64_t n, int64_t k, float* out) {
  const int64_t span = kBlockInputs / shape.subgroups;
  const int bits = int(shape.format);
  const int32_t zero = shape.centred ? 1 << (bits - 1) : 0;
  const uint8_t* base = reinterpret_cast<const uint8_t*>(panel);
  for (int64_t first = 0; first < k; first += span) {
    const int64_t step = first / kBlockInputs, index = first % kBlockInputs / span * kPanelOutputs + n;
    const uint8_t *block = base + shape.block_offset(step), *units = base + shape.unit_offset(step);
    const float scale = load_scale(block + shape.code_bytes, index, shape.scales, units);
    float minimum = 0.0f;
    if (shape.has_minimum) {
      minimum = load_scale(block + shape.minimum_offset(), index, shape.scales, units + kUnitBytes);
    }
    for (int64_t i = 0; i < span; ++i) {
      const int32_t code = load_code(block + n * 4, bits, first % kBlockInputs + i) - zero;
      const float product = float(code) * scale;
      out[first + i] = shape.has_minimum ? product + minimum : product;
    }
  }
}

}  // namespace

void embed_rows(const Linear& table, const int32_t* ids, int64_t count, float* out, int64_t ldo) {
  for (int64_t i = 0; i < count; ++i, out += ldo) {
    const LinearPart* part = table.parts;
    int64_t n = ids[i];
    while (n >= part->n) n -= part++->n;
    const PanelShape shape = panel_shape(*part);
    const char* panel = static_cast<const char*>(part->panels) + n / kPanelOutputs * shape.panel_bytes();
    if (part->format == WeightFormat::f32) {
      f32_row(panel, shape, n % kPanelOutputs, out);
    } else if (part->format == WeightFormat::bf16) {
      bf16_row(panel, n % kPanelOutputs, part->k, out);
    } else {
      grouped_row(panel, shape, n % kPanelOutputs, part->k, out);
    }
  }
}

}  // namespace octavo::OCTAVO_ISA

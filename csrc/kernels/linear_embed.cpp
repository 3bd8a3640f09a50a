// Rows of a packed matrix as float32: an embedding table that is tied to the output layer is stored once.

#include "kernels/half.h"
#include "kernels/linear.h"

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

inline float load_scale(const char* scales, int64_t index, bool half) {
  if (!half) return reinterpret_cast<const float*>(scales)[index];
  return half_to_float(reinterpret_cast<const uint16_t*>(scales)[index]);
}

// Two roundings, of scale * code and of + minimum, as Weight.dequantize does.
void grouped_row(const char* panel, const PanelShape& shape, int64_t n, int64_t k, float* out) {
  const int64_t span = kBlockInputs / shape.subgroups;
  const bool four = shape.format == WeightFormat::i4_group;
  for (int64_t first = 0; first < k; first += span) {
    const char* block = panel + first / kBlockInputs * shape.block_bytes;
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(block) + n * 4;
    const char* scales = block + shape.code_bytes;
    const int64_t index = first % kBlockInputs / span * kPanelOutputs + n;
    const float scale = load_scale(scales, index, shape.half_scales);
    const float minimum = shape.has_minimum ? load_scale(scales + shape.scale_bytes(), index, shape.half_scales) : 0.0f;
    for (int64_t i = 0; i < span; ++i) {
      const int64_t input = first % kBlockInputs + i;
      int32_t code;
      if (four) {
        code = (codes[input / 8 * kPanelOutputs * 4 + input % 4] >> (input % 8 / 4 * 4)) & 15;
      } else {
        code = codes[input / 4 * kPanelOutputs * 4 + input % 4] - 128;
      }
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

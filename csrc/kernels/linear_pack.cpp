// Canonical row-major weights -> panels (layouts: linear_layout.h). Outputs and inputs that pad the last panel and the
// last block are zero.

#include "kernels/half.h"
#include "kernels/linear.h"

namespace octavo::OCTAVO_ISA {
namespace {

inline uint32_t load4(const uint8_t* p) {
  uint32_t value;
  std::memcpy(&value, p, 4);
  return value;
}

// Nibbles 0 .. 7 (lowest bits first) -> byte j holds nibble j low and nibble 4 + j high.
inline uint32_t split_nibbles(uint32_t v) {
  uint64_t spread = (v & 0xffff) | (uint64_t(v >> 16) << 32);
  spread = (spread | (spread << 8)) & 0x00ff00ff00ff00ffull;
  spread = (spread | (spread << 4)) & 0x0f0f0f0f0f0f0f0full;
  return uint32_t(spread) | (uint32_t(spread >> 32) << 4);
}

// Outputs first_n .. first_n + valid - 1 of a float or bf16 matrix as 4-byte words (one float, two bf16), transposed.
void pack_words(const LinearSource& source, const PanelShape& shape, int64_t first_n, int64_t valid, uint32_t* out) {
  const int64_t row_bytes = source.k * (source.format == WeightFormat::f32 ? 4 : 2), whole = row_bytes / 4;
  const char* row = static_cast<const char*>(source.data) + first_n * row_bytes;
  if (valid < kPanelOutputs) std::memset(out, 0, shape.panel_bytes());
  for (int64_t n = 0; n < valid; ++n, row += row_bytes) {
    for (int64_t s = 0; s < whole; ++s) std::memcpy(out + s * kPanelOutputs + n, row + s * 4, 4);
    if (whole == shape.steps) continue;
    uint16_t last;
    std::memcpy(&last, row + whole * 4, 2);
    out[whole * kPanelOutputs + n] = last;
  }
}

// The codes of one output in one block; `inputs` is 32, or 16 in the last block of a K that 32 does not divide.
void pack_codes(const LinearSource& source, int64_t n, int64_t first_k, int64_t inputs, uint32_t* out) {
  const uint8_t* data = static_cast<const uint8_t*>(source.data);
  if (source.format == WeightFormat::i4_group) {
    const uint8_t* row = data + (n * source.k + first_k) / 2;
    for (int64_t q = 0; q < inputs / 8; ++q) out[q * kPanelOutputs] = split_nibbles(load4(row + q * 4));
  } else {
    const uint8_t* row = data + n * source.k + first_k;
    for (int64_t q = 0; q < inputs / 4; ++q) out[q * kPanelOutputs] = load4(row + q * 4) ^ 0x80808080;
  }
}

inline void store_scale(char* scales, int64_t index, float value, bool half) {
  if (half) {
    const uint16_t bits = exact_half(value);
    std::memcpy(scales + index * 2, &bits, 2);
  } else {
    std::memcpy(scales + index * 4, &value, 4);
  }
}

void pack_grouped(const LinearSource& source, const PanelShape& shape, int64_t first_n, int64_t valid, char* out) {
  const int64_t groups = source.k / source.group, span = kBlockInputs / shape.subgroups;
  for (int64_t s = 0; s < shape.steps; ++s, out += shape.block_bytes) {
    std::memset(out, 0, shape.block_bytes);
    const int64_t first_k = s * kBlockInputs, inputs = min_of(kBlockInputs, source.k - first_k);
    char* scales = out + shape.code_bytes;
    for (int64_t n = 0; n < valid; ++n) {
      pack_codes(source, first_n + n, first_k, inputs, reinterpret_cast<uint32_t*>(out) + n);
      for (int64_t sub = 0; sub * span < inputs; ++sub) {
        const int64_t from = (first_n + n) * groups + (first_k + sub * span) / source.group;
        const int64_t to = sub * kPanelOutputs + n;
        store_scale(scales, to, source.scale[from], shape.half_scales);
        if (shape.has_minimum) {
          store_scale(scales + shape.scale_bytes(), to, source.minimum[from], shape.half_scales);
        }
      }
    }
  }
}

}  // namespace

size_t packed_bytes(WeightFormat format, int64_t n, int64_t k, int32_t group, bool has_minimum, bool half_scales) {
  return size_t(ceil_div(n, kPanelOutputs) * panel_shape(format, k, group, has_minimum, half_scales).panel_bytes());
}

void pack(const LinearSource& source, void* panels, int64_t first, int64_t last) {
  const PanelShape shape =
      panel_shape(source.format, source.k, source.group, source.minimum != nullptr, source.half_scales);
  for (int64_t p = first; p < last; ++p) {
    char* out = static_cast<char*>(panels) + p * shape.panel_bytes();
    const int64_t first_n = p * kPanelOutputs, valid = min_of(kPanelOutputs, source.n - first_n);
    if (is_grouped(source.format)) {
      pack_grouped(source, shape, first_n, valid, out);
    } else {
      pack_words(source, shape, first_n, valid, reinterpret_cast<uint32_t*>(out));
    }
  }
}

}  // namespace octavo::OCTAVO_ISA

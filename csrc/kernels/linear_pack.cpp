// Canonical row-major weights -> panels (layouts: linear_layout.h). Outputs and inputs that pad the last panel and the
// last block are zero.

#include <cstring>

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

// Codes of four inputs, one in each byte of v -> their bits from 4 on, where the pairs (0, 2), (1, 3) want them.
inline uint32_t high_bits(uint32_t v, int high) {
  const uint32_t fields = (v >> 4) & (0x01010101u * ((1u << high) - 1));
  return (fields | fields >> (8 - high)) & (0x00010001u * ((1u << 2 * high) - 1));
}

// The codes of one output in one block; `inputs` is 32, or 16 in the last block of a K that 32 does not divide.
void pack_codes(const LinearSource& source, int64_t n, int64_t first_k, int64_t inputs, uint32_t* out) {
  const uint8_t* data = static_cast<const uint8_t*>(source.data);
  const uint8_t* row = data + n * source.k + first_k;
  const int high = int(source.format) - 4;
  if (source.format == WeightFormat::i4_group) {
    row = data + (n * source.k + first_k) / 2;
    for (int64_t q = 0; q < inputs / 8; ++q) out[q * kPanelOutputs] = split_nibbles(load4(row + q * 4));
  } else if (source.format == WeightFormat::i8_group) {
    for (int64_t q = 0; q < inputs / 4; ++q) out[q * kPanelOutputs] = load4(row + q * 4) ^ 0x80808080;
  } else {
    for (int64_t q = 0; q < inputs / 4; ++q) {
      const uint32_t four = load4(row + q * 4);
      out[q / 2 * kPanelOutputs] |= (four & 0x0f0f0f0f) << (q % 2 * 4);
      out[(4 + q * 2 * high / 16) * kPanelOutputs] |= high_bits(four, high) << (q * 2 * high % 16);
    }
  }
}

inline void copy_number(char* to, int64_t to_index, const void* from, int64_t from_index, int64_t size) {
  std::memcpy(to + to_index * size, static_cast<const char*>(from) + from_index * size, size);
}

// The units of outputs first_n .. first_n + valid - 1 for the blocks from `step` on.
void pack_units(const LinearSource& source, int64_t first_n, int64_t valid, int64_t step, char* out) {
  for (int64_t n = 0; n < valid; ++n) {
    const int64_t from = (first_n + n) * (source.k / kUnitInputs) + step / kUnitBlocks;
    copy_number(out, n, source.scale_unit, from, 2);
    if (source.has_minimum) copy_number(out + kUnitBytes, n, source.minimum_unit, from, 2);
  }
}

void pack_grouped(const LinearSource& source, const PanelShape& shape, int64_t first_n, int64_t valid, char* panel) {
  const int64_t groups = source.k / source.group, span = kBlockInputs / shape.subgroups;
  const int64_t size = shape.scale_bytes() / kPanelOutputs;
  std::memset(panel, 0, shape.panel_bytes());
  for (int64_t s = 0; s < shape.steps; ++s) {
    char* out = panel + shape.block_offset(s);
    if (shape.unit_bytes > 0 && s % kUnitBlocks == 0) {
      pack_units(source, first_n, valid, s, panel + shape.unit_offset(s));
    }
    const int64_t first_k = s * kBlockInputs, inputs = min_of(kBlockInputs, source.k - first_k);
    for (int64_t n = 0; n < valid; ++n) {
      pack_codes(source, first_n + n, first_k, inputs, reinterpret_cast<uint32_t*>(out) + n);
      for (int64_t sub = 0; sub * span < inputs; ++sub) {
        const int64_t from = (first_n + n) * groups + (first_k + sub * span) / source.group;
        const int64_t to = sub * kPanelOutputs + n;
        copy_number(out + shape.code_bytes, to, source.scale, from, size);
        if (source.has_minimum) copy_number(out + shape.minimum_offset(), to, source.minimum, from, size);
      }
    }
  }
}

}  // namespace

size_t packed_bytes(const PartShape& part) {
  return size_t(ceil_div(part.n, kPanelOutputs) * panel_shape(part).panel_bytes());
}

void pack(const LinearSource& source, void* panels, int64_t first, int64_t last) {
  const PanelShape shape = panel_shape(source);
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

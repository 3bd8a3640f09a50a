// Linear layers: the loops over parts, panels and row tiles, and the epilogue. Formats and instruction sets are known
// to the tiles (linear_tiles_*.inl) alone.

#include "kernels/exports.h"
#include "kernels/linear.h"
#include "kernels/linear_tiles.h"
#include "kernels/row_math.h"
#include "octavo/maxima.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Activations of one sweep over the panels: they should stay in the second-level cache beside a panel.
// Where K is too long for that, some tiles still share each reading of a panel.
constexpr int64_t kSweepBytes = 384 * 1024;
constexpr int64_t kSweepTiles = 8;

// Where the tiles of a kind start in the scratch, or its end for kind == kActivationKinds.
int64_t scratch_offset(const Linear& linear, int64_t rows, int kind) {
  int64_t offset = 0;
  for (int i = 0; i < kind; ++i) {
    bool used = false;
    for (int32_t p = 0; p < linear.num_parts; ++p) used |= int(activation_kind(linear.parts[p].format)) == i;
    const int64_t row_bytes = activation_row_bytes(ActivationKind(i), linear.k);
    if (used) offset += round_up(rows * row_bytes, 64);
  }
  return offset;
}

size_t scratch_bytes(const Linear& linear, int64_t rows) {
  return size_t(scratch_offset(linear, rows, kActivationKinds));
}

void prepare(const LinearCall& call, int64_t first, int64_t last) {
  const Linear& linear = *call.linear;
  bool done[kActivationKinds] = {};
  for (int32_t p = 0; p < linear.num_parts; ++p) {
    const ActivationKind kind = activation_kind(linear.parts[p].format);
    if (done[int(kind)]) continue;
    done[int(kind)] = true;
    char* tiles = static_cast<char*>(call.scratch) + scratch_offset(linear, call.rows, int(kind));
    convert_rows(kind, call, {first, last}, Tiling(call.rows, most_tile_rows(kind)), tiles);
  }
}

// What becomes of the sums of a tile: y = sums * scale of the row (or 1) + bias + residual, in this order, for `valid`
// outputs from first_n on, and the maxima of LinearCall; or gates. y may be the residual.
struct TileEnd {
  const LinearCall& call;
  int64_t first_row, rows, first_n, valid;
  const float* scales;  // of the rows, or null

  void write(const float* sums) const {
    if (call.gate == Gate::silu) {
      write_gated(sums, silu);
    } else if (call.gate == Gate::gelu) {
      write_gated(sums, gelu);
    } else {
      valid == kPanelOutputs ? write<true>(sums) : write<false>(sums);
    }
  }

 private:
  template <bool Whole>  // of kPanelOutputs
  void write(const float* sums) const {
    const float* bias = call.linear->bias + first_n;
    const float* residual = call.residual + first_row * call.ldr + first_n;
    float* y = call.y + first_row * call.ldy + first_n;
    for (int64_t r = 0; r < rows; ++r, sums += kPanelOutputs, residual += call.ldr, y += call.ldy) {
      f32x16 v[2] = {};
#pragma GCC unroll 2
      for (int64_t i = 0; i < 2; ++i) {
        const int64_t n = Whole ? kLanes : valid - i * kLanes, first = i * kLanes;
        if (!Whole && n <= 0) break;
        v[i] = load(sums + first);
        if (scales != nullptr) v[i] *= scales[r];
        if (call.linear->bias != nullptr) v[i] += load_lanes(bias + first, n);
        if (call.residual != nullptr) v[i] += load_lanes(residual + first, n);
        store_lanes(y + first, v[i], n);
      }
      if (call.maxima != nullptr) take_maxima<Whole>(v, call.maxima + (first_row + r) * call.ldm);
    }
  }

  template <class Activation>
  void write_gated(const float* sums, Activation activation) const {
    float* y = call.y + first_row * call.ldy + first_n / 2;
    for (int64_t r = 0; r < rows; ++r, sums += kPanelOutputs, y += call.ldy) {
      const float scale = scales != nullptr ? scales[r] : 1.0f;
      store(y, activation(load(sums) * scale) * (load(sums + kLanes) * scale));
    }
  }

  template <bool Whole>
  __attribute__((always_inline)) inline void take_maxima(f32x16 v[2], float* maxima) const {
    const bool finite = all_finite(v[0]) & all_finite(v[1]);  // lanes beyond `valid` are finite unless the row is bad
    if (!Whole) {
      for (int64_t n = valid; n < kPanelOutputs; ++n) v[n / kLanes][n % kLanes] = -INFINITY;
    }
    const f32x16 top = finite ? maximum(v[0], v[1]) : splat(INFINITY);
    maxima += first_n / kGroupLogits * kGroupLanes;
    store(maxima, first_n % kGroupLogits == 0 ? top : maximum(top, load(maxima)));
  }
};

// Panels of one part, all rows. offset: outputs of the parts before it.
void part_columns(const LinearCall& call, const LinearPart& part, int64_t offset, Range panels) {
  const PanelShape shape = panel_shape(part);
  const ActivationKind kind = activation_kind(part.format);
  const Tiling tiling(call.rows, most_tile_rows(kind));
  const int64_t row_bytes = activation_row_bytes(kind, part.k);
  const int64_t sweep = max_of(kSweepTiles, kSweepBytes / (tiling.height * row_bytes));
  char* tiles = static_cast<char*>(call.scratch) + scratch_offset(*call.linear, call.rows, int(kind));
  const Tile tall = find_tile(shape, tiling.height), low = tiling.height > 1 ? find_tile(shape, tiling.height - 1) : tall;
  alignas(64) float sums[kMaxTileRows * kPanelOutputs];
  for (int64_t start = 0; start < tiling.tiles; start += sweep) {
    const int64_t end = min_of(tiling.tiles, start + sweep);
    for (int64_t p = panels.first; p < panels.last; ++p) {
      const char* panel = static_cast<const char*>(part.panels) + p * shape.panel_bytes();
      const int64_t first_n = p * kPanelOutputs, valid = min_of(kPanelOutputs, part.n - first_n);
      for (int64_t t = start; t < end; ++t) {
        const int64_t m = tiling.first_row(t), rows = tiling.rows(t);
        const Prefetch ahead = plan_prefetch(shape, p == panels.first, t - start, end - start);
        char* x = tiles + m * row_bytes;
        (rows == tiling.height ? tall : low)(x, rows, panel, shape, ahead, sums);
        const float* scales = kind == ActivationKind::i16 ? row_scales(x, part.k, rows) : nullptr;
        TileEnd{call, m, rows, offset + first_n, valid, scales}.write(sums);
      }
    }
  }
}

void columns(const LinearCall& call, int thread, int threads) {
  const Linear& linear = *call.linear;
  int64_t total = 0;
  for (int32_t i = 0; i < linear.num_parts; ++i) total += ceil_div(linear.parts[i].n, kPanelOutputs);
  Range mine = split(total, thread, threads);
  if (call.maxima != nullptr) {  // a group of outputs is one thread's
    constexpr int64_t kPanels = kGroupLogits / kPanelOutputs;
    mine = split(ceil_div(total, kPanels), thread, threads);
    mine = {mine.first * kPanels, min_of(mine.last * kPanels, total)};
  }
  int64_t before = 0, offset = 0;
  for (int32_t i = 0; i < linear.num_parts; ++i) {
    const LinearPart& part = linear.parts[i];
    const int64_t count = ceil_div(part.n, kPanelOutputs);
    const Range panels = {max_of(mine.first - before, 0), min_of(mine.last - before, count)};
    if (panels.first < panels.last) part_columns(call, part, offset, panels);
    before += count;
    offset += part.n;
  }
}

}  // namespace

const LinearKernels kLinearKernels = {packed_bytes, pack, scratch_bytes, prepare, columns, embed_rows,
                                       multiply_adds};

}  // namespace octavo::OCTAVO_ISA

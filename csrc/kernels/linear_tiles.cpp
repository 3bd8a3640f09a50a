// The tiles of this build's instruction set, by format and row count.

#include "kernels/linear_tiles.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#include "kernels/linear_tiles_avx512.inl"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "kernels/linear_tiles_avx2.inl"
#else
#include "kernels/linear_tiles_portable.inl"
#endif

namespace octavo::OCTAVO_ISA {
namespace {

static_assert(kFloatRows <= kMaxTileRows && kGroupRows <= kMaxTileRows);

// Entry r - 1 is the tile of r rows.
struct FloatTiles {
  Tile f32[kFloatRows];
  Tile bf16[kFloatRows];
};

struct GroupTiles {
  Tile rows[kGroupRows];
};

template <int Rows>
constexpr void fill(FloatTiles& tiles) {
  tiles.f32[Rows - 1] = f32_tile<Rows>;
  tiles.bf16[Rows - 1] = bf16_tile<Rows>;
  if constexpr (Rows > 1) fill<Rows - 1>(tiles);
}

template <int Bits, int Subgroups, int Rows>
constexpr void fill(GroupTiles& tiles) {
  tiles.rows[Rows - 1] = group_tile<Bits, Subgroups, Rows>;
  if constexpr (Rows > 1) fill<Bits, Subgroups, Rows - 1>(tiles);
}

constexpr FloatTiles make_float_tiles() {
  FloatTiles tiles{};
  fill<kFloatRows>(tiles);
  return tiles;
}

template <int Bits, int Subgroups>
constexpr GroupTiles make_group_tiles() {
  GroupTiles tiles{};
  fill<Bits, Subgroups, kGroupRows>(tiles);
  return tiles;
}

constexpr FloatTiles kFloatTiles = make_float_tiles();
// By subgroups - 1.
constexpr GroupTiles kTiles4[2] = {make_group_tiles<4, 1>(), make_group_tiles<4, 2>()};
constexpr GroupTiles kTiles5[2] = {make_group_tiles<5, 1>(), make_group_tiles<5, 2>()};
constexpr GroupTiles kTiles6[2] = {make_group_tiles<6, 1>(), make_group_tiles<6, 2>()};
constexpr GroupTiles kTiles8[2] = {make_group_tiles<8, 1>(), make_group_tiles<8, 2>()};

}  // namespace

int most_tile_rows(ActivationKind kind) { return kind == ActivationKind::i16 ? kGroupRows : kFloatRows; }

Tile find_tile(const PanelShape& shape, int64_t rows) {
  if (shape.format == WeightFormat::f32) return kFloatTiles.f32[rows - 1];
  if (shape.format == WeightFormat::bf16) return kFloatTiles.bf16[rows - 1];
  const GroupTiles* tiles = shape.format == WeightFormat::i4_group   ? kTiles4
                            : shape.format == WeightFormat::i5_group ? kTiles5
                            : shape.format == WeightFormat::i6_group ? kTiles6
                                                                     : kTiles8;
  return tiles[shape.subgroups - 1].rows[rows - 1];
}

int64_t multiply_adds(WeightFormat format, int64_t rounds) { return register_multiply_adds(format, rounds); }

}  // namespace octavo::OCTAVO_ISA

// What the files kernels/linear_*.cpp share: each is a part of the table that linear.cpp exports.
#pragma once

#include "kernels/linear_layout.h"

namespace octavo::OCTAVO_ISA {

// linear_pack.cpp
size_t packed_bytes(const PartShape& part);
void pack(const LinearSource& source, void* panels, int64_t first, int64_t last);

// linear_embed.cpp
void embed_rows(const Linear& table, const int32_t* ids, int64_t count, float* out, int64_t ldo);

// linear_activations.cpp
/// Converts rows first .. last - 1 of a call's x, normed if it says so, into tiles.
void convert_rows(ActivationKind kind, const LinearCall& call, Range rows, const Tiling& tiling, char* tiles);

}  // namespace octavo::OCTAVO_ISA

// Paged varlen attention: the layout of KV memory and the tasks a step is cut into.
//
// One layer's slice of a block of block_size tokens is block_size / 16 consecutive sub-blocks of tiles
//   K: [kv head][key_dim / 2][16 tokens][2]      V: [kv head][8 token pairs][value_dim][2]
// so that both products read pairs along their reduction. Both dims are padded to a multiple of 16 in memory.
// Numbers are bfloat16; or of 8 bits, and a tile ends with 16 float32 scales, one a token: x is about scale * number, with
// scale = max|x| / most over the head, and x / scale rounded to the nearest number, ties to even. `most` is the greatest
// number: 127 of int8, 448 of fp8 E4M3, 57344 of fp8 E5M2 (OCP OFP8).
#pragma once

#include <cstddef>
#include <cstdint>

#include "octavo/partition.h"

namespace octavo {

inline constexpr int64_t kSubBlock = 16;    // tokens of one K or V tile
inline constexpr int64_t kChunk = 64;       // keys that share one softmax rescaling; starts at multiples of itself
inline constexpr int64_t kPartition = 512;  // keys of one partial result; partials are merged in order of position
inline constexpr int64_t kTileRows = 48;    // query rows (token, head of the group) that share a pass over the keys

inline constexpr int64_t kNoWindow = INT32_MAX;  // the window of a layer whose tokens see all before them

enum class KvFormat { kBf16, kInt8, kE4m3, kE5m2 };

/// One layer of the KV cache.
struct KvLayer {
  char* keys;
  char* values;
  int64_t block_stride;  // bytes from a block to the next
  int64_t block_size;
  int64_t kv_heads, key_dim, value_dim;
  KvFormat format;
};

static inline int64_t padded_dim(int64_t dim) { return round_up(dim, kSubBlock); }

/// Bytes of a tile of K or V: 16 tokens of one head of `dim` numbers.
static inline int64_t tile_bytes(KvFormat format, int64_t dim) {
  const int64_t numbers = padded_dim(dim) * kSubBlock;
  return format == KvFormat::kBf16 ? 2 * numbers : numbers + kSubBlock * static_cast<int64_t>(sizeof(float));
}

/// Bytes of the keys, or of the values, of one block.
static inline int64_t part_bytes(KvFormat format, int64_t block_size, int64_t kv_heads, int64_t dim) {
  return block_size / kSubBlock * kv_heads * tile_bytes(format, dim);
}

/// Bytes from the keys (`dim` is key_dim) or the values to where the tile of a sub-block (of its block) and head starts.
static inline int64_t tile_offset(const KvLayer& kv, int64_t dim, int64_t block, int64_t sub_block, int64_t head) {
  return block * kv.block_stride + (sub_block * kv.kv_heads + head) * tile_bytes(kv.format, dim);
}

/// One layer's attention over a step.
struct AttentionCall {
  KvLayer kv;
  const float* q;  // [T, heads, key_dim]
  int64_t ldq;
  float* out;  // [T, heads, value_dim]
  int64_t ldo;
  const int32_t* block_tables;  // [sequences, blocks_per_seq]
  int64_t blocks_per_seq;
  int64_t group;  // query heads per kv head
  float scale;
  int64_t window;  // keys a token sees at most, its own included
  float* partials;  // partial states of split tasks
};

/// Query rows of one request against one kv head: `tokens` consecutive tokens times the heads of the group, token
/// major. Token i is at `position` + i and sees the keys from first_key(position + i, window) to position + i; memory
/// of tiles before the first token's is not read.
/// A whole task does all partitions and writes `out`; a split one does one partition and writes partial states.
struct AttentionTask {
  int32_t sequence;
  int32_t token;  // row of q of the first token
  int32_t tokens;
  int32_t position;
  int32_t kv_head;
  int32_t partition;  // split: which one; whole: kWhole; merge: unused
  int64_t partial;    // split, merge: floats from `partials` to the state of row 0 in the task's first partition
};

inline constexpr int32_t kWhole = -1;

static inline int64_t first_key(int64_t position, int64_t window) { return max_of(0, position + 1 - window); }

/// The first partition in which a task has keys, and the one after the last.
static inline int64_t first_partition(const AttentionTask& task, int64_t window) {
  return first_key(task.position, window) / kPartition;
}
static inline int64_t end_partition(const AttentionTask& task) {
  return ceil_div(task.position + task.tokens, kPartition);
}

/// Floats of the partial state of one row: sums over the values, the greatest score, the denominator.
static inline int64_t state_size(int64_t padded_dim) { return padded_dim + 2; }

struct AttentionKernels {
  /// Writes one token's K and V heads (float32, [kv_heads, key_dim] and [kv_heads, value_dim]) to a slot.
  void (*write_kv)(const KvLayer& kv, int64_t slot, const float* k, const float* v);

  /// Bytes of 64-byte aligned scratch one thread needs.
  size_t (*scratch_bytes)(int64_t group, int64_t key_dim, int64_t value_dim);

  /// Does a task. `ahead`: one that this thread may do next, whose first keys are fetched at the end; may be null.
  void (*attend)(const AttentionCall& call, const AttentionTask& task, const AttentionTask* ahead, void* scratch);

  /// Merges the partial states of a task's rows, in order of position, and writes `out`.
  void (*merge)(const AttentionCall& call, const AttentionTask& task);
};

}  // namespace octavo

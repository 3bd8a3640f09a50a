// Paged varlen attention: the layout of KV memory and the tasks a step is cut into.
//
// K and V are bfloat16. A KV block of block_size tokens is block_size / 16 consecutive sub-blocks; inside one layer:
//   K: [sub-block][kv head][head_dim / 2][16 tokens][2]      V: [sub-block][kv head][8 token pairs][head_dim][2]
// so that both products read pairs along their reduction, as vdpbf16ps wants them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

inline constexpr int64_t kSubBlock = 16;    // tokens of one K/V tile
inline constexpr int64_t kChunk = 64;       // keys that share one softmax rescaling; starts at multiples of itself
inline constexpr int64_t kPartition = 512;  // keys of one partial result; partials are merged in order of position

/// One layer's attention over a step. Heads of one token are contiguous in q and out.
struct AttentionCall {
  const float* q;  // [T, heads * head_dim]
  int64_t ldq;
  float* out;  // [T, heads * head_dim]
  int64_t ldo;
  const uint16_t* keys;
  const uint16_t* values;
  const int32_t* block_tables;  // [S, blocks_per_seq]
  int64_t blocks_per_seq;
  int64_t block_size;
  int64_t heads, kv_heads, head_dim;
  float scale;
};

/// Query rows of one request against one kv head and one partition of the keys.
/// A row is (token, head of the group); `tokens` consecutive tokens, the first at position `position`.
struct AttentionTask {
  int32_t sequence;   // row of block_tables
  int32_t token;      // first row of q
  int32_t tokens;
  int32_t position;   // of the first token; token i sees keys 0 .. position + i
  int32_t kv_head;
  int32_t partition;  // keys partition * kPartition .. + kPartition - 1
  int64_t partial;    // index of the first row's partial state
};

struct AttentionKernels {
  /// Writes one token's K and V heads (float32, [kv_heads, head_dim]) to a slot.
  void (*write_kv)(uint16_t* keys, uint16_t* values, int64_t slot, const float* k, const float* v, int64_t kv_heads,
                   int64_t head_dim);

  /// Floats of scratch one thread needs.
  size_t (*scratch_floats)(int64_t group, int64_t head_dim);

  /// Computes the partial states of a task's rows: [head_dim sums, 1 maximum, 1 denominator] per row.
  void (*partial)(const AttentionCall& call, const AttentionTask& task, float* partials, float* scratch);

  /// out row = merge of `count` partial states, `stride` floats apart, in order.
  void (*merge)(const float* partials, int64_t count, int64_t stride, int64_t head_dim, float* out);
};

}  // namespace octavo

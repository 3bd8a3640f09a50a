// Paged attention: tasks (rows of one request x one kv head) over partitions of 512 keys in chunks of 64.
//
// Partitions and chunks start at fixed positions, and partial results are merged left to right, so that a row's
// result does not depend on how the step was cut into tasks.
#include <string.h>

#include "kernels/attention_tile.h"
#include "kernels/exports.h"

namespace octavo::OCTAVO_ISA {
namespace {

/// One task's working memory, carved from a thread's scratch. All arrays have one entry (or line) per row.
struct Tile {
  int64_t rows, dim, padded_dim;
  float* scores;      // [rows, 64]
  float* sums;        // [rows, padded_dim]
  float* lane_sums;   // [rows, 16]
  float* state;       // [rows, state_size]: partitions merged so far
  float* next;        // [state_size]
  float* top;         // [rows]
  float* rescale;     // [rows]
  uint16_t* q;        // [rows, padded_dim]
  uint16_t* weights;  // [rows, 64]
  uint16_t* tail;     // one tile of values
};

/// Lays a tile out in memory at `scratch` and returns the bytes it takes; null: only counts.
size_t lay_out(Tile& tile, char* scratch, int64_t rows, int64_t dim) {
  size_t used = 0;
  auto take = [&]<class T>(T*& array, int64_t count) {
    array = scratch ? reinterpret_cast<T*>(scratch + used) : nullptr;
    used += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
  };
  const int64_t padded = round_up(dim, kSubBlock);
  tile.rows = rows, tile.dim = dim, tile.padded_dim = padded;
  take(tile.scores, rows * kChunk);
  take(tile.sums, rows * padded);
  take(tile.lane_sums, rows * kLanes);
  take(tile.state, rows * state_size(padded));
  take(tile.next, state_size(padded));
  take(tile.top, rows);
  take(tile.rescale, rows);
  take(tile.q, rows * padded);
  take(tile.weights, rows * kChunk);
  take(tile.tail, kSubBlock * padded);
  return used;
}

int64_t most_rows(int64_t group) { return group > kTileRows ? group : kTileRows; }

size_t scratch_bytes(int64_t group, int64_t head_dim) {
  Tile tile;
  return lay_out(tile, nullptr, most_rows(group), head_dim);
}

const float* query(const AttentionCall& call, const AttentionTask& task, int64_t row) {
  const int64_t head = task.kv_head * call.group + row % call.group;
  return call.q + (task.token + row / call.group) * call.ldq + head * call.kv.head_dim;
}

float* output(const AttentionCall& call, const AttentionTask& task, int64_t row) {
  const int64_t head = task.kv_head * call.group + row % call.group;
  return call.out + (task.token + row / call.group) * call.ldo + head * call.kv.head_dim;
}

void load_queries(const AttentionCall& call, const AttentionTask& task, Tile& tile) {
  for (int64_t row = 0; row < tile.rows; row++) {
    const float* q = query(call, task, row);
    uint16_t* to = tile.q + row * tile.padded_dim;
    int64_t d = 0;
    for (; d + kLanes <= tile.dim; d += kLanes) store_bf16(to + d, load(q + d));
    for (; d < tile.dim; d++) to[d] = to_bf16(q[d]);
    for (; d < tile.padded_dim; d++) to[d] = 0;
  }
}

/// The tiles of keys and values of one chunk; key tiles beyond the last are repeats whose scores are masked.
struct ChunkTiles {
  int64_t count;
  const uint16_t* keys[kChunkTiles];
  const uint16_t* values[kChunkTiles];
};

/// Values of the last `kSubBlock - valid` tokens as zeros: memory that was never written, or belonged to another
/// request, may hold NaN, and NaN times a weight of zero is NaN.
void copy_valid_values(const uint16_t* from, int64_t valid, int64_t padded_dim, uint16_t* to) {
  memset(to, 0, kSubBlock * padded_dim * sizeof(uint16_t));
  memcpy(to, from, valid / 2 * 2 * padded_dim * sizeof(uint16_t));
  if (valid % 2 == 0) return;
  const int64_t pair = valid / 2 * 2 * padded_dim;
  for (int64_t d = 0; d < padded_dim; d++) to[pair + 2 * d] = from[pair + 2 * d];
}

ChunkTiles find_tiles(const AttentionCall& call, const AttentionTask& task, int64_t first_key, int64_t end_key,
                      const Tile& tile) {
  const KvLayer& kv = call.kv;
  const int32_t* table = call.block_tables + task.sequence * call.blocks_per_seq;
  ChunkTiles tiles;
  tiles.count = ceil_div(min_of(end_key - first_key, kChunk), kSubBlock);
  for (int64_t j = 0; j < kChunkTiles; j++) {
    const int64_t key = first_key + min_of(j, tiles.count - 1) * kSubBlock;
    const int64_t offset =
        tile_offset(kv, table[key / kv.block_size], key % kv.block_size / kSubBlock, task.kv_head);
    tiles.keys[j] = kv.keys + offset;
    tiles.values[j] = kv.values + offset;
  }
  const int64_t last_valid = end_key - first_key - (tiles.count - 1) * kSubBlock;
  if (last_valid < kSubBlock) {
    copy_valid_values(tiles.values[tiles.count - 1], last_valid, tile.padded_dim, tile.tail);
    tiles.values[tiles.count - 1] = tile.tail;
  }
  return tiles;
}

void attend_chunk(const AttentionCall& call, const AttentionTask& task, int64_t first_key, int64_t end_key,
                  Tile& tile) {
  const ChunkTiles tiles = find_tiles(call, task, first_key, end_key, tile);
  for (int64_t row = 0; row < tile.rows; row += kBlockRows) {
    const int64_t rows = min_of(kBlockRows, tile.rows - row);
    kScoreRows[rows - 1](tile.q + row * tile.padded_dim, tile.dim, tile.padded_dim, tiles.keys, call.scale,
                         tile.scores + row * kChunk);
  }
  for (int64_t row = 0; row < tile.rows; row++) {
    const int64_t visible = task.position + row / call.group + 1 - first_key;
    tile.rescale[row] = soften_row(tile.scores + row * kChunk, max_of(0, min_of(visible, kChunk)), tile.top + row,
                                   tile.lane_sums + row * kLanes, tile.weights + row * kChunk);
  }
  for (int64_t column = 0; column < tile.padded_dim; column += 4 * kLanes) {
    const int64_t vectors = min_of(4, (tile.padded_dim - column) / kLanes);
    for (int64_t row = 0; row < tile.rows; row += kBlockRows) {
      const int64_t rows = min_of(kBlockRows, tile.rows - row);
      kAccumulateRows[rows - 1][vectors - 1](tile.weights + row * kChunk, tiles.values, tiles.count, column,
                                             tile.padded_dim, tile.rescale + row, tile.sums + row * tile.padded_dim);
    }
  }
}

/// Leaves the state of all rows over the keys of one partition in the tile.
void attend_partition(const AttentionCall& call, const AttentionTask& task, int64_t partition, Tile& tile) {
  memset(tile.sums, 0, tile.rows * tile.padded_dim * sizeof(float));
  memset(tile.lane_sums, 0, tile.rows * kLanes * sizeof(float));
  for (int64_t row = 0; row < tile.rows; row++) tile.top[row] = kLowest;
  const int64_t end = min_of((partition + 1) * kPartition, task.position + task.tokens);
  for (int64_t key = partition * kPartition; key < end; key += kChunk) attend_chunk(call, task, key, end, tile);
}

void export_state(const Tile& tile, int64_t row, float* state) {
  memcpy(state, tile.sums + row * tile.padded_dim, tile.padded_dim * sizeof(float));
  state[tile.padded_dim] = tile.top[row];
  state[tile.padded_dim + 1] = sum(load(tile.lane_sums + row * kLanes));
}

/// state = state merged with the state over the next partition.
void merge_state(float* state, const float* next, int64_t padded_dim) {
  const float a = state[padded_dim], b = next[padded_dim];
  const float top = a < b ? b : a;
  const float keep = exponential(splat(a - top))[0], take = exponential(splat(b - top))[0];
  for (int64_t d = 0; d < padded_dim; d += kLanes) {
    store(state + d, multiply_add(load(next + d), splat(take), load(state + d) * keep));
  }
  state[padded_dim] = top;
  state[padded_dim + 1] = state[padded_dim + 1] * keep + next[padded_dim + 1] * take;
}

void write_output(const float* state, int64_t padded_dim, int64_t dim, float* out) {
  const float inverse = 1.0f / state[padded_dim + 1];
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(out + d, load(state + d) * inverse);
  if (d < dim) store_partial(out + d, load(state + d) * inverse, dim - d);
}

/// Partitions in which a row has keys.
int64_t partitions_of(const AttentionTask& task, int64_t row, int64_t group) {
  return (task.position + row / group) / kPartition + 1;
}

void attend_whole(const AttentionCall& call, const AttentionTask& task, Tile& tile) {
  const int64_t size = state_size(tile.padded_dim);
  const int64_t partitions = partitions_of(task, tile.rows - 1, call.group);
  for (int64_t partition = 0; partition < partitions; partition++) {
    attend_partition(call, task, partition, tile);
    for (int64_t row = 0; row < tile.rows; row++) {
      if (partition >= partitions_of(task, row, call.group)) continue;
      export_state(tile, row, partition == 0 ? tile.state + row * size : tile.next);
      if (partition > 0) merge_state(tile.state + row * size, tile.next, tile.padded_dim);
    }
  }
  for (int64_t row = 0; row < tile.rows; row++) {
    write_output(tile.state + row * size, tile.padded_dim, tile.dim, output(call, task, row));
  }
}

void attend(const AttentionCall& call, const AttentionTask& task, void* scratch) {
  Tile tile;
  lay_out(tile, static_cast<char*>(scratch), task.tokens * call.group, call.kv.head_dim);
  load_queries(call, task, tile);
  if (task.partition == kWhole) {
    attend_whole(call, task, tile);
    return;
  }
  const int64_t size = state_size(tile.padded_dim);
  attend_partition(call, task, task.partition, tile);
  float* states = call.partials + task.partial + task.partition * tile.rows * size;
  for (int64_t row = 0; row < tile.rows; row++) export_state(tile, row, states + row * size);
}

void merge(const AttentionCall& call, const AttentionTask& task) {
  const int64_t padded = padded_dim(call.kv), size = state_size(padded), rows = task.tokens * call.group;
  for (int64_t row = 0; row < rows; row++) {
    float* state = call.partials + task.partial + row * size;
    const int64_t partitions = partitions_of(task, row, call.group);
    for (int64_t partition = 1; partition < partitions; partition++) {
      merge_state(state, state + partition * rows * size, padded);
    }
    write_output(state, padded, call.kv.head_dim, output(call, task, row));
  }
}

/// One head's K or V of a token: 16 numbers from x as bf16, zeros after the last.
OCTAVO_INLINE void convert_lanes(const float* x, int64_t n, uint16_t* to) {
  store_bf16(to, n >= kLanes ? load(x) : load_partial(x, n));
}

/// A token's place in a tile of keys: pairs of dimensions lie 16 tokens apart.
void write_key(const float* k, int64_t head_dim, uint16_t* to) {
  alignas(64) uint16_t half[kLanes];
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    convert_lanes(k + d, head_dim - d, half);
    for (int64_t i = 0; i < kLanes; i += 2) memcpy(to + (d + i) * kSubBlock, half + i, 2 * sizeof(uint16_t));
  }
}

/// A token's place in a tile of values: dimensions lie one token apart.
void write_value(const float* v, int64_t head_dim, uint16_t* to) {
  alignas(64) uint16_t half[kLanes];
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    convert_lanes(v + d, head_dim - d, half);
    for (int64_t i = 0; i < kLanes; i++) to[2 * (d + i)] = half[i];
  }
}

void write_kv(const KvLayer& kv, int64_t slot, const float* k, const float* v) {
  const int64_t block = slot / kv.block_size, in_block = slot % kv.block_size;
  const int64_t token = in_block % kSubBlock, padded = padded_dim(kv);
  for (int64_t head = 0; head < kv.kv_heads; head++, k += kv.head_dim, v += kv.head_dim) {
    const int64_t offset = tile_offset(kv, block, in_block / kSubBlock, head);
    write_key(k, kv.head_dim, kv.keys + offset + 2 * token);
    write_value(v, kv.head_dim, kv.values + offset + token / 2 * 2 * padded + token % 2);
  }
}

}  // namespace

const AttentionKernels kAttentionKernels = {write_kv, scratch_bytes, attend, merge};

}  // namespace octavo::OCTAVO_ISA

// Paged attention: tasks (rows of one request x one kv head) over partitions of 512 keys in chunks of 64.
//
// Partitions and chunks start at fixed positions, and partial results are merged left to right, so that a row's
// result does not depend on how the step was cut into tasks.
#include <string.h>

#include "kernels/attention_write.h"
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
  float* q_scales;    // [rows]: makes scores of products
  float* w_scales;    // [rows]: of the weights, if int16
  float* inverses;    // [rows]: of these
  uint16_t* q;        // [rows, padded_dim]: bf16 or int16
  uint16_t* weights;  // [rows, 64]: bf16 or int16
  uint16_t* tail;     // one tile of bf16 values
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
  take(tile.q_scales, rows);
  take(tile.w_scales, rows);
  take(tile.inverses, rows);
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

constexpr float kLog2E = 1.44269504f;

template <class Kv>
void load_queries(const AttentionCall& call, const AttentionTask& task, Tile& tile) {
  for (int64_t row = 0; row < tile.rows; row++) {
    uint16_t* to = tile.q + row * tile.padded_dim;
    const float scale = load_query(Kv{}, query(call, task, row), tile.dim, tile.padded_dim, to);
    tile.q_scales[row] = scale * (call.scale * kLog2E);
  }
}

/// The tiles of keys and values of one chunk. Others than tiles first .. end - 1 are not a task's to read: in their
/// places stand repeats, whose scores are masked and whose values are left out.
struct ChunkTiles {
  int64_t first, end;
  const char* keys[kChunkTiles];
  const char* values[kChunkTiles];
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

/// The chunk in which a task's keys of a partition start.
int64_t first_chunk(const AttentionCall& call, const AttentionTask& task, int64_t partition) {
  return max_of(first_key(task.position, call.window) / kChunk * kChunk, partition * kPartition);
}

ChunkTiles find_tiles(const AttentionCall& call, const AttentionTask& task, int64_t chunk, int64_t end_key) {
  const KvLayer& kv = call.kv;
  const int32_t* table = call.block_tables + task.sequence * call.blocks_per_seq;
  ChunkTiles tiles;
  tiles.first = max_of(0, first_key(task.position, call.window) - chunk) / kSubBlock;
  tiles.end = ceil_div(min_of(end_key - chunk, kChunk), kSubBlock);
  for (int64_t j = 0; j < kChunkTiles; j++) {
    const int64_t key = chunk + max_of(tiles.first, min_of(j, tiles.end - 1)) * kSubBlock;
    const int64_t offset =
        tile_offset(kv, table[key / kv.block_size], key % kv.block_size / kSubBlock, task.kv_head);
    tiles.keys[j] = kv.keys + offset;
    tiles.values[j] = kv.values + offset;
  }
  return tiles;
}

/// Puts a clean copy in the place of a last tile of bf16 values that is not full.
void replace_tail(ChunkTiles& tiles, int64_t keys, const Tile& tile) {
  const int64_t last_valid = keys - (tiles.end - 1) * kSubBlock;
  if (last_valid >= kSubBlock) return;
  const char*& last = tiles.values[tiles.end - 1];
  copy_valid_values(numbers<Bf16Kv>(last), last_valid, tile.padded_dim, tile.tail);
  last = reinterpret_cast<const char*>(tile.tail);
}

/// The scales that make int16 of a chunk's weights, and their inverses. No weight times its value's scale exceeds the
/// chunk's greatest weight times its greatest scale.
template <class SeenBy>
void scale_weights(SeenBy seen_by, const ChunkTiles& tiles, Tile& tile) {
  const float of_all = greatest_scale(tiles.values, {0, kChunk}, tile.padded_dim);
  for (int64_t row = 0; row < tile.rows; row++) {
    const Seen seen = seen_by(row);
    tile.inverses[row] = seen.all() ? of_all : greatest_scale(tiles.values, seen, tile.padded_dim);
  }
  for (int64_t row = 0; row < tile.rows; row += kLanes) {
    const f32x16 most = power_of_two(load(tile.w_scales + row)) * load(tile.inverses + row);
    store(tile.w_scales + row, most * (1.0f / kMostInt16));
    store(tile.inverses + row, most > 1e-30f ? kMostInt16 / most : f32x16{});
  }
}

/// The online softmax of all rows over a chunk: scores become weights, and `rescale` the factors by which what was
/// summed before shrinks.
template <class Kv>
void soften(const AttentionCall& call, const AttentionTask& task, int64_t chunk, const ChunkTiles& tiles, Tile& tile) {
  auto seen_by = [&](int64_t row) {
    const int64_t position = task.position + row / call.group;
    return Seen{max_of(0, first_key(position, call.window) - chunk), min_of(position + 1 - chunk, kChunk)};
  };
  for (int64_t row = 0; row < tile.rows; row++) {
    const float here = greatest_score(tile.scores + row * kChunk, seen_by(row)), before = tile.top[row];
    tile.top[row] = before < here ? here : before;
    tile.rescale[row] = before - tile.top[row];
    tile.w_scales[row] = here - tile.top[row];
  }
  for (int64_t row = 0; row < tile.rows; row += kLanes) {  // arrays of rows are padded to whole vectors
    store(tile.rescale + row, power_of_two(load(tile.rescale + row)));
  }
  if (Kv::kFormat == KvFormat::kInt8) scale_weights(seen_by, tiles, tile);
  for (int64_t row = 0; row < tile.rows; row++) {
    weigh<Kv>(tile.scores + row * kChunk, seen_by(row), tile.top[row], tile.rescale[row], tiles.values,
              tile.padded_dim, tile.inverses[row], tile.lane_sums + row * kLanes, tile.weights + row * kChunk);
  }
}

/// `next`: the chunk whose tiles are fetched meanwhile, null: none.
template <class Kv>
void attend_chunk(const AttentionCall& call, const AttentionTask& task, int64_t chunk, ChunkTiles& tiles,
                  const ChunkTiles* next, int64_t end_key, Tile& tile) {
  const int64_t padded = tile.padded_dim;
  for (int64_t row = 0; row < tile.rows; row += kBlockRows) {
    const int64_t rows = min_of(kBlockRows, tile.rows - row);
    kScoreRows<Kv>[rows - 1](tile.q + row * padded, tile.dim, padded, tiles.keys,
                             next && row == 0 ? next->keys : nullptr, tile.q_scales + row, tile.scores + row * kChunk);
  }
  soften<Kv>(call, task, chunk, tiles, tile);
  if (Kv::kFormat == KvFormat::kBf16) replace_tail(tiles, min_of(end_key - chunk, kChunk), tile);
  for (int64_t column = 0; column < padded; column += 4 * kLanes) {
    const int64_t vectors = min_of(4, (padded - column) / kLanes);
    for (int64_t row = 0; row < tile.rows; row += kBlockRows) {
      const int64_t rows = min_of(kBlockRows, tile.rows - row);
      kAccumulateRows<Kv>[rows - 1][vectors - 1](
          tile.weights + row * kChunk + tiles.first * kSubBlock, tiles.values + tiles.first,
          next && row == 0 ? next->values : nullptr, tiles.end - tiles.first, column, padded, tile.rescale + row,
          tile.w_scales + row, tile.sums + row * padded);
    }
  }
}

/// Leaves the state of all rows over the keys of one partition in the tile.
template <class Kv>
void attend_partition(const AttentionCall& call, const AttentionTask& task, const AttentionTask* ahead,
                      int64_t partition, Tile& tile) {
  memset(tile.sums, 0, tile.rows * tile.padded_dim * sizeof(float));
  memset(tile.lane_sums, 0, tile.rows * kLanes * sizeof(float));
  for (int64_t row = 0; row < tile.rows; row++) tile.top[row] = kLowest;
  const int64_t all_keys = task.position + task.tokens, end = min_of((partition + 1) * kPartition, all_keys);
  const int64_t task_end = task.partition == kWhole ? all_keys : end;
  int64_t chunk = first_chunk(call, task, partition);
  ChunkTiles tiles = find_tiles(call, task, chunk, end), next;
  for (; chunk < end; chunk += kChunk) {
    const bool more = chunk + kChunk < task_end;
    if (more) {
      next = find_tiles(call, task, chunk + kChunk, task_end);
    } else if (ahead) {
      const int64_t start = first_chunk(call, *ahead, max_of(0, ahead->partition));
      next = find_tiles(call, *ahead, start, ahead->position + ahead->tokens);
    }
    attend_chunk<Kv>(call, task, chunk, tiles, more || ahead ? &next : nullptr, end, tile);
    tiles = next;
  }
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
  const float keep = power_of_two(splat(a - top))[0], take = power_of_two(splat(b - top))[0];
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

/// The partitions in which a row has keys.
Range partitions_of(const AttentionCall& call, const AttentionTask& task, int64_t row) {
  const int64_t position = task.position + row / call.group;
  return {first_key(position, call.window) / kPartition, position / kPartition + 1};
}

template <class Kv>
void attend_whole(const AttentionCall& call, const AttentionTask& task, const AttentionTask* ahead, Tile& tile) {
  const int64_t size = state_size(tile.padded_dim);
  for (int64_t partition = first_partition(task, call.window); partition < end_partition(task); partition++) {
    attend_partition<Kv>(call, task, ahead, partition, tile);
    for (int64_t row = 0; row < tile.rows; row++) {
      const Range own = partitions_of(call, task, row);
      if (partition < own.first || partition >= own.last) continue;
      export_state(tile, row, partition == own.first ? tile.state + row * size : tile.next);
      if (partition > own.first) merge_state(tile.state + row * size, tile.next, tile.padded_dim);
    }
  }
  for (int64_t row = 0; row < tile.rows; row++) {
    write_output(tile.state + row * size, tile.padded_dim, tile.dim, output(call, task, row));
  }
}

template <class Kv>
void attend_as(const AttentionCall& call, const AttentionTask& task, const AttentionTask* ahead, void* scratch) {
  Tile tile;
  lay_out(tile, static_cast<char*>(scratch), task.tokens * call.group, call.kv.head_dim);
  load_queries<Kv>(call, task, tile);
  if (task.partition == kWhole) {
    attend_whole<Kv>(call, task, ahead, tile);
    return;
  }
  const int64_t size = state_size(tile.padded_dim);
  attend_partition<Kv>(call, task, ahead, task.partition, tile);
  const int64_t number = task.partition - first_partition(task, call.window);
  float* states = call.partials + task.partial + number * tile.rows * size;
  for (int64_t row = 0; row < tile.rows; row++) export_state(tile, row, states + row * size);
}

void attend(const AttentionCall& call, const AttentionTask& task, const AttentionTask* ahead, void* scratch) {
  if (call.kv.format == KvFormat::kInt8) {
    attend_as<Int8Kv>(call, task, ahead, scratch);
  } else {
    attend_as<Bf16Kv>(call, task, ahead, scratch);
  }
}

void merge(const AttentionCall& call, const AttentionTask& task) {
  const int64_t padded = padded_dim(call.kv), size = state_size(padded), rows = task.tokens * call.group;
  const int64_t first = first_partition(task, call.window);
  for (int64_t row = 0; row < rows; row++) {
    const Range own = partitions_of(call, task, row);
    float* state = call.partials + task.partial + ((own.first - first) * rows + row) * size;
    for (int64_t number = 1; number < own.last - own.first; number++) {
      merge_state(state, state + number * rows * size, padded);
    }
    write_output(state, padded, call.kv.head_dim, output(call, task, row));
  }
}

void write_kv(const KvLayer& kv, int64_t slot, const float* k, const float* v) {
  if (kv.format == KvFormat::kInt8) {
    write_token<Int8Kv>(kv, slot, k, v);
  } else {
    write_token<Bf16Kv>(kv, slot, k, v);
  }
}

}  // namespace

const AttentionKernels kAttentionKernels = {write_kv, scratch_bytes, attend, merge};

}  // namespace octavo::OCTAVO_ISA

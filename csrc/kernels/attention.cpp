// Paged attention: tasks (rows of one request x one kv head) over partitions of 512 keys in chunks of 64.
//
// Partitions and chunks start at fixed positions, and partial results are merged left to right, so that a row's
// result does not depend on how the step was cut into tasks.
#include <string.h>

#include "kernels/attention_softmax.h"
#include "kernels/attention_write.h"
#include "kernels/exports.h"

namespace octavo::OCTAVO_ISA {
namespace {

/// One task's working memory, carved from a thread's scratch. All arrays have one entry (or line) per row.
struct Tile {
  int64_t rows, key_dim, value_dim;
  int64_t padded_key, padded_value;
  float* scores;      // [rows, 64]
  float* most;        // [rows, 16]: greatest scores, by lane
  float* sums;        // [rows, padded_value]
  float* lane_sums;   // [rows, 16]
  float* state;       // [rows, state_size]: partitions merged so far
  int32_t* tokens;    // [rows]: of the task
  float* top;         // [rows]
  float* rescale;     // [rows]
  float* q_scales;    // [rows]: makes exponents of scores
  float* w_scales;    // [rows]: of the weights, if int16
  float* inverses;    // [rows]: of these
  uint16_t* q;        // [rows, padded_key]: bf16 or int16
  uint16_t* weights;  // [rows, 64]: bf16 or int16
  uint16_t* tail;     // one tile of bf16 values
  uint16_t* wide;     // a chunk of keys and values of 8 bits as numbers of 16
};

/// Lays a tile out in memory at `scratch` and returns the bytes it takes; null: only counts.
size_t lay_out(Tile& tile, char* scratch, int64_t rows, int64_t key_dim, int64_t value_dim) {
  size_t used = 0;
  auto take = [&]<class T>(T*& array, int64_t count) {
    array = scratch ? reinterpret_cast<T*>(scratch + used) : nullptr;
    used += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
  };
  tile.rows = rows, tile.key_dim = key_dim, tile.value_dim = value_dim;
  tile.padded_key = padded_dim(key_dim), tile.padded_value = padded_dim(value_dim);
  take(tile.scores, rows * kChunk);
  take(tile.most, round_up(rows, kLanes) * kLanes);
  take(tile.sums, rows * tile.padded_value);
  take(tile.lane_sums, rows * kLanes);
  take(tile.state, rows * state_size(tile.padded_value));
  take(tile.tokens, rows);
  take(tile.top, rows);
  take(tile.rescale, rows);
  take(tile.q_scales, rows);
  take(tile.w_scales, rows);
  take(tile.inverses, rows);
  take(tile.q, rows * tile.padded_key);
  take(tile.weights, rows * kChunk);
  take(tile.tail, kSubBlock * tile.padded_value);
  take(tile.wide, kChunk * (tile.padded_key + tile.padded_value));
  return used;
}

constexpr int64_t kFetchAhead = 8192;  // bytes

int64_t most_rows(int64_t group) { return group > kTileRows ? group : kTileRows; }

size_t scratch_bytes(int64_t group, int64_t key_dim, int64_t value_dim) {
  Tile tile;
  return lay_out(tile, nullptr, most_rows(group), key_dim, value_dim);
}

const float* query(const AttentionCall& call, const AttentionTask& task, int64_t row) {
  const int64_t head = task.kv_head * call.group + row % call.group;
  return call.q + (task.token + row / call.group) * call.ldq + head * call.kv.key_dim;
}

float* output(const AttentionCall& call, const AttentionTask& task, int64_t row) {
  const int64_t head = task.kv_head * call.group + row % call.group;
  return call.out + (task.token + row / call.group) * call.ldo + head * call.kv.value_dim;
}

constexpr float kLog2E = 1.44269504f;

template <class Kv>
void load_queries(const AttentionCall& call, const AttentionTask& task, Tile& tile) {
  for (int64_t row = 0; row < tile.rows; row++) {
    tile.tokens[row] = static_cast<int32_t>(row / call.group);
    uint16_t* to = tile.q + row * tile.padded_key;
    const float scale = load_query<Kv>(query(call, task, row), tile.key_dim, tile.padded_key, to);
    tile.q_scales[row] = scale * (call.scale * kLog2E);
  }
}

/// The tiles of keys and values of one chunk. Others than tiles first .. end - 1 are not a task's to read: in their
/// places stand repeats, whose scores are masked and whose values are left out. Scales: of numbers of 8 bits.
struct ChunkTiles {
  int64_t first, end;
  const char* keys[kChunkTiles];
  const char* values[kChunkTiles];
  const float* key_scales[kChunkTiles];
  const float* value_scales[kChunkTiles];
};

/// Values of the last `kSubBlock - valid` tokens as zeros: memory that was never written, or belonged to another
/// request, may hold NaN, and NaN times a weight of zero is NaN.
void copy_valid_values(const uint16_t* from, int64_t valid, int64_t padded, uint16_t* to) {
  memset(to, 0, kSubBlock * padded * sizeof(uint16_t));
  memcpy(to, from, valid / 2 * 2 * padded * sizeof(uint16_t));
  if (valid % 2 == 0) return;
  const int64_t pair = valid / 2 * 2 * padded;
  for (int64_t d = 0; d < padded; d++) to[pair + 2 * d] = from[pair + 2 * d];
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
    const int64_t block = table[key / kv.block_size], sub_block = key % kv.block_size / kSubBlock;
    tiles.keys[j] = kv.keys + tile_offset(kv, kv.key_dim, block, sub_block, task.kv_head);
    tiles.values[j] = kv.values + tile_offset(kv, kv.value_dim, block, sub_block, task.kv_head);
    tiles.key_scales[j] = token_scales(tiles.keys[j], padded_dim(kv.key_dim));
    tiles.value_scales[j] = token_scales(tiles.values[j], padded_dim(kv.value_dim));
  }
  return tiles;
}

/// Puts a clean copy in the place of a last tile of bf16 values that is not full.
void replace_tail(ChunkTiles& tiles, int64_t keys, const Tile& tile) {
  const int64_t last_valid = keys - (tiles.end - 1) * kSubBlock;
  if (last_valid >= kSubBlock) return;
  const char*& last = tiles.values[tiles.end - 1];
  copy_valid_values(numbers<uint16_t>(last), last_valid, tile.padded_value, tile.tail);
  last = reinterpret_cast<const char*>(tile.tail);
}

/// The scales that make int16 of a chunk's weights, and their inverses. No weight times its value's scale exceeds the
/// chunk's greatest weight times its greatest scale.
template <class SeenBy>
void scale_weights(SeenBy seen_by, const ChunkTiles& tiles, Tile& tile) {
  const float of_all = greatest_scale(tiles.value_scales, {0, kChunk});
  for (int64_t row = 0; row < tile.rows; row++) {
    const Seen seen = seen_by(row);
    tile.inverses[row] = seen.all() ? of_all : greatest_scale(tiles.value_scales, seen);
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
    const int64_t position = task.position + tile.tokens[row];
    return Seen{max_of(0, first_key(position, call.window) - chunk), min_of(position + 1 - chunk, kChunk)};
  };
  const bool all = Seen{seen_by(tile.rows - 1).first, seen_by(0).end}.all();  // of the rows see the whole chunk
  for (int64_t row = 0; row < tile.rows && !all; row++) {
    hide_scores(tile.scores + row * kChunk, seen_by(row), tiles.first, tiles.end, tile.most + row * kLanes);
  }
  for (int64_t row = 0; row < tile.rows; row += kLanes) {  // arrays of rows are padded to whole vectors
    f32x16 most[kLanes];
    for (int64_t i = 0; i < kLanes; i++) most[i] = load(tile.most + (row + i) * kLanes);
    const f32x16 here = maximum(greatest_of_each(most) * load(tile.q_scales + row), splat(kLowest));
    const f32x16 before = load(tile.top + row), top = maximum(before, here);
    store(tile.top + row, top);
    store(tile.rescale + row, power_of_two(before - top));
    store(tile.w_scales + row, here - top);
  }
  if (Kv::kInteger) scale_weights(seen_by, tiles, tile);
  auto weigh_row = [&](int64_t row, Seen seen, int64_t first, int64_t end) __attribute__((always_inline)) {
    weigh<Kv>(tile.scores + row * kChunk, seen, first, end, tile.q_scales[row], tile.top[row], tile.rescale[row],
              tiles.value_scales, tile.inverses[row], tile.lane_sums + row * kLanes,
              tile.weights + row * kChunk);
  };
  for (int64_t row = 0; row < tile.rows && all; row++) weigh_row(row, {0, kChunk}, 0, kChunkTiles);
  for (int64_t row = 0; row < tile.rows && !all; row++) weigh_row(row, seen_by(row), tiles.first, tiles.end);
}

/// Puts copies in numbers of 16 bits in the place of tiles of 8 bits: worth it where several blocks of rows read them.
template <class Kv>
void widen_tiles(ChunkTiles& tiles, const ChunkTiles* next, Tile& tile) {
  const int64_t key_count = kSubBlock * tile.padded_key, value_count = kSubBlock * tile.padded_value;
  for (int64_t j = tiles.first; j < tiles.end; j++) {
    uint16_t* keys = tile.wide + j * key_count;
    uint16_t* values = tile.wide + kChunkTiles * key_count + j * value_count;
    widen_tile<Kv>(tiles.keys[j], key_count, tiles.values[j], keys);
    widen_tile<Kv>(tiles.values[j], value_count, next ? next->keys[j] : nullptr, values);
    tiles.keys[j] = reinterpret_cast<const char*>(keys);
    tiles.values[j] = reinterpret_cast<const char*>(values);
  }
  for (int64_t j = 0; j < tiles.first; j++) tiles.keys[j] = tiles.keys[tiles.first];
  for (int64_t j = tiles.end; j < kChunkTiles; j++) tiles.keys[j] = tiles.keys[tiles.end - 1];
}

template <class Kv>
void fetch_scales(const float* const* scales) {
  for (int64_t j = 0; j < kChunkTiles && Kv::kScaled; j++) __builtin_prefetch(scales[j]);
}

/// Adds a chunk, whose tiles hold `Number`s. The first block of rows fetches what comes about 8 KiB later: the values
/// while it goes over the keys, and the keys of the chunk `next`, if that is not null, while it goes over the values; or
/// all of `next`, where chunks are small.
template <class Kv, class Number>
void attend_chunk(const AttentionCall& call, const AttentionTask& task, int64_t chunk, ChunkTiles& tiles,
                  const ChunkTiles* next, int64_t end_key, Tile& tile) {
  constexpr bool kFetch = sizeof(Number) == sizeof(typename Kv::Number);  // copies are in the cache
  const int64_t padded = tile.padded_value;
  const bool large = kChunk * tile.padded_key * static_cast<int64_t>(sizeof(Number)) >= kFetchAhead;
  const ChunkTiles* after_keys = large ? &tiles : next;
  if (after_keys) fetch_scales<Kv>(large ? tiles.value_scales : next->key_scales);
  for (int64_t row = 0; row < tile.rows; row += kBlockRows) {
    const int64_t rows = min_of(kBlockRows, tile.rows - row);
    const ScoreRows score =
        rows == kBlockRows ? kScoreTiles<Kv, Number>[tiles.end - 1] : kScoreRows<Kv, Number>[rows - 1];
    score(tile.q + row * tile.padded_key, tile.key_dim, tile.padded_key, tiles.keys, tiles.key_scales,
          kFetch && row == 0 && after_keys ? (large ? tiles.values : next->keys) : nullptr, tile.scores + row * kChunk, tile.most + row * kLanes);
  }
  soften<Kv>(call, task, chunk, tiles, tile);
  if (next) fetch_scales<Kv>(large ? next->key_scales : next->value_scales);
  if (!Kv::kScaled) replace_tail(tiles, min_of(end_key - chunk, kChunk), tile);
  for (int64_t column = 0; column < padded; column += 4 * kLanes) {
    const int64_t vectors = min_of(4, (padded - column) / kLanes);
    for (int64_t row = 0; row < tile.rows; row += kBlockRows) {
      const int64_t rows = min_of(kBlockRows, tile.rows - row);
      kAccumulateRows<Kv, Number>[rows - 1][vectors - 1](
          tile.weights + row * kChunk + tiles.first * kSubBlock, tiles.values + tiles.first,
          kFetch && next && row == 0 ? (large ? next->keys : next->values) : nullptr, tiles.end - tiles.first, column, padded,
          tile.rescale + row, tile.w_scales + row, tile.sums + row * padded);
    }
  }
}

/// Fetches what a task reads of q, or writes of out: runs of a group's heads of `dim`, a run a token.
template <int Write>
void fetch_rows(const AttentionCall& call, const AttentionTask& task, const float* rows, int64_t stride, int64_t dim) {
  const int64_t width = call.group * dim;
  for (int64_t token = 0; token < task.tokens; token++) {
    const float* run = rows + (task.token + token) * stride + task.kv_head * width;
    for (int64_t i = 0; i < width; i += kLanes) __builtin_prefetch(run + i, Write);
  }
}

/// Leaves the state of all rows over the keys of one partition in the tile.
template <class Kv>
void attend_partition(const AttentionCall& call, const AttentionTask& task, const AttentionTask* ahead,
                      int64_t partition, Tile& tile) {
  memset(tile.sums, 0, tile.rows * tile.padded_value * sizeof(float));
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
      fetch_rows<0>(call, *ahead, call.q, call.ldq, call.kv.key_dim);
    }
    if (!more && task.partition == kWhole) fetch_rows<1>(call, task, call.out, call.ldo, call.kv.value_dim);
    const ChunkTiles* fetched = more || ahead ? &next : nullptr;
    if (Kv::kScaled && tile.rows > kBlockRows) {
      widen_tiles<Kv>(tiles, fetched, tile);
      attend_chunk<Kv, typename Kv::Wide>(call, task, chunk, tiles, fetched, end, tile);
    } else {
      attend_chunk<Kv, typename Kv::Number>(call, task, chunk, tiles, fetched, end, tile);
    }
    tiles = next;
  }
}

void export_state(const Tile& tile, int64_t row, float* state) {
  memcpy(state, tile.sums + row * tile.padded_value, tile.padded_value * sizeof(float));
  state[tile.padded_value] = tile.top[row];
  state[tile.padded_value + 1] = sum(load(tile.lane_sums + row * kLanes));
}

/// state = state merged with the one over the next partition: `next` and its greatest score and denominator.
void merge_state(float* state, const float* next, float b, float total, int64_t padded) {
  const float a = state[padded];
  const float top = a < b ? b : a;
  const float keep = power_of_two(splat(a - top))[0], take = power_of_two(splat(b - top))[0];
  for (int64_t d = 0; d < padded; d += kLanes) {
    store(state + d, multiply_add(load(next + d), splat(take), load(state + d) * keep));
  }
  state[padded] = top;
  state[padded + 1] = state[padded + 1] * keep + total * take;
}

void write_output(const float* state, int64_t padded, int64_t dim, float* out) {
  const float inverse = 1.0f / state[padded + 1];
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
  const int64_t size = state_size(tile.padded_value);
  for (int64_t partition = first_partition(task, call.window); partition < end_partition(task); partition++) {
    attend_partition<Kv>(call, task, ahead, partition, tile);
    for (int64_t row = 0; row < tile.rows; row++) {
      const Range own = partitions_of(call, task, row);
      if (partition < own.first || partition >= own.last) continue;
      float* state = tile.state + row * size;
      if (partition == own.first) {
        export_state(tile, row, state);
      } else {
        merge_state(state, tile.sums + row * tile.padded_value, tile.top[row],
                    sum(load(tile.lane_sums + row * kLanes)), tile.padded_value);
      }
    }
  }
  for (int64_t row = 0; row < tile.rows; row++) {
    write_output(tile.state + row * size, tile.padded_value, tile.value_dim, output(call, task, row));
  }
}

template <class Kv>
void attend_as(const AttentionCall& call, const AttentionTask& task, const AttentionTask* ahead, void* scratch) {
  Tile tile;
  lay_out(tile, static_cast<char*>(scratch), task.tokens * call.group, call.kv.key_dim, call.kv.value_dim);
  load_queries<Kv>(call, task, tile);
  if (task.partition == kWhole) {
    attend_whole<Kv>(call, task, ahead, tile);
    return;
  }
  const int64_t size = state_size(tile.padded_value);
  attend_partition<Kv>(call, task, ahead, task.partition, tile);
  const int64_t number = task.partition - first_partition(task, call.window);
  float* states = call.partials + task.partial + number * tile.rows * size;
  for (int64_t row = 0; row < tile.rows; row++) export_state(tile, row, states + row * size);
}

/// Calls `work` with the type that stands for a format.
template <class Work>
void with_format(KvFormat format, Work work) {
  switch (format) {
    case KvFormat::kBf16:
      return work(Bf16Kv{});
    case KvFormat::kInt8:
      return work(Int8Kv{});
    case KvFormat::kE4m3:
      return work(Fp8Kv<E4m3>{});
    case KvFormat::kE5m2:
      return work(Fp8Kv<E5m2>{});
  }
}

void attend(const AttentionCall& call, const AttentionTask& task, const AttentionTask* ahead, void* scratch) {
  with_format(call.kv.format, [&](auto kv) { attend_as<decltype(kv)>(call, task, ahead, scratch); });
}

void merge(const AttentionCall& call, const AttentionTask& task) {
  const int64_t padded = padded_dim(call.kv.value_dim), size = state_size(padded), rows = task.tokens * call.group;
  const int64_t first = first_partition(task, call.window);
  for (int64_t row = 0; row < rows; row++) {
    const Range own = partitions_of(call, task, row);
    float* state = call.partials + task.partial + ((own.first - first) * rows + row) * size;
    for (int64_t number = 1; number < own.last - own.first; number++) {
      const float* next = state + number * rows * size;
      merge_state(state, next, next[padded], next[padded + 1], padded);
    }
    write_output(state, padded, call.kv.value_dim, output(call, task, row));
  }
}

void write_kv(const KvLayer& kv, int64_t slot, const float* k, const float* v) {
  with_format(kv.format, [&](auto format) { write_token<decltype(format)>(kv, slot, k, v); });
}

}  // namespace

const AttentionKernels kAttentionKernels = {write_kv, scratch_bytes, attend, merge};

}  // namespace octavo::OCTAVO_ISA

#include "program/attention_plan.h"

#include <algorithm>

namespace octavo {

namespace {

constexpr int64_t kTasksPerThread = 4;  // a task larger than a share of this many a thread is split
constexpr int64_t kMostPartialFloats = int64_t{4} << 20;  // beyond, splitting costs more memory than it is worth

/// Tokens times keys that a task reads.
int64_t cost(const AttentionTask& task, int64_t window) {
  int64_t first = first_key(task.position, window), end = task.position + task.tokens;
  if (task.partition != kWhole) {
    first = max_of(first, task.partition * kPartition);
    end = min_of(end, (task.partition + 1) * kPartition);
  }
  return (end - first) * task.tokens;
}

void add_tiles(const Step& step, const AttentionShape& shape, std::vector<AttentionTask>& tasks) {
  const int64_t tile_tokens = max_of(1, kTileRows / shape.group);
  for (int64_t s = 0; s < step.sequences; s++) {
    const int64_t count = step.query_length(s), start = step.query_start_loc[s];
    for (int64_t token = 0; token < count; token += tile_tokens) {
      for (int64_t head = 0; head < shape.kv_heads; head++) {
        tasks.push_back({static_cast<int32_t>(s), static_cast<int32_t>(start + token),
                         static_cast<int32_t>(min_of(tile_tokens, count - token)), step.positions[start + token],
                         static_cast<int32_t>(head), kWhole, 0});
      }
    }
  }
}

/// Replaces whole tasks of several partitions, where they cost more than `most`, by one task per partition and a merge.
void split_tasks(const AttentionShape& shape, int64_t most, AttentionPlan& plan) {
  std::vector<AttentionTask> whole;
  whole.swap(plan.tasks);
  const int64_t size = state_size(padded_dim(shape.value_dim));
  for (AttentionTask task : whole) {
    const int64_t first = first_partition(task, shape.window), end = end_partition(task);
    const int64_t floats = (end - first) * task.tokens * shape.group * size;
    if (end - first == 1 || cost(task, shape.window) <= most || plan.partial_floats + floats > kMostPartialFloats) {
      plan.tasks.push_back(task);
      continue;
    }
    task.partial = plan.partial_floats;
    plan.partial_floats += floats;
    plan.merges.push_back(task);
    for (int64_t partition = first; partition < end; partition++) {
      task.partition = static_cast<int32_t>(partition);
      plan.tasks.push_back(task);
    }
  }
}

}  // namespace

void plan_attention(const Step& step, const AttentionShape& shape, int threads, AttentionPlan& plan) {
  const int64_t window = shape.window;
  plan.tasks.clear();
  plan.merges.clear();
  plan.partial_floats = 0;
  add_tiles(step, shape, plan.tasks);
  if (threads > 1) {
    int64_t all = 0;
    for (const AttentionTask& task : plan.tasks) all += cost(task, window);
    split_tasks(shape, all / (kTasksPerThread * threads), plan);
  }
  std::stable_sort(plan.tasks.begin(), plan.tasks.end(), [window](const AttentionTask& a, const AttentionTask& b) {
    return cost(a, window) > cost(b, window);
  });
}

}  // namespace octavo

// Cuts the attention of a step into tasks. Layers of the same shape use the same plan.
#pragma once

#include <compare>
#include <vector>

#include "octavo/attention.h"
#include "program/step.h"

namespace octavo {

/// What a layer's plan depends on. `group`: query heads per kv head.
struct AttentionShape {
  int64_t group, kv_heads, value_dim, window;
  auto operator<=>(const AttentionShape&) const = default;
};

struct AttentionPlan {
  std::vector<AttentionTask> tasks;   // costly ones first
  std::vector<AttentionTask> merges;  // of split tasks, after all tasks
  int64_t partial_floats = 0;         // memory for partial states
};

/// Makes the plan of a step for layers of one shape in `plan`, reusing its memory. Tiles of up to kTileRows rows; those
/// that are too large a part of the step to be shared out fairly, one task per partition of the keys. Results do not
/// depend on it.
void plan_attention(const Step& step, const AttentionShape& shape, int threads, AttentionPlan& plan);

}  // namespace octavo

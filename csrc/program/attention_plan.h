// Cuts the attention of a step into tasks. Layers of the same window use the same plan.
#pragma once

#include <vector>

#include "octavo/attention.h"
#include "program/step.h"

namespace octavo {

/// The heads of a model; equal in all its layers.
struct AttentionShape {
  int64_t group, kv_heads, head_dim;
};

struct AttentionPlan {
  std::vector<AttentionTask> tasks;   // costly ones first
  std::vector<AttentionTask> merges;  // of split tasks, after all tasks
  int64_t partial_floats = 0;         // memory for partial states
};

/// Makes the plan of a step for layers of one window in `plan`, reusing its memory. Tiles of up to kTileRows rows; those that are too
/// large a part of the step to be shared out fairly, one task per partition of the keys. Results do not depend on it.
void plan_attention(const Step& step, const AttentionShape& shape, int64_t window, int threads, AttentionPlan& plan);

}  // namespace octavo

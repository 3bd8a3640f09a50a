// Cuts the attention of a step into tasks. Every layer of the step uses the same plan.
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

/// Makes the plan of a step in `plan`, reusing its memory. Tiles of up to kTileRows rows, whole when there are enough
/// to keep the threads busy, else one task per partition of the keys. Results do not depend on the choice.
void plan_attention(const Step& step, const AttentionShape& shape, int threads, AttentionPlan& plan);

}  // namespace octavo

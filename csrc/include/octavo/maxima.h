// The greatest numbers of a row of logits, by lanes of groups: what a sampler looks at before it reads any logit. Taken
// where the logits are made, lane by lane, which costs next to nothing.
#pragma once

#include <cstdint>

#include "octavo/partition.h"

namespace octavo {

inline constexpr int64_t kGroupLogits = 512;  // of a row, from one multiple of it to the next
inline constexpr int64_t kGroupLanes = 16;    // lane l of a group: its logits l, l + 16, l + 32, ...

/// Maxima of a row of n logits: [group][lane], -infinity for lanes without a logit.
static inline int64_t maxima_size(int64_t n) { return ceil_div(n, kGroupLogits) * kGroupLanes; }

}  // namespace octavo

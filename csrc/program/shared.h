// What the stages of a program share: memory of threads, and the attention plans of a step.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "octavo/partition.h"
#include "program/attention_plan.h"
#include "program/memory.h"

namespace octavo {

/// Memory of its own for every thread, as large as any stage wants it.
struct ThreadScratch {
  explicit ThreadScratch(int threads) : threads(threads) {}

  const int threads;
  size_t bytes = 0;  // of a thread
  std::unique_ptr<Memory> memory;

  void reserve(size_t most) {
    if (most <= bytes) return;
    bytes = round_up(most, 64);
    memory = std::make_unique<Memory>(threads * bytes);
  }
  void* of(int thread) const { return memory->data() + thread * bytes; }
};

struct AttentionShared {
  explicit AttentionShared(int threads) : scratch(threads) {}

  std::map<AttentionShape, AttentionPlan> plans;
  std::vector<float> partials;
  ThreadScratch scratch;
};

}  // namespace octavo

// One step's inputs as they come from Python, and the check that makes them safe to follow.
#pragma once

#include <cstdint>

namespace octavo {

/// Mirrors octavo.backends.base.Limits, with what the program adds.
struct StepLimits {
  int64_t tokens, rows, sequences, blocks_per_seq, blocks, block_size;
  int64_t vocab_size, max_position, groups;
};

/// Mirrors octavo.backends.base.StepInputs. Arrays are C-contiguous. Slots and tables are those of all groups.
struct Step {
  int64_t tokens, rows, sequences, blocks_per_seq;
  const int32_t* token_ids;        // [tokens]
  const int32_t* positions;        // [tokens]
  const int32_t* slot_mapping;     // [groups, tokens]
  const int32_t* query_start_loc;  // [sequences + 1]
  const int32_t* seq_lens;         // [sequences]
  const int32_t* block_tables;     // [groups, sequences, blocks_per_seq]
  const int32_t* logit_rows;       // [rows]

  const int32_t* slots(int64_t group) const { return slot_mapping + group * tokens; }
  const int32_t* tables(int64_t group) const { return block_tables + group * sequences * blocks_per_seq; }
  int64_t query_length(int64_t s) const { return query_start_loc[s + 1] - query_start_loc[s]; }
};

/// Throws std::invalid_argument, naming the entry, unless every index of the step stays inside the limits.
void check_step(const Step& step, const StepLimits& limits);

}  // namespace octavo

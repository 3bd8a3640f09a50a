#include "program/step.h"

#include <stdexcept>
#include <string>

namespace octavo {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

void check_size(const char* what, int64_t size, int64_t limit) {
  if (size > limit) refuse(std::to_string(size) + " " + what + " in a step planned for " + std::to_string(limit));
}

void check_entries(const char* what, const int32_t* values, int64_t count, int64_t end) {
  for (int64_t i = 0; i < count; i++) {
    if (values[i] < 0 || values[i] >= end) {
      refuse(std::string(what) + "[" + std::to_string(i) + "] = " + std::to_string(values[i]) + " is not in 0.." +
             std::to_string(end - 1));
    }
  }
}

/// Tokens of a sequence are consecutive, end at its length, and their blocks are in its table.
void check_sequence(const Step& step, const StepLimits& limits, int64_t s) {
  const std::string name = "sequence " + std::to_string(s);
  const int64_t first = step.query_start_loc[s], count = step.query_length(s), length = step.seq_lens[s];
  if (count < 0 || first + count > step.tokens) refuse(name + ": query_start_loc is not increasing within the tokens");
  if (count == 0) return;
  if (length < count || length > limits.max_position) {
    refuse(name + ": length " + std::to_string(length) + " with " + std::to_string(count) + " new tokens, of at most " +
           std::to_string(limits.max_position));
  }
  const int64_t blocks = (length + limits.block_size - 1) / limits.block_size;
  if (blocks > step.blocks_per_seq) refuse(name + ": its table is shorter than its length");
  for (int64_t group = 0; group < limits.groups; group++) {
    check_entries("block_tables", step.tables(group) + s * step.blocks_per_seq, blocks, limits.blocks);
  }
  for (int64_t i = 0; i < count; i++) {
    if (step.positions[first + i] != length - count + i) {
      refuse(name + ": position of token " + std::to_string(first + i) + " is " +
             std::to_string(step.positions[first + i]) + ", not " + std::to_string(length - count + i));
    }
  }
}

}  // namespace

void check_step(const Step& step, const StepLimits& limits) {
  check_size("tokens", step.tokens, limits.tokens);
  check_size("logit rows", step.rows, limits.rows);
  check_size("sequences", step.sequences, limits.sequences);
  check_size("blocks per sequence", step.blocks_per_seq, limits.blocks_per_seq);
  check_entries("token_ids", step.token_ids, step.tokens, limits.vocab_size);
  check_entries("slot_mapping", step.slot_mapping, limits.groups * step.tokens, limits.blocks * limits.block_size);
  check_entries("logit_rows", step.logit_rows, step.rows, step.tokens);
  if (step.query_start_loc[0] != 0 || step.query_start_loc[step.sequences] != step.tokens) {
    refuse("query_start_loc does not run from 0 to the number of tokens");
  }
  for (int64_t s = 0; s < step.sequences; s++) check_sequence(step, limits, s);
}

}  // namespace octavo

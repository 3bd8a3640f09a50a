// What a program is made of: row stages, which treat each row alone, and wide stages, in which every thread takes a
// share of the whole. The files of csrc/stages each end with the kinds of stages they know:
//
//   constexpr StageKind kKinds[] = {stage_kind<Embed, add_embed>("embed", kEmbed), ...};
//   const StageKinds <file>_stages = stage_kinds(kKinds);
//
// Ops that need nothing but rows are simpler: csrc/ops.
#pragma once

#include <string>

#include "octavo/row_op.h"
#include "ops_list.h"
#include "program/step.h"

namespace octavo {

class Program;

/// Makes rows first .. last - 1 of its outputs from the same rows of its inputs. Stages of one phase run after each
/// other on small blocks of rows, so that rows stay in the cache.
class RowStage {
 public:
  virtual ~RowStage() = default;
  virtual void run(const Step& step, int64_t first, int64_t last) const = 0;
  /// Whether there is nothing to run in this step. A phase of idle stages costs no barrier.
  virtual bool idle(const Step&) const { return false; }
};

/// Runs on all threads, between barriers.
class WideStage {
 public:
  virtual ~WideStage() = default;
  /// Once per step, on one thread, before the threads start.
  virtual void begin(const Step&) {}
  virtual void run(const Step& step, int thread, int threads) = 0;
};

/// A stage by name: `add` appends one to a program. Throws std::invalid_argument.
struct StageKind {
  const char* name;
  Fields fields;
  void (*add)(Program& program, const void* args);
};

/// The kinds of a file.
struct StageKinds {
  const StageKind* first;
  int64_t count;
};

template <class Args, void (*Add)(Program&, const Args&), size_t Count>
constexpr StageKind stage_kind(const char* name, const Field (&fields)[Count]) {
  return {name, fields_of<Args>(fields), [](Program& program, const void* args) {
            Add(program, *static_cast<const Args*>(args));
          }};
}

template <size_t Count>
constexpr StageKinds stage_kinds(const StageKind (&kinds)[Count]) {
  return {kinds, Count};
}

#define OCTAVO_STAGES_FILE(name) extern const StageKinds name##_stages;
OCTAVO_STAGES_FILES
#undef OCTAVO_STAGES_FILE

/// The kind of this name, or null.
const StageKind* find_stage_kind(const std::string& name);

}  // namespace octavo

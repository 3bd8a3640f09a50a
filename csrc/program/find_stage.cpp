#include "stages/stage.h"

namespace octavo {

const StageKind* find_stage_kind(const std::string& name) {
#define OCTAVO_STAGES_FILE(name) &name##_stages,
  static const StageKinds* const files[] = {OCTAVO_STAGES_FILES};
#undef OCTAVO_STAGES_FILE
  for (const StageKinds* kinds : files) {
    for (int64_t i = 0; i < kinds->count; i++) {
      if (name == kinds->first[i].name) return kinds->first + i;
    }
  }
  return nullptr;
}

}  // namespace octavo

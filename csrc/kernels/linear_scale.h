// One scale or minimum of a panel, for code that is not vectorised by hand.
#pragma once

#include "kernels/half.h"
#include "kernels/linear_layout.h"

namespace octavo::OCTAVO_ISA {

/// Number `index` of `scales`; unit: where the units of output 0 of the panel lie. Counts times units are exact.
static inline float load_scale(const uint8_t* scales, int64_t index, ScaleKind kind, const uint8_t* unit) {
  if (kind == ScaleKind::f32) return reinterpret_cast<const float*>(scales)[index];
  if (kind == ScaleKind::f16) return half_to_float(reinterpret_cast<const uint16_t*>(scales)[index]);
  const float count = float(reinterpret_cast<const int8_t*>(scales)[index]);
  return count * half_to_float(reinterpret_cast<const uint16_t*>(unit)[index % kPanelOutputs]);
}

}  // namespace octavo::OCTAVO_ISA

// Registers LinearProbe with the extension module; what both bindings need to pack weights.
#pragma once

#include <nanobind/nanobind.h>

#include "octavo/linear.h"

namespace octavo {

/// Arrays come from Python as addresses, 0 for none.
inline LinearSource linear_source(const PartShape& shape, uintptr_t data, uintptr_t scale, uintptr_t minimum,
                                  uintptr_t scale_unit, uintptr_t minimum_unit) {
  return {shape,
          reinterpret_cast<const void*>(data),
          reinterpret_cast<const void*>(scale),
          reinterpret_cast<const void*>(minimum),
          reinterpret_cast<const uint16_t*>(scale_unit),
          reinterpret_cast<const uint16_t*>(minimum_unit)};
}

void bind_linear(nanobind::module_& module);

}  // namespace octavo

// Registers Sampler with the extension module.
#pragma once

#include <nanobind/nanobind.h>

namespace octavo {

void bind_sampler(nanobind::module_& module);

}  // namespace octavo

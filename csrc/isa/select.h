// Which kernel tables this machine can run.
#pragma once

#include <string>
#include <vector>

#include "octavo/kernels.h"

namespace octavo {

/// Tables that were built and that this CPU and operating system can run, best first. Never empty.
std::vector<const KernelTable*> usable_kernels();

/// The table named `isa`, or the best one for an empty name. Throws std::invalid_argument.
const KernelTable* select_kernels(const std::string& isa);

}  // namespace octavo

// What each kernel file hands to the table of its ISA.
#pragma once

#include "octavo/kernels.h"

namespace octavo::OCTAVO_ISA {

extern const LinearKernels kLinearKernels;
extern const AttentionKernels kAttentionKernels;
extern const SamplingKernels kSamplingKernels;

}  // namespace octavo::OCTAVO_ISA

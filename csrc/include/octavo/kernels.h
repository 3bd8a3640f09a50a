// The kernels of one instruction set, as a table of functions. One table per ISA is compiled (csrc/isa), and one is
// chosen when a backend is made.
//
// Rules for files under csrc/kernels and csrc/ops, which are compiled several times with different flags:
//  - everything lives in `namespace octavo::OCTAVO_ISA` (the macro is set by CMake: portable, avx2, avx512);
//  - functions are static or in the ISA's namespace, never plain inline: the linker keeps one copy of those;
//  - no containers or algorithms of the standard library: their inline functions could be compiled with AVX-512 here
//    and then be picked by the linker for code that must run anywhere;
//  - tables are constants, so that nothing of an ISA runs before it is chosen;
//  - no reduction may depend on the number of rows, on which rows share a call, or on threads;
//  - a row's arithmetic is the same for every tile shape: the same accumulators, in the same order.
#pragma once

#include "octavo/attention.h"
#include "octavo/linear.h"
#include "octavo/row_op.h"
#include "octavo/sampling.h"

namespace octavo {

struct KernelTable {
  const char* isa;       // "avx512"
  const char* features;  // "vnni, bf16", for people
  const LinearKernels* linear;
  const AttentionKernels* attention;
  const SamplingKernels* sampling;
  const RowOps* const* row_ops;  // of each file of csrc/ops
  int64_t num_row_ops;
};

// Defined in csrc/isa/<isa>.cpp, where built.
extern const KernelTable kPortableKernels;
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;

}  // namespace octavo

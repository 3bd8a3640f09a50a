// The kernels of one instruction set: compiled once per ISA with its own flags, OCTAVO_ISA and OCTAVO_TABLE.
#include "kernels/exports.h"
#include "ops/row_op.h"

namespace octavo {

#define OCTAVO_TEXT_(x) #x
#define OCTAVO_TEXT(x) OCTAVO_TEXT_(x)

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define OCTAVO_FEATURES "vnni, bf16"
#elif defined(__AVX2__)
#define OCTAVO_FEATURES "fma"
#else
#define OCTAVO_FEATURES "baseline"
#endif

namespace OCTAVO_ISA {

#define OCTAVO_OPS_FILE(name) &name##_ops,
static constexpr const RowOps* kRowOps[] = {OCTAVO_OPS_FILES};
#undef OCTAVO_OPS_FILE

}  // namespace OCTAVO_ISA

extern const KernelTable OCTAVO_TABLE = {
    OCTAVO_TEXT(OCTAVO_ISA),
    OCTAVO_FEATURES,
    &OCTAVO_ISA::kLinearKernels,
    &OCTAVO_ISA::kAttentionKernels,
    &OCTAVO_ISA::kSamplingKernels,
    OCTAVO_ISA::kRowOps,
    sizeof OCTAVO_ISA::kRowOps / sizeof *OCTAVO_ISA::kRowOps,
};

}  // namespace octavo

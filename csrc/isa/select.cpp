#include "isa/select.h"

#include <stdexcept>

namespace octavo {

#if defined(__x86_64__)
namespace {

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512bf16");
}

}  // namespace
#endif

std::vector<const KernelTable*> usable_kernels() {
  std::vector<const KernelTable*> tables;
#if defined(__x86_64__)
  if (has_avx512()) tables.push_back(&kAvx512Kernels);
  if (has_avx2()) tables.push_back(&kAvx2Kernels);
#endif
  tables.push_back(&kPortableKernels);
  return tables;
}

const KernelTable* select_kernels(const std::string& isa) {
  const auto tables = usable_kernels();
  if (isa.empty()) return tables.front();
  for (const KernelTable* table : tables) {
    if (isa == table->isa) return table;
  }
  throw std::invalid_argument("no kernels for '" + isa + "' on this machine");
}

}  // namespace octavo

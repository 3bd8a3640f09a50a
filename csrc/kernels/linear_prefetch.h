// Fetching weights ahead of their use.
#pragma once

#include <cstdint>

namespace octavo::OCTAVO_ISA {

// The hardware prefetcher alone does not reach the speed of memory. Panels of a thread are contiguous, so that running
// past a panel's end fetches the next one.
inline constexpr int64_t kPrefetchBytes = 4096;

/// Fetches `bytes` bytes of weights that will be needed kPrefetchBytes after those at `address`.
static inline void prefetch(const void* address, int64_t bytes) {
  const char* line = static_cast<const char*>(address) + kPrefetchBytes;
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(line + i);
}

}  // namespace octavo::OCTAVO_ISA

// How work is divided: always by position, never by who is free first, so that results do not depend on threads.
#pragma once

#include <cstdint>

namespace octavo {

struct Range {
  int64_t first, last;  // half open
};

/// The share of `thread` (0 .. threads - 1) of `count` items: contiguous, sizes differ by at most one.
static inline Range split(int64_t count, int thread, int threads) {
  return {count * thread / threads, count * (thread + 1) / threads};
}

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

static inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace octavo

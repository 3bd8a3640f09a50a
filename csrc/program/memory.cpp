#include "program/memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace octavo {

namespace {
constexpr size_t kHugePage = size_t{2} << 20;
}

Memory::Memory(size_t bytes) : size_(bytes) {
  const size_t slack = bytes >= kHugePage ? kHugePage : 0;
  mapped_ = (bytes ? bytes : 1) + slack;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
  flags |= MAP_NORESERVE;
#endif
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<char*>(mapping_);
  if (slack) {
    data_ += (kHugePage - reinterpret_cast<uintptr_t>(data_) % kHugePage) % kHugePage;
#ifdef MADV_HUGEPAGE
    madvise(data_, bytes, MADV_HUGEPAGE);  // a hint: failure costs speed only
#endif
  }
}

Memory::~Memory() { munmap(mapping_, mapped_); }

}  // namespace octavo

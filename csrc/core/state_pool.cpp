#include "tellin/state_pool.h"

#include <cstring>
#include <new>

#include "require.h"

namespace tellin {
namespace {

constexpr int64_t kLine = 64;

}  // namespace

int StatePool::add_layer(int64_t num_values) {
  require(num_values > 0 && num_values < (int64_t{1} << 31), "a state has between 1 and 2^31 values");
  layers_.push_back({num_values, slot_bytes_});
  slot_bytes_ += (num_values * static_cast<int64_t>(sizeof(float)) + kLine - 1) / kLine * kLine;
  return num_layers() - 1;
}

void StatePool::allocate(int64_t num_slots) {
  require(num_slots >= 0, "num_slots must not be negative");
  if (slot_bytes_ > 0 && num_slots > INT64_MAX / slot_bytes_) throw std::bad_alloc();
  free();
  memory_ = MappedMemory(static_cast<size_t>(num_slots * slot_bytes_), /*huge_pages=*/true);
  num_slots_ = num_slots;
}

void StatePool::free() {
  memory_ = MappedMemory();
  num_slots_ = 0;
}

void StatePool::copy_slot(int64_t source, int64_t target) {
  require(source >= 0 && source < num_slots_ && target >= 0 && target < num_slots_,
          "state slot out of range: " + std::to_string(source) + " to " + std::to_string(target) + " of " +
              std::to_string(num_slots_));
  if (source == target) return;
  std::memcpy(memory_.data() + target * slot_bytes_, memory_.data() + source * slot_bytes_,
              static_cast<size_t>(slot_bytes_));
}

}  // namespace tellin

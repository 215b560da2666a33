#include "tellin/kv_pool.h"

#include <cstring>
#include <new>
#include <stdexcept>

namespace tellin {
namespace {

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

KvLayout make_layout(KvDtype dtype, int64_t head_dim, int64_t value_dim, bool scales) {
  const int64_t bytes = dtype == KvDtype::kFloat32 ? 4 : (dtype == KvDtype::kInt8 ? 1 : 2);
  const int64_t key_bytes = head_dim * kTilePositions * bytes;  // a multiple of 64 but for int8
  const int64_t value_bytes = value_dim * kTilePositions * bytes;
  KvLayout layout{dtype, head_dim, value_dim, key_bytes, 0, key_bytes + value_bytes};
  if (scales) {
    layout.scale_offset = layout.tile_bytes;
    layout.tile_bytes +=
        (dtype == KvDtype::kInt16 ? 1 : 2) * kTilePositions * static_cast<int64_t>(sizeof(float));
  } else if (value_dim % 16 != 0) {
    layout.tile_bytes += 64;  // the last row of V is read as whole vectors of up to 16 values
  }
  layout.tile_bytes = round_up(layout.tile_bytes, 64);
  return layout;
}

}  // namespace

KvLayout kv_layout(KvDtype dtype, int64_t head_dim, int64_t value_dim) {
  return make_layout(dtype, head_dim, value_dim > 0 ? value_dim : head_dim,
                     dtype == KvDtype::kInt8 || dtype == KvDtype::kInt16);
}

KvLayout expanded_layout(const KvLayout& layout) {
  return make_layout(KvDtype::kFloat32, layout.head_dim, layout.value_dim, layout.scale_offset != 0);
}

KvPool::KvPool(int64_t block_size, KvDtype dtype)
    : block_size_(block_size), tiles_per_block_(block_size / kTilePositions), dtype_(dtype) {
  if (block_size <= 0 || block_size % kTilePositions != 0 || block_size > 65536) {
    throw std::invalid_argument("block_size must be a positive multiple of 16, at most 65536");
  }
}

void KvPool::add_layer(int64_t num_kv_heads, int64_t head_dim, int64_t value_dim) {
  const KvLayout layout = kv_layout(dtype_, head_dim, value_dim);
  layers_.push_back({num_kv_heads, layout, block_bytes_});
  block_bytes_ += num_kv_heads * tiles_per_block_ * layout.tile_bytes;
}

void KvPool::allocate(int64_t num_blocks, const std::string& system_root) {
  if (num_blocks < 0) throw std::invalid_argument("num_blocks must not be negative");
  if (block_bytes_ > 0 && num_blocks > INT64_MAX / block_bytes_) throw std::bad_alloc();
  free();
  memory_ = MappedMemory(static_cast<size_t>(num_blocks * block_bytes_), /*huge_pages=*/true);
  num_blocks_ = num_blocks;
  if (memory_.size() > 0) {
    ahead_ = std::make_unique<CommitAhead>(memory_.data(), memory_.size(), system_root);
  }
}

void KvPool::free() {
  ahead_.reset();  // before its memory goes
  memory_ = MappedMemory();
  num_blocks_ = 0;
}

void KvPool::copy_block(int64_t source, int64_t target) {
  if (source < 0 || source >= num_blocks_ || target < 0 || target >= num_blocks_) {
    throw std::invalid_argument("block id out of range");
  }
  if (source == target) return;
  std::memcpy(memory_.data() + target * block_bytes_, memory_.data() + source * block_bytes_,
              static_cast<size_t>(block_bytes_));
  used(target + 1);
}

void KvPool::used(int64_t num_blocks) noexcept {
  if (ahead_ != nullptr) ahead_->used(static_cast<size_t>(num_blocks * block_bytes_));
}

}  // namespace tellin

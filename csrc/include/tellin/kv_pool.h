// The paged KV cache of all layers: one lazily committed region of blocks.
//
// A block holds block_size consecutive positions of every layer: [layer][kv_head][tile][K then V], a tile
// being 16 positions (vector_kernels.h). Blocks are whole units in memory, so copying or abandoning one
// touches one range. Low blocks are handed out first, so what lies behind the highest one that was used is
// committed ahead (commit_ahead.h).
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tellin/commit_ahead.h"
#include "tellin/mapped_memory.h"
#include "tellin/vector_kernels.h"

namespace tellin {

// value_dim 0: that of keys.
KvLayout kv_layout(KvDtype dtype, int64_t head_dim, int64_t value_dim = 0);

// The float32 layout that tiles of `layout` expand to (scales kept if there are any).
KvLayout expanded_layout(const KvLayout& layout);

class KvPool {
 public:
  struct Layer {
    int64_t num_kv_heads;
    KvLayout layout;
    int64_t offset;  // bytes from the start of a block
  };

  KvPool(int64_t block_size, KvDtype dtype);

  void add_layer(int64_t num_kv_heads, int64_t head_dim, int64_t value_dim = 0);
  // Replaces the pool by an empty one. Throws std::bad_alloc. `system_root` as in commit_ahead.h.
  void allocate(int64_t num_blocks, const std::string& system_root);
  void free();
  void copy_block(int64_t source, int64_t target);
  // Blocks [0, num_blocks) hold something, or did: those behind them come next.
  void used(int64_t num_blocks) noexcept;

  int64_t block_size() const { return block_size_; }
  int64_t block_bytes() const { return block_bytes_; }
  int64_t num_blocks() const { return num_blocks_; }
  // End of what was committed ahead of its use, in bytes from the pool's start.
  size_t committed_bytes() const { return ahead_ == nullptr ? 0 : ahead_->committed(); }
  const std::vector<Layer>& layers() const { return layers_; }
  KvDtype dtype() const { return dtype_; }

  // The tile that holds positions [16 * tile, 16 * tile + 16) of a request, given that tile's block.
  uint8_t* tile(const Layer& layer, int64_t block, int64_t kv_head, int64_t tile) const {
    const int64_t in_block = tile % tiles_per_block_;
    return memory_.data() + block * block_bytes_ + layer.offset +
           (kv_head * tiles_per_block_ + in_block) * layer.layout.tile_bytes;
  }
  int64_t tiles_per_block() const { return tiles_per_block_; }

 private:
  int64_t block_size_;
  int64_t tiles_per_block_;
  KvDtype dtype_;
  int64_t block_bytes_ = 0;
  int64_t num_blocks_ = 0;
  std::vector<Layer> layers_;
  MappedMemory memory_;
  std::unique_ptr<CommitAhead> ahead_;  // ends before the memory does
};

}  // namespace tellin

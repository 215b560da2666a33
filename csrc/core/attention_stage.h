// Attention over the paged cache (or, for encoders, over the rows of the step): work lists and softmax
// states.
//
// Work is cut into (query tile, kv head) items, and when these are too few for the team also into partitions
// of 256 positions. Either way a row's partitions are computed alone and folded in position order.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "stage.h"
#include "tellin/kv_pool.h"

namespace tellin {

// What the work list of a layer depends on; layers of equal shape share it.
struct AttentionShape {
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;  // work is cut by these
  int64_t head_dim = 0;
  int64_t value_dim = 0;
  // Of them that read one head of the cache: where many query heads share one, parts of them are worked on
  // apart, so that there is work for all members.
  int64_t sharing = 1;
  int64_t window = 0;  // 0 = none
  bool causal = true;
  bool windowed = false;            // not causal: a window of the step is seen, not its request
  RowKind rows = RowKind::kTokens;  // of queries

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t tile_tokens() const;  // query tokens per item
  int64_t tile_rows() const { return tile_tokens() * group(); }
  bool operator==(const AttentionShape& other) const;
};

// Work list of one pass for one shape. Rebuilt before the pass runs; reuses its memory.
class AttentionSchedule {
 public:
  struct Item {
    const RequestRows* request;
    int64_t first_token, num_tokens;      // rows of the pass
    int64_t first_position;               // of first_token
    int64_t lowest, highest;              // positions [lowest, highest) that any of its rows sees
    int64_t first_partition, partitions;  // that any of its rows sees
    int64_t state;    // first of partitions * num_kv_heads row groups in states, -1 = not split
    int64_t counter;  // first of num_kv_heads counters
  };
  struct Task {
    int32_t item;
    int32_t kv_head;
    int32_t partition;  // -1 = all
  };

  AttentionSchedule(const AttentionShape& shape, int num_threads)
      : shape_(shape), num_threads_(num_threads) {}
  void build(const std::vector<RequestRows>& requests);

  const AttentionShape& shape() const { return shape_; }
  const std::vector<Task>& tasks() const { return tasks_; }
  const Item& item(const Task& task) const { return items_[static_cast<size_t>(task.item)]; }
  float* states(const Item& item, int64_t kv_head, int64_t partition);
  // True for the last of an item's partitions to be reported; the counter is then ready for the next layer.
  bool report(const Item& item, int64_t kv_head);

 private:
  void add_items(const RequestRows& request);

  const AttentionShape shape_;
  const int num_threads_;
  std::vector<Item> items_;
  std::vector<Task> tasks_;
  MappedMemory states_;
  std::unique_ptr<std::atomic<int64_t>[]> counters_;
  int64_t num_counters_ = 0;
};

// Memory of one member, enough for every shape of the program.
class AttentionScratch {
 public:
  void reserve(const AttentionShape& shape);
  void allocate();

  float* q = nullptr;          // [rows, head_dim]
  float* scores = nullptr;     // [kScratchRows, kPartition]
  float* states = nullptr;     // [rows, value_dim + kStatePadding]
  float* running = nullptr;    // the same
  uint8_t* panel = nullptr;    // kPartitionTiles expanded tiles
  int16_t* q_codes = nullptr;  // [rows, head_dim], and
  float* q_scales = nullptr;   // [rows]: queries for a cache of 16-bit codes
  int32_t* begin = nullptr;    // [rows]
  int32_t* end = nullptr;      // [rows]
  // What the member has fetched into its cache: the first tiles of a task's partition.
  struct {
    const void* stage = nullptr;
    int64_t task = 0, partition = 0, tiles = 0;
  } fetched;

 private:
  size_t q_floats_ = 0, state_floats_ = 0, panel_bytes_ = 0, rows_ = 0;
  MappedMemory memory_;
};

class AttentionStage final : public Stage {
 public:
  struct Buffers {
    const Buffer* q;
    const Buffer* k;  // with v nullptr: the cache is read only
    const Buffer* v;
    const Buffer* out;
  };
  // layer: index into the pool's layers, ignored if the shape is not causal. sinks: [num_heads] scores of a
  // position without a value that every row sees, or nullptr.
  AttentionStage(const KernelTables& kernels, const AttentionShape& shape, size_t shape_index,
                 const Buffers& buffers, float scale, float softcap, const float* sinks, const KvPool* pool,
                 int64_t layer, std::vector<AttentionScratch>* scratch);

  std::string kind() const override { return "attention"; }
  int64_t prepare(const Pass& pass) noexcept override;
  void run(int64_t task, int member) noexcept override;
  bool quantize_output(const Buffer& out, ActPrecision precision) override;
  void keep_values() override { keeps_values_ = true; }

 private:
  using Item = AttentionSchedule::Item;
  void load_queries(const Item& item, int64_t kv_head, AttentionScratch& scratch) const;
  bool reads_cache(const Item& item) const;  // as it is, not a copy expanded to float32
  void attend(int64_t task, int64_t partition, AttentionScratch& scratch, float* states) const;
  // Finds the tiles of the cache that rows of the item see in a partition; how many.
  int64_t cached_tiles(const Item& item, int64_t kv_head, int64_t partition, const uint8_t** tiles) const;
  // What is read after a task's partition, by the same member if nobody takes the task from it.
  void fetch_next(int64_t task, int64_t partition, int64_t tiles, const uint8_t** next,
                  AttentionScratch& scratch) const;
  void set_ranges(const Item& item, int64_t partition, AttentionScratch& scratch) const;
  void expand_rows(const Item& item, int64_t kv_head, int64_t partition, int64_t tile, uint8_t* out) const;
  void add_sinks(const Item& item, int64_t kv_head, float* running) const;
  void write_out(const Item& item, int64_t kv_head, const float* running, AttentionScratch& scratch) const;

  const KernelTables kernels_;
  const AttentionShape shape_;
  const size_t shape_index_;
  const Buffers buffers_;
  const float scale_;
  const float softcap_;
  const float* sinks_;
  const KvPool* pool_;
  const int64_t layer_;
  std::vector<AttentionScratch>* scratch_;
  const KvLayout panel_layout_;
  std::vector<ActPrecision> output_precisions_;  // in which the output is quantised
  bool keeps_values_ = false;
  AttentionSchedule* schedule_ = nullptr;
};

}  // namespace tellin

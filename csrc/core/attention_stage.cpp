#include "attention_stage.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tellin {
namespace {

constexpr float kLog2E = 1.44269504f;
// Query rows per item: enough to use an expanded panel of keys and values (128 KiB at head_dim 64, in L2)
// many times, few enough that a prompt of 512 tokens gives every core work.
constexpr int64_t kTileRows = 96;
// Up to this many rows the cache is read as it is; above, its tiles are expanded once to float32.
constexpr int64_t kDirectRows = 16;
// With fewer items per member than this the last ones would leave cores idle: split into partitions.
constexpr int64_t kItemsPerMember = 8;

int64_t divide_up(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}
size_t round_up64(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

void fetch(const uint8_t* tile, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(tile + at, 0, 3);
}

// Tiles of a request that rows of the item see in a partition.
struct TileRange {
  int64_t first, last;
};
TileRange visible_tiles(const AttentionSchedule::Item& item, int64_t partition) {
  const int64_t start = (item.first_partition + partition) * kPartition;
  const int64_t first = std::max(item.lowest, start), last = std::min(item.highest, start + kPartition);
  return {first / kTilePositions, divide_up(last, kTilePositions)};
}

}  // namespace

int64_t AttentionShape::tile_tokens() const {
  return std::clamp<int64_t>(kTileRows / group(), 4, 64);
}

bool AttentionShape::operator==(const AttentionShape& other) const {
  return num_heads == other.num_heads && num_kv_heads == other.num_kv_heads && head_dim == other.head_dim &&
         value_dim == other.value_dim && sharing == other.sharing && window == other.window &&
         causal == other.causal && windowed == other.windowed && rows == other.rows;
}

// ---- work list

void AttentionSchedule::add_items(const RequestRows& request) {
  const int64_t length = request.end - request.begin;
  for (int64_t at = 0; at < length; at += shape_.tile_tokens()) {
    Item item{};
    item.request = &request;
    item.first_token = request.begin + at;
    item.num_tokens = std::min(shape_.tile_tokens(), length - at);
    item.first_position = request.first_position + at;
    int64_t lowest = 0;
    int64_t highest = length;  // not causal: all of the request, or a window on both sides
    if (!shape_.causal && shape_.window > 0) {
      lowest = std::max<int64_t>(0, at - shape_.window + 1);
      highest = std::min(length, at + item.num_tokens - 1 + shape_.window);
    } else if (shape_.causal) {
      if (shape_.window > 0) lowest = std::max<int64_t>(0, item.first_position - shape_.window + 1);
      highest = item.first_position + item.num_tokens;
      for (int64_t t = at; request.seen_ends != nullptr && t < at + item.num_tokens; ++t)
        highest = std::max<int64_t>(highest, request.seen_ends[t]);
    }
    item.lowest = lowest;
    item.highest = highest;
    item.first_partition = lowest / kPartition;
    item.partitions = divide_up(highest, kPartition) - item.first_partition;
    item.state = -1;
    items_.push_back(item);
  }
}

void AttentionSchedule::build(const std::vector<RequestRows>& requests) {
  items_.clear();
  tasks_.clear();
  for (const RequestRows& request : requests) add_items(request);
  // Longest first, so that the last tasks to be taken are short.
  std::stable_sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) {
    return a.partitions * a.num_tokens > b.partitions * b.num_tokens;
  });
  const int64_t heads = shape_.num_kv_heads;
  const bool split =
      num_threads_ > 1 && static_cast<int64_t>(items_.size()) * heads < kItemsPerMember * num_threads_;
  int64_t num_states = 0, num_counters = 0;
  for (size_t i = 0; i < items_.size(); ++i) {
    Item& item = items_[i];
    const auto index = static_cast<int32_t>(i);
    if (!split || item.partitions == 1) {
      for (int32_t head = 0; head < heads; ++head) tasks_.push_back({index, head, -1});
      continue;
    }
    item.state = num_states;
    item.counter = num_counters;
    num_states += item.partitions * heads;
    num_counters += heads;
    // Tiles of a block's heads are neighbours in memory: read soon after each other they come faster.
    for (int32_t p = 0; p < item.partitions; ++p) {
      for (int32_t head = 0; head < heads; ++head) tasks_.push_back({index, head, p});
    }
  }
  const auto state_bytes =
      static_cast<size_t>(num_states * shape_.tile_rows() * (shape_.value_dim + kStatePadding)) *
      sizeof(float);
  if (state_bytes > states_.size())
    states_ = MappedMemory(state_bytes + state_bytes / 2, /*huge_pages=*/false);
  if (num_counters > num_counters_) {
    num_counters_ = 2 * num_counters;
    counters_ = std::make_unique<std::atomic<int64_t>[]>(static_cast<size_t>(num_counters_));
    for (int64_t i = 0; i < num_counters_; ++i) counters_[static_cast<size_t>(i)].store(0);
  }
}

float* AttentionSchedule::states(const Item& item, int64_t kv_head, int64_t partition) {
  const int64_t index = item.state + kv_head * item.partitions + partition;
  return reinterpret_cast<float*>(states_.data()) +
         index * shape_.tile_rows() * (shape_.value_dim + kStatePadding);
}

bool AttentionSchedule::report(const Item& item, int64_t kv_head) {
  std::atomic<int64_t>& counter = counters_[static_cast<size_t>(item.counter + kv_head)];
  if (counter.fetch_add(1, std::memory_order_acq_rel) + 1 < item.partitions) return false;
  counter.store(0, std::memory_order_relaxed);
  return true;
}

// ---- scratch

void AttentionScratch::reserve(const AttentionShape& shape) {
  const auto rows = static_cast<size_t>(shape.tile_rows());
  const auto head_dim = static_cast<size_t>(shape.head_dim);
  const auto value_dim = static_cast<size_t>(shape.value_dim);
  rows_ = std::max(rows_, rows);
  q_floats_ = std::max(q_floats_, rows * head_dim);
  state_floats_ = std::max(state_floats_, rows * (value_dim + kStatePadding));
  const KvLayout widest = expanded_layout(kv_layout(KvDtype::kInt8, shape.head_dim, shape.value_dim));
  panel_bytes_ = std::max(panel_bytes_, static_cast<size_t>(widest.tile_bytes * kPartitionTiles));
}

void AttentionScratch::allocate() {
  const size_t q_bytes = round_up64(q_floats_ * sizeof(float));
  const size_t code_bytes = rows_ * kQueryStride * sizeof(int16_t);
  const size_t score_bytes = kScratchRows * kPartition * sizeof(float);
  const size_t state_bytes = round_up64(state_floats_ * sizeof(float));
  const size_t row_bytes = round_up64(rows_ * sizeof(int32_t));
  // Each array starts 64 bytes past a different multiple of a page, or their stores would alias.
  memory_ = MappedMemory(
      q_bytes + code_bytes + score_bytes + 2 * state_bytes + panel_bytes_ + 3 * row_bytes + 10 * 64, false);
  uint8_t* at = memory_.data();
  const auto take = [&at](size_t bytes) {
    uint8_t* start = at;
    at += bytes + 64;
    return start;
  };
  q = reinterpret_cast<float*>(take(q_bytes));
  scores = reinterpret_cast<float*>(take(score_bytes));
  states = reinterpret_cast<float*>(take(state_bytes));
  running = reinterpret_cast<float*>(take(state_bytes));
  panel = take(panel_bytes_);
  q_codes = reinterpret_cast<int16_t*>(take(code_bytes));
  q_scales = reinterpret_cast<float*>(take(row_bytes));
  begin = reinterpret_cast<int32_t*>(take(row_bytes));
  end = reinterpret_cast<int32_t*>(take(row_bytes));
}

// ---- stage

AttentionStage::AttentionStage(const KernelTables& kernels, const AttentionShape& shape, size_t shape_index,
                               const Buffers& buffers, float scale, float softcap, const float* sinks,
                               const KvPool* pool, int64_t layer, std::vector<AttentionScratch>* scratch)
    : kernels_(kernels),
      shape_(shape),
      shape_index_(shape_index),
      buffers_(buffers),
      scale_(softcap > 0.0f ? scale : scale * kLog2E),  // scores in units of log2(e)
      softcap_(softcap),
      sinks_(sinks),
      pool_(pool),
      layer_(layer),
      scratch_(scratch),
      panel_layout_(expanded_layout(shape.causal
                                        ? pool->layers()[static_cast<size_t>(layer)].layout
                                        : kv_layout(KvDtype::kFloat32, shape.head_dim, shape.value_dim))) {}

int64_t AttentionStage::prepare(const Pass& pass) noexcept {
  schedule_ = pass.schedules[shape_index_].get();
  return static_cast<int64_t>(schedule_->tasks().size());
}

void AttentionStage::run(int64_t task_index, int member) noexcept {
  const AttentionSchedule::Task& task = schedule_->tasks()[static_cast<size_t>(task_index)];
  const Item& item = schedule_->item(task);
  AttentionScratch& scratch = (*scratch_)[static_cast<size_t>(member)];
  const int64_t rows = item.num_tokens * shape_.group();
  load_queries(item, task.kv_head, scratch);
  if (task.partition >= 0) {
    attend(task_index, task.partition, scratch, schedule_->states(item, task.kv_head, task.partition));
    if (!schedule_->report(item, task.kv_head)) return;
  }
  float* running = scratch.running;
  for (int64_t p = 0; p < item.partitions; ++p) {
    float* states = p == 0 ? scratch.running : scratch.states;
    if (task.partition < 0) {
      attend(task_index, p, scratch, states);
    } else {
      states = schedule_->states(item, task.kv_head, p);
      if (p == 0) running = states;
    }
    if (p > 0) kernels_.attention->fold(rows, shape_.value_dim, states, running);
  }
  if (sinks_ != nullptr) add_sinks(item, task.kv_head, running);
  write_out(item, task.kv_head, running, scratch);
}

bool AttentionStage::reads_cache(const Item& item) const {
  const int64_t rows = item.num_tokens * shape_.group();
  if (!shape_.causal) return false;
  return rows <= kDirectRows || pool_->dtype() == KvDtype::kFloat32 || pool_->dtype() == KvDtype::kInt16;
}

// Rows are ordered by token, then by head of the group.
void AttentionStage::load_queries(const Item& item, int64_t kv_head, AttentionScratch& scratch) const {
  const int64_t columns = shape_.group() * shape_.head_dim;
  for (int64_t t = 0; t < item.num_tokens; ++t) {
    const float* q = buffers_.q->row(item.first_token + t) + kv_head * columns;
    if (shape_.causal && pool_->dtype() == KvDtype::kInt16) {
      kernels_.attention->encode_queries(q, scale_, shape_.group(), shape_.head_dim,
                                         scratch.q_codes + t * shape_.group() * kQueryStride,
                                         scratch.q_scales + t * shape_.group());
      continue;
    }
    kernels_.vector->scale(q, scale_, columns, scratch.q + t * columns);
  }
}

void AttentionStage::set_ranges(const Item& item, int64_t partition, AttentionScratch& scratch) const {
  const int64_t start = (item.first_partition + partition) * kPartition;
  for (int64_t t = 0; t < item.num_tokens; ++t) {
    const int64_t position = item.first_position + t;
    int64_t begin = 0;
    int64_t end = item.request->end - item.request->begin;
    if (!shape_.causal && shape_.window > 0) {
      const int64_t at = item.first_token + t - item.request->begin;
      begin = std::max<int64_t>(0, at - shape_.window + 1);
      end = std::min(end, at + shape_.window);
    } else if (shape_.causal) {
      if (shape_.window > 0) begin = std::max<int64_t>(0, position - shape_.window + 1);
      const int32_t* const seen_ends = item.request->seen_ends;
      end = seen_ends == nullptr ? position + 1 : seen_ends[item.first_token + t - item.request->begin];
    }
    for (int64_t g = 0; g < shape_.group(); ++g) {
      const int64_t row = t * shape_.group() + g;
      scratch.begin[row] = static_cast<int32_t>(std::clamp<int64_t>(begin - start, 0, kPartition));
      scratch.end[row] = static_cast<int32_t>(std::clamp<int64_t>(end - start, 0, kPartition));
    }
  }
}

int64_t AttentionStage::cached_tiles(const Item& item, int64_t kv_head, int64_t partition,
                                     const uint8_t** tiles) const {
  const KvPool::Layer& layer = pool_->layers()[static_cast<size_t>(layer_)];
  const TileRange range = visible_tiles(item, partition);
  for (int64_t tile = range.first; tile < range.last; ++tile) {
    const int64_t block = item.request->block_table[tile / pool_->tiles_per_block()];
    *tiles++ = pool_->tile(layer, block, kv_head / shape_.sharing, tile);
  }
  return range.last - range.first;
}

void AttentionStage::fetch_next(int64_t task_index, int64_t partition, int64_t count, const uint8_t** next,
                                AttentionScratch& scratch) const {
  const AttentionSchedule::Task* task = &schedule_->tasks()[static_cast<size_t>(task_index)];
  if (task->partition < 0 && partition + 1 < schedule_->item(*task).partitions) {
    ++partition;
  } else {
    if (++task_index == static_cast<int64_t>(schedule_->tasks().size())) return;
    partition = std::max(0, (++task)->partition);
  }
  const Item& item = schedule_->item(*task);
  if (!reads_cache(item)) return;
  const uint8_t* tiles[kPartitionTiles];
  const int64_t fetched = std::min(count, cached_tiles(item, task->kv_head, partition, tiles));
  std::copy_n(tiles, fetched, next);
  scratch.fetched = {this, task_index, partition, fetched};
}

void AttentionStage::attend(int64_t task_index, int64_t partition, AttentionScratch& scratch,
                            float* states) const {
  const AttentionSchedule::Task& task = schedule_->tasks()[static_cast<size_t>(task_index)];
  const Item& item = schedule_->item(task);
  set_ranges(item, partition, scratch);
  const uint8_t* tiles[kPartitionTiles] = {};
  const uint8_t* next[kPartitionTiles] = {};
  const TileRange range = visible_tiles(item, partition);
  const int64_t count = range.last - range.first;
  const int64_t first = range.first % kPartitionTiles;
  KvLayout layout = panel_layout_;
  if (shape_.causal) cached_tiles(item, task.kv_head, partition, tiles + first);
  if (reads_cache(item)) {
    layout = pool_->layers()[static_cast<size_t>(layer_)].layout;
    const auto& fetched = scratch.fetched;
    const bool known = fetched.stage == this && fetched.task == task_index && fetched.partition == partition;
    for (int64_t t = known ? fetched.tiles : 0; t < count; ++t) fetch(tiles[first + t], layout.tile_bytes);
    std::copy_n(tiles, kPartitionTiles, next);
    fetch_next(task_index, partition, count, next + first, scratch);
  } else {
    for (int64_t t = first; t < first + count; ++t) {
      uint8_t* panel = scratch.panel + t * panel_layout_.tile_bytes;
      if (shape_.causal) {
        const KvLayout& cached = pool_->layers()[static_cast<size_t>(layer_)].layout;
        kernels_.attention->kv_expand(cached, tiles[t], panel_layout_, panel);
      } else {
        expand_rows(item, task.kv_head, partition, t, panel);
      }
      tiles[t] = panel;
    }
    std::copy_n(tiles, kPartitionTiles, next);
  }
  const int64_t rows = item.num_tokens * shape_.group();
  const AttentionRows query_rows{scratch.q, rows, scratch.begin,   scratch.end,
                                 softcap_,  next, scratch.q_codes, scratch.q_scales};
  kernels_.attention->attend(layout, tiles, query_rows, scratch.scores, states);
}

// A tile made from rows of the step, for encoders.
void AttentionStage::expand_rows(const Item& item, int64_t kv_head, int64_t partition, int64_t tile,
                                 uint8_t* out) const {
  const int64_t first =
      item.request->begin + (item.first_partition + partition) * kPartition + tile * kTilePositions;
  const int64_t last = std::min(first + kTilePositions, item.request->end);
  const int64_t head = kv_head / shape_.sharing;
  for (int64_t row = first; row < last; ++row) {
    kernels_.attention->kv_store(panel_layout_, buffers_.k->row(row) + head * shape_.head_dim,
                                 buffers_.v->row(row) + head * shape_.value_dim, row - first, out);
  }
}

// A sink takes its share of the weights and adds no value.
void AttentionStage::add_sinks(const Item& item, int64_t kv_head, float* running) const {
  const int64_t group = shape_.group();
  const int64_t stride = shape_.value_dim + kStatePadding;
  for (int64_t row = 0; row < item.num_tokens * group; ++row) {
    float* const state = running + row * stride + shape_.value_dim;  // maximum, sum
    state[1] += std::exp2(sinks_[kv_head * group + row % group] * kLog2E - state[0]);
  }
}

// Values that nobody reads are written over the queries.
void AttentionStage::write_out(const Item& item, int64_t kv_head, const float* running,
                               AttentionScratch& scratch) const {
  const int64_t group = shape_.group();
  const int64_t stride = shape_.value_dim + kStatePadding;
  const int64_t columns = group * shape_.value_dim;
  const int64_t column = kv_head * columns, end = item.first_token + item.num_tokens;
  float* const values = keeps_values_ ? buffers_.out->base : scratch.q - item.first_token * columns - column;
  const int64_t ldo = keeps_values_ ? buffers_.out->stride : columns;
  for (int64_t t = 0; t < item.num_tokens; ++t) {
    float* out = values + (item.first_token + t) * ldo + column;
    for (int64_t g = 0; g < group; ++g) {
      kernels_.attention->finish(shape_.value_dim, running + (t * group + g) * stride,
                                 out + g * shape_.value_dim);
    }
  }
  quantize_columns(kernels_, output_precisions_, *buffers_.out, values, ldo, item.first_token, end, column,
                   column + columns);
}

bool AttentionStage::quantize_output(const Buffer& out, ActPrecision precision) {
  if (&out != buffers_.out || shape_.group() * shape_.value_dim % kActBlock != 0) return false;
  output_precisions_.push_back(precision);
  return true;
}

}  // namespace tellin

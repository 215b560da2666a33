#include "recurrence_stage.h"

#include <algorithm>
#include <cstring>

namespace tellin {
namespace {

constexpr int64_t kTasksPerMember = 4;
constexpr int64_t kTaskValues = 8192;  // of a state, each for one row: a microsecond or so

}  // namespace

int64_t RecurrenceStage::prepare(const Pass& pass) noexcept {
  pass_ = &pass;
  const auto requests = static_cast<int64_t>(pass.state_rows.size());
  if (requests == 0) return 0;
  const int64_t whole = requests * shape_.num_heads;
  const int64_t blocks = (shape_.columns + shape_.block - 1) / shape_.block;
  const int64_t wanted = (kTasksPerMember * num_threads_ + whole - 1) / whole;
  const int64_t worthwhile =
      pass.num_tokens * shape_.num_heads * shape_.head_values() / (whole * kTaskValues);
  parts_ = std::max<int64_t>(1, std::min({blocks, wanted, worthwhile}));
  return whole * parts_;
}

void RecurrenceStage::run(int64_t task, int) noexcept {
  const StateRows& rows = pass_->state_rows[static_cast<size_t>(task / (shape_.num_heads * parts_))];
  const int64_t head = task / parts_ % shape_.num_heads;
  const int64_t blocks = (shape_.columns + shape_.block - 1) / shape_.block;
  const int64_t first = blocks * (task % parts_) / parts_ * shape_.block;
  const int64_t last = std::min(shape_.columns, blocks * (task % parts_ + 1) / parts_ * shape_.block);
  const Part part{head, first, last - first};
  const int64_t offset = head * shape_.head_values() + first * shape_.depth;
  const size_t bytes = static_cast<size_t>(part.count * shape_.depth) * sizeof(float);
  float* const state = pool_->state(layer_, rows.slot) + offset;
  if (rows.from_zero) std::memset(state, 0, bytes);
  int64_t at = rows.begin;
  for (size_t i = rows.first_save; i < rows.last_save; ++i) {
    const StateSave& save = pass_->state_saves[i];
    run_rows(part, at, save.end, state);
    std::memcpy(pool_->state(layer_, save.slot) + offset, state, bytes);
    at = save.end;
  }
  if (at < rows.end) run_rows(part, at, rows.end, state);
}

// ---- the three

ConvStage::ConvStage(const KernelTables& kernels, const StatePool* pool, int layer, int num_threads,
                     const Operands& operands, const float* weight, int64_t kernel)
    : RecurrenceStage(kernels, {1, kernel - 1, operands.x->width, kBlock}, pool, layer, num_threads),
      op_(operands),
      weight_(static_cast<size_t>(kernel * operands.x->width)) {
  const int64_t columns = operands.x->width;
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t j = 0; j < kernel; ++j)
      weight_[static_cast<size_t>(j * columns + c)] = weight[c * kernel + j];
  }
}

void ConvStage::run_rows(const Part& part, int64_t begin, int64_t end, float* state) const noexcept {
  for (int64_t c = part.first; c < part.first + part.count; c += kBlock) {
    ConvRows rows;
    rows.x = op_.x->row(begin) + c;
    rows.x_stride = op_.x->stride;
    rows.out = op_.out->row(begin) + c;
    rows.out_stride = op_.out->stride;
    rows.num_rows = end - begin;
    rows.columns = std::min(kBlock, part.first + part.count - c);
    rows.weight = weight_.data() + c;
    rows.weight_stride = shape_.columns;
    rows.kernel = shape_.depth + 1;
    rows.bias = op_.bias == nullptr ? nullptr : op_.bias + c;
    rows.has_act = op_.has_act;
    rows.act = op_.act;
    rows.state = state + (c - part.first) * shape_.depth;
    kernels_.recurrent->short_conv(rows);
  }
}

void DeltaStage::run_rows(const Part& part, int64_t begin, int64_t end, float* state) const noexcept {
  const int64_t heads = shape_.num_heads;
  const int64_t key_head = op_.tiled ? part.head % op_.num_k_heads : part.head / (heads / op_.num_k_heads);
  const int64_t key = key_head * shape_.depth;
  const int64_t value = part.head * shape_.columns + part.first;
  DeltaRows rows;
  rows.q = op_.q->row(begin) + key;
  rows.k = op_.k->row(begin) + key;
  rows.v = op_.v->row(begin) + value;
  rows.a = op_.a->row(begin) + part.head;
  rows.b = op_.b->row(begin) + part.head;
  rows.q_stride = op_.q->stride;
  rows.k_stride = op_.k->stride;
  rows.v_stride = op_.v->stride;
  rows.a_stride = op_.a->stride;
  rows.b_stride = op_.b->stride;
  rows.out = op_.out->row(begin) + value;
  rows.out_stride = op_.out->stride;
  rows.num_rows = end - begin;
  rows.depth = shape_.depth;
  rows.columns = part.count;
  rows.decay = op_.decay[part.head];
  rows.dt_bias = op_.dt_bias[part.head];
  rows.state = state;
  kernels_.recurrent->gated_delta(rows);
}

void ScanStage::run_rows(const Part& part, int64_t begin, int64_t end, float* state) const noexcept {
  const int64_t group = part.head / (shape_.num_heads / op_.num_groups) * shape_.depth;
  const int64_t value = part.head * shape_.columns + part.first;
  ScanRows rows;
  rows.x = op_.x->row(begin) + value;
  rows.b = op_.b->row(begin) + group;
  rows.c = op_.c->row(begin) + group;
  rows.dt = op_.dt->row(begin) + part.head;
  rows.x_stride = op_.x->stride;
  rows.b_stride = op_.b->stride;
  rows.c_stride = op_.c->stride;
  rows.dt_stride = op_.dt->stride;
  rows.out = op_.out->row(begin) + value;
  rows.out_stride = op_.out->stride;
  rows.num_rows = end - begin;
  rows.depth = shape_.depth;
  rows.columns = part.count;
  rows.decay = op_.decay[part.head];
  rows.skip = op_.skip[part.head];
  rows.dt_bias = op_.dt_bias[part.head];
  rows.dt_min = op_.dt_min;
  rows.dt_max = op_.dt_max;
  rows.state = state;
  kernels_.recurrent->selective_scan(rows);
}

}  // namespace tellin

#include "linear_stage.h"

#include <algorithm>
#include <utility>

namespace tellin {
namespace {

// Up to this many rows a step is a walk over the weights: a task takes all rows for a few groups.
constexpr int64_t kFewRows = 64;
// Most rows per task of a large batch: as many as the kernels take in one pass over the weights. Whole kernel
// tiles (of 2, 3, 4 or 6 rows) fit into a multiple of kRowStep.
constexpr int64_t kTaskRows = 192;
constexpr int64_t kRowStep = 12;
// Least rows of a block: members have rows of their own if the batch has as many for each. Fewer would not
// pay for reading all weights.
constexpr int64_t kBlockRows = 32;
// Tasks per member that a large batch is cut into if it can be: the last ones to end leave others idle.
constexpr int64_t kTasksPerMember = 8;
// Bytes of a matrix per task of a small batch, at most: some 4 us of one core's memory bandwidth, against 0.1
// us to take a task. Towards the end of a share tasks become smaller, so that members end together.
constexpr int64_t kTaskBytes = 64 << 10;
constexpr int64_t kTasksLeft = 2;  // a task is at most this part of what is left of a share
// Integer kernels walk two groups side by side; their outputs are a block of the next layer's activations.
constexpr int64_t kIntGroups = 2;
// Rows whose outputs are finished, then quantised while they are in cache.
constexpr int64_t kFinishRows = 16;
static_assert(kIntGroups * kGroupRows % kActBlock == 0 && kGroupsPerTask % kIntGroups == 0);
static_assert(kGroupsPerTask * kGroupRows % kSampleBlock == 0);

int64_t divide_up(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}
int64_t group_bytes(const LinearPart& part) {
  return static_cast<int64_t>(part.weight->group_bytes + (part.up != nullptr ? part.up->group_bytes : 0));
}

}  // namespace

LinearStage::LinearStage(const KernelTables& kernels, int num_threads, const Buffer* x,
                         std::vector<LinearPart> parts)
    : kernels_(kernels), num_threads_(num_threads), x_(x), parts_(std::move(parts)) {
  int64_t scratch_tiles = 0;
  for (const LinearPart& part : parts_) {
    scratch_tiles = std::max<int64_t>(scratch_tiles, part.up != nullptr ? 2 : part.residual != nullptr);
  }
  for (size_t i = 0; i < parts_.size(); ++i) {
    const int64_t num_groups = parts_[i].weight->num_groups;
    for (int64_t begin = 0; begin < num_groups; begin += kGroupsPerTask) {
      large_chunks_.push_back({static_cast<int32_t>(i), static_cast<int32_t>(begin),
                               static_cast<int32_t>(std::min(begin + kGroupsPerTask, num_groups))});
    }
  }
  cut_shares();
  int64_t widest = kGroupsPerTask * kGroupRows;
  for (const Chunk& chunk : small_chunks_) {
    widest = std::max<int64_t>(widest, (chunk.end - chunk.begin) * kGroupRows);
  }
  if (scratch_tiles > 0) {
    // The second tile does not start a whole number of pages after the first, or their stores would alias.
    tile_floats_ = kTaskRows * widest + 16;
    const int64_t floats = scratch_tiles * tile_floats_;
    for (int member = 0; member < num_threads_; ++member) {
      scratch_.emplace_back(static_cast<size_t>(floats) * sizeof(float), /*huge_pages=*/false);
    }
  }
}

// Members' shares of a small batch: equal bytes of weights, cut into tasks.
void LinearStage::cut_shares() {
  small_chunks_.clear();
  small_shares_.clear();
  int64_t total = 0;
  for (const LinearPart& part : parts_) total += group_bytes(part) * part.weight->num_groups;
  int64_t done = 0;
  for (size_t i = 0; i < parts_.size(); ++i) {
    const int64_t num_groups = parts_[i].weight->num_groups;
    const bool whole_blocks = finds_maxima_ || parts_[i].precision == ActPrecision::kFloat32;
    const int64_t grain = whole_blocks ? kGroupsPerTask : kIntGroups;
    const auto matrix_bytes = static_cast<int64_t>(parts_[i].weight->group_bytes);
    for (int64_t begin = 0; begin < num_groups;) {
      // Member m has what begins in [total * m / n, total * (m + 1) / n).
      const int64_t member = done * num_threads_ / total;
      while (static_cast<int64_t>(small_shares_.size()) <= member) {
        small_shares_.push_back(static_cast<int64_t>(small_chunks_.size()));
      }
      const int64_t left = divide_up(total * (member + 1), num_threads_) - done;
      const int64_t wanted = left / kTasksLeft / group_bytes(parts_[i]) / grain * grain;
      const int64_t most =
          std::max<int64_t>(1, divide_up(kTaskBytes / matrix_bytes, kGroupsPerTask)) * kGroupsPerTask;
      const bool is_last = left <= 2 * grain * group_bytes(parts_[i]);
      const int64_t count = is_last ? 2 * grain : std::clamp(wanted, grain, most);
      const int64_t end = std::min(num_groups, begin + count);
      small_chunks_.push_back(
          {static_cast<int32_t>(i), static_cast<int32_t>(begin), static_cast<int32_t>(end)});
      done += (end - begin) * group_bytes(parts_[i]);
      begin = end;
    }
  }
  small_shares_.resize(static_cast<size_t>(num_threads_) + 1, static_cast<int64_t>(small_chunks_.size()));
}

const int64_t* LinearStage::shares() const noexcept {
  return chunks_ == &small_chunks_ ? small_shares_.data() : nullptr;
}

std::string LinearStage::kind() const {
  if (parts_[0].up != nullptr) return "gated_linear";
  if (parts_[0].out->rows == RowKind::kLogits && parts_[0].out->exported) return "linear(head)";
  return parts_.size() > 1 ? "multi_linear" : "linear";
}

int64_t LinearStage::prepare(const Pass& pass) noexcept {
  num_rows_ = pass.num_rows(parts_[0].out->rows);
  const bool few = num_rows_ <= kFewRows;
  chunks_ = few ? &small_chunks_ : &large_chunks_;
  const auto num_chunks = static_cast<int64_t>(chunks_->size());
  const int64_t blocks = few ? 1 : std::clamp<int64_t>(num_rows_ / kBlockRows, 1, num_threads_);
  block_rows_ = std::max<int64_t>(1, divide_up(num_rows_, blocks));
  tile_rows_ = block_rows_;
  if (!few) {
    const int64_t wanted = divide_up(kTasksPerMember * num_threads_, num_chunks * blocks);
    const int64_t tiles =
        std::max(divide_up(block_rows_, kTaskRows), std::min(wanted, divide_up(block_rows_, kBlockRows)));
    tile_rows_ = divide_up(divide_up(block_rows_, tiles), kRowStep) * kRowStep;
  }
  num_tiles_ = divide_up(block_rows_, tile_rows_);
  return divide_up(num_rows_, block_rows_) * num_tiles_ * num_chunks;
}

// Tasks are ordered by block of rows, so that a member's range is rows of its own; then by chunk, so that the
// tiles of a block find its weights in cache.
void LinearStage::run(int64_t task, int member) noexcept {
  const int64_t per_block = num_tiles_ * static_cast<int64_t>(chunks_->size());
  const int64_t block = task / per_block * block_rows_;
  const Chunk& chunk = (*chunks_)[static_cast<size_t>(task % per_block / num_tiles_)];
  const LinearPart& part = parts_[static_cast<size_t>(chunk.part)];
  const int64_t m0 = block + task % num_tiles_ * tile_rows_;
  const int64_t m1 = std::min({num_rows_, block + block_rows_, m0 + tile_rows_});
  if (m0 >= m1) return;
  const int64_t column = chunk.begin * kGroupRows;
  const int64_t count = std::min(chunk.end * kGroupRows, part.weight->n) - column;
  float* scratch =
      scratch_.empty() ? nullptr : reinterpret_cast<float*>(scratch_[static_cast<size_t>(member)].data());
  // Kernels address the whole result: the origin of a tile in scratch lies before it.
  float* scratch_origin = scratch == nullptr ? nullptr : scratch - m0 * count - column;
  if (part.up != nullptr) {
    // The two matrices are read in turns.
    PackedMatrix gate_weight = *part.weight, up_weight = *part.up;
    gate_weight.follow = up_weight.data + chunk.begin * static_cast<int64_t>(up_weight.group_bytes);
    up_weight.follow = gate_weight.data + chunk.end * static_cast<int64_t>(gate_weight.group_bytes);
    product(part.precision, gate_weight, m0, m1, chunk, scratch_origin, count);
    product(part.precision, up_weight, m0, m1, chunk, scratch_origin + tile_floats_, count);
  } else if (part.residual != nullptr) {
    // `out` may be `residual`: the product must not overwrite it.
    product(part.precision, *part.weight, m0, m1, chunk, scratch_origin, count);
  } else {
    product(part.precision, *part.weight, m0, m1, chunk, part.out->base, part.out->stride);
  }
  finish(part, m0, m1, column, count, scratch);
  if (finds_maxima_) note_maxima(*part.out, m0, m1, column, count);
}

// The tile was just written: it is in cache. Tasks begin at whole blocks.
void LinearStage::note_maxima(const Buffer& out, int64_t m0, int64_t m1, int64_t column,
                              int64_t count) const {
  const Buffer::Maxima& maxima = out.maxima;
  kernels_.sampling->tile_max(out.row(m0) + column, out.stride, m1 - m0, count,
                              maxima.base + m0 * maxima.stride + column / kSampleBlock, maxima.stride);
}

// Both products of rows [0, rows) in scratch to act(gate) * up in `out`, which may be `gate`.
void LinearStage::gate(const LinearPart& part, int64_t rows, int64_t column, int64_t count, float* gate,
                       float* out, int64_t ldo) const {
  const VectorKernels& k = *kernels_.vector;
  if (part.bias == nullptr && part.up_bias == nullptr && ldo == count) {
    count *= rows;  // rows without a gap are one
    rows = 1;
  }
  for (int64_t m = 0; m < rows; ++m, gate += count, out += ldo) {
    float* up = gate + tile_floats_;
    if (part.bias != nullptr) k.add(gate, part.bias + column, count, gate);
    if (part.up_bias != nullptr) k.add(up, part.up_bias + column, count, up);
    k.act_mul(part.act, gate, up, count, out);
  }
}

// What follows the products of columns [column, column + count).
void LinearStage::finish(const LinearPart& part, int64_t m0, int64_t m1, int64_t column, int64_t count,
                         float* scratch) const {
  const VectorKernels& k = *kernels_.vector;
  if (part.up == nullptr && part.residual == nullptr && part.bias == nullptr && output_precisions_.empty())
    return;
  const bool in_scratch = part.up != nullptr && !keeps_values_;
  float* const values = in_scratch ? scratch - m0 * count - column : part.out->base;
  const int64_t stride = in_scratch ? count : part.out->stride;
  for (int64_t begin = m0; begin < m1; begin += kFinishRows) {
    const int64_t end = std::min(m1, begin + kFinishRows);
    float* out = values + begin * stride + column;
    float* y = scratch == nullptr ? nullptr : scratch + (begin - m0) * count;
    if (part.up != nullptr) {
      gate(part, end - begin, column, count, y, out, stride);
    } else if (part.residual != nullptr) {
      for (int64_t m = begin; m < end; ++m, y += count, out += stride) {
        if (part.bias != nullptr) k.add(y, part.bias + column, count, y);
        k.add(y, part.residual->row(m) + column, count, out);
      }
    } else if (part.bias != nullptr) {
      for (int64_t m = begin; m < end; ++m, out += stride) k.add(out, part.bias + column, count, out);
    }
    quantize_columns(kernels_, output_precisions_, *part.out, values, stride, begin, end, column,
                     column + count);
  }
}

// Tasks begin and end at whole blocks of the output if it has whole blocks.
bool LinearStage::quantize_output(const Buffer& out, ActPrecision precision) {
  if (parts_.size() != 1 || parts_[0].out != &out || out.width % kActBlock != 0) return false;
  output_precisions_.push_back(precision);
  return true;
}

bool LinearStage::find_maxima(Buffer& out) {
  if (parts_.size() != 1 || parts_[0].out != &out) return false;
  keeps_values_ = true;
  finds_maxima_ = true;
  cut_shares();
  return true;
}

void LinearStage::product(ActPrecision precision, const PackedMatrix& w, int64_t m0, int64_t m1,
                          const Chunk& chunk, float* out, int64_t ldo) const {
  const LinearInput x{precision, x_->quantized(precision).rows, x_->base, x_->stride};
  linear_product(kernels_, x, w, m0, m1, chunk.begin, chunk.end, out, ldo);
}

}  // namespace tellin

#include "linear_stage.h"

#include <algorithm>
#include <utility>

namespace tellin {
namespace {

// Up to this many rows a step is a walk over the weights: a task takes all rows for a few groups.
constexpr int64_t kFewRows = 16;
// Most rows per task of a large batch: as many as the kernels take in one pass over the weights. Whole kernel
// tiles (of 2, 3, 4 or 6 rows) fit into a multiple of kRowStep.
constexpr int64_t kTaskRows = 192;
constexpr int64_t kRowStep = 12;
// Least rows of a block: members have rows of their own if the batch has as many for each. Fewer would not
// pay for reading all weights.
constexpr int64_t kBlockRows = 32;
// Tasks per member that a large batch is cut into if it can be: the last ones to end leave others idle.
constexpr int64_t kTasksPerMember = 8;
// Bytes of weights per task of a small batch: some 4 us of one core's memory bandwidth, against 0.1 us to
// take a task.
constexpr int64_t kTaskBytes = 64 << 10;

int64_t divide_up(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}
int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

LinearStage::LinearStage(const KernelTables& kernels, int num_threads, const Buffer* x,
                         ActPrecision precision, std::vector<LinearPart> parts)
    : kernels_(kernels), num_threads_(num_threads), x_(x), precision_(precision), parts_(std::move(parts)) {
  int64_t total_bytes = 0;
  bool needs_scratch = false;
  for (const LinearPart& part : parts_) {
    total_bytes += part.weight->num_groups * static_cast<int64_t>(part.weight->group_bytes);
    needs_scratch = needs_scratch || part.up != nullptr || part.residual != nullptr;
  }
  int64_t widest = 0;
  for (size_t i = 0; i < parts_.size(); ++i) {
    const PackedMatrix& w = *parts_[i].weight;
    const int64_t wanted = std::min(kTaskBytes, total_bytes / (4 * num_threads_));
    const int64_t few = std::max<int64_t>(
        kGroupsPerTask, round_up(wanted / static_cast<int64_t>(w.group_bytes), kGroupsPerTask));
    for (auto [chunks, step] : {std::pair(&small_chunks_, few), std::pair(&large_chunks_, kGroupsPerTask)}) {
      for (int64_t begin = 0; begin < w.num_groups; begin += step) {
        chunks->push_back({static_cast<int32_t>(i), static_cast<int32_t>(begin),
                           static_cast<int32_t>(std::min(begin + step, w.num_groups))});
      }
      widest = std::max(widest, step * kGroupRows);
    }
  }
  if (needs_scratch) {
    const int64_t floats = kTaskRows * widest;
    for (int member = 0; member < num_threads_; ++member) {
      scratch_.emplace_back(static_cast<size_t>(floats) * sizeof(float), /*huge_pages=*/false);
    }
  }
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
        std::max(divide_up(block_rows_, kTaskRows), std::min(wanted, divide_up(block_rows_, kFewRows)));
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
  const VectorKernels& k = *kernels_.vector;
  float* scratch =
      scratch_.empty() ? nullptr : reinterpret_cast<float*>(scratch_[static_cast<size_t>(member)].data());
  // Kernels address the whole result: the origin of a tile in scratch lies before it.
  float* scratch_origin = scratch == nullptr ? nullptr : scratch - m0 * count - column;
  if (part.up != nullptr) {
    // The two matrices are read in turns.
    PackedMatrix gate_weight = *part.weight, up_weight = *part.up;
    gate_weight.follow = up_weight.data + chunk.begin * static_cast<int64_t>(up_weight.group_bytes);
    up_weight.follow = gate_weight.data + chunk.end * static_cast<int64_t>(gate_weight.group_bytes);
    product(gate_weight, m0, m1, chunk, part.out->base, part.out->stride);
    product(up_weight, m0, m1, chunk, scratch_origin, count);
    for (int64_t m = m0; m < m1; ++m) {
      float* gate = part.out->row(m) + column;
      float* up = scratch + (m - m0) * count;
      if (part.bias != nullptr) k.add(gate, part.bias + column, count, gate);
      if (part.up_bias != nullptr) k.add(up, part.up_bias + column, count, up);
      k.act_mul(part.act, gate, up, count, gate);
    }
  } else if (part.residual != nullptr) {
    // `out` may be `residual`: the product must not overwrite it.
    product(*part.weight, m0, m1, chunk, scratch_origin, count);
    for (int64_t m = m0; m < m1; ++m) {
      float* y = scratch + (m - m0) * count;
      if (part.bias != nullptr) k.add(y, part.bias + column, count, y);
      k.add(y, part.residual->row(m) + column, count, part.out->row(m) + column);
    }
  } else {
    product(*part.weight, m0, m1, chunk, part.out->base, part.out->stride);
    if (part.bias == nullptr) return;
    for (int64_t m = m0; m < m1; ++m) {
      float* y = part.out->row(m) + column;
      k.add(y, part.bias + column, count, y);
    }
  }
}

void LinearStage::product(const PackedMatrix& w, int64_t m0, int64_t m1, const Chunk& chunk, float* out,
                          int64_t ldo) const {
  if (precision_ == ActPrecision::kInt8) {
    kernels_.linear->linear_int8(w, x_->int8.rows, m0, m1, chunk.begin, chunk.end, out, ldo);
  } else if (precision_ == ActPrecision::kInt16) {
    kernels_.linear->linear_int16(w, x_->int16.rows, m0, m1, chunk.begin, chunk.end, out, ldo);
  } else {
    kernels_.linear->linear_f32(w, x_->base, x_->stride, m0, m1, chunk.begin, chunk.end, out, ldo);
  }
}

}  // namespace tellin

#include "head_linear_stage.h"

#include <algorithm>
#include <cstring>

#include "program_state.h"
#include "require.h"

namespace tellin {
namespace {

// Rows per task, at most: what the kernels take in one pass over a head's weights.
constexpr int64_t kTileRows = 192;

}  // namespace

// Tasks of one head are neighbours: its weights stay in cache.
int64_t HeadLinearStage::prepare(const Pass& pass) noexcept {
  num_rows_ = pass.num_rows(op_.out->rows);
  num_tiles_ = (num_rows_ + kTileRows - 1) / kTileRows;
  return num_tiles_ * op_.num_heads;
}

void HeadLinearStage::run(int64_t task, int) noexcept {
  const int64_t head = task / num_tiles_;
  const int64_t m0 = task % num_tiles_ * kTileRows, m1 = std::min(num_rows_, m0 + kTileRows);
  const int64_t n = op_.n(), k = op_.weight->k, rest = op_.rest();
  const int64_t groups = n / kGroupRows, column = head * (n + rest);
  // Kernels write to columns of the whole weight's result.
  kernels_.linear->linear_f32(*op_.weight, op_.x->base + head * (k + rest), op_.x->stride, m0, m1,
                              head * groups, (head + 1) * groups, op_.out->base + column - head * n,
                              op_.out->stride);
  if (rest > 0) {
    for (int64_t m = m0; m < m1; ++m) {
      std::memcpy(op_.out->row(m) + column + n, op_.x->row(m) + head * (k + rest) + k,
                  static_cast<size_t>(rest) * sizeof(float));
    }
  }
  quantize_columns(kernels_, output_precisions_, *op_.out, op_.out->base, op_.out->stride, m0, m1, column,
                   column + n + rest);
}

bool HeadLinearStage::quantize_output(const Buffer& out, ActPrecision precision) {
  if (&out != op_.out || (op_.n() + op_.rest()) % kActBlock != 0) return false;
  output_precisions_.push_back(precision);
  return true;
}

void Program::head_linear(int x, int weight, int out, int64_t num_heads) {
  require(!state_->finalized, "the program is final");
  require(weight >= 0 && weight < num_weights(), "weight id " + std::to_string(weight) + " is out of range");
  const Weight& matrix = *weights_[static_cast<size_t>(weight)];
  require(matrix.precision == ActPrecision::kFloat32, "head_linear: the weight must be packed for float32");
  const Buffer& input = state_->buffer(x);
  Buffer& target = state_->buffer(out);
  const HeadLinear op{&input, &matrix.packed, &target, num_heads};
  require(num_heads > 0 && input.width % num_heads == 0 && matrix.packed.n % num_heads == 0,
          "head_linear: the heads must be equal parts of the input and of the weight");
  require(op.n() % kGroupRows == 0, "head_linear: a head has " + std::to_string(op.n()) +
                                        " rows of the weight; they must be a multiple of " +
                                        std::to_string(kGroupRows));
  require(op.rest() >= 0 && target.width == num_heads * (op.n() + op.rest()),
          "head_linear: the widths of input, weight and output do not fit");
  require(target.rows == input.rows && &target != &input, "head_linear: bad output");
  state_->reads(input);
  state_->wrote(target);
  state_->stages.push_back({std::make_unique<HeadLinearStage>(state_->kernels, op), input.rows});
}

}  // namespace tellin

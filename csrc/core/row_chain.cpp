#include "row_chain.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "stream_rows.h"

namespace tellin {
namespace {

// About a microsecond of work: less than this is not worth a hand-over to another core.
constexpr int64_t kValuesPerTask = 8192;

const char* name(RowOp::Kind kind) {
  switch (kind) {
    case RowOp::Kind::kEmbed:
      return "embed";
    case RowOp::Kind::kInput:
      return "input";
    case RowOp::Kind::kRmsNorm:
      return "rms_norm";
    case RowOp::Kind::kLayerNorm:
      return "layer_norm";
    case RowOp::Kind::kAngles:
      return "angles";
    case RowOp::Kind::kRope:
      return "rope";
    case RowOp::Kind::kKvStore:
      return "kv_store";
    case RowOp::Kind::kActMul:
      return "act_mul";
    case RowOp::Kind::kActivation:
      return "activation";
    case RowOp::Kind::kGateRows:
      return "gate_rows";
    case RowOp::Kind::kAdd:
      return "add";
    case RowOp::Kind::kConcat:
      return "concat";
    case RowOp::Kind::kAddBias:
      return "add_bias";
    case RowOp::Kind::kAddGiven:
      return "add_given";
    case RowOp::Kind::kAddTable:
      return "add_table";
    case RowOp::Kind::kScale:
      return "scale";
    case RowOp::Kind::kScaleColumns:
      return "scale_columns";
    case RowOp::Kind::kAddScaled:
      return "add_scaled";
    case RowOp::Kind::kMatchMagnitude:
      return "match_magnitude";
    case RowOp::Kind::kKeepLargest:
      return "keep_largest";
    case RowOp::Kind::kPositionScale:
      return "scale_by_position";
    case RowOp::Kind::kXielu:
      return "xielu";
    case RowOp::Kind::kSoftcap:
      return "softcap";
    case RowOp::Kind::kQuantize:
      return "quantize";
    case RowOp::Kind::kBlockMax:
      return "block_max";
  }
  return "";
}

}  // namespace

void RowChain::append(const RowOp& op) {
  ops_.push_back(op);
  const Buffer* buffer = op.out != nullptr ? op.out : op.x;
  values_per_row_ += buffer->width;
}

std::string RowChain::kind() const {
  std::string text;
  for (const RowOp& op : ops_) {
    const std::string part = name(op.kind);
    if (text.size() >= part.size() && text.compare(text.size() - part.size(), part.size(), part) == 0)
      continue;
    text += (text.empty() ? "" : "+") + part;
  }
  return text;
}

int64_t RowChain::prepare(const Pass& pass) noexcept {
  pass_ = &pass;
  num_rows_ = pass.num_rows(rows_);
  rows_per_task_ = std::max<int64_t>(1, kValuesPerTask / std::max<int64_t>(1, values_per_row_));
  return (num_rows_ + rows_per_task_ - 1) / rows_per_task_;
}

void RowChain::run(int64_t task, int) noexcept {
  const int64_t end = std::min(num_rows_, (task + 1) * rows_per_task_);
  for (int64_t row = task * rows_per_task_; row < end; ++row) {
    for (const RowOp& op : ops_) run_op(op, row);
  }
}

bool RowChain::find_maxima(Buffer& out) {
  const auto writes = [&out](const RowOp& op) { return (op.out != nullptr ? op.out : op.x) == &out; };
  if (out.rows != rows_ || std::none_of(ops_.begin(), ops_.end(), writes)) return false;
  RowOp op{};
  op.kind = RowOp::Kind::kBlockMax;
  op.x = &out;
  append(op);
  return true;
}

void RowChain::run_op(const RowOp& op, int64_t row) const {
  const VectorKernels& k = *kernels_.vector;
  switch (op.kind) {
    case RowOp::Kind::kEmbed: {
      float* out = op.out->row(row);
      if (op.takes_given && pass_->embed_index != nullptr && pass_->embed_index[row] >= 0) {
        return copy_given(op, row);
      }
      int32_t id = pass_->token_ids[row];
      if (op.count > 0 && id >= op.count) id = 0;
      kernels_.linear->dequantize_row(op.table_type, op.table, id, op.out->width, out);
      if (op.factor != 1.0f) k.scale(out, op.factor, op.out->width, out);
      return;
    }
    case RowOp::Kind::kInput:
      return copy_given(op, row);
    case RowOp::Kind::kRmsNorm:
      for (int64_t i = 0; i < op.count; ++i) {
        k.rms_norm(op.x->row(row) + i * op.group, op.weight + i * op.weight_step, op.group, op.factor,
                   op.out->row(row) + i * op.group);
      }
      return;
    case RowOp::Kind::kLayerNorm:
      return k.layer_norm(op.x->row(row), op.weight, op.bias, op.x->width, op.factor, op.out->row(row));
    case RowOp::Kind::kAngles: {
      // In double precision: a float angle of a few thousand radians would be off by 1e-4.
      const auto half = static_cast<int64_t>(op.frequencies->size());
      float* cosines = op.out->row(row);
      const bool has_axes = !op.axes->empty() && pass_->rope_positions != nullptr;
      const int64_t token = rows_ == RowKind::kTokens ? pass_->first_row + row : pass_->logits_indices[row];
      double position = pass_->positions_of(rows_)[row];
      for (int64_t i = 0; i < half; ++i) {
        if (has_axes) {
          const int64_t axis = (*op.axes)[static_cast<size_t>(i)];
          position = pass_->rope_positions[axis * pass_->rope_stride + token];
        }
        const double angle = position * (*op.frequencies)[static_cast<size_t>(i)];
        cosines[i] = static_cast<float>(std::cos(angle) * static_cast<double>(op.factor));
        cosines[half + i] = static_cast<float>(std::sin(angle) * static_cast<double>(op.factor));
      }
      return;
    }
    case RowOp::Kind::kRope: {
      const int64_t half = op.y->width / 2;
      const float* cosines = op.y->row(row);
      for (int64_t head = 0; head < op.count; ++head) {
        k.rope(op.x->row(row) + head * op.group + op.offset, cosines, cosines + half, half, op.interleaved);
      }
      return;
    }
    case RowOp::Kind::kKvStore:
      return store_kv(op, row);
    case RowOp::Kind::kActMul:
      return k.act_mul(op.act, op.x->row(row), op.y->row(row) + op.start, op.x->width, op.out->row(row));
    case RowOp::Kind::kActivation:
      return k.activation(op.act, op.x->row(row), op.x->width, op.out->row(row));
    case RowOp::Kind::kGateRows:
      return k.scale(op.x->row(row), 1.0f / (1.0f + std::exp(-op.y->row(row)[0])), op.x->width,
                     op.out->row(row));
    case RowOp::Kind::kAdd:
      return k.add(op.x->row(row), op.y->row(row), op.x->width, op.out->row(row));
    case RowOp::Kind::kConcat: {
      float* out = op.out->row(row);
      std::memcpy(out, op.x->row(row), static_cast<size_t>(op.x->width) * sizeof(float));
      std::memcpy(out + op.x->width, op.y->row(row), static_cast<size_t>(op.y->width) * sizeof(float));
      return;
    }
    case RowOp::Kind::kAddBias:
      return k.add(op.x->row(row), op.bias, op.x->width, op.x->row(row));
    case RowOp::Kind::kAddGiven:
      return add_given(op, row);
    case RowOp::Kind::kAddTable: {
      float* scratch = op.y->row(row);
      int32_t entry = pass_->positions[row];
      if (op.by_token_type) entry = pass_->token_types == nullptr ? 0 : pass_->token_types[row];
      kernels_.linear->dequantize_row(op.table_type, op.table, entry, op.x->width, scratch);
      return k.add(op.x->row(row), scratch, op.x->width, op.x->row(row));
    }
    case RowOp::Kind::kScale:
      return k.scale(op.x->row(row), op.factor, op.x->width, op.x->row(row));
    case RowOp::Kind::kScaleColumns:
      return scale_columns(op.x->row(row), op.weight, op.x->width);
    case RowOp::Kind::kAddScaled: {
      const float coef = (op.coefs->row(row)[op.start] + op.bound) * op.factor;
      return add_scaled(op.x->row(row), op.y->row(row), coef, op.x->width, op.out->row(row));
    }
    case RowOp::Kind::kMatchMagnitude:
      return match_magnitude(op.x->row(row), op.y->row(row), op.x->width);
    case RowOp::Kind::kKeepLargest:
      return keep_largest(op.x->row(row), op.factor, op.x->width);
    case RowOp::Kind::kPositionScale: {
      const float factor = position_factor(pass_->positions_of(rows_)[row], op.factor, op.group);
      if (factor == 1.0f) return;
      return k.scale(op.x->row(row), factor, op.x->width, op.x->row(row));
    }
    case RowOp::Kind::kXielu:
      return xielu(op.x->row(row), op.xielu, op.x->width, op.out->row(row));
    case RowOp::Kind::kSoftcap:
      return k.softcap(op.x->row(row), op.factor, op.x->width, op.x->row(row));
    case RowOp::Kind::kQuantize:
      return kernels_.linear->quantize_row(op.precision, op.x->row(row), op.x->width, row,
                                           op.x->quantized(op.precision).rows);
    case RowOp::Kind::kBlockMax: {
      const Buffer::Maxima& maxima = op.x->maxima;
      kernels_.sampling->block_max(op.x->row(row), op.x->width, maxima.base + row * maxima.stride);
      return;
    }
  }
}

void RowChain::copy_given(const RowOp& op, int64_t row) const {
  const float* given = pass_->embeds + pass_->embed_index[row] * pass_->embed_width;
  std::memcpy(op.out->row(row), given, static_cast<size_t>(op.out->width) * sizeof(float));
}

void RowChain::add_given(const RowOp& op, int64_t row) const {
  if (pass_->embed_index == nullptr || pass_->embed_index[row] < 0) return;
  const float* given = pass_->embeds + pass_->embed_index[row] * pass_->embed_width + op.start;
  kernels_.vector->add(op.x->row(row), given, op.x->width, op.x->row(row));
}

void RowChain::store_kv(const RowOp& op, int64_t row) const {
  const KvPool& pool = *op.pool;
  const KvPool::Layer& layer = pool.layers()[static_cast<size_t>(op.layer)];
  const int64_t block = pass_->slots[row] / pool.block_size();
  const int64_t offset = pass_->slots[row] % pool.block_size();
  const int64_t head_dim = layer.layout.head_dim, value_dim = layer.layout.value_dim;
  for (int64_t head = 0; head < layer.num_kv_heads; ++head) {
    kernels_.attention->kv_store(layer.layout, op.x->row(row) + head * head_dim,
                                 op.y->row(row) + head * value_dim, offset % kTilePositions,
                                 pool.tile(layer, block, head, offset / kTilePositions));
  }
}

int64_t GatherStage::prepare(const Pass& pass) noexcept {
  pass_ = &pass;
  return (static_cast<int64_t>(pass.gathers.size()) + kRowsPerTask - 1) / kRowsPerTask;
}

void GatherStage::run(int64_t task, int) noexcept {
  const auto begin = static_cast<size_t>(task * kRowsPerTask);
  const size_t end = std::min(pass_->gathers.size(), begin + static_cast<size_t>(kRowsPerTask));
  for (size_t i = begin; i < end; ++i) {
    const Gather& gather = pass_->gathers[i];
    std::memcpy(out_->row(gather.logit), x_->row(gather.token),
                static_cast<size_t>(x_->width) * sizeof(float));
  }
}

}  // namespace tellin

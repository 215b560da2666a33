#include "lora_stage.h"

#include <algorithm>
#include <utility>

#include "linear_stage.h"
#include "program_state.h"
#include "require.h"

namespace tellin {
namespace {

constexpr size_t kAlignment = 64;

size_t aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

PackedMatrix layout_of(const LinearKernels& kernels, const TensorView& tensor) {
  check_tensor(tensor);
  require(tensor.type == QuantType::F32 || tensor.type == QuantType::F16 || tensor.type == QuantType::BF16,
          "the matrices of an adapter must be of a float type");
  PackedMatrix matrix{};
  matrix.source = tensor.type;
  matrix.layout = kernels.layout_id(tensor.type, ActPrecision::kFloat32);
  matrix.n = tensor.rows;
  matrix.k = tensor.columns;
  matrix.num_groups = (tensor.rows + kGroupRows - 1) / kGroupRows;
  matrix.group_bytes = kernels.packed_group_bytes(tensor.type, tensor.columns, ActPrecision::kFloat32);
  require(matrix.group_bytes > 0,
          "no kernel for float matrices with rows of " + std::to_string(tensor.columns) + " values");
  return matrix;
}

size_t bytes_of(const PackedMatrix& matrix) {
  return aligned(matrix.group_bytes * static_cast<size_t>(matrix.num_groups));
}

// Packs a matrix to `target`; returns where the next one goes.
uint8_t* pack(const LinearKernels& kernels, const TensorView& tensor, PackedMatrix* matrix, uint8_t* target) {
  kernels.pack_groups(tensor.type, ActPrecision::kFloat32, tensor.data, matrix->n, matrix->k, 0,
                      matrix->num_groups, target);
  matrix->data = target;
  return target + bytes_of(*matrix);
}

size_t index(RowKind kind) {
  return kind == RowKind::kTokens ? 0 : 1;
}

}  // namespace

void append_lora_rows(int32_t slot, int64_t begin, int64_t end, std::vector<LoraRows>* rows) {
  if (slot < 0) return;
  while (begin < end) {
    const bool joins = !rows->empty() && rows->back().slot == slot && rows->back().end == begin;
    if (joins && begin - rows->back().begin < kLoraRows) {
      rows->back().end = std::min(end, rows->back().begin + kLoraRows);
    } else {
      rows->push_back({slot, begin, std::min(end, begin + kLoraRows)});
    }
    begin = rows->back().end;
  }
}

// ---- stages

int64_t LoraShrinkStage::prepare(const Pass& pass) noexcept {
  rows_ = &pass.lora_rows[index(x_->rows)];
  return static_cast<int64_t>(rows_->size() * low_.size());
}

void LoraShrinkStage::run(int64_t task, int) noexcept {
  const auto parts = static_cast<int64_t>(low_.size());
  const LoraRows& rows = (*rows_)[static_cast<size_t>(task / parts)];
  const int64_t part = task % parts;
  const LoraMatrices* matrices = state_->find(rows.slot, first_site_ + static_cast<int>(part));
  if (matrices == nullptr) return;
  const Buffer& low = *low_[static_cast<size_t>(part)];
  kernels_.linear->linear_f32(matrices->a, x_->base, x_->stride, rows.begin, rows.end, 0,
                              matrices->a.num_groups, low.base, low.stride);
}

LoraExpandStage::LoraExpandStage(const KernelTables& kernels, LoraState* state, int first_site,
                                 std::vector<Buffer*> low, std::vector<Buffer*> outs)
    : kernels_(kernels),
      state_(state),
      first_site_(first_site),
      low_(std::move(low)),
      outs_(std::move(outs)) {
  constexpr int64_t step = kLoraColumns / kGroupRows;
  for (size_t part = 0; part < outs_.size(); ++part) {
    const int64_t groups = (outs_[part]->width + kGroupRows - 1) / kGroupRows;
    for (int64_t begin = 0; begin < groups; begin += step) {
      chunks_.push_back({static_cast<int32_t>(part), begin, std::min(begin + step, groups)});
    }
  }
}

int64_t LoraExpandStage::prepare(const Pass& pass) noexcept {
  rows_ = &pass.lora_rows[index(outs_[0]->rows)];
  return static_cast<int64_t>(rows_->size() * chunks_.size());
}

void LoraExpandStage::run(int64_t task, int member) noexcept {
  const auto num_chunks = static_cast<int64_t>(chunks_.size());
  const LoraRows& rows = (*rows_)[static_cast<size_t>(task / num_chunks)];
  const Chunk& chunk = chunks_[static_cast<size_t>(task % num_chunks)];
  const LoraMatrices* matrices = state_->find(rows.slot, first_site_ + chunk.part);
  if (matrices == nullptr) return;
  const Buffer& low = *low_[static_cast<size_t>(chunk.part)];
  const Buffer& out = *outs_[static_cast<size_t>(chunk.part)];
  const int64_t column = chunk.begin * kGroupRows;
  const int64_t count = std::min(chunk.end * kGroupRows, out.width) - column;
  auto* scratch = reinterpret_cast<float*>(state_->scratch[static_cast<size_t>(member)].data());
  // The kernel addresses the whole result: the origin of this tile in scratch lies before it.
  kernels_.linear->linear_f32(matrices->b, low.base, low.stride, rows.begin, rows.end, chunk.begin, chunk.end,
                              scratch - rows.begin * count - column, count);
  for (int64_t m = rows.begin; m < rows.end; ++m) {
    float* y = out.row(m) + column;
    kernels_.vector->add(y, scratch + (m - rows.begin) * count, count, y);
  }
}

// ---- program

int Program::lora(int x, const std::vector<int>& outs, int64_t max_rank) {
  require(!state_->finalized, "the program is final");
  require(!outs.empty() && max_rank > 0, "lora: no parts, or a rank that is not positive");
  LoraState& lora = state_->lora;
  Buffer& input = state_->buffer(x);
  const auto first_site = static_cast<int>(lora.sites.size());
  std::vector<Buffer*>& shared = lora.low[index(input.rows)];
  std::vector<Buffer*> targets;
  for (const int id : outs) {
    Buffer& target = state_->buffer(id);
    require(&target != &input && target.rows == input.rows,
            "lora: outputs must be other buffers with the same kind of rows as the input");
    targets.push_back(&target);
    lora.sites.push_back({input.width, target.width, max_rank});
  }
  while (shared.size() < outs.size()) {
    shared.push_back(&state_->buffer(add_buffer(max_rank, input.rows == RowKind::kLogits)));
  }
  require(shared[0]->width == max_rank, "lora: all operations must have the same largest rank");
  while (lora.scratch.size() < static_cast<size_t>(num_threads())) {
    lora.scratch.emplace_back(static_cast<size_t>(kLoraRows * kLoraColumns) * sizeof(float),
                              /*huge_pages=*/false);
  }
  state_->reads(input);
  for (const Buffer* target : targets) state_->reads(*target);
  const std::vector<Buffer*> low(shared.begin(), shared.begin() + static_cast<int64_t>(outs.size()));
  std::unique_ptr<Stage> shrink =
      std::make_unique<LoraShrinkStage>(state_->kernels, &lora, &input, first_site, low);
  auto* linear =
      state_->stages.empty() ? nullptr : dynamic_cast<LinearStage*>(state_->stages.back().stage.get());
  if (linear != nullptr && linear->input() == &input) {
    std::unique_ptr<Stage>& last = state_->stages.back().stage;
    last = std::make_unique<SideBySide>(std::move(last), std::move(shrink));
  } else {
    state_->stages.push_back({std::move(shrink), input.rows});
  }
  for (const Buffer* target : targets) state_->wrote(*target);
  state_->stages.push_back(
      {std::make_unique<LoraExpandStage>(state_->kernels, &lora, first_site, low, std::move(targets)),
       input.rows});
  return first_site;
}

void Program::set_adapter(int slot, const std::vector<LoraWeights>& weights) {
  LoraState& lora = state_->lora;
  require(slot >= 0 && slot < kMaxAdapterSlots,
          "adapter slots are 0 to " + std::to_string(kMaxAdapterSlots - 1) + ", not " + std::to_string(slot));
  const LinearKernels& kernels = *state_->kernels.linear;
  auto adapter = std::make_unique<LoraState::Adapter>();
  adapter->sites.resize(lora.sites.size());
  size_t total = 0;
  for (const LoraWeights& w : weights) {
    require(w.site >= 0 && w.site < static_cast<int>(lora.sites.size()),
            "lora site " + std::to_string(w.site) + " does not exist");
    const LoraState::Site& site = lora.sites[static_cast<size_t>(w.site)];
    const int64_t rank = w.a.rows;
    require(rank > 0 && rank <= site.max_rank,
            "a rank of " + std::to_string(rank) + "; the largest is " + std::to_string(site.max_rank));
    require(w.a.columns == site.in && w.b.rows == site.out && w.b.columns == rank,
            "the ranks or the shapes of the matrices do not fit their site");
    LoraMatrices& matrices = adapter->sites[static_cast<size_t>(w.site)];
    matrices.a = layout_of(kernels, w.a);
    matrices.b = layout_of(kernels, w.b);
    total += bytes_of(matrices.a) + bytes_of(matrices.b);
  }
  adapter->memory = MappedMemory(std::max(total, kAlignment), /*huge_pages=*/false);
  uint8_t* target = adapter->memory.data();
  for (const LoraWeights& w : weights) {
    LoraMatrices& matrices = adapter->sites[static_cast<size_t>(w.site)];
    require(matrices.a.data == nullptr, "a site is given twice");
    target = pack(kernels, w.a, &matrices.a, target);
    target = pack(kernels, w.b, &matrices.b, target);
  }
  if (static_cast<size_t>(slot) >= lora.slots.size()) lora.slots.resize(static_cast<size_t>(slot) + 1);
  lora.slots[static_cast<size_t>(slot)] = std::move(adapter);
}

void Program::clear_adapter(int slot) {
  LoraState& lora = state_->lora;
  if (slot >= 0 && static_cast<size_t>(slot) < lora.slots.size()) {
    lora.slots[static_cast<size_t>(slot)] = nullptr;
  }
}

void Program::check_adapters(const StepInput& in) const {
  if (in.adapter_slots == nullptr) return;
  const LoraState& lora = state_->lora;
  for (int64_t r = 0; r < in.num_requests; ++r) {
    const int32_t slot = in.adapter_slots[r];
    if (slot < 0) continue;
    require(static_cast<size_t>(slot) < lora.slots.size() && lora.slots[static_cast<size_t>(slot)] != nullptr,
            "adapter_slots[" + std::to_string(r) + "] is " + std::to_string(slot) + ", an empty slot");
  }
}

void Program::find_lora_rows(const StepInput& in, size_t num_passes) {
  for (size_t p = 0; p < num_passes; ++p) {
    for (std::vector<LoraRows>& rows : state_->passes[p]->lora_rows) rows.clear();
  }
  if (in.adapter_slots == nullptr) return;
  size_t p = 0;
  for (int64_t r = 0; r < in.num_requests; ++r) {
    const int64_t end = in.query_start_loc[r + 1];
    for (int64_t at = in.query_start_loc[r]; at < end;) {
      while (at >= state_->passes[p]->first_row + state_->passes[p]->num_tokens) ++p;
      Pass& pass = *state_->passes[p];
      const int64_t stop = std::min(end, pass.first_row + pass.num_tokens);
      append_lora_rows(in.adapter_slots[r], at - pass.first_row, stop - pass.first_row, &pass.lora_rows[0]);
      at = stop;
    }
  }
  // Logit rows are computed in the last pass, all of the step.
  std::vector<LoraRows>& logit_rows = state_->passes[num_passes - 1]->lora_rows[1];
  for (int64_t i = 0; i < in.num_logits; ++i) {
    const int32_t* after =
        std::upper_bound(in.query_start_loc, in.query_start_loc + in.num_requests + 1, in.logits_indices[i]);
    append_lora_rows(in.adapter_slots[after - in.query_start_loc - 1], i, i + 1, &logit_rows);
  }
}

}  // namespace tellin

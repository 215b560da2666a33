#include "experts_stage.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace tellin {
namespace {

// Up to this many rows choose in less time than other members take to be told.
constexpr int64_t kRowsAlone = 8;
constexpr int64_t kRouteRows = 16;  // per task of others
// Most rows per tile, and values of a product that it makes: as in other linear layers.
constexpr int64_t kTileRows = 192;
constexpr int64_t kTileValues = kTileRows * kGroupsPerTask * kGroupRows;
constexpr int64_t kRowStep = 12;
// Fewer rows take as long as this many: they wait for memory.
constexpr int64_t kLeastCost = 4;
constexpr int64_t kTaskBytes = 64 << 10;  // of a matrix per task, at most
constexpr int64_t kTasksLeft = 2;         // a task is at most this part of what is left of a share
constexpr int64_t kIntGroups = 2;         // a block of the next layer's activations
constexpr int64_t kSumGroups = 16;        // per task of the sum, at most
constexpr float kLeastTotal = 1e-20f;     // shares of experts that a bias made chosen may all be 0
constexpr int64_t kSumRows = 64;          // of a block of the sum, at least

int64_t divide_up(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}
int64_t round_up(int64_t value, int64_t step) {
  return divide_up(value, step) * step;
}
int64_t floats_per_row(int64_t width) {
  return (divide_up(width, 16) | 1) * 16;
}

// Adds columns [column, column + count) of an expert's bias to rows [0, rows) of a product.
void add_bias(const VectorKernels& vector, const ExpertMatrices& matrices, size_t expert, int64_t rows,
              int64_t column, int64_t count, float* product) {
  if (matrices.bias.empty()) return;
  const float* const bias = matrices.bias[expert] + column;
  for (int64_t m = 0; m < rows; ++m, product += count) vector.add(product, bias, count, product);
}

// A matrix, and what is read after columns of it.
PackedMatrix followed(const PackedMatrix& matrix, const uint8_t* follow) {
  PackedMatrix copy = matrix;
  copy.follow = follow;
  return copy;
}

const uint8_t* group(const PackedMatrix& matrix, int64_t index) {
  return matrix.data + index * static_cast<int64_t>(matrix.group_bytes);
}

}  // namespace

// ---- state

ExpertsState::ExpertsState(const KernelTables& kernels, int threads, const ExpertsShape& the_shape,
                           Buffer* hidden_rows)
    : shape(the_shape),
      hidden(hidden_rows),
      num_threads(threads),
      offsets(static_cast<size_t>(the_shape.num_experts) + 1),
      scratch(static_cast<size_t>(threads)),
      next_(static_cast<size_t>(the_shape.num_experts)) {
  active.reserve(static_cast<size_t>(shape.num_experts));
  bounds.reserve(static_cast<size_t>(num_threads) + 1);
  const auto bytes8 =
      static_cast<int64_t>(kernels.linear->quantized_row_bytes(shape.width, ActPrecision::kInt8));
  const auto bytes16 =
      static_cast<int64_t>(kernels.linear->quantized_row_bytes(shape.width, ActPrecision::kInt16));
  const int64_t float_bytes = 4 * floats_per_row(shape.width);
  const int64_t product_bytes = 4 * (2 * kTileValues + 16);
  for (Scratch& mine : scratch) {
    mine.memory =
        MappedMemory(static_cast<size_t>(kTileRows * (bytes8 + bytes16 + float_bytes) + product_bytes),
                     /*huge_pages=*/false);
    mine.products = reinterpret_cast<float*>(mine.memory.data());
    mine.int8 = {mine.memory.data() + product_bytes, bytes8};
    mine.int16 = {mine.int8.data + kTileRows * bytes8, bytes16};
    mine.floats = reinterpret_cast<float*>(mine.int16.data + kTileRows * bytes16);
  }
}

// A tile of an expert is cut into tasks of at least kGroupsPerTask groups, but for the ends of shares.
int64_t ExpertsState::max_tasks(int64_t rows) const {
  const int64_t tiles = shape.num_experts + rows * shape.top_k / kTileRows + 1;
  const int64_t columns = std::max(shape.inner, shape.width);
  return tiles * (columns / (kGroupsPerTask * kGroupRows) + 1) + 40 * num_threads;
}

void ExpertsState::reserve(int64_t rows) {
  choices_.resize(std::max(choices_.size(), static_cast<size_t>(rows * shape.top_k)));
  entries.resize(choices_.size());
  tasks.reserve(static_cast<size_t>(max_tasks(rows)));
}

// The experts of the largest keys, of equal ones those of lower ids; ascending. All are compared with the
// least one chosen so far.
void ExpertsState::pick(const float* keys, Choice* chosen) const noexcept {
  const auto count = static_cast<int32_t>(shape.num_experts);
  const auto top_k = static_cast<int32_t>(shape.top_k);
  int32_t size = 0;
  for (int32_t e = 0; e < count; ++e) {
    const float key = keys[e];
    if (size == top_k && !(key > chosen[top_k - 1].share)) continue;
    int32_t at = size < top_k ? size++ : top_k - 1;
    for (; at > 0 && key > chosen[at - 1].share; --at) chosen[at] = chosen[at - 1];
    chosen[at] = {e, key};
  }
  std::sort(chosen, chosen + top_k, [](const Choice& a, const Choice& b) { return a.expert < b.expert; });
}

// Keys of groups that are not chosen become less than any other; of equally good groups the first are.
void ExpertsState::hide_groups(const ExpertsRouting& routing, float* keys) const noexcept {
  const int64_t size = shape.num_experts / routing.groups;
  float best[kMaxExperts];
  for (int64_t g = 0; g < routing.groups; ++g) {
    float first = -std::numeric_limits<float>::infinity(), second = first;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      second = std::max(second, std::min(first, keys[e]));
      first = std::max(first, keys[e]);
    }
    best[g] = routing.sigmoid ? first + second : first;
  }
  for (int64_t g = 0; g < routing.groups; ++g) {
    int64_t better = 0;
    for (int64_t other = 0; other < routing.groups; ++other) {
      better += best[other] > best[g] || (best[other] == best[g] && other < g);
    }
    if (better < routing.top_groups) continue;
    std::fill(keys + g * size, keys + (g + 1) * size, -std::numeric_limits<float>::infinity());
  }
}

// False: there are no shares, for a logit is not a number, or the largest is infinite.
bool ExpertsState::share_logits(const float* logits, bool normalize, Choice* chosen) const noexcept {
  pick(logits, chosen);
  float largest = logits[0];
  bool has_nan = false;
  for (int64_t e = 0; e < shape.num_experts; ++e) {
    has_nan |= logits[e] != logits[e];
    largest = std::max(largest, logits[e]);
  }
  if (has_nan || !std::isfinite(largest)) return false;
  float total = 0.0f;
  if (!normalize) {
    for (int64_t e = 0; e < shape.num_experts; ++e) total += std::exp(logits[e] - largest);
  }
  for (int64_t i = 0; i < shape.top_k; ++i) {
    chosen[i].share = std::exp(chosen[i].share - largest);
    if (normalize) total += chosen[i].share;
  }
  for (int64_t i = 0; i < shape.top_k; ++i) chosen[i].share /= total;
  return true;
}

// As above, from the scores of all experts.
bool ExpertsState::share_scores(const float* logits, const ExpertsRouting& routing,
                                Choice* chosen) const noexcept {
  float scores[kMaxExperts], keys[kMaxExperts];
  float largest = logits[0];
  bool has_nan = false;
  for (int64_t e = 0; e < shape.num_experts; ++e) {
    has_nan |= logits[e] != logits[e];
    largest = std::max(largest, logits[e]);
  }
  if (has_nan || (!routing.sigmoid && !std::isfinite(largest))) return false;
  float total = 0.0f;
  for (int64_t e = 0; e < shape.num_experts; ++e) {
    scores[e] = routing.sigmoid ? 1.0f / (1.0f + std::exp(-logits[e])) : std::exp(logits[e] - largest);
    total += scores[e];
  }
  for (int64_t e = 0; e < shape.num_experts; ++e) {
    if (!routing.sigmoid) scores[e] /= total;
    keys[e] = routing.bias == nullptr ? scores[e] : scores[e] + routing.bias[e];
  }
  if (routing.groups != routing.top_groups) hide_groups(routing, keys);
  pick(keys, chosen);
  total = 0.0f;
  for (int64_t i = 0; i < shape.top_k; ++i) {
    chosen[i].share = scores[chosen[i].expert];
    total += chosen[i].share;
  }
  if (!routing.normalize) return true;
  total = std::max(total, kLeastTotal);
  for (int64_t i = 0; i < shape.top_k; ++i) chosen[i].share /= total;
  return true;
}

void ExpertsState::choose(const Buffer& router, const ExpertsRouting& routing, int64_t begin,
                          int64_t end) noexcept {
  for (int64_t row = begin; row < end; ++row) {
    const float* logits = router.row(row);
    Choice* chosen = &choices_[static_cast<size_t>(row * shape.top_k)];
    const bool has_shares = routing.is_plain() ? share_logits(logits, routing.normalize, chosen)
                                               : share_scores(logits, routing, chosen);
    const float scale = has_shares ? routing.scale : std::numeric_limits<float>::quiet_NaN();
    if (scale != 1.0f) {
      for (int64_t i = 0; i < shape.top_k; ++i) chosen[i].share *= scale;
    }
    if (routing.scales == nullptr) continue;
    for (int64_t i = 0; i < shape.top_k; ++i) chosen[i].share *= routing.scales[chosen[i].expert];
  }
}

void ExpertsState::sort(int64_t num_rows) noexcept {
  ++serial;
  const auto count = static_cast<size_t>(num_rows * shape.top_k);
  std::fill(next_.begin(), next_.end(), 0);
  for (size_t i = 0; i < count; ++i) ++next_[static_cast<size_t>(choices_[i].expert)];
  active.clear();
  int32_t begin = 0;
  for (size_t e = 0; e < next_.size(); ++e) {
    offsets[e] = begin;
    if (next_[e] > 0) active.push_back(static_cast<int32_t>(e));
    begin += next_[e];
    next_[e] = offsets[e];
  }
  offsets.back() = begin;
  for (size_t i = 0; i < count; ++i) {
    const Choice& choice = choices_[i];
    const auto row = static_cast<int32_t>(i / static_cast<size_t>(shape.top_k));
    entries[static_cast<size_t>(next_[static_cast<size_t>(choice.expert)]++)] = {row, choice.share};
  }
}

void ExpertsState::begin_tasks(int64_t total_cost) noexcept {
  tasks.clear();
  bounds.clear();
  total_cost_ = std::max<int64_t>(1, total_cost);
  cost_done_ = 0;
}

// Member m has what begins in [total * m / n, total * (m + 1) / n).
void ExpertsState::cut(Task task, int64_t num_groups, int64_t group_cost, int64_t grain,
                       int64_t most) noexcept {
  for (int64_t begin = 0; begin < num_groups;) {
    const int64_t member = cost_done_ * num_threads / total_cost_;
    while (static_cast<int64_t>(bounds.size()) <= member)
      bounds.push_back(static_cast<int64_t>(tasks.size()));
    const int64_t left = divide_up(total_cost_ * (member + 1), num_threads) - cost_done_;
    const int64_t wanted = left / kTasksLeft / group_cost / grain * grain;
    const bool is_last = left <= 2 * grain * group_cost;
    const int64_t count = std::clamp(is_last ? 2 * grain : wanted, grain, std::max(grain, most));
    const int64_t end = std::min(num_groups, begin + count);
    task.first = static_cast<int32_t>(begin);
    task.last = static_cast<int32_t>(end);
    tasks.push_back(task);
    cost_done_ += (end - begin) * group_cost;
    begin = end;
  }
}

void ExpertsState::end_tasks() noexcept {
  bounds.resize(static_cast<size_t>(num_threads) + 1, static_cast<int64_t>(tasks.size()));
}

// ---- rows choose their experts

int64_t RouteStage::prepare(const Pass& pass) noexcept {
  num_rows_ = pass.num_rows(op_->state->shape.rows);
  return num_rows_ <= kRowsAlone ? 0 : divide_up(num_rows_, kRouteRows);
}

void RouteStage::run(int64_t task, int) noexcept {
  op_->state->choose(*op_->router, op_->routing, task * kRouteRows,
                     std::min(num_rows_, (task + 1) * kRouteRows));
}

// ---- gate and up

int64_t ExpertsGateStage::prepare(const Pass& pass) noexcept {
  ExpertsState& state = *op_->state;
  const int64_t num_rows = pass.num_rows(state.shape.rows);
  if (num_rows == 0) return 0;
  if (num_rows <= kRowsAlone) state.choose(*op_->router, op_->routing, 0, num_rows);
  state.sort(num_rows);
  cut_tasks();
  return static_cast<int64_t>(state.tasks.size());
}

// An expert's tiles, each in chunks of groups: a member keeps the rows of a tile while it goes through them.
void ExpertsGateStage::cut_tasks() noexcept {
  ExpertsState& state = *op_->state;
  const PackedMatrix& matrix = *op_->gate.of[0];
  const bool floats =
      op_->gate.precision == ActPrecision::kFloat32 || op_->up.precision == ActPrecision::kFloat32;
  const int64_t grain = floats ? kGroupsPerTask : kIntGroups;
  const int64_t byte_groups =
      round_up(std::max<int64_t>(1, kTaskBytes / static_cast<int64_t>(matrix.group_bytes)), kGroupsPerTask);
  const auto each_tile = [&](const auto& body) {
    for (const int32_t expert : state.active) {
      const int64_t begin = state.offsets[static_cast<size_t>(expert)];
      const int64_t end = state.offsets[static_cast<size_t>(expert) + 1];
      const int64_t tiles = divide_up(end - begin, kTileRows);
      const int64_t rows = tiles == 1 ? end - begin : round_up(divide_up(end - begin, tiles), kRowStep);
      for (int64_t m = begin; m < end; m += rows) body(expert, m, std::min(end, m + rows));
    }
  };
  int64_t total = 0;
  each_tile([&](int32_t, int64_t begin, int64_t end) {
    total += std::max(kLeastCost, end - begin) * matrix.num_groups;
  });
  state.begin_tasks(total);
  each_tile([&](int32_t expert, int64_t begin, int64_t end) {
    const int64_t rows = end - begin;
    const int64_t fitting = kTileValues / (rows * kGroupRows) / kGroupsPerTask * kGroupsPerTask;
    const ExpertsState::Task task{expert, static_cast<int32_t>(begin), static_cast<int32_t>(end), 0, 0};
    state.cut(task, matrix.num_groups, std::max(kLeastCost, rows), grain, std::min(fitting, byte_groups));
  });
  state.end_tasks();
}

// The rows of a tile as kernels read them: row m0 + i is that of entry begin + i.
struct ExpertsGateStage::Rows {
  LinearInput input;
  int64_t m0;
};

ExpertsGateStage::Rows ExpertsGateStage::rows_of(ActPrecision precision, const ExpertsState::Task& task,
                                                 ExpertsState::Scratch& scratch) const {
  const Buffer& x = *op_->x;
  const bool floats = precision == ActPrecision::kFloat32;
  const QuantizedRows source = floats ? QuantizedRows{nullptr, 0} : x.quantized(precision).rows;
  const ExpertsState::Entry* entries = op_->state->entries.data() + task.begin;
  const int64_t count = task.end - task.begin;
  if (entries[count - 1].row - entries[0].row == count - 1) {  // they lie side by side as it is
    return {{precision, source, x.base, x.stride}, entries[0].row};
  }
  const QuantizedRows target = precision == ActPrecision::kInt8 ? scratch.int8 : scratch.int16;
  const int64_t stride = floats_per_row(x.width);
  const auto index = static_cast<size_t>(precision);
  if (scratch.gathered[index] != op_->state->serial || scratch.gathered_begin[index] != task.begin) {
    scratch.gathered[index] = op_->state->serial;
    scratch.gathered_begin[index] = task.begin;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = entries[i].row;
      if (floats) {
        std::memcpy(scratch.floats + i * stride, x.row(row), static_cast<size_t>(x.width) * sizeof(float));
      } else {
        std::memcpy(target.data + i * target.row_bytes, source.data + row * source.row_bytes,
                    static_cast<size_t>(source.row_bytes));
      }
    }
  }
  return {{precision, target, scratch.floats, stride}, 0};
}

void ExpertsGateStage::run(int64_t index, int member) noexcept {
  ExpertsState& state = *op_->state;
  const ExpertsState::Task& task = state.tasks[static_cast<size_t>(index)];
  ExpertsState::Scratch& scratch = state.scratch[static_cast<size_t>(member)];
  const auto expert = static_cast<size_t>(task.expert);
  const PackedMatrix& gate_matrix = *op_->gate.of[expert];
  const PackedMatrix& up_matrix = *op_->up.of[expert];
  const int64_t column = task.first * kGroupRows;
  const int64_t count = std::min<int64_t>(task.last * kGroupRows, gate_matrix.n) - column;
  const int64_t rows = task.end - task.begin;
  // What is read next: the same groups of `up`, then the next task's of `gate`.
  const size_t next = std::min(static_cast<size_t>(index) + 1, state.tasks.size() - 1);
  const ExpertsState::Task& after = state.tasks[next];
  const PackedMatrix& gate_after = *op_->gate.of[static_cast<size_t>(after.expert)];
  // The second product does not start a whole number of pages after the first, or their stores would alias.
  float* gate = scratch.products;
  float* up = scratch.products + kTileValues + 16;
  const Rows gate_rows = rows_of(op_->gate.precision, task, scratch);
  linear_product(kernels_, gate_rows.input, followed(gate_matrix, group(up_matrix, task.first)), gate_rows.m0,
                 gate_rows.m0 + rows, task.first, task.last, gate - gate_rows.m0 * count - column, count);
  const Rows up_rows = rows_of(op_->up.precision, task, scratch);
  linear_product(kernels_, up_rows.input, followed(up_matrix, group(gate_after, after.first)), up_rows.m0,
                 up_rows.m0 + rows, task.first, task.last, up - up_rows.m0 * count - column, count);
  const VectorKernels& vector = *kernels_.vector;
  add_bias(vector, op_->gate, expert, rows, column, count, gate);
  add_bias(vector, op_->up, expert, rows, column, count, up);
  const Buffer& hidden = *state.hidden;
  const ActPrecision precision = op_->down.precision;
  if (precision == ActPrecision::kFloat32) {
    for (int64_t m = 0; m < rows; ++m) {
      vector.act_mul(op_->act, gate + m * count, up + m * count, count, hidden.row(task.begin + m) + column);
    }
  } else {
    vector.act_mul(op_->act, gate, up, rows * count, gate);
    kernels_.linear->quantize_part(precision, gate - task.begin * count - column, count, task.begin, task.end,
                                   column, column + count, hidden.quantized(precision).rows);
  }
}

// ---- down, and the sum

int64_t ExpertsDownStage::prepare(const Pass& pass) noexcept {
  ExpertsState& state = *op_->state;
  const int64_t num_rows = pass.num_rows(state.shape.rows);
  if (num_rows == 0) return 0;
  const PackedMatrix& matrix = *op_->down.of[0];
  // All rows, unless that leaves members without columns.
  const int64_t wanted = divide_up(4 * kGroupsPerTask * state.num_threads, matrix.num_groups);
  const int64_t blocks = std::clamp<int64_t>(num_rows / kSumRows, 1, wanted);
  const int64_t block_rows = divide_up(num_rows, blocks);
  // Every task begins anew with each expert: few members have longer tasks.
  const bool is_short = matrix.num_groups < 4 * kGroupsPerTask * state.num_threads;
  const bool floats = op_->down.precision == ActPrecision::kFloat32;
  const int64_t grain = is_short && !floats ? kIntGroups : kGroupsPerTask;
  state.begin_tasks(divide_up(num_rows, block_rows) * matrix.num_groups);
  for (int64_t row = 0; row < num_rows; row += block_rows) {
    const ExpertsState::Task task{0, static_cast<int32_t>(row),
                                  static_cast<int32_t>(std::min(num_rows, row + block_rows)), 0, 0};
    state.cut(task, matrix.num_groups, 1, grain, kSumGroups);
  }
  state.end_tasks();
  return static_cast<int64_t>(state.tasks.size());
}

void ExpertsDownStage::run(int64_t index, int member) noexcept {
  ExpertsState& state = *op_->state;
  const ExpertsState::Task& task = state.tasks[static_cast<size_t>(index)];
  const ActPrecision precision = op_->down.precision;
  const Buffer& hidden = *state.hidden;
  const LinearInput input{precision, hidden.quantized(precision).rows, hidden.base, hidden.stride};
  const int64_t column = task.first * kGroupRows;
  const int64_t count = std::min<int64_t>(task.last * kGroupRows, op_->down.of[0]->n) - column;
  const int64_t tile_rows = kTileValues / (kGroupRows * (task.last - task.first)) / kRowStep * kRowStep;
  float* scratch = state.scratch[static_cast<size_t>(member)].products;
  for (int64_t row = task.begin; row < task.end; ++row) {
    std::fill_n(op_->out->row(row) + column, count, 0.0f);
  }
  const auto before = [](const ExpertsState::Entry& entry, int32_t row) { return entry.row < row; };
  const ExpertsState::Entry* entries = state.entries.data();
  for (size_t i = 0; i < state.active.size(); ++i) {
    const auto expert = static_cast<size_t>(state.active[i]);
    const ExpertsState::Entry* const last = entries + state.offsets[expert + 1];
    const ExpertsState::Entry* const first =
        std::lower_bound(entries + state.offsets[expert], last, task.begin, before);
    const int64_t begin = first - entries;
    const int64_t end = std::lower_bound(first, last, task.end, before) - entries;
    // The same columns of the next expert follow, or the next columns of the first one.
    const bool is_last = i + 1 == state.active.size();
    const PackedMatrix& next = *op_->down.of[static_cast<size_t>(state.active[is_last ? 0 : i + 1])];
    const PackedMatrix matrix =
        followed(*op_->down.of[expert], group(next, is_last ? task.last : task.first));
    for (int64_t m = begin; m < end; m += tile_rows) {
      const int64_t stop = std::min(end, m + tile_rows);
      linear_product(kernels_, input, matrix, m, stop, task.first, task.last, scratch - m * count - column,
                     count);
      add_bias(*kernels_.vector, op_->down, expert, stop - m, column, count, scratch);
      for (int64_t entry = m; entry < stop; ++entry) {
        kernels_.vector->add_scaled(scratch + (entry - m) * count, entries[entry].share, count,
                                    op_->out->row(entries[entry].row) + column);
      }
    }
  }
}

}  // namespace tellin

// Lowering of recurrences, and what a step says about their states.
#include <algorithm>

#include "program_state.h"
#include "recurrence_stage.h"
#include "require.h"

namespace tellin {
namespace {

constexpr int64_t kMaxStateDim = 256;

void require_columns(const char* op, const char* operand, const Buffer& buffer, int64_t count, int64_t size) {
  require(buffer.rows == RowKind::kTokens, std::string(op) + ": operands must have token rows");
  require(buffer.width == count * size,
          std::string(op) + ": " + operand + " has " + std::to_string(buffer.width) + " columns where " +
              std::to_string(count) + " x " + std::to_string(size) + " are needed");
}

void require_dims(const char* op, int64_t depth, int64_t columns) {
  require(depth >= 1 && depth <= kMaxStateDim && columns >= 1 && columns <= kMaxStateDim,
          std::string(op) + ": a state of " + std::to_string(depth) + " x " + std::to_string(columns) +
              " values; supported are 1 to 256 each way");
}

}  // namespace

int Program::add_state_layer(int64_t num_values) {
  require(!state_->finalized, "the program is final");
  return states_.add_layer(num_values);
}

void Program::check_state_layer(int layer, int64_t num_values) const {
  require(!state_->finalized, "the program is final");
  require(layer >= 0 && layer < states_.num_layers(), "a recurrence's state is out of range");
  require(states_.num_values(layer) == num_values,
          "a recurrence's state has " + std::to_string(states_.num_values(layer)) + " values where " +
              std::to_string(num_values) + " are needed");
}

void Program::add_recurrence(std::initializer_list<Buffer*> operands, Buffer& out,
                             std::unique_ptr<Stage> stage) {
  for (const Buffer* operand : operands) {
    require(operand != &out, "a recurrence's output must be a buffer of its own");
  }
  for (const Buffer* operand : operands) state_->reads(*operand);
  state_->wrote(out);
  state_->stages.push_back({std::move(stage), RowKind::kTokens});
}

void Program::short_conv(int x, int weight, int bias, int out, int layer, int64_t kernel,
                         const Activation* act) {
  Buffer& input = state_->buffer(x);
  Buffer& target = state_->buffer(out);
  require(kernel >= 2 && kernel <= kMaxConvKernel, "short_conv: a kernel of " + std::to_string(kernel) +
                                                       " rows; supported are 2 to " +
                                                       std::to_string(kMaxConvKernel));
  require(act == nullptr || *act != Activation::kSwigluOai, "swiglu_oai is a product of two values");
  require_columns("short_conv", "x", input, 1, input.width);
  require_columns("short_conv", "out", target, 1, input.width);
  check_state_layer(layer, (kernel - 1) * input.width);
  const float* const weights = state_->vector(weight, kernel * input.width);
  require(weights != nullptr, "short_conv needs a weight");
  const ConvStage::Operands operands{&input, &target, state_->vector(bias, input.width), act != nullptr,
                                     act == nullptr ? Activation::kIdentity : *act};
  add_recurrence({&input}, target,
                 std::make_unique<ConvStage>(state_->kernels, &states_, layer, num_threads(), operands,
                                             weights, kernel));
}

void Program::gated_delta(const DeltaBuffers& ids, int decay, int dt_bias, int layer, int64_t num_k_heads,
                          int64_t num_v_heads, bool tiled) {
  Buffer& q = state_->buffer(ids.q);
  Buffer& k = state_->buffer(ids.k);
  Buffer& v = state_->buffer(ids.v);
  Buffer& a = state_->buffer(ids.a);
  Buffer& b = state_->buffer(ids.b);
  Buffer& out = state_->buffer(ids.out);
  const char* const name = "gated_delta";
  require(num_k_heads > 0 && num_v_heads > 0 && num_v_heads % num_k_heads == 0,
          "gated_delta: value heads must be a multiple of key heads");
  const int64_t depth = q.width / num_k_heads, columns = v.width / num_v_heads;
  require_dims(name, depth, columns);
  require_columns(name, "q", q, num_k_heads, depth);
  require_columns(name, "k", k, num_k_heads, depth);
  require_columns(name, "v", v, num_v_heads, columns);
  require_columns(name, "out", out, num_v_heads, columns);
  require_columns(name, "a", a, num_v_heads, 1);
  require_columns(name, "b", b, num_v_heads, 1);
  check_state_layer(layer, num_v_heads * depth * columns);
  const DeltaStage::Operands operands{&q,
                                      &k,
                                      &v,
                                      &a,
                                      &b,
                                      &out,
                                      state_->vector(decay, num_v_heads),
                                      state_->vector(dt_bias, num_v_heads),
                                      num_k_heads,
                                      tiled};
  require(operands.decay != nullptr && operands.dt_bias != nullptr, "gated_delta needs decay and dt_bias");
  const StateShape shape{num_v_heads, depth, columns, kStateColumns};
  add_recurrence(
      {&q, &k, &v, &a, &b}, out,
      std::make_unique<DeltaStage>(state_->kernels, shape, &states_, layer, num_threads(), operands));
}

void Program::selective_scan(const ScanBuffers& ids, int decay, int skip, int dt_bias, int layer,
                             int64_t num_heads, int64_t num_groups, float dt_min, float dt_max) {
  Buffer& x = state_->buffer(ids.x);
  Buffer& b = state_->buffer(ids.b);
  Buffer& c = state_->buffer(ids.c);
  Buffer& dt = state_->buffer(ids.dt);
  Buffer& out = state_->buffer(ids.out);
  const char* const name = "selective_scan";
  require(num_heads > 0 && num_groups > 0 && num_heads % num_groups == 0,
          "selective_scan: heads must be a multiple of groups");
  const int64_t columns = x.width / num_heads, depth = b.width / num_groups;
  require_dims(name, depth, columns);
  require_columns(name, "x", x, num_heads, columns);
  require_columns(name, "out", out, num_heads, columns);
  require_columns(name, "b", b, num_groups, depth);
  require_columns(name, "c", c, num_groups, depth);
  require_columns(name, "dt", dt, num_heads, 1);
  check_state_layer(layer, num_heads * depth * columns);
  require(dt_min >= 0.0f && dt_min <= dt_max, "selective_scan: time steps have no such limits");
  const ScanStage::Operands operands{&x,
                                     &b,
                                     &c,
                                     &dt,
                                     &out,
                                     state_->vector(decay, num_heads),
                                     state_->vector(skip, num_heads),
                                     state_->vector(dt_bias, num_heads),
                                     num_groups,
                                     dt_min,
                                     dt_max};
  require(operands.decay != nullptr && operands.skip != nullptr && operands.dt_bias != nullptr,
          "selective_scan needs decay, skip and dt_bias");
  const StateShape shape{num_heads, depth, columns, kStateColumns};
  add_recurrence(
      {&x, &b, &c, &dt}, out,
      std::make_unique<ScanStage>(state_->kernels, shape, &states_, layer, num_threads(), operands));
}

// ---- a step

void Program::check_states(const StepInput& in) const {
  if (states_.num_layers() == 0) return;
  require(in.state_slots != nullptr, "state_slots must name a slot for each request: the plan has states");
  require(states_.num_slots() > 0, "no recurrent states: call init_state_cache() first");
  std::vector<int64_t>& taken = state_->slot_taken;
  taken.assign(in.state_slots, in.state_slots + in.num_requests);
  for (int64_t i = 0; i < in.num_saves; ++i) taken.push_back(in.state_saves[3 * i + 2]);
  std::sort(taken.begin(), taken.end());
  if (!taken.empty()) {
    for (const int64_t slot : {taken.front(), taken.back()}) {
      require(slot >= 0 && slot < states_.num_slots(), "state slot " + std::to_string(slot) +
                                                           " is out of range; there are " +
                                                           std::to_string(states_.num_slots()));
    }
  }
  const auto twice = std::adjacent_find(taken.begin(), taken.end());
  require(twice == taken.end(), "a state slot is used twice in a step");
  for (int64_t r = 0; r < in.num_requests; ++r) {
    for (int64_t t = in.query_start_loc[r] + 1; t < in.query_start_loc[r + 1]; ++t) {
      require(in.positions[t] == in.positions[t - 1] + 1, "positions of a request must follow each other");
    }
  }
  for (int64_t i = 0; i < in.num_saves; ++i) {
    const int32_t* save = in.state_saves + 3 * i;
    const int64_t r = save[0];
    require(r >= 0 && r < in.num_requests, "state_saves: request " + std::to_string(r) + " is out of range");
    const int64_t begin = in.query_start_loc[r], end = in.query_start_loc[r + 1];
    require(begin < end && save[1] > in.positions[begin] && save[1] <= in.positions[end - 1] + 1,
            "state_saves: request " + std::to_string(r) + " has no row at position " +
                std::to_string(int64_t{save[1]} - 1) + " in the step");
    require(i == 0 || save[-3] < r || (save[-3] == r && save[-2] < save[1]), "state_saves must ascend");
  }
}

void Program::find_state_rows(const StepInput& in, size_t num_passes) {
  for (size_t p = 0; p < num_passes; ++p) {
    state_->passes[p]->state_rows.clear();
    state_->passes[p]->state_saves.clear();
  }
  if (states_.num_layers() == 0) return;
  size_t p = 0;
  int64_t save = 0;
  for (int64_t r = 0; r < in.num_requests; ++r) {
    const int64_t end = in.query_start_loc[r + 1];
    const int64_t first_row = in.query_start_loc[r];
    for (int64_t at = first_row; at < end;) {
      while (at >= state_->passes[p]->first_row + state_->passes[p]->num_tokens) ++p;
      Pass& pass = *state_->passes[p];
      const int64_t stop = std::min(end, pass.first_row + pass.num_tokens);
      StateRows rows{at - pass.first_row,   stop - pass.first_row,   in.state_slots[r],
                     in.positions[at] == 0, pass.state_saves.size(), pass.state_saves.size()};
      for (; save < in.num_saves && in.state_saves[3 * save] == r; ++save) {
        const int64_t after = first_row + in.state_saves[3 * save + 1] - in.positions[first_row];
        if (after > stop) break;
        pass.state_saves.push_back({after - pass.first_row, in.state_saves[3 * save + 2]});
      }
      rows.last_save = pass.state_saves.size();
      pass.state_rows.push_back(rows);
      at = stop;
    }
  }
}

}  // namespace tellin

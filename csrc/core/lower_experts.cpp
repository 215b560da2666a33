// Lowering of mixtures of experts.
#include <algorithm>

#include "experts_stage.h"
#include "program_state.h"
#include "require.h"

namespace tellin {

// Operations of one shape share what lies between their stages.
ExpertsState* Program::State::experts_state(const ExpertsShape& shape, int num_threads) {
  for (const auto& entry : experts) {
    if (entry->shape == shape) return entry.get();
  }
  auto hidden = std::make_unique<Buffer>();
  hidden->width = shape.inner;
  hidden->stride = ((shape.inner + 15) / 16 | 1) * 16;  // an odd number of cache lines
  hidden->rows = shape.rows;
  hidden->per_row = shape.top_k;
  experts.push_back(std::make_unique<ExpertsState>(kernels, num_threads, shape, hidden.get()));
  buffers.push_back(std::move(hidden));
  return experts.back().get();
}

// The same matrix of every expert: `rows` x the input's width (0: any number of rows), packed alike; and
// their biases, or none.
ExpertMatrices Program::expert_matrices(const ExpertParts& parts, const Buffer& input, int64_t rows) const {
  ExpertMatrices matrices;
  require(parts.biases.empty() || parts.biases.size() == parts.weights.size(),
          "experts: each needs a bias, or none has one");
  for (const int id : parts.weights) {
    const Weight& weight = checked_weight(id, input);
    if (matrices.of.empty()) {
      matrices.precision = weight.precision;
      if (rows == 0) rows = weight.packed.n;
    }
    require(weight.packed.n == rows, "experts: a matrix has " + std::to_string(weight.packed.n) +
                                         " rows where " + std::to_string(rows) + " are needed");
    require(weight.precision == matrices.precision &&
                (matrices.of.empty() || weight.packed.layout == matrices.of[0]->layout),
            "experts: the matrices must have one storage type");
    matrices.of.push_back(&weight.packed);
  }
  for (const int bias : parts.biases) {
    require(bias >= 0, "experts: each needs a bias, or none has one");
    matrices.bias.push_back(state_->vector(bias, rows));
  }
  return matrices;
}

void Program::experts(int x, int router, const ExpertParts& gate, const ExpertParts& up,
                      const ExpertParts& down, int out, Activation act, const Routing& routing) {
  require(!state_->finalized, "the program is final");
  Buffer& input = state_->buffer(x);
  Buffer& logits = state_->buffer(router);
  Buffer& target = state_->buffer(out);
  const auto count = static_cast<int64_t>(gate.weights.size());
  require(count >= 1 && count <= kMaxExperts, "experts: there must be between 1 and 1024");
  require(up.weights.size() == gate.weights.size() && down.weights.size() == gate.weights.size() &&
              logits.width == count,
          "experts: each needs three matrices and a logit");
  const int64_t top_k = routing.top_k;
  require(top_k >= 1 && top_k <= std::min(count, kMaxExpertsPerRow),
          "experts: a row may choose between 1 and 32 of them, and not more than there are");
  require(logits.rows == input.rows && target.rows == input.rows,
          "experts: operands must have the same kind of rows");
  require(&target != &input && &target != &logits, "experts: the output must be a buffer of its own");
  ExpertsOperands op;
  op.x = &input;
  op.router = &logits;
  op.out = &target;
  op.act = act;
  op.routing.sigmoid = routing.sigmoid;
  op.routing.normalize = routing.normalize;
  op.routing.bias = state_->vector(routing.bias, count);
  op.routing.scale = routing.scale;
  op.routing.scales = state_->vector(routing.scales, count);
  const int64_t groups = routing.groups, size = groups > 0 ? count / groups : 0;
  require(groups >= 1 && size * groups == count, "experts: there must be equally many in each group");
  require(routing.top_groups >= 1 && routing.top_groups <= groups && routing.top_groups * size >= top_k,
          "experts: a row must choose from 1 to all groups, with as many experts as it uses");
  require(!routing.sigmoid || groups == 1 || size >= 2, "experts: a group must have two or more");
  op.routing.groups = groups;
  op.routing.top_groups = routing.top_groups;
  op.gate = expert_matrices(gate, input, 0);
  const int64_t inner = op.gate.of[0]->n;
  op.up = expert_matrices(up, input, inner);
  op.state = state_->experts_state({count, top_k, input.width, inner, input.rows}, num_threads());
  Buffer& hidden = *op.state->hidden;
  op.down = expert_matrices(down, hidden, target.width);
  if (op.down.precision != ActPrecision::kFloat32) hidden.quantized(op.down.precision).used = true;
  state_->reads(logits);
  for (const ActPrecision precision : {op.gate.precision, op.up.precision}) {
    if (precision == ActPrecision::kFloat32) {
      state_->reads(input);
    } else {
      state_->quantize(input, precision);
    }
  }
  const auto shared = std::make_shared<const ExpertsOperands>(std::move(op));
  state_->stages.push_back({std::make_unique<RouteStage>(shared), input.rows});
  state_->stages.push_back({std::make_unique<ExpertsGateStage>(state_->kernels, shared), input.rows});
  state_->stages.push_back({std::make_unique<ExpertsDownStage>(state_->kernels, shared), input.rows});
  state_->wrote(target);
}

}  // namespace tellin

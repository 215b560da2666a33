// Lowering of models/plan/elementwise.py.
#include "program_state.h"
#include "require.h"

namespace tellin {

void Program::scale_by_position(int x, float beta, int64_t length) {
  RowOp op{};
  op.kind = RowOp::Kind::kPositionScale;
  op.x = &state_->buffer(x);
  require(length >= 1, "scale_by_position: the length must be positive");
  op.factor = beta;
  op.group = length;
  state_->attends_logit_rows |= op.x->rows == RowKind::kLogits;
  state_->append(op, *op.x);
}

void Program::xielu(int x, int out, const XieluVectors& vectors) {
  RowOp op{};
  op.kind = RowOp::Kind::kXielu;
  op.x = &state_->buffer(x);
  op.out = &state_->buffer(out);
  require(op.x->width == op.out->width && op.x->rows == op.out->rows,
          "xielu: input and output must have the same shape");
  const int ids[] = {vectors.alpha_p, vectors.alpha_n, vectors.beta, vectors.eps};
  float values[4];
  for (int i = 0; i < 4; ++i) {
    const float* value = state_->vector(ids[i], 1);
    require(value != nullptr, "xielu needs four vectors of one value");
    values[i] = *value;
  }
  op.xielu = XieluNumbers::of(values[0], values[1], values[2], values[3]);
  state_->append(op, *op.out);
}

}  // namespace tellin

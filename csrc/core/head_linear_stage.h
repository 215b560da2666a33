// A linear layer for each head: parts of a row that go through matrices of their own.
//
// Multi-head latent attention brings the queries of each head to the space of the latents, and values back.
// Together these matrices are a few percent of a model, so activations stay float32 whatever their type.
#pragma once
#include <vector>

#include "stage.h"

namespace tellin {

// x is [rows, heads * (k + rest)], out [rows, heads * (n + rest)]: of each head the first k values become n,
// the others pass. `weight`: [heads * n, k], n a multiple of kGroupRows, packed for kFloat32.
struct HeadLinear {
  const Buffer* x;
  const PackedMatrix* weight;
  const Buffer* out;
  int64_t num_heads;

  int64_t n() const { return weight->n / num_heads; }
  int64_t rest() const { return x->width / num_heads - weight->k; }
};

class HeadLinearStage final : public Stage {
 public:
  HeadLinearStage(const KernelTables& kernels, const HeadLinear& op) : kernels_(kernels), op_(op) {}

  std::string kind() const override { return "head_linear"; }
  int64_t prepare(const Pass& pass) noexcept override;
  void run(int64_t task, int member) noexcept override;
  bool quantize_output(const Buffer& out, ActPrecision precision) override;

 private:
  const KernelTables kernels_;
  const HeadLinear op_;
  std::vector<ActPrecision> output_precisions_;
  int64_t num_rows_ = 0, num_tiles_ = 0;
};

}  // namespace tellin

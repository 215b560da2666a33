// Linear layers of one input: tiles of tokens x output groups, each finished (bias, residual, gate) while it
// is in cache.
#pragma once
#include <vector>

#include "stage.h"

namespace tellin {

// out = (x w^T + bias) + residual, or with `up`: act(x w^T + bias) * (x up^T + up_bias).
struct LinearPart {
  const PackedMatrix* weight = nullptr;  // and `up`: packed for `precision`
  ActPrecision precision = ActPrecision::kInt8;
  const float* bias = nullptr;
  const PackedMatrix* up = nullptr;
  const float* up_bias = nullptr;
  Activation act = Activation::kSilu;
  const Buffer* out = nullptr;
  const Buffer* residual = nullptr;
};

class LinearStage final : public Stage {
 public:
  LinearStage(const KernelTables& kernels, int num_threads, const Buffer* x, std::vector<LinearPart> parts);

  const Buffer* input() const { return x_; }

  std::string kind() const override;
  int64_t prepare(const Pass& pass) noexcept override;
  const int64_t* shares() const noexcept override;
  void run(int64_t task, int member) noexcept override;
  bool quantize_output(const Buffer& out, ActPrecision precision) override;
  bool find_maxima(Buffer& out) override;
  void keep_values() override { keeps_values_ = true; }

 private:
  struct Chunk {
    int32_t part;
    int32_t begin, end;  // groups
  };
  void cut_shares();
  void note_maxima(const Buffer& out, int64_t m0, int64_t m1, int64_t column, int64_t count) const;
  void gate(const LinearPart& part, int64_t rows, int64_t column, int64_t count, float* gate, float* out,
            int64_t ldo) const;
  void finish(const LinearPart& part, int64_t m0, int64_t m1, int64_t column, int64_t count,
              float* scratch) const;
  void product(ActPrecision precision, const PackedMatrix& w, int64_t m0, int64_t m1, const Chunk& chunk,
               float* out, int64_t ldo) const;

  const KernelTables kernels_;
  const int num_threads_;
  const Buffer* x_;
  const std::vector<LinearPart> parts_;
  std::vector<ActPrecision> output_precisions_;  // in which the output is quantised
  bool finds_maxima_ = false;
  bool keeps_values_ = false;                       // of a gated layer; others always write them
  std::vector<Chunk> small_chunks_, large_chunks_;  // for few rows, for many
  std::vector<int64_t> small_shares_;  // of small_chunks_: where each member's begin, and the end
  const std::vector<Chunk>* chunks_ = nullptr;
  std::vector<MappedMemory> scratch_;  // per member, for a tile of each matrix
  int64_t tile_floats_ = 0;
  int64_t num_rows_ = 0;
  int64_t block_rows_ = 0;  // rows that one member works on, mostly
  int64_t tile_rows_ = 0;
  int64_t num_tiles_ = 0;  // of a block
};

}  // namespace tellin

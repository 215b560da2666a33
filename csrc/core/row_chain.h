// Operations that treat each row by itself, chained: a task takes a few rows through all of them while they
// are in cache.
#pragma once
#include <memory>
#include <vector>

#include "elementwise_rows.h"
#include "stage.h"
#include "tellin/kv_pool.h"

namespace tellin {

// One operation on one row. A tagged struct rather than classes: the chain is walked once per row and step.
struct RowOp {
  enum class Kind {
    kEmbed,           // out = table[token] * factor, or the row that is given
    kInput,           // out = the row that is given
    kRmsNorm,         // out = rms_norm(x) * weight, in groups of `group` values
    kLayerNorm,       // out = layer_norm(x) * weight + bias
    kAngles,          // out = cosines and sines of the row's position
    kRope,            // x rotated by the angles in y
    kKvStore,         // x, y = k, v into the cache
    kActMul,          // out = act(x) * y, columns of y from `start` on
    kActivation,      // out = act(x)
    kGateRows,        // out = x * sigmoid(y), y one value
    kAdd,             // out = x + y
    kConcat,          // out = x, then y
    kAddBias,         // x += bias
    kAddGiven,        // x += the row that is given, if one is, its columns from `start` on
    kAddTable,        // x += table[position], or of the token's type
    kScale,           // x *= factor
    kScaleColumns,    // x *= weight
    kAddScaled,       // out = x + factor * (coefs[start] + bound) * y
    kMatchMagnitude,  // x as long as y
    kKeepLargest,     // x = max(0, x - mean - factor * std)
    kPositionScale,   // x *= 1 + factor * ln(1 + position / group)
    kXielu,           // out = xielu(x)
    kSoftcap,         // x = factor * tanh(x / factor)
    kQuantize,        // quantised rows of x
    kBlockMax,        // maxima of x
  };
  Kind kind;
  Buffer* x = nullptr;
  Buffer* y = nullptr;
  Buffer* out = nullptr;
  Buffer* coefs = nullptr;  // kAddScaled
  const float* weight = nullptr;
  const float* bias = nullptr;
  float factor = 1.0f;      // or epsilon
  int64_t group = 0;        // or head_dim
  int64_t offset = 0;       // kRope: the first dimension of a head that is rotated
  int64_t count = 0;        // groups or heads
  int64_t weight_step = 0;  // kRmsNorm: from one group's weights to the next's; 0: they share them
  int64_t start = 0;        // kActMul, kAddScaled, kAddGiven
  float bound = 0.0f;       // kAddScaled
  XieluNumbers xielu{};
  Activation act = Activation::kSilu;
  ActPrecision precision = ActPrecision::kInt8;
  bool interleaved = false;
  bool by_token_type = false;  // kAddTable
  bool takes_given = true;     // kEmbed: a row that is given is not looked up
  // kEmbed, kAddTable: the table as it lies in the file
  QuantType table_type = QuantType::F32;
  const uint8_t* table = nullptr;
  // kAngles
  const std::vector<double>* frequencies = nullptr;
  const std::vector<int32_t>* axes = nullptr;  // by frequency: which of a row's three positions; empty: all 0
  // kKvStore
  const KvPool* pool = nullptr;
  int64_t layer = 0;
};

class RowChain final : public Stage {
 public:
  RowChain(const KernelTables& kernels, RowKind rows) : kernels_(kernels), rows_(rows) {}

  RowKind rows() const { return rows_; }
  void append(const RowOp& op);

  std::string kind() const override;
  int64_t prepare(const Pass& pass) noexcept override;
  void run(int64_t task, int member) noexcept override;
  bool find_maxima(Buffer& out) override;

 private:
  void run_op(const RowOp& op, int64_t row) const;
  void copy_given(const RowOp& op, int64_t row) const;
  void add_given(const RowOp& op, int64_t row) const;
  void store_kv(const RowOp& op, int64_t row) const;

  const KernelTables kernels_;
  const RowKind rows_;
  std::vector<RowOp> ops_;
  int64_t values_per_row_ = 0;
  const Pass* pass_ = nullptr;
  int64_t num_rows_ = 0;
  int64_t rows_per_task_ = 1;
};

// Copies the token rows whose logits are wanted.
class GatherStage final : public Stage {
 public:
  GatherStage(const Buffer* x, const Buffer* out) : x_(x), out_(out) {}
  std::string kind() const override { return "gather_rows"; }
  int64_t prepare(const Pass& pass) noexcept override;
  void run(int64_t task, int member) noexcept override;

 private:
  static constexpr int64_t kRowsPerTask = 32;
  const Buffer* x_;
  const Buffer* out_;
  const Pass* pass_ = nullptr;
};

}  // namespace tellin

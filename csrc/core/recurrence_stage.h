// Recurrences: operations that go from row to row of a request and keep a state of it (state_pool.h).
//
// A state is a matrix per head, [depth][columns], whose columns depend on no other column. A task is some
// columns of one head of one request, for all of its rows of the pass: so what it changes is nobody else's,
// and the order of a row's operations is the same however the work is cut.
#pragma once
#include "stage.h"
#include "tellin/state_pool.h"

namespace tellin {

struct StateShape {
  int64_t num_heads;
  int64_t depth, columns;
  int64_t block;  // columns that lie side by side in memory: [columns / block][depth][block]

  int64_t head_values() const { return depth * columns; }
};

class RecurrenceStage : public Stage {
 public:
  RecurrenceStage(const KernelTables& kernels, const StateShape& shape, const StatePool* pool, int layer,
                  int num_threads)
      : kernels_(kernels), shape_(shape), pool_(pool), layer_(layer), num_threads_(num_threads) {}

  int64_t prepare(const Pass& pass) noexcept final;
  void run(int64_t task, int member) noexcept final;

 protected:
  // Columns [first, first + count) of a head.
  struct Part {
    int64_t head, first, count;
  };
  // Rows [begin, end) of the pass; the state of these columns, which is changed.
  virtual void run_rows(const Part& part, int64_t begin, int64_t end, float* state) const noexcept = 0;

  const KernelTables kernels_;
  const StateShape shape_;

 private:
  const StatePool* pool_;
  const int layer_;
  const int num_threads_;
  const Pass* pass_ = nullptr;
  int64_t parts_ = 1;  // of a head
};

class ConvStage final : public RecurrenceStage {
 public:
  // Columns of a task: their rows stay in the first-level cache while they are read again.
  static constexpr int64_t kBlock = 256;

  struct Operands {
    const Buffer* x;
    const Buffer* out;
    const float* bias;  // nullptr = none
    bool has_act;
    Activation act;
  };
  // weight [columns, kernel].
  ConvStage(const KernelTables& kernels, const StatePool* pool, int layer, int num_threads,
            const Operands& operands, const float* weight, int64_t kernel);
  std::string kind() const override { return "short_conv"; }

 protected:
  void run_rows(const Part& part, int64_t begin, int64_t end, float* state) const noexcept override;

 private:
  const Operands op_;
  std::vector<float> weight_;  // [kernel, columns]
};

class DeltaStage final : public RecurrenceStage {
 public:
  struct Operands {
    const Buffer *q, *k, *v, *a, *b, *out;
    const float *decay, *dt_bias;  // [num_v_heads]
    int64_t num_k_heads;
    bool tiled;
  };
  DeltaStage(const KernelTables& kernels, const StateShape& shape, const StatePool* pool, int layer,
             int num_threads, const Operands& operands)
      : RecurrenceStage(kernels, shape, pool, layer, num_threads), op_(operands) {}
  std::string kind() const override { return "gated_delta"; }

 protected:
  void run_rows(const Part& part, int64_t begin, int64_t end, float* state) const noexcept override;

 private:
  const Operands op_;
};

class ScanStage final : public RecurrenceStage {
 public:
  struct Operands {
    const Buffer *x, *b, *c, *dt, *out;
    const float *decay, *skip, *dt_bias;  // [num_heads]
    int64_t num_groups;
    float dt_min, dt_max;
  };
  ScanStage(const KernelTables& kernels, const StateShape& shape, const StatePool* pool, int layer,
            int num_threads, const Operands& operands)
      : RecurrenceStage(kernels, shape, pool, layer, num_threads), op_(operands) {}
  std::string kind() const override { return "selective_scan"; }

 protected:
  void run_rows(const Part& part, int64_t begin, int64_t end, float* state) const noexcept override;

 private:
  const Operands op_;
};

}  // namespace tellin

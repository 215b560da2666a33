// Mixture of experts, in two or three stages: rows choose their experts; gate and up of every expert that was
// chosen, for its rows; down of them, added up.
//
// An entry is a row and one expert that it chose. Entries are sorted by expert, then by row, so that the rows
// of an expert lie side by side for the kernels. A row's result is the sum over its experts in the order of
// their ids, whatever else is in the step and however the work is cut into tasks.
#pragma once
#include <memory>
#include <vector>

#include "stage.h"

namespace tellin {

// More are refused when a program is built: a row's scores lie on the stack.
constexpr int64_t kMaxExperts = 1024;
constexpr int64_t kMaxExpertsPerRow = 32;

struct ExpertsShape {
  int64_t num_experts, top_k;
  int64_t width, inner;  // values of a row of x, and between the matrices of an expert
  RowKind rows;

  bool operator==(const ExpertsShape& other) const {
    return num_experts == other.num_experts && top_k == other.top_k && width == other.width &&
           inner == other.inner && rows == other.rows;
  }
};

// How logits become shares.
struct ExpertsRouting {
  bool sigmoid = false;           // scores are sigmoids of the logits, not their softmax
  bool normalize = false;         // shares are divided by their sum
  const float* bias = nullptr;    // added to scores to choose by, not to shares
  float scale = 1.0f;             // of shares, at last, and
  const float* scales = nullptr;  // of each expert's
  // Experts are chosen from the `top_groups` best of `groups`. A group is as good as its largest key, or with
  // sigmoid as the sum of its two largest.
  int64_t groups = 1, top_groups = 1;

  // Scores in the order of the logits, so that those of experts that are not chosen need not be known.
  bool is_plain() const { return !sigmoid && bias == nullptr && groups == top_groups; }
};

// Who works on which rows, and memory for what lies between stages. Operations of one shape share it, for
// they run one after the other.
class ExpertsState {
 public:
  struct Entry {
    int32_t row;
    float share;
  };
  // Entries [begin, end) of one expert, of which a task takes groups [first, last); or for the sum, rows
  // [begin, end) of all experts.
  struct Task {
    int32_t expert;
    int32_t begin, end;
    int32_t first, last;
  };
  // Of one member. Rows are those of the tile that was gathered last.
  struct alignas(64) Scratch {
    MappedMemory memory;
    QuantizedRows int8{nullptr, 0}, int16{nullptr, 0};
    float* floats = nullptr;
    float* products = nullptr;
    int64_t gathered[3] = {-1, -1, -1};  // by precision: `serial`, and the first entry of the tile
    int64_t gathered_begin[3] = {-1, -1, -1};
  };

  ExpertsState(const KernelTables& kernels, int num_threads, const ExpertsShape& shape, Buffer* hidden);

  // Makes room for a step; the only function that allocates or throws.
  void reserve(int64_t rows);
  // Finds the experts of rows [begin, end), ascending, and their shares.
  void choose(const Buffer& router, const ExpertsRouting& routing, int64_t begin, int64_t end) noexcept;
  // Lists the entries of every expert once all rows have chosen.
  void sort(int64_t num_rows) noexcept;

  // Tasks are cut for shares of equal cost, and are smaller towards the end of a share.
  void begin_tasks(int64_t total_cost) noexcept;
  void cut(Task task, int64_t num_groups, int64_t group_cost, int64_t grain, int64_t most) noexcept;
  void end_tasks() noexcept;

  const ExpertsShape shape;
  Buffer* const hidden;  // a row for each entry
  const int num_threads;
  std::vector<Entry> entries;
  std::vector<int32_t> offsets;  // of every expert's entries, and their number
  std::vector<int32_t> active;   // experts that have rows
  std::vector<Task> tasks;
  std::vector<int64_t> bounds;  // of the members' shares of tasks
  std::vector<Scratch> scratch;
  int64_t serial = 0;  // counts sets of entries

 private:
  struct Choice {
    int32_t expert;
    float share;
  };
  int64_t max_tasks(int64_t rows) const;
  void pick(const float* keys, Choice* chosen) const noexcept;
  void hide_groups(const ExpertsRouting& routing, float* keys) const noexcept;
  bool share_logits(const float* logits, bool normalize, Choice* chosen) const noexcept;
  bool share_scores(const float* logits, const ExpertsRouting& routing, Choice* chosen) const noexcept;

  std::vector<Choice> choices_;  // [rows, top_k]
  std::vector<int32_t> next_;    // of every expert, while entries are sorted
  int64_t total_cost_ = 0, cost_done_ = 0;
};

// One matrix of every expert, and its bias if there are any.
struct ExpertMatrices {
  std::vector<const PackedMatrix*> of;
  std::vector<const float*> bias;
  ActPrecision precision;
};

struct ExpertsOperands {
  const Buffer* x;
  const Buffer* router;
  const Buffer* out;
  ExpertMatrices gate, up, down;
  Activation act;
  ExpertsRouting routing;
  ExpertsState* state;
};

// Rows choose their experts, if there are many rows: the next stage does it itself for few.
class RouteStage final : public Stage {
 public:
  explicit RouteStage(std::shared_ptr<const ExpertsOperands> op) : op_(std::move(op)) {}
  std::string kind() const override { return "route"; }
  int64_t prepare(const Pass& pass) noexcept override;
  void run(int64_t task, int member) noexcept override;

 private:
  const std::shared_ptr<const ExpertsOperands> op_;
  int64_t num_rows_ = 0;
};

// hidden[entry] = act(gate x) * (up x)
class ExpertsGateStage final : public Stage {
 public:
  ExpertsGateStage(const KernelTables& kernels, std::shared_ptr<const ExpertsOperands> op)
      : kernels_(kernels), op_(std::move(op)) {}
  std::string kind() const override { return "experts(gate)"; }
  int64_t prepare(const Pass& pass) noexcept override;
  const int64_t* shares() const noexcept override { return op_->state->bounds.data(); }
  void run(int64_t task, int member) noexcept override;

 private:
  struct Rows;
  Rows rows_of(ActPrecision precision, const ExpertsState::Task& task, ExpertsState::Scratch& scratch) const;
  void cut_tasks() noexcept;

  const KernelTables kernels_;
  const std::shared_ptr<const ExpertsOperands> op_;
};

// out[row] = sum of share * (down hidden[entry]) over the row's entries
class ExpertsDownStage final : public Stage {
 public:
  ExpertsDownStage(const KernelTables& kernels, std::shared_ptr<const ExpertsOperands> op)
      : kernels_(kernels), op_(std::move(op)) {}
  std::string kind() const override { return "experts(down)"; }
  int64_t prepare(const Pass& pass) noexcept override;
  const int64_t* shares() const noexcept override { return op_->state->bounds.data(); }
  void run(int64_t task, int member) noexcept override;

 private:
  const KernelTables kernels_;
  const std::shared_ptr<const ExpertsOperands> op_;
};

}  // namespace tellin

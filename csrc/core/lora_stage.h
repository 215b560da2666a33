// LoRA adapters: out += (x A^T) B^T for the rows whose request has an adapter, in two stages per operation.
// A step without such rows skips both.
//
// The products are those of the linear kernels in float32, so a row's value does not depend on its
// neighbours or on how rows are cut into tasks.
#pragma once
#include <memory>
#include <vector>

#include "stage.h"

namespace tellin {

// One adapter's matrices for one site, packed.
struct LoraMatrices {
  PackedMatrix a;  // [rank, in]; data is nullptr if the adapter has nothing for the site
  PackedMatrix b;  // [out, rank]
};

// Rows [begin, end) of a pass that have the adapter in `slot`.
struct LoraRows {
  int32_t slot;
  int64_t begin, end;
};

// The adapters that are loaded, and the linear layers ("sites") that they may change.
struct LoraState {
  struct Site {
    int64_t in, out, max_rank;
  };
  struct Adapter {
    MappedMemory memory;
    std::vector<LoraMatrices> sites;  // by site
  };
  std::vector<Site> sites;
  std::vector<std::unique_ptr<Adapter>> slots;  // nullptr = empty
  // Buffers of x A^T, by part of an operation; shared by all operations, for they run one after the other.
  std::vector<Buffer*> low[2];        // by kind of rows
  std::vector<MappedMemory> scratch;  // per member, for one tile of an expansion

  const LoraMatrices* find(int32_t slot, int site) const {
    const LoraMatrices& found = slots[static_cast<size_t>(slot)]->sites[static_cast<size_t>(site)];
    return found.a.data == nullptr ? nullptr : &found;
  }
};

// Rows per task: enough to reuse a matrix while it is in cache, few enough to keep all members busy.
constexpr int64_t kLoraRows = 48;
// Output columns per task of an expansion.
constexpr int64_t kLoraColumns = 512;

// Appends the rows of a run of requests' rows with the same slot, cut to kLoraRows.
void append_lora_rows(int32_t slot, int64_t begin, int64_t end, std::vector<LoraRows>* rows);

// low = x A^T for every part.
class LoraShrinkStage final : public Stage {
 public:
  LoraShrinkStage(const KernelTables& kernels, const LoraState* state, const Buffer* x, int first_site,
                  std::vector<Buffer*> low)
      : kernels_(kernels), state_(state), x_(x), first_site_(first_site), low_(std::move(low)) {}
  std::string kind() const override { return "lora(shrink)"; }
  int64_t prepare(const Pass& pass) noexcept override;
  void run(int64_t task, int member) noexcept override;

 private:
  const KernelTables kernels_;
  const LoraState* state_;
  const Buffer* x_;
  const int first_site_;
  const std::vector<Buffer*> low_;
  const std::vector<LoraRows>* rows_ = nullptr;
};

// A stage with the tasks of two that do not touch what the other writes: one wait for both.
class SideBySide final : public Stage {
 public:
  SideBySide(std::unique_ptr<Stage> main, std::unique_ptr<Stage> side)
      : main_(std::move(main)), side_(std::move(side)) {}
  std::string kind() const override { return main_->kind(); }
  int64_t prepare(const Pass& pass) noexcept override {
    num_main_ = main_->prepare(pass);
    num_side_ = side_->prepare(pass);
    return num_main_ + num_side_;
  }
  const int64_t* shares() const noexcept override { return num_side_ == 0 ? main_->shares() : nullptr; }
  void run(int64_t task, int member) noexcept override {
    if (task < num_main_) {
      main_->run(task, member);
    } else {
      side_->run(task - num_main_, member);
    }
  }

 private:
  const std::unique_ptr<Stage> main_, side_;
  int64_t num_main_ = 0, num_side_ = 0;
};

// out += low B^T for every part.
class LoraExpandStage final : public Stage {
 public:
  LoraExpandStage(const KernelTables& kernels, LoraState* state, int first_site, std::vector<Buffer*> low,
                  std::vector<Buffer*> outs);
  std::string kind() const override { return "lora(expand)"; }
  int64_t prepare(const Pass& pass) noexcept override;
  void run(int64_t task, int member) noexcept override;

 private:
  struct Chunk {
    int32_t part;
    int64_t begin, end;  // groups
  };
  const KernelTables kernels_;
  LoraState* state_;
  const int first_site_;
  const std::vector<Buffer*> low_, outs_;
  std::vector<Chunk> chunks_;
  const std::vector<LoraRows>* rows_ = nullptr;
};

}  // namespace tellin

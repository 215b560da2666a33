// What a Program is made of, shared by its builder (program.cpp) and its runner (program_run.cpp).
#pragma once
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "attention_stage.h"
#include "experts_stage.h"
#include "lora_stage.h"
#include "row_chain.h"
#include "stage.h"
#include "tellin/program.h"

namespace tellin {

struct Program::Weight {
  TensorView source;
  ActPrecision precision;
  PackedMatrix packed;
  int64_t packed_rows = 0;
  bool is_shared = false;  // lies in another program's arena
};

struct Program::State {
  KernelTables kernels{};
  bool finalized = false;
  bool has_causal_attention = false;
  bool attends_logit_rows = false;
  bool has_full_attention = false;    // encoder: a request must be in one pass
  bool has_windows = false;           // some of its attention is within windows
  bool logits_before_gather = false;  // a gather follows work on logit rows: stages cannot be reordered
  int64_t vocab_size = 0;
  int64_t num_embeddings = 0;   // least number of rows of any embedding table
  int64_t embed_width = 0;      // of all embeddings and inputs; -1 = they differ
  int64_t given_width = 0;      // of rows that are given: at least this, for what is added later
  bool needs_embeds = false;    // every row must be given
  int64_t num_positions = -1;   // least number of rows of any position table
  int64_t num_token_types = 0;  // likewise of token type tables; 0 = the plan has none

  std::vector<std::unique_ptr<Buffer>> buffers;  // of the plan, then internal ones
  std::vector<std::unique_ptr<std::vector<float>>> vectors;
  struct Rotary {
    std::unique_ptr<std::vector<double>> frequencies;
    float attention_factor;
    std::unique_ptr<std::vector<int32_t>> axes;
    // By kind of rows: [num_rows, cosines then sines], filled before the first rope of a pass.
    Buffer* angles[2] = {nullptr, nullptr};
  };
  std::vector<Rotary> rotaries;
  // Buffers whose quantised rows match their values, while building.
  std::vector<std::pair<const Buffer*, ActPrecision>> quantized_valid;
  // The chains that wrote buffers last, while building.
  std::vector<std::pair<const Buffer*, RowChain*>> chain_of;
  // Stages whose output has been read as quantised rows at most, while building.
  std::vector<std::pair<const Buffer*, Stage*>> unread;

  struct StageEntry {
    std::unique_ptr<Stage> stage;
    RowKind rows;
  };
  std::vector<StageEntry> stages;
  std::vector<AttentionShape> shapes;
  std::vector<AttentionScratch> scratch;  // per member

  LoraState lora;
  std::vector<std::unique_ptr<ExpertsState>> experts;  // by shape

  // Of the running step; kept between steps for their memory.
  std::vector<int64_t> slots;
  std::vector<int32_t> logit_positions;
  std::vector<int32_t> logit_seen_ends;
  std::vector<int32_t> embed_index;
  std::vector<int64_t> slot_taken;  // state slots of the step, ascending
  std::vector<std::unique_ptr<Pass>> passes;

  int64_t num_tokens = -1;  // of the last step; -1 = none yet
  int64_t num_logits = 0;

  bool profiling = false;
  std::vector<double> stage_seconds;
  // One list per member, on cache lines of its own: members write at the same time.
  struct alignas(64) MemberSpans {
    std::vector<StageSpan> spans;
    int64_t serial = -1;  // of the stage run that the last span belongs to
  };
  std::vector<MemberSpans> member_spans;
  int64_t stage_serial = 0;  // counts stage runs while profiling

  // Lowering. Each throws std::invalid_argument for operands that do not exist or do not fit.
  Buffer& buffer(int id) const;
  const float* vector(int id, int64_t width) const;  // nullptr for id -1
  // Appends to the last stage if that is a chain over the same rows, else starts one.
  RowChain& chain(RowKind rows);
  void append(const RowOp& op, Buffer& target);
  // The same, without a buffer that changes.
  void append(const RowOp& op, RowKind rows);
  // Makes quantised rows of x: once per value of x, shared by its readers.
  void quantize(Buffer& x, ActPrecision precision);
  // Every operation notes what float values it reads, then what it writes.
  void reads(const Buffer& buffer);
  void wrote(const Buffer& buffer);
  // Notes that rows of this width can be given.
  void takes_embeds(int64_t width);
  // Values of a row that is given; -1 = none can be.
  int64_t width_of_given() const { return embed_width > 0 ? std::max(embed_width, given_width) : -1; }
  size_t shape_index(const AttentionShape& shape);
  ExpertsState* experts_state(const ExpertsShape& shape, int num_threads);
};

}  // namespace tellin

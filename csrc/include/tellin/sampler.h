// The sampler: logits of a step to token ids and log-probabilities, one independent row at a time.
//
// It keeps the sampling parameters of live requests in slots, set once per request. A call names, for every
// row of logits, the slot it belongs to and how many ids of that slot's history precede it; everything else
// (counts for penalties, position of the random draw) follows from these, so a row's result is a pure
// function of its logits, parameters and history: not of the batch, the order or the thread.
//
// Order of operations: grammar mask, allowed ids, bad words, min tokens, logit bias, repetition / frequency /
// presence penalties, (greedy choice), temperature, min-p, top-k, top-p, draw. "Better" is total: larger
// value first, lower id among equals; top-k keeps exactly the k best, and top_k = 1 is greedy. Random choice
// is exact integer arithmetic over the weights of sampling_kernels.h.
#pragma once
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "tellin/sampling_kernels.h"
#include "tellin/thread_team.h"

namespace tellin {

constexpr int32_t kNoLogprobs = -1;
constexpr int32_t kAllLogprobs = -2;

struct SlotParams {
  float temperature = 0.0f;  // 0 = greedy
  double top_p = 1.0;
  int32_t top_k = 0;  // 0 = off
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
  float frequency_penalty = 0.0f;
  float presence_penalty = 0.0f;
  uint64_t rng_key = 0;
  int32_t min_tokens = 0;
  int32_t num_logprobs = kNoLogprobs;  // top ids wanted beside the sampled one
  bool has_allowed_ids = false;
  std::vector<int32_t> allowed_ids;  // ids outside [0, n) are ignored, in all lists
  std::vector<int32_t> stop_ids;     // forbidden while fewer than min_tokens ids were output
  std::vector<int32_t> bias_ids;
  std::vector<float> bias_values;
  std::vector<std::vector<int32_t>> bad_words;
  std::vector<int32_t> logprob_ids;  // report these ids instead of the top ones
};

enum class LogprobsMode : int32_t {
  kRawLogprobs = 0,
  kRawLogits = 1,
  kProcessedLogprobs = 2,
  kProcessedLogits = 3
};

// Parts of the pipeline, for callers that run code of their own between them.
enum SampleStage : int32_t {
  kStageMasks = 1,      // check for NaN and +infinity, grammar mask, allowed ids, bad words, min tokens, bias
  kStagePenalties = 2,  // repetition, frequency, presence
  kStageScale = 4,      // divide by temperature and apply min-p in place
  kStageFinish = 8,     // temperature, min-p, top-k, top-p, draw, log-probabilities
  kStageScaled = 16,    // no part: says that kStageScale was run, so kStageFinish omits temperature and min-p
};
constexpr int32_t kStageDefault = kStageMasks | kStagePenalties | kStageFinish;

enum RowStatus : int32_t {
  kRowOk = 0,
  kRowNotFinite = 1,   // the model gave NaN or +infinity
  kRowNothingLeft = 2  // the masks leave no id
};

struct SampleBatch {
  float* logits;  // [*, logits_stride]; rows are overwritten
  int64_t logits_stride;
  int64_t num_rows;
  const int32_t* slots;         // [num_rows]
  const int32_t* logits_rows;   // [num_rows] row of logits
  const int32_t* history_lens;  // [num_rows] ids of the slot's history before the sampled one
  const int32_t* prompt_lens;   // [num_rows] how many of them are prompt
  const int32_t* history;       // [*, history_stride] by slot
  int64_t history_stride;
  const int32_t* bitmask;  // [*, bitmask_stride], or null
  int64_t bitmask_stride;
  const int32_t* bitmask_rows;  // [num_rows], -1 = unconstrained; null if bitmask is
  const float* raw;             // [*, raw_stride] logits before another's changes, or null
  int64_t raw_stride;
  const int32_t* raw_rows;  // [num_rows], -1 = the row of logits itself; null if raw is
  const float* maxima;      // [*, maxima_stride] by row of logits: its block maxima (block_max of
                            // sampling_kernels.h), unless null
  int64_t maxima_stride;
  int32_t stages;
  int32_t* tokens;       // [num_rows] out
  int32_t* status;       // [num_rows] in and out: rows whose status is not kRowOk are skipped
  int32_t* logprob_ids;  // [num_rows, logprob_stride] out, or null: sampled id, then the others
  float* logprobs;       // [num_rows, logprob_stride] out
  int64_t logprob_stride;
  int32_t* ranks;  // [num_rows] out: entries at least as large as the sampled one's
};

// What filters leave: entries > lowest, and entries equal to it up to an id.
struct Cut {
  static constexpr int32_t kAnyId = std::numeric_limits<int32_t>::max();

  float lowest = -std::numeric_limits<float>::infinity();
  int32_t last_id = kAnyId;

  bool keeps(float value, int64_t id) const {
    return (value > lowest) | ((value == lowest) & (id <= last_id));
  }
};

// The entries of a row that `cut` keeps, in id order, and the sum of their weights.
class EntryList {
 public:
  EntryArrays arrays() const { return {values_.get(), ids_.get(), weights_.get()}; }
  // Makes room for the entries of a row of n; what the list held is lost. Pages that no entry reaches stay
  // untouched.
  void make_room(int64_t n);

  int64_t size = 0;
  uint64_t mass = 0;
  Cut cut;

 private:
  int64_t room_ = 0;
  std::unique_ptr<float[]> values_;
  std::unique_ptr<int32_t[]> ids_;
  std::unique_ptr<uint64_t[]> weights_;
};

// Entry of a row, for log-probabilities.
struct Candidate {
  float value;
  int32_t id;
};

// Buffers of one thread.
struct SamplerScratch {
  std::vector<float> maxima, sorted_maxima, raw, raw_maxima;
  std::vector<uint64_t> masses, tail_masses;
  EntryList listed, rest;
  std::vector<Candidate> best;
  std::vector<uint32_t> counts;
  std::vector<int32_t> touched;     // blocks whose maxima are to be found anew
  std::vector<uint8_t> is_touched;  // by block; 0 before and after
};

// Mass of a row, and the bounds on it that draws begin with when entries down to `listed_nats` below the
// row's maximum are listed and of blocks whose maximum lies down to `nats` below it the others are estimated:
// what every draw relies on, for tests.
struct MassRange {
  uint64_t least, exact, most;
};
MassRange mass_range(const SamplingKernels& kernels, const float* x, int64_t n, float inv_t, float nats,
                     float listed_nats);

class Sampler {
 public:
  // `num_ids`: entries of a row that may be sampled (the tokenizer's size); the rest of a row is never read.
  Sampler(int64_t num_ids, LogprobsMode mode, const SamplingKernels* kernels)
      : num_ids_(num_ids), mode_(mode), kernels_(kernels) {}
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;

  void set_slot(int64_t slot, SlotParams params);
  const SlotParams* slot(int64_t slot) const;
  // Columns of the log-probability table that a slot asks for, the sampled id included; 0 = none.
  int64_t num_logprob_columns(int64_t slot) const;
  int64_t num_ids() const { return num_ids_; }
  const SamplingKernels& kernels() const { return *kernels_; }

  // Runs the stages on every row, on the threads of `team` if there is one; rows must name slots that were
  // set and lie inside the arrays. Throws std::bad_alloc; what rows hold is then undefined.
  void run(const SampleBatch& batch, ThreadTeam* team);

  // Log-probabilities (or logits, by mode) of the given ids and of the k best of each row [num_rows, stride];
  // outputs as in SampleBatch, with k + 1 columns. status[i] is kRowNotFinite for rows that hold NaN or
  // +infinity. `maxima` [num_rows, maxima_stride] are the rows' block maxima, unless null.
  void prompt_logprobs(const float* logits, int64_t stride, const float* maxima, int64_t maxima_stride,
                       int64_t num_rows, const int32_t* ids, int64_t k, int32_t* out_ids, float* out_values,
                       int64_t out_stride, int32_t* ranks, int32_t* status, ThreadTeam* team);

 private:
  template <class F>
  void for_each_row(int64_t num_rows, ThreadTeam* team, F&& f);
  void run_row(const SampleBatch& batch, int64_t row, SamplerScratch& scratch) const;

  int64_t num_ids_;
  LogprobsMode mode_;
  const SamplingKernels* kernels_;
  std::vector<SlotParams> slots_;
  std::vector<SamplerScratch> scratch_ = std::vector<SamplerScratch>(1);
};

}  // namespace tellin

#include "tellin/sampler.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <new>
#include <stdexcept>
#include <utility>

#include "sampler_select.h"
#include "tellin/philox.h"

namespace tellin {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr float kPosInf = std::numeric_limits<float>::infinity();
constexpr int64_t kMinTeamEntries = 1 << 19;  // greedy a few us of work on one core, top-p 0.1 ms
constexpr size_t kScattered = 16;             // blocks in order that cost as much as one somewhere
constexpr uint32_t kAdjusted = 0x80000000u;   // mark in the counts: the repetition penalty is applied

bool is_id(int32_t id, int64_t n) {
  return id >= 0 && id < n;
}

void forbid(float* x, int64_t n, const std::vector<int32_t>& ids) {
  for (const int32_t id : ids) {
    if (is_id(id, n)) x[id] = kNegInf;
  }
}

void keep_allowed(float* x, int64_t n, const std::vector<int32_t>& allowed) {
  std::vector<std::pair<int32_t, float>> kept;
  kept.reserve(allowed.size());
  for (const int32_t id : allowed) {
    if (is_id(id, n)) kept.emplace_back(id, x[id]);
  }
  std::fill(x, x + n, kNegInf);
  for (const auto& [id, value] : kept) x[id] = value;
}

// Forbids the last id of every bad word whose other ids are the last outputs.
void forbid_bad_words(float* x, int64_t n, const std::vector<std::vector<int32_t>>& words,
                      const int32_t* outputs, int64_t num_outputs) {
  for (const std::vector<int32_t>& word : words) {
    const int64_t prefix = static_cast<int64_t>(word.size()) - 1;
    if (prefix > num_outputs || !is_id(word.back(), n)) continue;
    if (std::equal(word.begin(), word.end() - 1, outputs + num_outputs - prefix)) x[word.back()] = kNegInf;
  }
}

void add_bias(float* x, int64_t n, const SlotParams& params) {
  for (size_t i = 0; i < params.bias_ids.size(); ++i) {
    if (is_id(params.bias_ids[i], n)) x[params.bias_ids[i]] += params.bias_values[i];
  }
}

// Repetition over prompt and output, then frequency and presence over the output. `counts` holds n zeros
// before and after; the top bit marks ids that are done.
void penalize(float* x, int64_t n, const SlotParams& params, const int32_t* history, int64_t prompt_len,
              int64_t history_len, std::vector<uint32_t>& counts) {
  counts.resize(static_cast<size_t>(n), 0);
  for (int64_t i = prompt_len; i < history_len; ++i) {
    if (is_id(history[i], n)) ++counts[static_cast<size_t>(history[i])];
  }
  const float r = params.repetition_penalty;
  for (int64_t i = 0; i < history_len; ++i) {
    const int32_t id = history[i];
    if (!is_id(id, n)) continue;
    uint32_t& count = counts[static_cast<size_t>(id)];
    if ((count & kAdjusted) != 0) continue;
    float value = x[id];
    value = value > 0.0f ? value / r : value * r;
    value -= params.frequency_penalty * static_cast<float>(count);
    if (count > 0) value -= params.presence_penalty;
    x[id] = value;
    count |= kAdjusted;
  }
  for (int64_t i = 0; i < history_len; ++i) {
    if (is_id(history[i], n)) counts[static_cast<size_t>(history[i])] = 0;
  }
}

bool has_penalties(const SlotParams& p) {
  return p.repetition_penalty != 1.0f || p.frequency_penalty != 0.0f || p.presence_penalty != 0.0f;
}

// Block maxima of the first n entries of a row: those the caller knows, but for a block that ends elsewhere,
// or if it has none, those found now.
void find_maxima(const SamplingKernels& kernels, const float* x, int64_t n, const float* known,
                 std::vector<float>& maxima) {
  maxima.resize(static_cast<size_t>(num_sample_blocks(n)));
  if (known == nullptr) {
    kernels.block_max(x, n, maxima.data());
    return;
  }
  std::copy(known, known + maxima.size(), maxima.begin());
  const int64_t rest = n % kSampleBlock;
  if (rest != 0) kernels.block_max(x + n - rest, rest, &maxima.back());
}

bool is_raw(LogprobsMode mode) {
  return mode == LogprobsMode::kRawLogprobs || mode == LogprobsMode::kRawLogits;
}

bool is_logits(LogprobsMode mode) {
  return mode == LogprobsMode::kRawLogits || mode == LogprobsMode::kProcessedLogits;
}

// How entries of a row become reported values: x / T, or (x - max) / T - log(mass).
struct ValueMap {
  bool logits;
  float max;
  float temperature;
  double log_mass;

  float operator()(float x) const {
    if (logits) return temperature == 1.0f ? x : x / temperature;
    return static_cast<float>((static_cast<double>(x) - max) / temperature - log_mass);
  }
};

double log_of_mass(uint64_t mass) {
  return std::log(static_cast<double>(mass)) - kWeightBits * 0.69314718055994530942;
}

double log_of_sum(const LogitsRow& row) {
  return std::log(row.kernels->sum_exp(row.x, row.n, row.maxima, row.max, row.inv_t));
}

// One row of the table: the chosen id, then `others` (or the best ids).
void report(const LogitsRow& row, const ValueMap& value, int32_t chosen, const std::vector<int32_t>* others,
            int64_t num_best, SamplerScratch& scratch, int32_t* ids, float* values, int32_t* rank) {
  ids[0] = chosen;
  values[0] = value(row.x[chosen]);
  *rank = static_cast<int32_t>(row.kernels->count_at_least(row.x, row.n, row.maxima, row.x[chosen]));
  if (others != nullptr) {
    for (size_t i = 0; i < others->size(); ++i) {
      const int32_t id = (*others)[i];
      ids[i + 1] = id;
      values[i + 1] = is_id(id, row.n) ? value(row.x[id]) : kNegInf;
    }
  } else if (num_best > 0) {
    gather_top_k(row, num_best, scratch);
    std::vector<Candidate>& best = scratch.best;
    std::sort(best.begin(), best.end(), better);
    for (size_t i = 0; i < best.size(); ++i) {
      ids[i + 1] = best[i].id;
      values[i + 1] = value(best[i].value);
    }
  }
}

// The pipeline on one row.
class RowRun {
 public:
  RowRun(const SamplingKernels& kernels, int64_t n, LogprobsMode mode, const SlotParams& params,
         const SampleBatch& batch, int64_t row, int64_t columns, SamplerScratch& scratch)
      : kernels_(kernels), n_(n), mode_(mode), params_(params), batch_(batch), row_(row), scratch_(scratch) {
    x_ = batch.logits + batch.logits_rows[row] * batch.logits_stride;
    history_ = batch.history + batch.slots[row] * batch.history_stride;
    prompt_len_ = batch.prompt_lens[row];
    history_len_ = batch.history_lens[row];
    if (batch.logprob_ids != nullptr) columns_ = columns;
    scratch_.is_touched.resize(static_cast<size_t>(num_sample_blocks(n)), 0);
    forget_touched();
  }

  void run() {
    if ((batch_.stages & kStageMasks) != 0 && !apply_masks()) return;
    if ((batch_.stages & kStagePenalties) != 0 && has_penalties(params_)) {
      keep_raw();
      fetch_history();
      penalize(x_, n_, params_, history_, prompt_len_, history_len_, scratch_.counts);
      for (int64_t i = 0; i < history_len_; ++i) touch(history_[i]);
    }
    if ((batch_.stages & kStageScale) != 0) scale();
    if ((batch_.stages & kStageFinish) != 0) finish();
  }

 private:
  // Brings the maxima up to date. Returns false if an entry is NaN or +infinity.
  bool refresh_maxima() {
    const size_t many = scratch_.is_touched.size() / kScattered;
    if (!maxima_valid_ || scratch_.touched.size() > many) {
      find_maxima(kernels_, x_, n_, nullptr, scratch_.maxima);
      maxima_valid_ = true;
    } else {
      for (const int32_t block : scratch_.touched) {
        const int64_t begin = block * kSampleBlock;
        kernels_.block_max(x_ + begin, std::min(kSampleBlock, n_ - begin),
                           &scratch_.maxima[static_cast<size_t>(block)]);
      }
    }
    forget_touched();
    return max_of_maxima(kernels_, scratch_.maxima.data(), n_) < kPosInf;
  }

  // The blocks that penalties change lie anywhere, and nothing has read them since the head wrote them.
  __attribute__((always_inline)) void fetch_history() const {  // out of line, GCC takes it for without effect
    if (!maxima_valid_) return;
    for (int64_t i = 0; i < history_len_; ++i) {
      if (!is_id(history_[i], n_)) continue;
      const float* block = x_ + history_[i] / kSampleBlock * kSampleBlock;
      for (int64_t j = 0; j < kSampleBlock; j += 16) __builtin_prefetch(block + j);
    }
  }

  // Entry `id` was changed.
  void touch(int32_t id) {
    if (!maxima_valid_ || !is_id(id, n_)) return;
    const int32_t block = id / static_cast<int32_t>(kSampleBlock);
    if (scratch_.is_touched[static_cast<size_t>(block)] != 0) return;
    scratch_.is_touched[static_cast<size_t>(block)] = 1;
    scratch_.touched.push_back(block);
  }
  void touch(const std::vector<int32_t>& ids) {
    for (const int32_t id : ids) touch(id);
  }
  void forget_touched() {
    for (const int32_t block : scratch_.touched) scratch_.is_touched[static_cast<size_t>(block)] = 0;
    scratch_.touched.clear();
  }

  // Copies the row for raw log-probabilities before its first change, unless the caller did.
  void keep_raw() {
    if (columns_ == 0 || !is_raw(mode_) || raw_kept_ || (batch_.stages & kStageFinish) == 0) return;
    if (batch_.raw != nullptr && batch_.raw_rows[row_] >= 0) return;
    scratch_.raw.assign(x_, x_ + n_);
    if (maxima_valid_) {
      scratch_.raw_maxima = scratch_.maxima;
    } else {
      find_maxima(kernels_, x_, n_, nullptr, scratch_.raw_maxima);
    }
    raw_kept_ = true;
  }

  bool apply_masks() {
    const float* known =
        batch_.maxima == nullptr ? nullptr : batch_.maxima + batch_.logits_rows[row_] * batch_.maxima_stride;
    find_maxima(kernels_, x_, n_, known, scratch_.maxima);
    maxima_valid_ = true;
    if (!refresh_maxima()) {
      batch_.status[row_] = kRowNotFinite;
      return false;
    }
    const int64_t num_outputs = history_len_ - prompt_len_;
    const int32_t mask_row = batch_.bitmask == nullptr ? -1 : batch_.bitmask_rows[row_];
    const bool below_min_tokens = num_outputs < params_.min_tokens && !params_.stop_ids.empty();
    if (mask_row < 0 && !params_.has_allowed_ids && params_.bad_words.empty() && !below_min_tokens &&
        params_.bias_ids.empty()) {
      return true;
    }
    keep_raw();
    maxima_valid_ = mask_row < 0 && !params_.has_allowed_ids;
    if (mask_row >= 0) kernels_.apply_bitmask(x_, n_, batch_.bitmask + mask_row * batch_.bitmask_stride);
    if (params_.has_allowed_ids) keep_allowed(x_, n_, params_.allowed_ids);
    forbid_bad_words(x_, n_, params_.bad_words, history_ + prompt_len_, num_outputs);
    if (below_min_tokens) forbid(x_, n_, params_.stop_ids);
    add_bias(x_, n_, params_);
    for (const std::vector<int32_t>& word : params_.bad_words) touch(word.back());
    if (below_min_tokens) touch(params_.stop_ids);
    touch(params_.bias_ids);
    return true;
  }

  void scale() {
    if (params_.temperature <= 0.0f) return;
    if (params_.temperature != 1.0f) kernels_.divide(x_, n_, params_.temperature);
    maxima_valid_ = false;
    if (params_.min_p > 0.0f && refresh_maxima()) {
      const LogitsRow row = this->row(1.0f);
      const float lowest = row.max > kNegInf ? min_p_lowest(row, params_.min_p) : kNegInf;
      for (int64_t i = 0; i < n_; ++i) x_[i] = x_[i] >= lowest ? x_[i] : kNegInf;
    }
  }

  LogitsRow row(float inv_t) const {
    return {&kernels_, x_, n_, scratch_.maxima.data(), max_of_maxima(kernels_, scratch_.maxima.data(), n_),
            inv_t};
  }

  void finish() {
    if (!refresh_maxima()) {
      batch_.status[row_] = kRowNotFinite;
      return;
    }
    const bool greedy = params_.temperature <= 0.0f;
    const bool scaled = (batch_.stages & kStageScaled) != 0 || greedy;
    const float temperature = scaled ? 1.0f : params_.temperature;
    const LogitsRow row = this->row(1.0f / temperature);
    if (row.max == kNegInf) {
      batch_.status[row_] = kRowNothingLeft;
      return;
    }
    const bool processed = columns_ > 0 && !is_raw(mode_);
    int32_t id = 0;
    uint64_t mass = 0;
    if (greedy) {
      id = argmax(row);
    } else {
      const PhiloxBlock bits = philox4x32(params_.rng_key, static_cast<uint32_t>(history_len_ - prompt_len_),
                                          RandomPurpose::kSample);
      const Draw draw = filter_and_draw(row, params_.top_k, params_.top_p, scaled ? 0.0f : params_.min_p,
                                        {philox_u64(bits, 0), philox_u64(bits, 1)}, processed, scratch_);
      id = draw.id;
      mass = draw.mass;
    }
    batch_.tokens[row_] = id;
    if (columns_ > 0) write_logprobs(row, temperature, id, mass);
  }

  void write_logprobs(LogitsRow row, float temperature, int32_t id, uint64_t mass) {
    float value_temperature = temperature;
    if (is_raw(mode_)) {
      row = raw_row(row);
      value_temperature = 1.0f;
      mass = 0;
    } else {
      kernels_.block_max(x_, n_, scratch_.maxima.data());  // entries were dropped
    }
    ValueMap value{is_logits(mode_), row.max, value_temperature, 0.0};
    if (!value.logits) value.log_mass = mass != 0 ? log_of_mass(mass) : log_of_sum(row);
    const int64_t at = row_ * batch_.logprob_stride;
    const bool by_ids = !params_.logprob_ids.empty();
    report(row, value, id, by_ids ? &params_.logprob_ids : nullptr, columns_ - 1, scratch_,
           batch_.logprob_ids + at, batch_.logprobs + at, batch_.ranks + row_);
  }

  LogitsRow raw_row(const LogitsRow& current) {
    const bool from_caller = batch_.raw != nullptr && batch_.raw_rows[row_] >= 0;
    if (!from_caller && !raw_kept_) {
      return {&kernels_, current.x, n_, current.maxima, current.max, 1.0f};
    }
    if (from_caller) {
      const float* raw = batch_.raw + batch_.raw_rows[row_] * batch_.raw_stride;
      scratch_.raw.assign(raw, raw + n_);
      find_maxima(kernels_, raw, n_, nullptr, scratch_.raw_maxima);
    }
    const float max = max_of_maxima(kernels_, scratch_.raw_maxima.data(), n_);
    return {&kernels_, scratch_.raw.data(), n_, scratch_.raw_maxima.data(), max, 1.0f};
  }

  const SamplingKernels& kernels_;
  const int64_t n_;
  const LogprobsMode mode_;
  const SlotParams& params_;
  const SampleBatch& batch_;
  const int64_t row_;
  SamplerScratch& scratch_;
  float* x_;
  const int32_t* history_;
  int64_t prompt_len_, history_len_;
  int64_t columns_ = 0;
  bool maxima_valid_ = false;
  bool raw_kept_ = false;
};

}  // namespace

void Sampler::set_slot(int64_t slot, SlotParams params) {
  if (slot < 0) throw std::invalid_argument("slot must not be negative");
  if (static_cast<size_t>(slot) >= slots_.size()) slots_.resize(static_cast<size_t>(slot) + 1);
  slots_[static_cast<size_t>(slot)] = std::move(params);
}

const SlotParams* Sampler::slot(int64_t slot) const {
  return slot < 0 || static_cast<size_t>(slot) >= slots_.size() ? nullptr
                                                                : &slots_[static_cast<size_t>(slot)];
}

int64_t Sampler::num_logprob_columns(int64_t slot) const {
  const SlotParams& params = slots_[static_cast<size_t>(slot)];
  if (!params.logprob_ids.empty()) return 1 + static_cast<int64_t>(params.logprob_ids.size());
  if (params.num_logprobs == kAllLogprobs) return 1 + num_ids_;
  return params.num_logprobs < 0 ? 0 : 1 + std::min<int64_t>(params.num_logprobs, num_ids_);
}

// f(row, scratch) for every row: on the team if there is enough to do for waking it to pay.
template <class F>
void Sampler::for_each_row(int64_t num_rows, ThreadTeam* team, F&& f) {
  const bool alone = team == nullptr || team->num_threads() == 1 || num_rows == 1 ||
                     num_rows * num_ids_ < kMinTeamEntries || num_rows > ThreadTeam::kMaxTasks;
  if (alone) {
    for (int64_t row = 0; row < num_rows; ++row) f(row, scratch_[0]);
    return;
  }
  const size_t members = static_cast<size_t>(team->num_threads());
  if (scratch_.size() < members) scratch_.resize(members);
  std::atomic<bool> failed{false};
  team->parallel_for(num_rows, [&](int64_t row, int member) noexcept {
    try {
      f(row, scratch_[static_cast<size_t>(member)]);
    } catch (...) {  // only memory can run out
      failed.store(true, std::memory_order_relaxed);
    }
  });
  if (failed.load(std::memory_order_relaxed)) throw std::bad_alloc();
}

void Sampler::run(const SampleBatch& batch, ThreadTeam* team) {
  for_each_row(batch.num_rows, team, [&](int64_t row, SamplerScratch& scratch) {
    if (batch.status[row] == kRowOk) run_row(batch, row, scratch);
  });
}

void Sampler::run_row(const SampleBatch& batch, int64_t row, SamplerScratch& scratch) const {
  const SlotParams& params = slots_[static_cast<size_t>(batch.slots[row])];
  RowRun(*kernels_, num_ids_, mode_, params, batch, row, num_logprob_columns(batch.slots[row]), scratch)
      .run();
}

void Sampler::prompt_logprobs(const float* logits, int64_t stride, const float* maxima, int64_t maxima_stride,
                              int64_t num_rows, const int32_t* ids, int64_t k, int32_t* out_ids,
                              float* out_values, int64_t out_stride, int32_t* ranks, int32_t* status,
                              ThreadTeam* team) {
  for_each_row(num_rows, team, [&](int64_t i, SamplerScratch& scratch) {
    // The row is only read: LogitsRow is shared with code that writes.
    float* x = const_cast<float*>(logits + i * stride);
    const float* known = maxima == nullptr ? nullptr : maxima + i * maxima_stride;
    find_maxima(*kernels_, x, num_ids_, known, scratch.maxima);
    const float max = max_of_maxima(*kernels_, scratch.maxima.data(), num_ids_);
    if (max == kPosInf) {
      status[i] = kRowNotFinite;
      return;
    }
    if (max == kNegInf) {
      status[i] = kRowNothingLeft;
      return;
    }
    const LogitsRow row = {kernels_, x, num_ids_, scratch.maxima.data(), max, 1.0f};
    ValueMap value{is_logits(mode_), max, 1.0f, 0.0};
    if (!value.logits) value.log_mass = log_of_sum(row);
    report(row, value, ids[i], nullptr, std::min(k, num_ids_), scratch, out_ids + i * out_stride,
           out_values + i * out_stride, ranks + i);
    status[i] = kRowOk;
  });
}

}  // namespace tellin

// Running a program: checks of a step, its passes, and the job the thread team executes.
#include <algorithm>
#include <chrono>
#include <new>

#include "program_state.h"
#include "require.h"
#include "task_shares.h"

namespace tellin {
namespace {

using Clock = std::chrono::steady_clock;

// Rows per pass: enough to hide the reading of the weights behind their use, few enough that the activations
// of a layer stay in the last-level cache (512 rows x 2048 values x 4 bytes = 4 MiB per buffer).
constexpr int64_t kPassRows = 512;

double seconds_between(Clock::time_point a, Clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

int64_t nanoseconds(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

std::string row_text(const char* array, int64_t index, int64_t value) {
  return std::string(array) + "[" + std::to_string(index) + "] is " + std::to_string(value);
}

// Grows a buffer's memory to `rows`. Old memory of exported buffers lives on in the caller's views.
void reserve(Buffer& buffer, int64_t rows, const LinearKernels& kernels) {
  rows = std::max<int64_t>(rows, 1);
  if (rows > buffer.capacity) {
    const int64_t capacity = std::max(rows, std::min(2 * buffer.capacity, kPassRows));
    const auto bytes = static_cast<size_t>(capacity * buffer.stride) * sizeof(float);
    buffer.memory = std::make_shared<MappedMemory>(bytes, /*huge_pages=*/true);
    const Buffer::Maxima& maxima = buffer.maxima;
    if (maxima.blocks > 0) {
      buffer.maxima.memory = std::make_shared<MappedMemory>(
          static_cast<size_t>(capacity * maxima.stride) * sizeof(float), /*huge_pages=*/false);
      buffer.maxima.base = reinterpret_cast<float*>(maxima.memory->data());
    }
    for (ActPrecision precision : {ActPrecision::kInt8, ActPrecision::kInt16}) {
      Buffer::Quantized& quantized = buffer.quantized(precision);
      if (!quantized.used) continue;
      const auto row_bytes = static_cast<int64_t>(kernels.quantized_row_bytes(buffer.width, precision));
      quantized.memory = MappedMemory(static_cast<size_t>(capacity * row_bytes), /*huge_pages=*/true);
      quantized.rows = {quantized.memory.data(), row_bytes};
      for (int64_t row = 0; row < capacity; ++row)
        kernels.pad_row(precision, buffer.width, row, quantized.rows);
    }
    buffer.capacity = capacity;
  }
  buffer.base = reinterpret_cast<float*>(buffer.memory->data());
}

}  // namespace

void Program::check_step(const StepInput& in) const {
  const State& state = *state_;
  require(state.finalized, "finalize() the program before running it");
  for (const auto& weight : weights_)
    require(weight->packed_rows == weight->packed.n, "not all weights are packed");
  check_adapters(in);
  check_embeds(in);
  check_windows(in);
  require(in.num_requests >= 0 && in.num_tokens >= 0 && in.query_start_loc[0] == 0 &&
              in.query_start_loc[in.num_requests] == in.num_tokens,
          "query_start_loc must go from 0 to the number of tokens");
  require(in.num_tokens < (int64_t{1} << 24) && in.num_logits < (int64_t{1} << 24),
          "more than 2^24 rows in a step");
  for (int64_t t = 0; t < in.num_tokens; ++t) {
    const int64_t limit = state.num_embeddings > 0 ? state.num_embeddings : INT32_MAX;
    require(in.token_ids[t] >= 0 && in.token_ids[t] < limit,
            row_text("token_ids", t, in.token_ids[t]) + "; valid ids are 0 to " + std::to_string(limit - 1));
    const int64_t positions = state.num_positions >= 0 ? state.num_positions : INT32_MAX;
    require(in.positions[t] >= 0 && in.positions[t] < positions, row_text("positions", t, in.positions[t]) +
                                                                     "; valid positions are 0 to " +
                                                                     std::to_string(positions - 1));
    const int64_t types = state.num_token_types;
    require(in.token_types == nullptr || (in.token_types[t] >= 0 && in.token_types[t] < types),
            "token_types[" + std::to_string(t) + "] is out of range; the plan has " + std::to_string(types) +
                " types");
  }
  for (int64_t i = 0; i < in.num_logits; ++i) {
    require(in.logits_indices[i] >= 0 && in.logits_indices[i] < in.num_tokens,
            row_text("logits_indices", i, in.logits_indices[i]) + "; the step has " +
                std::to_string(in.num_tokens) + " rows");
  }
  for (int64_t r = 0; r < in.num_requests; ++r) {
    const int64_t begin = in.query_start_loc[r], end = in.query_start_loc[r + 1];
    require(begin <= end && end <= in.num_tokens, "query_start_loc must not decrease");
    if (!state.has_causal_attention || begin == end) continue;
    const int64_t length = in.seq_lens[r];
    require(length >= end - begin, row_text("seq_lens", r, length) + ", less than the rows of the request");
    for (int64_t t = begin; t < end; ++t) {
      require(in.positions[t] == length - (end - t),
              row_text("positions", t, in.positions[t]) +
                  "; rows of a request must be its last positions, so " + std::to_string(length - (end - t)));
    }
    require(pool_.num_blocks() > 0, "no KV cache: call init_kv_cache() first");
    const int64_t blocks = (length + pool_.block_size() - 1) / pool_.block_size();
    require(blocks <= in.max_blocks, "block_table has " + std::to_string(in.max_blocks) +
                                         " columns; request " + std::to_string(r) + " needs " +
                                         std::to_string(blocks));
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t block = in.block_table[r * in.max_blocks + b];
      require(block >= 0 && block < pool_.num_blocks(),
              row_text("block_table", r * in.max_blocks + b, block) + "; the cache has " +
                  std::to_string(pool_.num_blocks()) + " blocks");
    }
  }
  check_seen_ends(in);
  check_states(in);
}

void Program::check_seen_ends(const StepInput& in) const {
  if (in.seen_ends == nullptr) return;
  require(state_->has_causal_attention, "seen_ends: the plan has no causal attention");
  for (int64_t r = 0; r < in.num_requests; ++r) {
    for (int64_t t = in.query_start_loc[r]; t < in.query_start_loc[r + 1]; ++t) {
      require(in.seen_ends[t] > in.positions[t] && in.seen_ends[t] <= in.seq_lens[r],
              row_text("seen_ends", t, in.seen_ends[t]) + "; it must be greater than the row's position " +
                  std::to_string(in.positions[t]) + " and at most " + std::to_string(in.seq_lens[r]));
    }
  }
}

void Program::check_embeds(const StepInput& in) const {
  const State& state = *state_;
  require(!state.needs_embeds || in.num_embeds == in.num_tokens,
          "embeds has " + std::to_string(in.num_embeds) +
              " rows; the plan needs one for each of the step's " + std::to_string(in.num_tokens));
  if (in.num_embeds == 0) return;
  const int64_t width = state.width_of_given();
  require(in.embed_width == width, "embeds has rows of " + std::to_string(in.embed_width) +
                                       " values; the plan takes " +
                                       (width > 0 ? std::to_string(width) : std::string("none")));
  for (int64_t i = 0; i < in.num_embeds; ++i) {
    require(in.embed_rows[i] > (i == 0 ? -1 : in.embed_rows[i - 1]) && in.embed_rows[i] < in.num_tokens,
            row_text("embed_rows", i, in.embed_rows[i]) + "; rows must ascend and be less than " +
                std::to_string(in.num_tokens));
  }
}

void Program::check_windows(const StepInput& in) const {
  if (!state_->has_windows) return;
  require(in.window_starts != nullptr && in.window_starts[0] == 0 &&
              in.window_starts[in.num_windows] == in.num_tokens,
          "window_starts must go from 0 to the number of tokens: the plan has windowed attention");
  const int32_t* const end = in.window_starts + in.num_windows + 1;
  require(std::is_sorted(in.window_starts, end), "window_starts must not decrease");
  for (int64_t r = 0; r < in.num_requests; ++r) {
    require(std::binary_search(in.window_starts, end, in.query_start_loc[r]),
            "window_starts must have the start of request " + std::to_string(r));
  }
}

// One step, as the team sees it.
class Program::Run final : public ThreadTeam::Job {
 public:
  Run(Program& program, const StepInput& input)
      : state_(*program.state_),
        input_(input),
        pool_(program.pool_),
        num_threads_(program.num_threads()),
        shares_(num_threads_) {
    cut_passes();
    program.find_lora_rows(input, num_passes_);
    program.find_state_rows(input, num_passes_);
    reserve_memory();
    begin_pass();
    last_time_ = Clock::now();
  }

  int64_t next_stage() noexcept override {
    if (state_.profiling && current_ != nullptr) record();
    for (;;) {
      if (next_ == state_.stages.size()) {
        if (++pass_ == num_passes_) return 0;
        begin_pass();
      }
      const State::StageEntry& entry = state_.stages[next_++];
      const int64_t tasks = entry.stage->prepare(*state_.passes[pass_]);
      if (tasks == 0) continue;
      current_ = entry.stage.get();
      ++state_.stage_serial;
      shares_.deal(tasks, current_->shares());
      return tasks;
    }
  }

  // The team counts tasks; which one a member does is decided here.
  void run_task(int64_t, int member) noexcept override {
    const int64_t task = shares_.take(member);
    if (!state_.profiling) {
      current_->run(task, member);
      return;
    }
    const int64_t begin = nanoseconds(Clock::now());
    current_->run(task, member);
    note_span(member, begin, nanoseconds(Clock::now()));
  }

  // One more than the highest cache block that the step writes.
  int64_t blocks_used() const { return blocks_used_; }

 private:
  void record() {
    const Clock::time_point now = Clock::now();
    state_.stage_seconds[next_ - 1] += seconds_between(last_time_, now);
    last_time_ = now;
  }

  void note_span(int member, int64_t begin, int64_t end) noexcept {
    State::MemberSpans& mine = state_.member_spans[static_cast<size_t>(member)];
    if (mine.serial == state_.stage_serial && !mine.spans.empty()) {
      mine.spans.back().end_ns = end;
    } else if (mine.spans.size() < mine.spans.capacity()) {
      mine.spans.push_back({static_cast<int64_t>(next_) - 1, member, begin, end});
      mine.serial = state_.stage_serial;
    }
  }

  Pass& new_pass(int64_t first_row) {
    if (num_passes_ == state_.passes.size()) {
      auto pass = std::make_unique<Pass>();
      for (const AttentionShape& shape : state_.shapes) {
        pass->schedules.push_back(std::make_unique<AttentionSchedule>(shape, num_threads_));
      }
      state_.passes.push_back(std::move(pass));
    }
    Pass& pass = *state_.passes[num_passes_++];
    pass.first_row = first_row;
    pass.num_tokens = pass.num_logits = 0;
    pass.requests.clear();
    pass.logit_requests.clear();
    pass.windows.clear();
    pass.gathers.clear();
    return pass;
  }

  void cut_passes() {
    // Encoders see all of a request at once, so their requests are not cut.
    const bool whole = state_.has_full_attention;
    const int64_t limit = state_.logits_before_gather ? INT64_MAX : kPassRows;
    Pass* pass = &new_pass(0);
    for (int64_t r = 0; r < input_.num_requests; ++r) {
      const int64_t end = input_.query_start_loc[r + 1];
      for (int64_t at = input_.query_start_loc[r]; at < end;) {
        const int64_t room = limit - pass->num_tokens;
        const int64_t count = whole ? end - at : rows_to_cut(at, std::min(end - at, room));
        if (count > room || count == 0) {
          if (pass->num_tokens > 0) {
            pass = &new_pass(at);
            continue;
          }
        }
        const int64_t begin = pass->num_tokens;
        pass->requests.push_back({begin, begin + count, input_.positions[at],
                                  input_.block_table + r * input_.max_blocks,
                                  input_.seen_ends == nullptr ? nullptr : input_.seen_ends + at});
        pass->num_tokens += count;
        at += count;
      }
    }
    pass->num_logits = input_.num_logits;
    if (state_.attends_logit_rows) find_logit_requests(*pass);
    if (state_.has_windows) find_windows();
    fill_passes();
  }

  // A request is in one pass, and its windows with it.
  void find_windows() {
    size_t p = 0;
    for (int64_t w = 0; w < input_.num_windows; ++w) {
      const int64_t begin = input_.window_starts[w], end = input_.window_starts[w + 1];
      if (begin == end) continue;
      while (begin >= state_.passes[p]->first_row + state_.passes[p]->num_tokens) ++p;
      Pass& pass = *state_.passes[p];
      pass.windows.push_back({begin - pass.first_row, end - pass.first_row, 0, nullptr, nullptr});
    }
  }

  // How many rows of a request from `at` on a pass takes, of at most `count`: what they see must be computed
  // in it or before. If none can be cut off in time, as many as belong together.
  int64_t rows_to_cut(int64_t at, int64_t count) const {
    if (input_.seen_ends == nullptr || count == 0) return count;
    const int64_t first = input_.positions[at];
    int64_t reach = 0, last = 0;
    for (int64_t rows = 1; rows <= count || last == 0; ++rows) {
      reach = std::max<int64_t>(reach, input_.seen_ends[at + rows - 1] - first);
      if (reach == rows) last = rows;
    }
    return last;
  }

  // Rows of logits that are consecutive tokens of a request belong together.
  void find_logit_requests(Pass& pass) {
    state_.logit_positions.resize(static_cast<size_t>(input_.num_logits));
    state_.logit_seen_ends.resize(static_cast<size_t>(input_.num_logits));
    int32_t* const seen_ends = state_.logit_seen_ends.data();
    for (int64_t i = 0; i < input_.num_logits; ++i) {
      const int32_t token = input_.logits_indices[i];
      state_.logit_positions[static_cast<size_t>(i)] = input_.positions[token];
      if (input_.seen_ends != nullptr) seen_ends[i] = input_.seen_ends[token];
      const int32_t* const end = input_.query_start_loc + input_.num_requests;
      const int64_t request =
          std::upper_bound(input_.query_start_loc, end, token) - input_.query_start_loc - 1;
      const int32_t* const table = input_.block_table + request * input_.max_blocks;
      const bool follows = i > 0 && token == input_.logits_indices[i - 1] + 1;
      if (follows && token > input_.query_start_loc[request]) {
        ++pass.logit_requests.back().end;
      } else {
        pass.logit_requests.push_back({i, i + 1, input_.positions[token], table,
                                       input_.seen_ends == nullptr ? nullptr : seen_ends + i});
      }
    }
  }

  void fill_passes() {
    if (state_.has_causal_attention) {
      state_.slots.resize(static_cast<size_t>(input_.num_tokens));
      for (int64_t r = 0; r < input_.num_requests; ++r) {
        for (int64_t t = input_.query_start_loc[r]; t < input_.query_start_loc[r + 1]; ++t) {
          const int64_t position = input_.positions[t];
          const int64_t block = input_.block_table[r * input_.max_blocks + position / pool_.block_size()];
          blocks_used_ = std::max(blocks_used_, block + 1);
          state_.slots[static_cast<size_t>(t)] = block * pool_.block_size() + position % pool_.block_size();
        }
      }
    }
    if (input_.num_embeds > 0) {
      state_.embed_index.assign(static_cast<size_t>(input_.num_tokens), -1);
      for (int64_t i = 0; i < input_.num_embeds; ++i) {
        state_.embed_index[static_cast<size_t>(input_.embed_rows[i])] = static_cast<int32_t>(i);
      }
    }
    for (size_t p = 0; p < num_passes_; ++p) {
      Pass& pass = *state_.passes[p];
      pass.embeds = input_.embeds;
      pass.embed_width = input_.embed_width;
      pass.embed_index = input_.num_embeds > 0 ? state_.embed_index.data() + pass.first_row : nullptr;
      pass.token_ids = input_.token_ids + pass.first_row;
      pass.positions = input_.positions + pass.first_row;
      pass.token_types = input_.token_types == nullptr ? nullptr : input_.token_types + pass.first_row;
      pass.rope_positions = input_.rope_positions;
      pass.rope_stride = input_.num_tokens;
      pass.logits_indices = input_.logits_indices;
      pass.slots = state_.slots.data() + (state_.slots.empty() ? 0 : pass.first_row);
      pass.logit_positions = state_.logit_positions.data();
      for (const auto& schedule : pass.schedules) {
        const AttentionShape& shape = schedule->shape();
        schedule->build(shape.windowed ? pass.windows : pass.requests_of(shape.rows));
      }
    }
    size_t p = 0;
    for (int64_t i = 0; i < input_.num_logits; ++i) {
      const int64_t token = input_.logits_indices[i];
      const auto holds = [&](const Pass& pass) {
        return token >= pass.first_row && token < pass.first_row + pass.num_tokens;
      };
      while (!holds(*state_.passes[p])) p = (p + 1) % num_passes_;
      state_.passes[p]->gathers.push_back({token - state_.passes[p]->first_row, i});
    }
  }

  void reserve_memory() {
    int64_t widest = 0;
    for (size_t p = 0; p < num_passes_; ++p) widest = std::max(widest, state_.passes[p]->num_tokens);
    for (const auto& buffer : state_.buffers) {
      const int64_t tokens = buffer->exported ? input_.num_tokens : widest;
      const int64_t rows = buffer->rows == RowKind::kTokens ? tokens : input_.num_logits;
      reserve(*buffer, rows * buffer->per_row, *state_.kernels.linear);
    }
    for (const auto& experts : state_.experts) {
      experts->reserve(experts->shape.rows == RowKind::kTokens ? widest : input_.num_logits);
    }
  }

  void begin_pass() {
    next_ = 0;
    for (const auto& buffer : state_.buffers) {
      if (buffer->rows != RowKind::kTokens || !buffer->exported) continue;
      buffer->base =
          reinterpret_cast<float*>(buffer->memory->data()) + state_.passes[pass_]->first_row * buffer->stride;
    }
  }

  State& state_;
  const StepInput& input_;
  const KvPool& pool_;
  const int num_threads_;
  TaskShares shares_;
  int64_t blocks_used_ = 0;
  size_t num_passes_ = 0;
  size_t pass_ = 0;
  size_t next_ = 0;
  Stage* current_ = nullptr;
  Clock::time_point last_time_;
};

void Program::forward(const StepInput& input) {
  const Clock::time_point start = Clock::now();
  check_step(input);
  Run run(*this, input);
  team_->run(run);
  pool_.used(run.blocks_used());
  state_->num_tokens = input.num_tokens;
  state_->num_logits = input.num_logits;
  last_forward_s_ = seconds_between(start, Clock::now());
}

RowsView Program::view(int id) const {
  require(id >= 0, "the plan has no such buffer");
  const Buffer& buffer = state_->buffer(id);
  require(buffer.memory != nullptr && state_->num_tokens >= 0, "no step has run yet");
  const int64_t rows = buffer.rows == RowKind::kTokens ? state_->num_tokens : state_->num_logits;
  return {buffer.memory, reinterpret_cast<float*>(buffer.memory->data()), rows, buffer.width, buffer.stride};
}

RowsView Program::block_maxima() const {
  RowsView rows = output();
  const Buffer::Maxima& maxima = state_->buffer(output_).maxima;
  return {maxima.memory, maxima.base, rows.rows, maxima.blocks, maxima.stride};
}

}  // namespace tellin

// A plan compiled for this machine: weights, buffers, KV cache and a list of stages, run in one call per
// step.
//
// Made once by add_* calls in plan order, then finalize(), then pack_weight() until every weight is packed.
// After that only forward() and the cache functions are called. Everything is checked here, before any thread
// starts; bad arguments throw std::invalid_argument and leave the program as it was. Not thread-safe by
// itself: one caller at a time (the binding holds a lock).
#pragma once
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tellin/kv_pool.h"
#include "tellin/linear.h"
#include "tellin/mapped_memory.h"
#include "tellin/state_pool.h"
#include "tellin/thread_team.h"
#include "tellin/vector_kernels.h"

namespace tellin {

struct Buffer;
struct ExpertMatrices;
struct LinearPart;
class Stage;

// Arrays of one step (see kernels/batch.py), owned by the caller.
struct StepInput {
  const int32_t* token_ids = nullptr;  // [num_tokens]
  const int32_t* positions = nullptr;  // [num_tokens]
  int64_t num_tokens = 0;
  const int32_t* query_start_loc = nullptr;  // [num_requests + 1]
  const int32_t* seq_lens = nullptr;         // [num_requests]
  int64_t num_requests = 0;
  const int32_t* block_table = nullptr;  // [num_requests, max_blocks]
  int64_t max_blocks = 0;
  const int32_t* logits_indices = nullptr;  // [num_logits]
  int64_t num_logits = 0;
  const int32_t* adapter_slots = nullptr;  // [num_requests], -1 = no adapter; nullptr = no request has one
  // [num_embeds, embed_width], given instead of looked up; what is wider than an embedding is added later
  const float* embeds = nullptr;
  const int32_t* embed_rows = nullptr;  // [num_embeds], ascending
  int64_t num_embeds = 0;
  int64_t embed_width = 0;
  const int32_t* token_types = nullptr;  // [num_tokens]; nullptr = all 0
  // [3, num_tokens], what rotary tables with axes turn by; nullptr = positions, three times
  const int32_t* rope_positions = nullptr;
  // [num_tokens], in causal attention: behind the last position that each row sees, which the step computes
  // or an earlier one has; nullptr = its own
  const int32_t* seen_ends = nullptr;
  const int32_t* window_starts = nullptr;  // [num_windows + 1], as query_start_loc; for windowed attention
  int64_t num_windows = 0;
  const int32_t* state_slots = nullptr;  // [num_requests]; needed if the plan has recurrences
  const int32_t* state_saves = nullptr;  // [num_saves, 3]: request, number of tokens, slot
  int64_t num_saves = 0;
};

// A tensor as it lies in its file: rows of whole blocks. Must stay valid as long as the program for
// embeddings and learned positions, until pack_weight() for the others.
struct TensorView {
  QuantType type;
  const uint8_t* data;
  size_t num_bytes;
  int64_t rows, columns;
};

// A LoRA adapter's matrices for one linear layer, of a float type each: A [rank, in], B [out, rank].
struct LoraWeights {
  int site;
  TensorView a, b;
};

// Throws std::invalid_argument unless shape, type and size agree.
void check_tensor(const TensorView& tensor);
// Whether rows [begin, end) hold no NaN and no infinity.
bool is_finite(const TensorView& tensor, int64_t begin, int64_t end);

// When a thread worked on a stage: from the start of its first task to the end of its last one.
struct StageSpan {
  int64_t stage;     // index in listing()
  int64_t member;    // of the thread team; 0 is the thread that called forward()
  int64_t begin_ns;  // steady clock
  int64_t end_ns;
};

// Rows of an output buffer; the memory lives as long as someone holds it.
struct RowsView {
  std::shared_ptr<MappedMemory> memory;
  float* data;
  int64_t rows, width, stride;
};

class Program {
 public:
  struct Options {
    std::string isa;  // empty = the best this machine runs
    int num_threads = 1;
    int64_t block_size = 16;
    KvDtype kv_dtype = KvDtype::kFloat16;
    const Program* team_of = nullptr;  // whose threads run this one too, in turns; nullptr: it has its own
  };
  struct Part {
    int weight;
    int bias;  // vector id, -1 = none
    int out;   // buffer id
  };

  // One matrix of every expert, by weight ids; and the vector ids of their biases, or none.
  struct ExpertParts {
    std::vector<int> weights, biases;
  };

  // How a row's logits become the shares of the experts that it chooses.
  struct Routing {
    int64_t top_k;
    bool sigmoid;            // scores are sigmoids of the logits, not their softmax
    bool normalize;          // shares are divided by their sum
    int bias;                // vector id: added to scores to choose by, not to shares; -1 = none
    float scale;             // of shares, at last, and
    int scales;              // vector id: of each expert's; -1 = none
    int64_t groups = 1;      // of equally many neighbouring experts, of which a row
    int64_t top_groups = 1;  // chooses this many before it chooses experts
  };

  struct DeltaBuffers {
    int q, k, v, a, b, out;
  };
  struct ScanBuffers {
    int x, b, c, dt, out;
  };
  struct XieluVectors {
    int alpha_p, alpha_n, beta, eps;  // of one value each
  };

  explicit Program(const Options& options);
  ~Program();

  int add_buffer(int64_t width, bool logit_rows);
  // `precision` of the activations that meet a quantised weight; float weights always meet float32. A tensor
  // without data: its rows come by pack_rows().
  int add_weight(const TensorView& tensor, ActPrecision precision);
  // A weight that another program of the same instruction set has packed; its memory lives as long as either.
  int share_weight(const Program& owner, int weight);
  int add_vector(const TensorView& tensor, float offset);  // float32 copy of a norm weight or bias
  int add_kv_layer(int64_t num_kv_heads, int64_t head_dim, int64_t value_dim);
  int add_state_layer(int64_t num_values);
  // `axes`: which of a row's three positions each frequency turns by; empty: the one of the cache.
  int add_rotary(std::vector<double> frequencies, float attention_factor, std::vector<int32_t> axes = {});

  // rest_is_first: ids behind the table take its row 0.
  void embed(const TensorView& table, int out, float scale, bool rest_is_first = false);
  void input(int out);  // rows that the caller gives
  // The weight has `group` values, or one for each of the row.
  void rms_norm(int x, int weight, int out, float eps, int64_t group);
  void layer_norm(int x, int weight, int bias, int out, float eps);
  void linear(int x, const std::vector<Part>& parts, int residual);
  // Each of `num_heads` equal parts of x goes through rows of the weight that are its own, as many as the
  // weight has columns of it; what follows these passes unchanged behind the product.
  void head_linear(int x, int weight, int out, int64_t num_heads);
  void gated_linear(int x, Part gate, Part up, int out, Activation act);
  // Router: a logit for each expert.
  void experts(int x, int router, const ExpertParts& gate, const ExpertParts& up, const ExpertParts& down,
               int out, Activation act, const Routing& routing);
  // out = x * sigmoid(gate), one value per row.
  void gate_rows(int x, int gate, int out);
  // out += (x A^T) B^T for each of `outs`, in rows of requests with an adapter. Returns the number of the
  // first output's site; the others follow.
  int lora(int x, const std::vector<int>& outs, int64_t max_rank);
  // Rotates from dimension `offset` of each head on.
  void rope(int x, int rotary, int64_t num_heads, int64_t head_dim, bool interleaved, int64_t offset);
  // Without k and v (-1) the layer's cache is read as an earlier attention has filled it.
  // sinks: vector id of num_heads scores that take part in the softmax without a value, -1 = none.
  // windowed, if not causal: a query sees the window of the step that it is in, not its request.
  void attention(int q, int k, int v, int out, int layer, int64_t num_heads, int64_t num_kv_heads,
                 int64_t head_dim, int64_t value_dim, float scale, int64_t window, float softcap, bool causal,
                 int sinks, bool windowed);
  // Recurrences, see models/plan/ir.py; `layer` is a state layer. weight: vector id, [width, kernel]; act:
  // nullptr = none.
  void short_conv(int x, int weight, int bias, int out, int layer, int64_t kernel, const Activation* act);
  // decay: A, a negative number per head.
  void gated_delta(const DeltaBuffers& buffers, int decay, int dt_bias, int layer, int64_t num_k_heads,
                   int64_t num_v_heads, bool tiled);
  void selective_scan(const ScanBuffers& buffers, int decay, int skip, int dt_bias, int layer,
                      int64_t num_heads, int64_t num_groups, float dt_min, float dt_max);
  // The columns of `up` from up_start on.
  void act_mul(int gate, int up, int out, Activation act, int64_t up_start = 0);
  void activation(int x, int out, Activation act);
  void add(int x, int y, int out);
  void concat(int x, int y, int out);
  void add_bias(int x, int bias);
  // Of rows that are given: columns from start on of what is given.
  void add_given(int x, int64_t start);
  void add_position(int x, const TensorView& table);
  void add_token_type(int x, const TensorView& table);
  void gather_rows(int x, int out);
  void scale(int x, float factor);
  void scale_by_weight(int x, int weight);  // a vector of one value, or of one per column
  // See models/plan/streams.py.
  void add_scaled(int x, int y, int coefs, int out, int64_t column, float offset, float factor);
  void match_magnitude(int x, int target);
  void keep_largest(int x, float deviations);
  // See models/plan/elementwise.py.
  void scale_by_position(int x, float beta, int64_t length);
  void xielu(int x, int out, const XieluVectors& vectors);
  void softcap(int x, float cap);
  void finalize(int output, int hidden, int64_t vocab_size);

  int num_weights() const { return static_cast<int>(weights_.size()); }
  // Repacks rows [begin, end) of a weight into the arena with the whole team; their file pages are not needed
  // afterwards. A weight is packed from its first row to its last, in steps of whole groups of 16 rows.
  // Throws std::domain_error if they hold NaN or infinity.
  void pack_weight(int weight, int64_t begin, int64_t end);
  // The same with rows that lie elsewhere: `rows` become rows [begin, begin + rows.rows).
  void pack_rows(int weight, int64_t begin, const TensorView& rows);

  // `system_root`: where the /proc lies that tells how busy the system is; for tests.
  void init_kv_cache(int64_t num_blocks, const std::string& system_root = "");
  void free_kv_cache() { pool_.free(); }
  void copy_kv_block(int64_t source, int64_t target) { pool_.copy_block(source, target); }
  int64_t kv_bytes_per_block() const { return pool_.block_bytes(); }
  int64_t num_kv_blocks() const { return pool_.num_blocks(); }
  // End of what was committed ahead of its use, in bytes from the cache's start (commit_ahead.h).
  size_t kv_committed_bytes() const { return pool_.committed_bytes(); }

  void init_state_cache(int64_t num_slots) { states_.allocate(num_slots); }
  void free_state_cache() { states_.free(); }
  void copy_state(int64_t source, int64_t target) { states_.copy_slot(source, target); }
  int64_t state_bytes_per_slot() const { return states_.slot_bytes(); }

  // Loads an adapter into a slot, in the place of what was there. The matrices are copied.
  void set_adapter(int slot, const std::vector<LoraWeights>& weights);
  void clear_adapter(int slot);
  static constexpr int kMaxAdapterSlots = 4096;

  void forward(const StepInput& input);
  RowsView output() const { return view(output_); }
  // Largest entries of the output's blocks of kSampleBlock values (see sampling_kernels.h), found when they
  // were written; width is 0 if they were not.
  RowsView block_maxima() const;
  RowsView hidden() const { return view(hidden_); }

  const char* isa() const;
  int num_threads() const { return team_->num_threads(); }
  size_t weight_bytes() const { return arena_->size(); }  // without those that are shared
  double last_forward_s() const { return last_forward_s_; }
  ThreadTeam& team() { return *team_; }

  void set_profile(bool enabled);
  // Seconds per kind of stage since profiling was switched on.
  std::map<std::string, double> profile() const;
  // The same per stage, in order.
  const std::vector<double>& stage_seconds() const;
  // Spans of all threads since the last call; a thread keeps at most kMaxSpans.
  std::vector<StageSpan> take_spans();
  static constexpr size_t kMaxSpans = 200000;
  int num_stages() const;
  // One line per stage, in order.
  std::vector<std::string> listing() const;

 private:
  struct Weight;
  struct State;  // stages, buffers and what a step needs; internal types
  class Run;

  const Weight& checked_weight(int id, const Buffer& input) const;
  void add_table(int x, const TensorView& table, bool by_token_type);
  void pack_rows(Weight* weight, const TensorView& source, int64_t source_begin, int64_t begin, int64_t end);
  void add_linear(Buffer& input, std::vector<LinearPart> parts);
  ExpertMatrices expert_matrices(const ExpertParts& parts, const Buffer& input, int64_t rows) const;
  void check_step(const StepInput& input) const;
  void check_adapters(const StepInput& input) const;
  void check_embeds(const StepInput& input) const;
  void check_seen_ends(const StepInput& input) const;
  void check_windows(const StepInput& input) const;
  void find_lora_rows(const StepInput& input, size_t num_passes);
  void check_state_layer(int layer, int64_t num_values) const;
  void add_recurrence(std::initializer_list<Buffer*> operands, Buffer& out, std::unique_ptr<Stage> stage);
  void check_states(const StepInput& input) const;
  void find_state_rows(const StepInput& input, size_t num_passes);
  RowsView view(int buffer) const;

  std::shared_ptr<ThreadTeam> team_;
  KvPool pool_;
  StatePool states_;
  std::vector<std::unique_ptr<Weight>> weights_;
  std::shared_ptr<MappedMemory> arena_ = std::make_shared<MappedMemory>();
  std::vector<std::shared_ptr<MappedMemory>> shared_arenas_;
  std::unique_ptr<State> state_;
  int output_ = -1;
  int hidden_ = -1;
  double last_forward_s_ = 0.0;
};

}  // namespace tellin

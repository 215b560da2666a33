// A compiled program is a list of stages; within a stage tasks run in any order on any member, between stages
// all earlier writes are visible.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tellin/linear.h"
#include "tellin/mapped_memory.h"
#include "tellin/sampling_kernels.h"
#include "tellin/vector_kernels.h"

namespace tellin {

// One row per scheduled token, or one per position whose logits are wanted.
enum class RowKind { kTokens, kLogits };

// Activations: float32 [rows, width], row r at base + r * stride.
struct Buffer {
  int64_t width = 0;
  int64_t stride = 0;
  RowKind rows = RowKind::kTokens;
  int64_t per_row = 1;    // rows of the buffer for each of those
  bool exported = false;  // read by the caller afterwards: contiguous, and all rows of the step are kept
  int64_t capacity = 0;   // rows
  std::shared_ptr<MappedMemory> memory;
  float* base = nullptr;  // row 0 of the current pass
  // The rows as linear layers of quantised weights read them.
  struct Quantized {
    bool used = false;
    MappedMemory memory;
    QuantizedRows rows{nullptr, 0};
  };
  Quantized int8, int16;
  // Largest entry of every block of kSampleBlock values, for the sampler (see SamplingKernels::block_max).
  struct Maxima {
    int64_t blocks = 0;  // of a row; 0 = not wanted
    int64_t stride = 0;
    std::shared_ptr<MappedMemory> memory;
    float* base = nullptr;
  };
  Maxima maxima;

  float* row(int64_t r) const { return base + r * stride; }
  Quantized& quantized(ActPrecision precision) { return precision == ActPrecision::kInt8 ? int8 : int16; }
  const Quantized& quantized(ActPrecision precision) const {
    return precision == ActPrecision::kInt8 ? int8 : int16;
  }
};

// Consecutive rows of one request within a pass.
struct RequestRows {
  int64_t begin, end;          // rows [begin, end) of the pass
  int64_t first_position;      // of row `begin`; the others follow
  const int32_t* block_table;  // of the request
  const int32_t* seen_ends;    // behind the last position that each row sees; nullptr: its own
};

// Consecutive rows of one request within a pass, as recurrences see them.
struct StateRows {
  int64_t begin, end;            // rows [begin, end) of the pass
  int64_t slot;                  // where the request's state lies
  bool from_zero;                // row `begin` is the request's first
  size_t first_save, last_save;  // of the pass's saves
};

struct StateSave {
  int64_t end;   // the state before this row of the pass
  int64_t slot;  // goes there, too
};

struct Gather {
  int64_t token;  // row of the pass
  int64_t logit;  // row of the step
};

class AttentionSchedule;
struct LoraRows;

// A step is run in passes of a bounded number of rows, so that activations stay in cache and memory stays
// small: later passes see the KV cache of earlier ones. Logit rows are computed once, in the last pass.
struct Pass {
  int64_t first_row = 0;  // in the step
  int64_t num_tokens = 0;
  int64_t num_logits = 0;  // rows of the step; 0 in all passes but the last
  const int32_t* token_ids = nullptr;
  const int32_t* positions = nullptr;
  const int32_t* logit_positions = nullptr;  // of the rows of logits
  const int32_t* token_types = nullptr;      // nullptr: all 0
  const int32_t* rope_positions = nullptr;   // of the step: [3, rope_stride]; nullptr: as positions
  int64_t rope_stride = 0;
  const int32_t* logits_indices = nullptr;  // of the step: the row of each row of logits
  const int64_t* slots = nullptr;           // KV slot of each row
  const float* embeds = nullptr;            // of the step: rows that are given
  int64_t embed_width = 0;                  // values of each
  const int32_t* embed_index = nullptr;     // which of them each row is, -1 = none; nullptr: no row is given
  std::vector<RequestRows> requests;
  std::vector<RequestRows> logit_requests;  // rows of logits, likewise
  std::vector<RequestRows> windows;         // parts of requests that windowed attention sees
  std::vector<Gather> gathers;
  std::vector<std::unique_ptr<AttentionSchedule>> schedules;  // by attention shape
  std::vector<LoraRows> lora_rows[2];                         // by kind of rows: those with an adapter
  std::vector<StateRows> state_rows;                          // empty if the plan has no recurrences
  std::vector<StateSave> state_saves;

  int64_t num_rows(RowKind kind) const { return kind == RowKind::kTokens ? num_tokens : num_logits; }
  const int32_t* positions_of(RowKind kind) const {
    return kind == RowKind::kTokens ? positions : logit_positions;
  }
  const std::vector<RequestRows>& requests_of(RowKind kind) const {
    return kind == RowKind::kTokens ? requests : logit_requests;
  }
};

struct KernelTables {
  const LinearKernels* linear;
  const VectorKernels* vector;
  const AttentionKernels* attention;
  const SamplingKernels* sampling;
  const RecurrentKernels* recurrent;
};

// Quantises columns [begin, end) of rows [m0, m1) of a buffer for those who read them. Their values are at
// values + m * stride.
inline void quantize_columns(const KernelTables& kernels, const std::vector<ActPrecision>& precisions,
                             const Buffer& buffer, const float* values, int64_t stride, int64_t m0,
                             int64_t m1, int64_t begin, int64_t end) {
  for (const ActPrecision precision : precisions) {
    kernels.linear->quantize_part(precision, values, stride, m0, m1, begin, end,
                                  buffer.quantized(precision).rows);
  }
}

// Rows of a matrix product's input: records of the precision, or floats.
struct LinearInput {
  ActPrecision precision;
  QuantizedRows quantized;
  const float* floats;
  int64_t stride;  // of floats
};

// Products of rows [m0, m1) with output groups [g0, g1) of w.
inline void linear_product(const KernelTables& kernels, const LinearInput& x, const PackedMatrix& w,
                           int64_t m0, int64_t m1, int64_t g0, int64_t g1, float* out, int64_t ldo) {
  if (x.precision == ActPrecision::kInt8) {
    kernels.linear->linear_int8(w, x.quantized, m0, m1, g0, g1, out, ldo);
  } else if (x.precision == ActPrecision::kInt16) {
    kernels.linear->linear_int16(w, x.quantized, m0, m1, g0, g1, out, ldo);
  } else {
    kernels.linear->linear_f32(w, x.floats, x.stride, m0, m1, g0, g1, out, ldo);
  }
}

class Stage {
 public:
  virtual ~Stage() = default;
  // For profiles: what most of the stage's time goes to.
  virtual std::string kind() const = 0;
  // Number of tasks for this pass; 0 skips the stage. Called by one member before any run().
  virtual int64_t prepare(const Pass& pass) noexcept = 0;
  // Where each member's share of the tasks begins, and their number; nullptr: shares are equal.
  virtual const int64_t* shares() const noexcept { return nullptr; }
  virtual void run(int64_t task, int member) noexcept = 0;
  // While building: from now on the stage also quantises what it writes to `out`, if it can.
  virtual bool quantize_output(const Buffer&, ActPrecision) { return false; }
  // While building: what the stage writes is read as it is, too, not only as quantised rows. A stage may
  // leave it unwritten otherwise.
  virtual void keep_values() {}
  // While building: from now on the stage, the last to write to `out`, also fills its maxima, if it can.
  virtual bool find_maxima(Buffer& /*out*/) { return false; }
};

}  // namespace tellin

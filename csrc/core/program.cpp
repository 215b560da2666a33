// Building a program: buffers, weights and their packing. Operations are lowered in lower.cpp.
#include "tellin/program.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <stdexcept>
#include <utility>

#include "program_state.h"
#include "require.h"

namespace tellin {
namespace {

constexpr size_t kWeightAlignment = 64;
constexpr int64_t kPackBytes = 256 << 10;  // of packed weights per task of pack_weight

// Floats from one row of `width` to the next. Rows an odd number of cache lines apart spread over all sets of
// a cache, so that a tile of them stays in it.
int64_t odd_lines(int64_t width) {
  return ((width + 15) / 16 | 1) * 16;
}

const char* checked_isa(const LinearKernels* linear, const std::string& isa) {
  require(linear != nullptr, "isa '" + isa + "' is unknown or cannot run on this machine");
  return linear->isa;
}

struct BlockSize {
  int64_t elements, bytes;
};

BlockSize block_size_of(QuantType type) {
  switch (type) {
    case QuantType::F32:
      return {1, 4};
    case QuantType::F16:
    case QuantType::BF16:
      return {1, 2};
    case QuantType::Q4_0:
      return {32, 18};
    case QuantType::Q4_1:
      return {32, 20};
    case QuantType::Q5_0:
      return {32, 22};
    case QuantType::Q5_1:
      return {32, 24};
    case QuantType::Q8_0:
      return {32, 34};
    case QuantType::Q2_K:
      return {256, 84};
    case QuantType::Q3_K:
      return {256, 110};
    case QuantType::Q4_K:
      return {256, 144};
    case QuantType::Q5_K:
      return {256, 176};
    case QuantType::Q6_K:
      return {256, 210};
    case QuantType::IQ4_NL:
      return {32, 18};
    case QuantType::IQ4_XS:
      return {256, 136};
    case QuantType::MXFP4:
      return {32, 17};
    case QuantType::E4M3:
      return {128, 132};
  }
  throw std::invalid_argument("unknown tensor type " + std::to_string(static_cast<int>(type)));
}

bool is_float(QuantType type) {
  return type == QuantType::F32 || type == QuantType::F16 || type == QuantType::BF16 ||
         type == QuantType::E4M3;
}

// Number of bytes that type and shape need.
int64_t check_shape(const TensorView& tensor) {
  const BlockSize block = block_size_of(tensor.type);
  require(tensor.rows > 0 && tensor.columns > 0 && tensor.rows < (int64_t{1} << 40) / tensor.columns,
          "tensor must have between 1 and 2^40 elements");
  require(tensor.columns % block.elements == 0,
          "rows of a tensor must be whole blocks of " + std::to_string(block.elements) + " values");
  return tensor.rows * (tensor.columns / block.elements) * block.bytes;
}

}  // namespace

void check_tensor(const TensorView& tensor) {
  const int64_t needed = check_shape(tensor);
  require(
      static_cast<int64_t>(tensor.num_bytes) == needed,
      "tensor has " + std::to_string(tensor.num_bytes) + " bytes, its shape needs " + std::to_string(needed));
}

Program::Program(const Options& options)
    : team_(options.team_of != nullptr ? options.team_of->team_
                                       : std::make_shared<ThreadTeam>(options.num_threads)),
      pool_(options.block_size, options.kv_dtype),
      state_(std::make_unique<State>()) {
  const LinearKernels* linear = linear_kernels(options.isa.empty() ? nullptr : options.isa.c_str());
  const char* isa = checked_isa(linear, options.isa);
  const SamplingKernels* sampling = sampling_kernels(isa);
  state_->kernels = {linear, vector_kernels(isa), attention_kernels(isa), sampling, recurrent_kernels(isa)};
  require(state_->kernels.vector != nullptr && state_->kernels.attention != nullptr && sampling != nullptr &&
              state_->kernels.recurrent != nullptr,
          "isa '" + std::string(isa) + "' has no row kernels in this build");
  require(options.num_threads >= 1 && options.num_threads <= ThreadTeam::kMaxThreads,
          "num_threads must be between 1 and " + std::to_string(ThreadTeam::kMaxThreads));
  require(options.num_threads == num_threads(),
          "num_threads must be that of the program whose team is shared");
  state_->scratch = std::vector<AttentionScratch>(static_cast<size_t>(options.num_threads));
}

Program::~Program() = default;

const char* Program::isa() const {
  return state_->kernels.linear->isa;
}

// ---- buffers and weights

int Program::add_buffer(int64_t width, bool logit_rows) {
  require(width > 0 && width < (int64_t{1} << 31), "buffer width must be between 1 and 2^31");
  auto buffer = std::make_unique<Buffer>();
  buffer->width = width;
  buffer->stride = odd_lines(width);
  buffer->rows = logit_rows ? RowKind::kLogits : RowKind::kTokens;
  state_->buffers.push_back(std::move(buffer));
  return static_cast<int>(state_->buffers.size()) - 1;
}

int Program::add_weight(const TensorView& tensor, ActPrecision precision) {
  require(!state_->finalized, "the program is final");
  if (tensor.data == nullptr) {
    check_shape(tensor);
  } else {
    check_tensor(tensor);
  }
  auto weight = std::make_unique<Weight>();
  weight->source = tensor;
  weight->precision = is_float(tensor.type) ? ActPrecision::kFloat32 : precision;
  const LinearKernels& kernels = *state_->kernels.linear;
  if (kernels.packed_group_bytes(tensor.type, tensor.columns, weight->precision) == 0) {
    weight->precision = ActPrecision::kFloat32;
  }
  const size_t group_bytes = kernels.packed_group_bytes(tensor.type, tensor.columns, weight->precision);
  require(group_bytes > 0, "no kernel for weights of type " + std::to_string(static_cast<int>(tensor.type)) +
                               " with rows of " + std::to_string(tensor.columns) + " values");
  const int64_t groups = (tensor.rows + kGroupRows - 1) / kGroupRows;
  weight->packed = {tensor.type, kernels.layout_id(tensor.type, weight->precision),
                    tensor.rows, tensor.columns,
                    groups,      group_bytes,
                    nullptr};
  weights_.push_back(std::move(weight));
  return num_weights() - 1;
}

int Program::share_weight(const Program& owner, int id) {
  require(!state_->finalized, "the program is final");
  require(id >= 0 && id < owner.num_weights(), "weight id " + std::to_string(id) + " is out of range");
  const Weight& packed = *owner.weights_[static_cast<size_t>(id)];
  require(packed.packed_rows == packed.packed.n && !packed.is_shared,
          "a weight can be shared by the program that has packed it");
  require(state_->kernels.linear == owner.state_->kernels.linear,
          "weights are shared by programs of the same instruction set");
  auto weight = std::make_unique<Weight>(packed);
  weight->is_shared = true;
  shared_arenas_.push_back(owner.arena_);
  weights_.push_back(std::move(weight));
  return num_weights() - 1;
}

int Program::add_vector(const TensorView& tensor, float offset) {
  check_tensor(tensor);
  const int64_t count = tensor.rows * tensor.columns;
  auto values = std::make_unique<std::vector<float>>(static_cast<size_t>(count));
  for (int64_t row = 0; row < tensor.rows; ++row) {
    state_->kernels.linear->dequantize_row(tensor.type, tensor.data, row, tensor.columns,
                                           values->data() + row * tensor.columns);
  }
  if (offset != 0.0f) {
    for (float& value : *values) value += offset;
  }
  state_->vectors.push_back(std::move(values));
  return static_cast<int>(state_->vectors.size()) - 1;
}

int Program::add_kv_layer(int64_t num_kv_heads, int64_t head_dim, int64_t value_dim) {
  require(num_kv_heads > 0 && num_kv_heads <= 4096, "num_kv_heads must be between 1 and 4096");
  require(head_dim > 0 && head_dim <= kMaxHeadDim && head_dim % 8 == 0,
          "head_dim must be a multiple of 8, at most " + std::to_string(kMaxHeadDim));
  require(value_dim > 0 && value_dim <= head_dim && value_dim % 8 == 0,
          "value_dim must be a multiple of 8, at most head_dim");
  pool_.add_layer(num_kv_heads, head_dim, value_dim);
  return static_cast<int>(pool_.layers().size()) - 1;
}

int Program::add_rotary(std::vector<double> frequencies, float attention_factor, std::vector<int32_t> axes) {
  require(!frequencies.empty() && frequencies.size() <= 256, "a rotary table has 1 to 256 frequencies");
  require(axes.empty() || axes.size() == frequencies.size(), "a rotary table has an axis for each frequency");
  for (const int32_t axis : axes) require(axis >= 0 && axis < 3, "axes of a rotary table are 0 to 2");
  state_->rotaries.push_back({std::make_unique<std::vector<double>>(std::move(frequencies)),
                              attention_factor,
                              std::make_unique<std::vector<int32_t>>(std::move(axes)),
                              {}});
  return static_cast<int>(state_->rotaries.size()) - 1;
}

void Program::finalize(int output, int hidden, int64_t vocab_size) {
  State& state = *state_;
  require(!state.finalized, "the program is already final");
  require(!state.stages.empty(), "the program has no operations");
  require(vocab_size > 0, "vocab_size must be positive");
  for (int id : {output, hidden}) {
    if (id < 0) continue;
    Buffer& buffer = state.buffer(id);
    state.reads(buffer);
    buffer.exported = true;
    buffer.stride = buffer.width;
  }
  Buffer& logits = state.buffer(output);
  if (logits.rows == RowKind::kLogits) {
    logits.stride = odd_lines(logits.width);
    if (state.stages.back().stage->find_maxima(logits)) {
      logits.maxima.blocks = (logits.width + kSampleBlock - 1) / kSampleBlock;
      logits.maxima.stride = odd_lines(logits.maxima.blocks);
    }
  }
  output_ = output;
  hidden_ = hidden;
  state.vocab_size = vocab_size;

  size_t total = 0;
  for (const auto& weight : weights_) {
    if (weight->is_shared) continue;
    total += weight->packed.group_bytes * static_cast<size_t>(weight->packed.num_groups);
    total = (total + kWeightAlignment - 1) / kWeightAlignment * kWeightAlignment;
  }
  arena_ = std::make_shared<MappedMemory>(total, /*huge_pages=*/true);
  size_t offset = 0;
  for (const auto& weight : weights_) {
    if (weight->is_shared) continue;
    weight->packed.data = arena_->data() + offset;
    offset += weight->packed.group_bytes * static_cast<size_t>(weight->packed.num_groups);
    offset = (offset + kWeightAlignment - 1) / kWeightAlignment * kWeightAlignment;
  }
  for (AttentionScratch& scratch : state.scratch) {
    for (const AttentionShape& shape : state.shapes) scratch.reserve(shape);
    if (!state.shapes.empty()) scratch.allocate();
  }
  state.stage_seconds.assign(state.stages.size(), 0.0);
  state.finalized = true;
}

void Program::pack_weight(int id, int64_t begin, int64_t end) {
  require(id >= 0 && id < num_weights(), "weight id " + std::to_string(id) + " is out of range");
  Weight& weight = *weights_[static_cast<size_t>(id)];
  require(weight.source.data != nullptr || weight.packed_rows == weight.packed.n,
          "the rows of this weight are to be given");
  pack_rows(&weight, weight.source, 0, begin, end);
}

void Program::pack_rows(int id, int64_t begin, const TensorView& rows) {
  require(id >= 0 && id < num_weights(), "weight id " + std::to_string(id) + " is out of range");
  Weight& weight = *weights_[static_cast<size_t>(id)];
  check_tensor(rows);
  require(weight.source.data == nullptr && rows.type == weight.source.type && rows.columns == weight.packed.k,
          "rows must be of the weight's type and width, and the weight without any of its own");
  pack_rows(&weight, rows, begin, begin, begin + rows.rows);
}

void Program::pack_rows(Weight* target_weight, const TensorView& source, int64_t source_begin, int64_t begin,
                        int64_t end) {
  require(state_->finalized, "finalize() the program before packing weights");
  Weight& weight = *target_weight;
  const PackedMatrix& packed = weight.packed;
  require(begin == weight.packed_rows && begin < end && end <= packed.n,
          "rows of a weight must be packed in order, each once");
  require(end == packed.n || end % kGroupRows == 0, "weights are packed in steps of 16 rows");
  const LinearKernels& kernels = *state_->kernels.linear;
  // Groups and rows are counted from the source's first row.
  const int64_t before = source_begin / kGroupRows;
  uint8_t* target =
      arena_->data() + (packed.data - arena_->data()) + before * static_cast<int64_t>(packed.group_bytes);
  const int64_t first = begin / kGroupRows - before;
  const int64_t last = (end + kGroupRows - 1) / kGroupRows - before;
  const int64_t step = std::max<int64_t>(1, kPackBytes / static_cast<int64_t>(packed.group_bytes));
  std::atomic<bool> finite{true};
  team_->parallel_for((last - first + step - 1) / step, [&](int64_t task, int) {
    const int64_t g0 = first + task * step;
    const int64_t g1 = std::min(last, g0 + step);
    if (!is_finite(source, g0 * kGroupRows, std::min(source.rows, g1 * kGroupRows))) finite.store(false);
    kernels.pack_groups(source.type, weight.precision, source.data, source.rows, packed.k, g0, g1, target);
  });
  if (!finite.load()) throw std::domain_error("the tensor holds NaN or infinity");
  weight.packed_rows = end;
  if (end == packed.n) weight.source.data = nullptr;
}

void Program::init_kv_cache(int64_t num_blocks, const std::string& system_root) {
  pool_.allocate(num_blocks, system_root);
}

void Program::set_profile(bool enabled) {
  state_->profiling = enabled;
  if (!enabled) return;
  std::fill(state_->stage_seconds.begin(), state_->stage_seconds.end(), 0.0);
  state_->member_spans.assign(static_cast<size_t>(num_threads()), {});
  for (State::MemberSpans& member : state_->member_spans) member.spans.reserve(kMaxSpans);
}

const std::vector<double>& Program::stage_seconds() const {
  return state_->stage_seconds;
}

int Program::num_stages() const {
  return static_cast<int>(state_->stages.size());
}

std::vector<StageSpan> Program::take_spans() {
  std::vector<StageSpan> all;
  for (State::MemberSpans& member : state_->member_spans) {
    all.insert(all.end(), member.spans.begin(), member.spans.end());
    member.spans.clear();
  }
  return all;
}

std::map<std::string, double> Program::profile() const {
  std::map<std::string, double> seconds;
  for (size_t i = 0; i < state_->stages.size(); ++i) {
    seconds[state_->stages[i].stage->kind()] += state_->stage_seconds[i];
  }
  return seconds;
}

std::vector<std::string> Program::listing() const {
  std::vector<std::string> lines;
  for (const auto& entry : state_->stages) lines.push_back(entry.stage->kind());
  return lines;
}

}  // namespace tellin

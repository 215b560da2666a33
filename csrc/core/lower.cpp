// Lowering of plan operations to stages: row operations join the running chain, linear layers and attention
// are stages of their own.
#include <algorithm>
#include <cstdint>

#include "linear_stage.h"
#include "program_state.h"
#include "require.h"

namespace tellin {
namespace {

// Query heads of one kv head that are worked on together, at most if they can be cut so: a block of the
// attention kernels.
constexpr int64_t kGroupHeads = 8;

void require_like(const Buffer& a, const Buffer& b) {
  require(a.width == b.width, "operands must have the same width, not " + std::to_string(a.width) + " and " +
                                  std::to_string(b.width));
  require(a.rows == b.rows, "operands must have the same kind of rows");
}

void require_tokens(const Buffer& buffer) {
  require(buffer.rows == RowKind::kTokens,
          "the operation needs positions: its operands must have token rows");
}

RowOp make(RowOp::Kind kind) {
  RowOp op;
  op.kind = kind;
  return op;
}

}  // namespace

// ---- state

Buffer& Program::State::buffer(int id) const {
  require(id >= 0 && id < static_cast<int>(buffers.size()),
          "buffer id " + std::to_string(id) + " is out of range");
  return *buffers[static_cast<size_t>(id)];
}

const float* Program::State::vector(int id, int64_t width) const {
  if (id < 0) return nullptr;
  require(id < static_cast<int>(vectors.size()), "vector id " + std::to_string(id) + " is out of range");
  const std::vector<float>& values = *vectors[static_cast<size_t>(id)];
  require(static_cast<int64_t>(values.size()) == width, "a vector has " + std::to_string(values.size()) +
                                                            " values where " + std::to_string(width) +
                                                            " are needed");
  return values.data();
}

RowChain& Program::State::chain(RowKind rows) {
  require(!finalized, "the program is final");
  if (!stages.empty()) {
    auto* last = dynamic_cast<RowChain*>(stages.back().stage.get());
    if (last != nullptr && last->rows() == rows) return *last;
  }
  auto stage = std::make_unique<RowChain>(kernels, rows);
  RowChain& chain = *stage;
  stages.push_back({std::move(stage), rows});
  return chain;
}

void Program::State::append(const RowOp& op, Buffer& target) {
  append(op, target.rows);
  wrote(target);
  chain_of.emplace_back(&target, &chain(target.rows));
}

void Program::State::append(const RowOp& op, RowKind rows) {
  for (const Buffer* buffer : {op.x, op.y}) {
    if (buffer != nullptr) reads(*buffer);
  }
  chain(rows).append(op);
}

void Program::State::reads(const Buffer& buffer) {
  for (const auto& [target, stage] : unread) {
    if (target == &buffer) stage->keep_values();
  }
}

void Program::State::wrote(const Buffer& target) {
  const auto is_target = [&](const auto& entry) { return entry.first == &target; };
  quantized_valid.erase(std::remove_if(quantized_valid.begin(), quantized_valid.end(), is_target),
                        quantized_valid.end());
  unread.erase(std::remove_if(unread.begin(), unread.end(), is_target), unread.end());
  chain_of.erase(std::remove_if(chain_of.begin(), chain_of.end(), is_target), chain_of.end());
}

void Program::State::quantize(Buffer& x, ActPrecision precision) {
  const std::pair<const Buffer*, ActPrecision> entry(&x, precision);
  if (std::find(quantized_valid.begin(), quantized_valid.end(), entry) != quantized_valid.end()) return;
  x.quantized(precision).used = true;
  quantized_valid.push_back(entry);
  if (!stages.empty() && stages.back().stage->quantize_output(x, precision)) return;
  RowOp op = make(RowOp::Kind::kQuantize);
  op.precision = precision;
  op.x = &x;
  for (const auto& [target, writer] : chain_of) {
    if (target != &x) continue;
    writer->append(op);  // while the row is in cache, whatever stages have come since
    return;
  }
  append(op, x.rows);
}

void Program::State::takes_embeds(int64_t width) {
  embed_width = embed_width == 0 || embed_width == width ? width : -1;
}

size_t Program::State::shape_index(const AttentionShape& shape) {
  const auto found = std::find(shapes.begin(), shapes.end(), shape);
  if (found != shapes.end()) return static_cast<size_t>(found - shapes.begin());
  shapes.push_back(shape);
  return shapes.size() - 1;
}

// ---- row operations

void Program::embed(const TensorView& table, int out, float scale, bool rest_is_first) {
  Buffer& target = state_->buffer(out);
  require_tokens(target);
  check_tensor(table);
  require(table.columns == target.width, "the embedding's width must be that of its output");
  RowOp op = make(RowOp::Kind::kEmbed);
  op.out = &target;
  op.table = table.data;
  op.table_type = table.type;
  op.factor = scale;
  if (rest_is_first) {
    op.count = table.rows;
  } else {
    const int64_t known = state_->num_embeddings;
    state_->num_embeddings = known == 0 ? table.rows : std::min(known, table.rows);
  }
  op.takes_given = !state_->needs_embeds;
  if (op.takes_given) state_->takes_embeds(target.width);
  state_->append(op, target);
}

void Program::input(int out) {
  Buffer& target = state_->buffer(out);
  require_tokens(target);
  RowOp op = make(RowOp::Kind::kInput);
  op.out = &target;
  state_->takes_embeds(target.width);
  state_->needs_embeds = true;
  state_->append(op, target);
}

void Program::rms_norm(int x, int weight, int out, float eps, int64_t group) {
  RowOp op = make(RowOp::Kind::kRmsNorm);
  op.x = &state_->buffer(x);
  op.out = &state_->buffer(out);
  require_like(*op.x, *op.out);
  op.group = group > 0 ? group : op.x->width;
  require(op.x->width % op.group == 0, "the norm's group must divide the width");
  op.count = op.x->width / op.group;
  const bool has_own =
      op.count > 1 && weight >= 0 && weight < static_cast<int>(state_->vectors.size()) &&
      static_cast<int64_t>(state_->vectors[static_cast<size_t>(weight)]->size()) == op.x->width;
  op.weight = state_->vector(weight, has_own ? op.x->width : op.group);
  op.weight_step = has_own ? op.group : 0;
  require(op.weight != nullptr, "a norm needs a weight");
  op.factor = eps;
  state_->append(op, *op.out);
}

void Program::layer_norm(int x, int weight, int bias, int out, float eps) {
  RowOp op = make(RowOp::Kind::kLayerNorm);
  op.x = &state_->buffer(x);
  op.out = &state_->buffer(out);
  require_like(*op.x, *op.out);
  op.weight = state_->vector(weight, op.x->width);
  op.bias = state_->vector(bias, op.x->width);
  require(op.weight != nullptr, "a norm needs a weight");
  op.factor = eps;
  state_->append(op, *op.out);
}

void Program::rope(int x, int rotary, int64_t num_heads, int64_t head_dim, bool interleaved, int64_t offset) {
  RowOp op = make(RowOp::Kind::kRope);
  op.x = &state_->buffer(x);
  require(rotary >= 0 && rotary < static_cast<int>(state_->rotaries.size()),
          "rotary table id is out of range");
  State::Rotary& table = state_->rotaries[static_cast<size_t>(rotary)];
  require(num_heads > 0 && head_dim > 0 && num_heads * head_dim == op.x->width,
          "rope: the width must be num_heads * head_dim");
  const auto width = 2 * static_cast<int64_t>(table.frequencies->size());
  require(offset >= 0 && offset + width <= head_dim, "rope: more frequencies than pairs in a head");
  Buffer*& angle_buffer = table.angles[static_cast<size_t>(op.x->rows)];
  state_->attends_logit_rows |= op.x->rows == RowKind::kLogits;
  if (angle_buffer == nullptr) {
    const int id = add_buffer(width, op.x->rows == RowKind::kLogits);
    angle_buffer = &state_->buffer(id);
    RowOp angles = make(RowOp::Kind::kAngles);
    angles.out = angle_buffer;
    angles.frequencies = table.frequencies.get();
    angles.axes = table.axes.get();
    angles.factor = table.attention_factor;
    state_->append(angles, *angle_buffer);
  }
  op.y = angle_buffer;
  op.group = head_dim;
  op.count = num_heads;
  op.interleaved = interleaved;
  op.offset = offset;
  state_->append(op, *op.x);
}

void Program::act_mul(int gate, int up, int out, Activation act, int64_t up_start) {
  RowOp op = make(RowOp::Kind::kActMul);
  op.x = &state_->buffer(gate);
  op.y = &state_->buffer(up);
  op.out = &state_->buffer(out);
  require(op.x->rows == op.y->rows, "act_mul: operands must have the same kind of rows");
  require(up_start >= 0 && up_start <= op.y->width - op.x->width, "act_mul: columns of up out of range");
  require_like(*op.x, *op.out);
  op.start = up_start;
  op.act = act;
  state_->append(op, *op.out);
}

void Program::activation(int x, int out, Activation act) {
  require(act != Activation::kSwigluOai, "swiglu_oai is a product of two values");
  RowOp op = make(RowOp::Kind::kActivation);
  op.x = &state_->buffer(x);
  op.out = &state_->buffer(out);
  require_like(*op.x, *op.out);
  op.act = act;
  state_->append(op, *op.out);
}

void Program::gate_rows(int x, int gate, int out) {
  RowOp op = make(RowOp::Kind::kGateRows);
  op.x = &state_->buffer(x);
  op.y = &state_->buffer(gate);
  op.out = &state_->buffer(out);
  require_like(*op.x, *op.out);
  require(op.y->width == 1 && op.y->rows == op.x->rows, "gate_rows: the gate must have one value per row");
  state_->append(op, *op.out);
}

void Program::add(int x, int y, int out) {
  RowOp op = make(RowOp::Kind::kAdd);
  op.x = &state_->buffer(x);
  op.y = &state_->buffer(y);
  op.out = &state_->buffer(out);
  require_like(*op.x, *op.y);
  require_like(*op.x, *op.out);
  state_->append(op, *op.out);
}

void Program::concat(int x, int y, int out) {
  RowOp op = make(RowOp::Kind::kConcat);
  op.x = &state_->buffer(x);
  op.y = &state_->buffer(y);
  op.out = &state_->buffer(out);
  require(op.out != op.x && op.out != op.y, "concat: the output must be a buffer of its own");
  require(op.x->width + op.y->width == op.out->width, "concat: the output must be as wide as both operands");
  require(op.x->rows == op.out->rows && op.y->rows == op.out->rows,
          "operands must have the same kind of rows");
  state_->append(op, *op.out);
}

void Program::add_bias(int x, int bias) {
  RowOp op = make(RowOp::Kind::kAddBias);
  op.x = &state_->buffer(x);
  op.bias = state_->vector(bias, op.x->width);
  require(op.bias != nullptr, "add_bias needs a vector");
  state_->append(op, *op.x);
}

void Program::add_given(int x, int64_t start) {
  RowOp op = make(RowOp::Kind::kAddGiven);
  op.x = &state_->buffer(x);
  require_tokens(*op.x);
  require(start >= 0 && start <= INT32_MAX, "add_given: start must be in [0, 2^31)");
  op.start = start;
  state_->given_width = std::max(state_->given_width, start + op.x->width);
  state_->append(op, *op.x);
}

void Program::add_position(int x, const TensorView& table) {
  add_table(x, table, /*by_token_type=*/false);
  const int64_t known = state_->num_positions;
  state_->num_positions = known < 0 ? table.rows : std::min(known, table.rows);
}

void Program::add_token_type(int x, const TensorView& table) {
  add_table(x, table, /*by_token_type=*/true);
  const int64_t known = state_->num_token_types;
  state_->num_token_types = known == 0 ? table.rows : std::min(known, table.rows);
}

void Program::add_table(int x, const TensorView& table, bool by_token_type) {
  Buffer& target = state_->buffer(x);
  require_tokens(target);
  check_tensor(table);
  require(table.columns == target.width, "the table's width must be that of its operand");
  RowOp op = make(RowOp::Kind::kAddTable);
  op.x = &target;
  op.y = &state_->buffer(add_buffer(target.width, /*logit_rows=*/false));
  op.table = table.data;
  op.table_type = table.type;
  op.by_token_type = by_token_type;
  state_->append(op, target);
}

void Program::scale(int x, float factor) {
  RowOp op = make(RowOp::Kind::kScale);
  op.x = &state_->buffer(x);
  op.factor = factor;
  state_->append(op, *op.x);
}

void Program::scale_by_weight(int x, int weight) {
  require(weight >= 0 && weight < static_cast<int>(state_->vectors.size()), "scale_by_weight needs a vector");
  if (state_->vectors[static_cast<size_t>(weight)]->size() == 1) return scale(x, *state_->vector(weight, 1));
  RowOp op = make(RowOp::Kind::kScaleColumns);
  op.x = &state_->buffer(x);
  op.weight = state_->vector(weight, op.x->width);
  state_->append(op, *op.x);
}

void Program::add_scaled(int x, int y, int coefs, int out, int64_t column, float offset, float factor) {
  RowOp op = make(RowOp::Kind::kAddScaled);
  op.x = &state_->buffer(x);
  op.y = &state_->buffer(y);
  op.coefs = &state_->buffer(coefs);
  op.out = &state_->buffer(out);
  require_like(*op.x, *op.y);
  require_like(*op.x, *op.out);
  require(op.coefs->rows == op.x->rows && column >= 0 && column < op.coefs->width,
          "add_scaled: the column of coefficients is out of range");
  require(op.out != op.y && op.out != op.coefs, "add_scaled: the output must be x or a buffer of its own");
  op.start = column;
  op.bound = offset;
  op.factor = factor;
  state_->reads(*op.coefs);
  state_->append(op, *op.out);
}

void Program::match_magnitude(int x, int target) {
  RowOp op = make(RowOp::Kind::kMatchMagnitude);
  op.x = &state_->buffer(x);
  op.y = &state_->buffer(target);
  require_like(*op.x, *op.y);
  state_->append(op, *op.x);
}

void Program::keep_largest(int x, float deviations) {
  RowOp op = make(RowOp::Kind::kKeepLargest);
  op.x = &state_->buffer(x);
  op.factor = deviations;
  state_->append(op, *op.x);
}

void Program::softcap(int x, float cap) {
  require(cap > 0.0f, "softcap must be positive");
  RowOp op = make(RowOp::Kind::kSoftcap);
  op.x = &state_->buffer(x);
  op.factor = cap;
  state_->append(op, *op.x);
}

// ---- stages of their own

void Program::gather_rows(int x, int out) {
  require(!state_->finalized, "the program is final");
  Buffer& source = state_->buffer(x);
  Buffer& target = state_->buffer(out);
  require(source.width == target.width, "gather_rows: widths differ");
  require(source.rows == RowKind::kTokens && target.rows == RowKind::kLogits,
          "gather_rows goes from token rows to logit rows");
  for (const State::StageEntry& entry : state_->stages) {
    if (entry.rows == RowKind::kLogits) state_->logits_before_gather = true;
  }
  state_->reads(source);
  state_->stages.push_back({std::make_unique<GatherStage>(&source, &target), RowKind::kTokens});
  state_->wrote(target);
}

void Program::linear(int x, const std::vector<Part>& parts, int residual) {
  require(!state_->finalized, "the program is final");
  require(!parts.empty(), "linear: no parts");
  require(residual < 0 || parts.size() == 1, "linear: a residual needs a single part");
  Buffer& input = state_->buffer(x);
  std::vector<LinearPart> quantized, floats;
  for (const Part& part : parts) {
    const Weight& weight = checked_weight(part.weight, input);
    Buffer& target = state_->buffer(part.out);
    require(target.width == weight.packed.n, "linear: the weight has " + std::to_string(weight.packed.n) +
                                                 " rows, its output " + std::to_string(target.width) +
                                                 " columns");
    require(target.rows == input.rows, "linear: input and output must have the same kind of rows");
    require(&target != &input, "linear: the output must not be the input");
    LinearPart lowered;
    lowered.weight = &weight.packed;
    lowered.precision = weight.precision;
    lowered.bias = state_->vector(part.bias, target.width);
    lowered.out = &target;
    if (residual >= 0) {
      lowered.residual = &state_->buffer(residual);
      require_like(*lowered.residual, target);
      require(lowered.residual != &input, "linear: the residual must not be the input");
    }
    (weight.precision == ActPrecision::kFloat32 ? floats : quantized).push_back(lowered);
  }
  // A float matrix among quantised ones takes so much longer that it is a stage of its own.
  add_linear(input, std::move(quantized));
  add_linear(input, std::move(floats));
}

void Program::gated_linear(int x, Part gate, Part up, int out, Activation act) {
  require(!state_->finalized, "the program is final");
  Buffer& input = state_->buffer(x);
  Buffer& target = state_->buffer(out);
  const Weight& gate_weight = checked_weight(gate.weight, input);
  const Weight& up_weight = checked_weight(up.weight, input);
  require(gate_weight.packed.n == target.width && up_weight.packed.n == target.width,
          "gated_linear: both weights must have as many rows as the output has columns");
  require(target.rows == input.rows && &target != &input, "gated_linear: bad output");
  if (gate_weight.precision != up_weight.precision) {
    // Two kinds of arithmetic: two plain layers and a product.
    const int up_out = add_buffer(target.width, target.rows == RowKind::kLogits);
    linear(x, {{gate.weight, gate.bias, out}, {up.weight, up.bias, up_out}}, -1);
    act_mul(out, up_out, out, act);
    return;
  }
  LinearPart part;
  part.weight = &gate_weight.packed;
  part.precision = gate_weight.precision;
  part.bias = state_->vector(gate.bias, target.width);
  part.up = &up_weight.packed;
  part.up_bias = state_->vector(up.bias, target.width);
  part.act = act;
  part.out = &target;
  add_linear(input, {part});
}

const Program::Weight& Program::checked_weight(int id, const Buffer& input) const {
  require(id >= 0 && id < num_weights(), "weight id " + std::to_string(id) + " is out of range");
  const Weight& weight = *weights_[static_cast<size_t>(id)];
  require(weight.packed.k == input.width, "linear: the weight has " + std::to_string(weight.packed.k) +
                                              " columns, its input " + std::to_string(input.width));
  return weight;
}

void Program::add_linear(Buffer& input, std::vector<LinearPart> parts) {
  if (parts.empty()) return;
  for (const LinearPart& part : parts) {
    if (part.precision == ActPrecision::kFloat32) {
      state_->reads(input);
    } else {
      state_->quantize(input, part.precision);
    }
    if (part.residual != nullptr) state_->reads(*part.residual);
  }
  for (const LinearPart& part : parts) state_->wrote(*part.out);
  const Buffer* const only_out = parts.size() == 1 ? parts[0].out : nullptr;
  auto stage = std::make_unique<LinearStage>(state_->kernels, num_threads(), &input, std::move(parts));
  if (only_out != nullptr) state_->unread.emplace_back(only_out, stage.get());
  state_->stages.push_back({std::move(stage), input.rows});
}

void Program::attention(int q, int k, int v, int out, int layer, int64_t num_heads, int64_t num_kv_heads,
                        int64_t head_dim, int64_t value_dim, float scale, int64_t window, float softcap,
                        bool causal, int sinks, bool windowed) {
  require(!state_->finalized, "the program is final");
  Buffer& query = state_->buffer(q);
  Buffer* const key = k < 0 ? nullptr : &state_->buffer(k);
  Buffer* const value = v < 0 ? nullptr : &state_->buffer(v);
  Buffer& target = state_->buffer(out);
  const bool writes = key != nullptr && value != nullptr;
  require(writes || (causal && key == value), "attention: without k and v it must be causal");
  require(num_kv_heads > 0 && num_heads > 0 && num_heads % num_kv_heads == 0,
          "attention: num_heads must be a multiple of num_kv_heads");
  require(head_dim > 0 && head_dim <= kMaxHeadDim && head_dim % 8 == 0,
          "attention: head_dim must be a multiple of 8, at most " + std::to_string(kMaxHeadDim));
  require(value_dim > 0 && value_dim <= head_dim && value_dim % 8 == 0,
          "attention: value_dim must be a multiple of 8, at most head_dim");
  require(query.width == num_heads * head_dim && target.width == num_heads * value_dim,
          "attention: q and out must have num_heads * head_dim (of values) columns");
  if (writes) {
    require(key->width == num_kv_heads * head_dim && value->width == num_kv_heads * value_dim,
            "attention: k and v must have num_kv_heads * head_dim (of values) columns");
    for (const Buffer* buffer : {&query, key, value}) require_tokens(*buffer);
  }
  require(target.rows == query.rows, "attention: q and out must have the same kind of rows");
  require(&target != key && &target != value && (&target != &query || causal),
          "attention: the output must be a buffer of its own");
  require(window >= 0 && softcap >= 0.0f, "attention: window and softcap must not be negative");
  require(!windowed || !causal, "attention: within windows it must not be causal");
  AttentionShape shape;
  const int64_t group = num_heads / num_kv_heads;
  if (group > kGroupHeads && group % kGroupHeads == 0) shape.sharing = group / kGroupHeads;
  shape.num_heads = num_heads;
  shape.num_kv_heads = num_kv_heads * shape.sharing;
  shape.head_dim = head_dim;
  shape.value_dim = value_dim;
  shape.window = window;
  shape.causal = causal;
  shape.windowed = windowed;
  state_->has_windows |= windowed;
  shape.rows = query.rows;
  state_->attends_logit_rows |= query.rows == RowKind::kLogits;
  if (causal) {
    require(layer >= 0 && layer < static_cast<int>(pool_.layers().size()),
            "attention: cache layer out of range");
    const KvPool::Layer& cache = pool_.layers()[static_cast<size_t>(layer)];
    require(cache.num_kv_heads == num_kv_heads && cache.layout.head_dim == head_dim &&
                cache.layout.value_dim == value_dim,
            "attention: the cache layer has another shape");
    state_->has_causal_attention = true;
    if (writes) {
      RowOp store = make(RowOp::Kind::kKvStore);
      store.x = key;
      store.y = value;
      store.pool = &pool_;
      store.layer = layer;
      state_->append(store, RowKind::kTokens);
    }
  } else {
    state_->has_full_attention = true;
  }
  for (const Buffer* buffer : {&query, key, value}) {
    if (buffer != nullptr) state_->reads(*buffer);
  }
  state_->wrote(target);
  auto stage =
      std::make_unique<AttentionStage>(state_->kernels, shape, state_->shape_index(shape),
                                       AttentionStage::Buffers{&query, key, value, &target}, scale, softcap,
                                       state_->vector(sinks, num_heads), &pool_, layer, &state_->scratch);
  state_->unread.emplace_back(&target, stage.get());
  state_->stages.push_back({std::move(stage), query.rows});
}

}  // namespace tellin

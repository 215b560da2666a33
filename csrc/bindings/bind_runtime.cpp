// Python API of the plan executor: arrays become pointers, the GIL is released, nothing else. Checks of
// values are the program's; nanobind checks types, dimensions and contiguity.
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "tellin/commit_ahead.h"
#include "tellin/program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tellin {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Spans = nb::ndarray<nb::numpy, int64_t, nb::ndim<2>, nb::c_contig>;
using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<nb::numpy, float, nb::ndim<2>>;
using TensorTuple = std::tuple<int, Bytes, int64_t, int64_t>;       // type, bytes, rows, columns
using LoraTuple = std::tuple<int, TensorTuple, TensorTuple>;        // site, A, B
using PartTuple = std::tuple<int, int, int>;                        // weight, bias, out
using ExpertPair = std::tuple<std::vector<int>, std::vector<int>>;  // weights, biases

TensorView tensor_view(int type, const Bytes& data, int64_t rows, int64_t columns) {
  return {static_cast<QuantType>(type), data.data(), data.shape(0), rows, columns};
}

TensorView tensor_view(const TensorTuple& tensor) {
  const auto& [type, data, rows, columns] = tensor;
  return tensor_view(type, data, rows, columns);
}

Program::ExpertParts expert_parts(const ExpertPair& ids) {
  return {std::get<0>(ids), std::get<1>(ids)};
}

Program::Part part(const PartTuple& ids) {
  return {std::get<0>(ids), std::get<1>(ids), std::get<2>(ids)};
}

Activation activation_named(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "relu") return Activation::kRelu;
  if (name == "quick_gelu") return Activation::kQuickGelu;
  if (name == "swiglu_oai") return Activation::kSwigluOai;
  if (name == "sigmoid") return Activation::kSigmoid;
  if (name == "identity") return Activation::kIdentity;
  throw std::invalid_argument(
      "unknown activation '" + name +
      "'; known: silu, gelu, gelu_tanh, quick_gelu, relu, swiglu_oai, sigmoid, identity");
}

KvDtype kv_dtype_named(const std::string& name) {
  if (name == "float32") return KvDtype::kFloat32;
  if (name == "float16") return KvDtype::kFloat16;
  if (name == "int16") return KvDtype::kInt16;
  if (name == "int8") return KvDtype::kInt8;
  throw std::invalid_argument("unknown kv_cache_dtype '" + name + "'; known: float32, float16, int16, int8");
}

// A program with the arrays it reads and a lock: several Python threads may call it.
class BoundProgram {
 public:
  BoundProgram(const std::string& isa, int num_threads, int64_t block_size, const std::string& kv_dtype,
               const BoundProgram* team_of)
      : program({isa, num_threads, block_size, kv_dtype_named(kv_dtype),
                 team_of == nullptr ? nullptr : &team_of->program}) {}

  int add_weight(int type, const Bytes& data, int64_t rows, int64_t columns, const std::string& precision) {
    const int id = program.add_weight(tensor_view(type, data, rows, columns), act_precision_named(precision));
    arrays_.push_back(data);
    return id;
  }
  int add_vector(int type, const Bytes& data, int64_t rows, int64_t columns, float offset) {
    return program.add_vector(tensor_view(type, data, rows, columns), offset);
  }
  void embed(int type, const Bytes& data, int64_t rows, int64_t columns, int out, float scale,
             bool rest_is_first) {
    program.embed(tensor_view(type, data, rows, columns), out, scale, rest_is_first);
    arrays_.push_back(data);
  }
  void add_position(int x, int type, const Bytes& data, int64_t rows, int64_t columns) {
    program.add_position(x, tensor_view(type, data, rows, columns));
    arrays_.push_back(data);
  }
  void add_token_type(int x, int type, const Bytes& data, int64_t rows, int64_t columns) {
    program.add_token_type(x, tensor_view(type, data, rows, columns));
    arrays_.push_back(data);
  }
  int add_row_weight(int type, int64_t rows, int64_t columns, const std::string& precision) {
    const TensorView tensor{static_cast<QuantType>(type), nullptr, 0, rows, columns};
    return program.add_weight(tensor, act_precision_named(precision));
  }
  int share_weight(BoundProgram& owner, int id) {
    const nb::gil_scoped_release release;  // the owner may be in a step
    const std::lock_guard<std::mutex> lock(owner.mutex);
    return program.share_weight(owner.program, id);
  }
  void pack_rows(int id, int64_t begin, int type, const Bytes& data, int64_t rows, int64_t columns) {
    const TensorView source = tensor_view(type, data, rows, columns);
    const nb::gil_scoped_release release;
    const std::lock_guard<std::mutex> lock(mutex);
    program.pack_rows(id, begin, source);
  }
  void pack_weight(int id, int64_t begin, int64_t end) {
    const nb::gil_scoped_release release;
    const std::lock_guard<std::mutex> lock(mutex);
    program.pack_weight(id, begin, end);
  }
  void init_kv_cache(int64_t num_blocks, const std::string& system_root) {
    const nb::gil_scoped_release release;
    const std::lock_guard<std::mutex> lock(mutex);
    program.init_kv_cache(num_blocks, system_root);
  }
  void free_kv_cache() {
    const nb::gil_scoped_release release;
    const std::lock_guard<std::mutex> lock(mutex);
    program.free_kv_cache();
  }
  void copy_kv_block(int64_t source, int64_t target) {
    const nb::gil_scoped_release release;
    const std::lock_guard<std::mutex> lock(mutex);
    program.copy_kv_block(source, target);
  }

  void init_state_cache(int64_t num_slots) {
    const nb::gil_scoped_release release;
    const std::lock_guard<std::mutex> lock(mutex);
    program.init_state_cache(num_slots);
  }
  void free_state_cache() {
    const nb::gil_scoped_release release;
    const std::lock_guard<std::mutex> lock(mutex);
    program.free_state_cache();
  }
  void copy_state(int64_t source, int64_t target) {
    const nb::gil_scoped_release release;
    const std::lock_guard<std::mutex> lock(mutex);
    program.copy_state(source, target);
  }

  size_t kv_committed_bytes() {
    const std::lock_guard<std::mutex> lock(mutex);
    return program.kv_committed_bytes();
  }

  void set_adapter(int slot, const std::vector<LoraTuple>& weights) {
    std::vector<LoraWeights> list;
    for (const auto& [site, a, b] : weights) list.push_back({site, tensor_view(a), tensor_view(b)});
    const nb::gil_scoped_release release;
    const std::lock_guard<std::mutex> lock(mutex);
    program.set_adapter(slot, list);
  }
  void clear_adapter(int slot) {
    const nb::gil_scoped_release release;
    const std::lock_guard<std::mutex> lock(mutex);
    program.clear_adapter(slot);
  }

  Rows forward(const Ints& token_ids, const Ints& positions, const Ints& query_start_loc,
               const Ints& seq_lens, const Table& block_table, const Ints& logits_indices,
               const std::optional<Ints>& adapter_slots, const std::optional<Floats>& embeds,
               const std::optional<Ints>& embed_rows, const std::optional<Ints>& token_types,
               const std::optional<Ints>& state_slots, const std::optional<Table>& state_saves,
               const std::optional<Table>& rope_positions, const std::optional<Ints>& seen_ends,
               const std::optional<Ints>& window_starts) {
    StepInput input;
    input.token_ids = token_ids.data();
    input.positions = positions.data();
    input.num_tokens = static_cast<int64_t>(token_ids.shape(0));
    input.query_start_loc = query_start_loc.data();
    input.seq_lens = seq_lens.data();
    input.num_requests = static_cast<int64_t>(seq_lens.shape(0));
    input.block_table = block_table.data();
    input.max_blocks = static_cast<int64_t>(block_table.shape(1));
    input.logits_indices = logits_indices.data();
    input.num_logits = static_cast<int64_t>(logits_indices.shape(0));
    if (positions.shape(0) != token_ids.shape(0)) {
      throw std::invalid_argument("positions must have as many entries as token_ids");
    }
    if (query_start_loc.shape(0) != seq_lens.shape(0) + 1) {
      throw std::invalid_argument("query_start_loc must have one more entry than seq_lens");
    }
    if (adapter_slots.has_value()) {
      input.adapter_slots = adapter_slots->data();
      if (adapter_slots->shape(0) != seq_lens.shape(0)) {
        throw std::invalid_argument("adapter_slots must have as many entries as seq_lens");
      }
    }
    if (embeds.has_value()) {
      input.embeds = embeds->data();
      input.num_embeds = static_cast<int64_t>(embeds->shape(0));
      input.embed_width = static_cast<int64_t>(embeds->shape(1));
      if (!embed_rows.has_value() || embed_rows->shape(0) != embeds->shape(0)) {
        throw std::invalid_argument("embed_rows must have as many entries as embeds has rows");
      }
      input.embed_rows = embed_rows->data();
    }
    if (token_types.has_value()) {
      input.token_types = token_types->data();
      if (token_types->shape(0) != token_ids.shape(0)) {
        throw std::invalid_argument("token_types must have as many entries as token_ids");
      }
    }
    if (rope_positions.has_value()) {
      input.rope_positions = rope_positions->data();
      if (rope_positions->shape(0) != 3 || rope_positions->shape(1) != token_ids.shape(0)) {
        throw std::invalid_argument("rope_positions must have three rows of as many entries as token_ids");
      }
    }
    if (seen_ends.has_value()) {
      input.seen_ends = seen_ends->data();
      if (seen_ends->shape(0) != token_ids.shape(0)) {
        throw std::invalid_argument("seen_ends must have as many entries as token_ids");
      }
    }
    if (state_slots.has_value()) {
      input.state_slots = state_slots->data();
      if (state_slots->shape(0) != seq_lens.shape(0)) {
        throw std::invalid_argument("state_slots must have as many entries as seq_lens");
      }
    }
    if (state_saves.has_value()) {
      input.state_saves = state_saves->data();
      input.num_saves = static_cast<int64_t>(state_saves->shape(0));
      if (state_saves->shape(1) != 3) throw std::invalid_argument("state_saves must have 3 columns");
    }
    if (window_starts.has_value()) {
      if (window_starts->shape(0) < 1) throw std::invalid_argument("window_starts must not be empty");
      input.window_starts = window_starts->data();
      input.num_windows = static_cast<int64_t>(window_starts->shape(0)) - 1;
    }
    if (block_table.shape(0) != seq_lens.shape(0)) {
      throw std::invalid_argument("block_table must have one row per request");
    }
    RowsView rows;
    {
      const nb::gil_scoped_release release;
      const std::lock_guard<std::mutex> lock(mutex);
      program.forward(input);
      rows = program.output();
    }
    return to_numpy(rows);
  }
  Rows hidden() {
    const std::lock_guard<std::mutex> lock(mutex);
    return to_numpy(program.hidden());
  }

  std::optional<Rows> block_maxima() {
    const std::lock_guard<std::mutex> lock(mutex);
    const RowsView maxima = program.block_maxima();
    if (maxima.width == 0) return std::nullopt;
    return to_numpy(maxima);
  }

  void set_profile(bool enabled) {
    const std::lock_guard<std::mutex> lock(mutex);
    program.set_profile(enabled);
  }
  // Spans [n, 4] (stage, member, begin, end), and the time now on their clock, in nanoseconds.
  nb::tuple take_spans() {
    const std::lock_guard<std::mutex> lock(mutex);
    auto spans = std::make_unique<std::vector<StageSpan>>(program.take_spans());
    static_assert(sizeof(StageSpan) == 4 * sizeof(int64_t));
    auto* data = reinterpret_cast<int64_t*>(spans->data());
    const size_t count = spans->size();
    const nb::capsule owner(spans.get(),
                            [](void* p) noexcept { delete static_cast<std::vector<StageSpan>*>(p); });
    spans.release();
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return nb::make_tuple(Spans(data, {count, 4}, owner),
                          std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
  }

  Program program;
  std::mutex mutex;

 private:
  // A view; its memory lives as long as the array, even if the program lets go of it.
  static Rows to_numpy(const RowsView& view) {
    auto owner = std::make_unique<std::shared_ptr<MappedMemory>>(view.memory);
    const nb::capsule capsule(
        owner.get(), [](void* p) noexcept { delete static_cast<std::shared_ptr<MappedMemory>*>(p); });
    owner.release();
    return Rows(view.data, {static_cast<size_t>(view.rows), static_cast<size_t>(view.width)}, capsule,
                {view.stride, 1});
  }

  std::vector<Bytes> arrays_;  // of weights and tables
};

}  // namespace

void bind_runtime(nb::module_& m) {
  nb::class_<ThreadTeam>(m, "ThreadTeam")
      .def(nb::init<int>(), "num_threads"_a)
      .def_prop_ro("num_threads", &ThreadTeam::num_threads);
  m.def(
      "is_finite",
      [](int type, const Bytes& data, int64_t rows, int64_t columns) {
        const TensorView tensor = tensor_view(type, data, rows, columns);
        check_tensor(tensor);
        const nb::gil_scoped_release release;
        return is_finite(tensor, 0, rows);
      },
      "quant_type"_a, "data"_a, "rows"_a, "columns"_a);

  m.def("commit_ahead", &CommitAhead::ahead, "used"_a, "bytes"_a, "available"_a);
  m.def("available_memory", &available_memory, "root"_a);

  nb::class_<BoundProgram>(m, "Program", "A plan compiled for this machine (csrc/include/tellin/program.h).")
      .def(nb::init<const std::string&, int, int64_t, const std::string&, const BoundProgram*>(), "isa"_a,
           "num_threads"_a, "block_size"_a, "kv_dtype"_a, "team_of"_a.none() = nb::none())
      .def(
          "add_buffer",
          [](BoundProgram& p, int64_t width, bool logit_rows) {
            return p.program.add_buffer(width, logit_rows);
          },
          "width"_a, "logit_rows"_a)
      .def("add_weight", &BoundProgram::add_weight, "quant_type"_a, "data"_a, "rows"_a, "columns"_a,
           "precision"_a)
      .def("add_row_weight", &BoundProgram::add_row_weight, "quant_type"_a, "rows"_a, "columns"_a,
           "precision"_a)
      .def("share_weight", &BoundProgram::share_weight, "owner"_a, "weight"_a)
      .def("add_vector", &BoundProgram::add_vector, "quant_type"_a, "data"_a, "rows"_a, "columns"_a,
           "offset"_a)
      .def(
          "add_kv_layer",
          [](BoundProgram& p, int64_t heads, int64_t head_dim, int64_t value_dim) {
            return p.program.add_kv_layer(heads, head_dim, value_dim > 0 ? value_dim : head_dim);
          },
          "num_kv_heads"_a, "head_dim"_a, "value_dim"_a = 0)
      .def(
          "add_rotary",
          [](BoundProgram& p, std::vector<double> inv_freq, float factor, std::vector<int32_t> axes) {
            return p.program.add_rotary(std::move(inv_freq), factor, std::move(axes));
          },
          "inv_freq"_a, "attention_factor"_a, "axes"_a = std::vector<int32_t>())
      .def(
          "input", [](BoundProgram& p, int out) { p.program.input(out); }, "out"_a)
      .def("embed", &BoundProgram::embed, "quant_type"_a, "data"_a, "rows"_a, "columns"_a, "out"_a, "scale"_a,
           "rest_is_first"_a = false)
      .def(
          "rms_norm",
          [](BoundProgram& p, int x, int weight, int out, float eps, int64_t group) {
            p.program.rms_norm(x, weight, out, eps, group);
          },
          "x"_a, "weight"_a, "out"_a, "eps"_a, "group"_a)
      .def(
          "layer_norm",
          [](BoundProgram& p, int x, int weight, int bias, int out, float eps) {
            p.program.layer_norm(x, weight, bias, out, eps);
          },
          "x"_a, "weight"_a, "bias"_a, "out"_a, "eps"_a)
      .def(
          "linear",
          [](BoundProgram& p, int x, const std::vector<PartTuple>& parts, int residual) {
            std::vector<Program::Part> list;
            for (const PartTuple& ids : parts) list.push_back(part(ids));
            p.program.linear(x, list, residual);
          },
          "x"_a, "parts"_a, "residual"_a)
      .def(
          "head_linear",
          [](BoundProgram& p, int x, int weight, int out, int64_t num_heads) {
            p.program.head_linear(x, weight, out, num_heads);
          },
          "x"_a, "weight"_a, "out"_a, "num_heads"_a)
      .def(
          "concat", [](BoundProgram& p, int x, int y, int out) { p.program.concat(x, y, out); }, "x"_a, "y"_a,
          "out"_a)
      .def(
          "gated_linear",
          [](BoundProgram& p, int x, const PartTuple& gate, const PartTuple& up, int out,
             const std::string& act) {
            p.program.gated_linear(x, part(gate), part(up), out, activation_named(act));
          },
          "x"_a, "gate"_a, "up"_a, "out"_a, "act"_a)
      .def(
          "experts",
          [](BoundProgram& p, int x, int router, const ExpertPair& gate, const ExpertPair& up,
             const ExpertPair& down, int out, const std::string& act, int64_t top_k, bool normalize,
             bool sigmoid, int selection_bias, float scale, int scales, int64_t groups, int64_t top_groups) {
            p.program.experts(x, router, expert_parts(gate), expert_parts(up), expert_parts(down), out,
                              activation_named(act),
                              {top_k, sigmoid, normalize, selection_bias, scale, scales, groups, top_groups});
          },
          "x"_a, "router"_a, "gate"_a, "up"_a, "down"_a, "out"_a, "act"_a, "top_k"_a, "normalize"_a,
          "sigmoid"_a = false, "selection_bias"_a = -1, "scale"_a = 1.0f, "scales"_a = -1, "groups"_a = 1,
          "top_groups"_a = 1)
      .def(
          "gate_rows", [](BoundProgram& p, int x, int gate, int out) { p.program.gate_rows(x, gate, out); },
          "x"_a, "gate"_a, "out"_a)
      .def(
          "rope",
          [](BoundProgram& p, int x, int rotary, int64_t num_heads, int64_t head_dim, bool interleaved,
             int64_t offset) { p.program.rope(x, rotary, num_heads, head_dim, interleaved, offset); },
          "x"_a, "rotary"_a, "num_heads"_a, "head_dim"_a, "interleaved"_a, "offset"_a = 0)
      .def(
          "attention",
          [](BoundProgram& p, int q, int k, int v, int out, int layer, int64_t num_heads,
             int64_t num_kv_heads, int64_t head_dim, float scale, int64_t window, float softcap, bool causal,
             int sinks, int64_t value_dim, bool windowed) {
            p.program.attention(q, k, v, out, layer, num_heads, num_kv_heads, head_dim,
                                value_dim > 0 ? value_dim : head_dim, scale, window, softcap, causal, sinks,
                                windowed);
          },
          "q"_a, "k"_a, "v"_a, "out"_a, "layer"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "scale"_a,
          "window"_a, "softcap"_a, "causal"_a, "sinks"_a = -1, "value_dim"_a = 0, "windowed"_a = false)
      .def(
          "add_state_layer",
          [](BoundProgram& p, int64_t num_values) { return p.program.add_state_layer(num_values); },
          "num_values"_a)
      .def(
          "short_conv",
          [](BoundProgram& p, int x, int weight, int bias, int out, int state, int64_t kernel,
             const std::optional<std::string>& act) {
            const Activation known = act.has_value() ? activation_named(*act) : Activation::kIdentity;
            p.program.short_conv(x, weight, bias, out, state, kernel, act.has_value() ? &known : nullptr);
          },
          "x"_a, "weight"_a, "bias"_a, "out"_a, "state"_a, "kernel"_a, "act"_a.none())
      .def(
          "gated_delta",
          [](BoundProgram& p, int q, int k, int v, int a, int b, int out, int decay, int dt_bias, int state,
             int64_t num_k_heads, int64_t num_v_heads, bool tiled) {
            p.program.gated_delta({q, k, v, a, b, out}, decay, dt_bias, state, num_k_heads, num_v_heads,
                                  tiled);
          },
          "q"_a, "k"_a, "v"_a, "a"_a, "b"_a, "out"_a, "decay"_a, "dt_bias"_a, "state"_a, "num_k_heads"_a,
          "num_v_heads"_a, "tiled"_a)
      .def(
          "selective_scan",
          [](BoundProgram& p, int x, int b, int c, int dt, int out, int decay, int skip, int dt_bias,
             int state, int64_t num_heads, int64_t num_groups, float dt_min, float dt_max) {
            p.program.selective_scan({x, b, c, dt, out}, decay, skip, dt_bias, state, num_heads, num_groups,
                                     dt_min, dt_max);
          },
          "x"_a, "b"_a, "c"_a, "dt"_a, "out"_a, "decay"_a, "skip"_a, "dt_bias"_a, "state"_a, "num_heads"_a,
          "num_groups"_a, "dt_min"_a, "dt_max"_a)
      .def(
          "act_mul",
          [](BoundProgram& p, int gate, int up, int out, const std::string& act, int64_t up_start) {
            p.program.act_mul(gate, up, out, activation_named(act), up_start);
          },
          "gate"_a, "up"_a, "out"_a, "act"_a, "up_start"_a = 0)
      .def(
          "activation",
          [](BoundProgram& p, int x, int out, const std::string& act) {
            p.program.activation(x, out, activation_named(act));
          },
          "x"_a, "out"_a, "act"_a)
      .def(
          "add", [](BoundProgram& p, int x, int y, int out) { p.program.add(x, y, out); }, "x"_a, "y"_a,
          "out"_a)
      .def(
          "add_bias", [](BoundProgram& p, int x, int bias) { p.program.add_bias(x, bias); }, "x"_a, "bias"_a)
      .def(
          "add_given", [](BoundProgram& p, int x, int64_t start) { p.program.add_given(x, start); }, "x"_a,
          "start"_a)
      .def("add_position", &BoundProgram::add_position, "x"_a, "quant_type"_a, "data"_a, "rows"_a,
           "columns"_a)
      .def("add_token_type", &BoundProgram::add_token_type, "x"_a, "quant_type"_a, "data"_a, "rows"_a,
           "columns"_a)
      .def(
          "gather_rows", [](BoundProgram& p, int x, int out) { p.program.gather_rows(x, out); }, "x"_a,
          "out"_a)
      .def(
          "scale", [](BoundProgram& p, int x, float factor) { p.program.scale(x, factor); }, "x"_a,
          "factor"_a)
      .def(
          "add_scaled",
          [](BoundProgram& p, int x, int y, int coefs, int out, int64_t column, float offset, float factor) {
            p.program.add_scaled(x, y, coefs, out, column, offset, factor);
          },
          "x"_a, "y"_a, "coefs"_a, "out"_a, "column"_a, "offset"_a, "factor"_a)
      .def(
          "match_magnitude", [](BoundProgram& p, int x, int target) { p.program.match_magnitude(x, target); },
          "x"_a, "target"_a)
      .def(
          "keep_largest",
          [](BoundProgram& p, int x, float deviations) { p.program.keep_largest(x, deviations); }, "x"_a,
          "deviations"_a)
      .def(
          "scale_by_weight", [](BoundProgram& p, int x, int weight) { p.program.scale_by_weight(x, weight); },
          "x"_a, "weight"_a)
      .def(
          "scale_by_position",
          [](BoundProgram& p, int x, float beta, int64_t length) {
            p.program.scale_by_position(x, beta, length);
          },
          "x"_a, "beta"_a, "length"_a)
      .def(
          "xielu",
          [](BoundProgram& p, int x, int out, int alpha_p, int alpha_n, int beta, int eps) {
            p.program.xielu(x, out, {alpha_p, alpha_n, beta, eps});
          },
          "x"_a, "out"_a, "alpha_p"_a, "alpha_n"_a, "beta"_a, "eps"_a)
      .def(
          "softcap", [](BoundProgram& p, int x, float cap) { p.program.softcap(x, cap); }, "x"_a, "cap"_a)
      .def(
          "finalize",
          [](BoundProgram& p, int output, int hidden, int64_t vocab_size) {
            p.program.finalize(output, hidden, vocab_size);
          },
          "output"_a, "hidden"_a, "vocab_size"_a)
      .def(
          "lora",
          [](BoundProgram& p, int x, const std::vector<int>& outs, int64_t max_rank) {
            return p.program.lora(x, outs, max_rank);
          },
          "x"_a, "outs"_a, "max_rank"_a)
      .def("set_adapter", &BoundProgram::set_adapter, "slot"_a, "weights"_a)
      .def("clear_adapter", &BoundProgram::clear_adapter, "slot"_a)
      .def("pack_weight", &BoundProgram::pack_weight, "weight"_a, "begin"_a, "end"_a)
      .def("pack_rows", &BoundProgram::pack_rows, "weight"_a, "begin"_a, "quant_type"_a, "data"_a, "rows"_a,
           "columns"_a)
      .def("init_kv_cache", &BoundProgram::init_kv_cache, "num_blocks"_a, "system_root"_a = "")
      .def("free_kv_cache", &BoundProgram::free_kv_cache)
      .def("init_state_cache", &BoundProgram::init_state_cache, "num_slots"_a)
      .def("free_state_cache", &BoundProgram::free_state_cache)
      .def("copy_state", &BoundProgram::copy_state, "source"_a, "target"_a)
      .def_prop_ro("state_bytes_per_slot", [](BoundProgram& p) { return p.program.state_bytes_per_slot(); })
      .def("copy_kv_block", &BoundProgram::copy_kv_block, "source"_a, "target"_a)
      .def("forward", &BoundProgram::forward, "token_ids"_a.noconvert(), "positions"_a.noconvert(),
           "query_start_loc"_a.noconvert(), "seq_lens"_a.noconvert(), "block_table"_a.noconvert(),
           "logits_indices"_a.noconvert(), "adapter_slots"_a.noconvert() = nb::none(),
           "embeds"_a.noconvert() = nb::none(), "embed_rows"_a.noconvert() = nb::none(),
           "token_types"_a.noconvert() = nb::none(), "state_slots"_a.noconvert() = nb::none(),
           "state_saves"_a.noconvert() = nb::none(), "rope_positions"_a.noconvert() = nb::none(),
           "seen_ends"_a.noconvert() = nb::none(), "window_starts"_a.noconvert() = nb::none())
      .def("hidden", &BoundProgram::hidden)
      .def("block_maxima", &BoundProgram::block_maxima)
      .def("set_profile", &BoundProgram::set_profile, "enabled"_a)
      .def("profile", [](BoundProgram& p) { return p.program.profile(); })
      .def_prop_ro("num_stages", [](BoundProgram& p) { return p.program.num_stages(); })
      .def("stage_seconds", [](BoundProgram& p) { return p.program.stage_seconds(); })
      .def("take_spans", &BoundProgram::take_spans)
      .def("listing", [](BoundProgram& p) { return p.program.listing(); })
      .def_prop_ro("kv_bytes_per_block", [](BoundProgram& p) { return p.program.kv_bytes_per_block(); })
      .def_prop_ro("num_kv_blocks", [](BoundProgram& p) { return p.program.num_kv_blocks(); })
      .def_prop_ro("kv_committed_bytes", [](BoundProgram& p) { return p.kv_committed_bytes(); })
      .def_prop_ro("num_threads", [](BoundProgram& p) { return p.program.num_threads(); })
      .def_prop_ro(
          "thread_team", [](BoundProgram& p) -> ThreadTeam& { return p.program.team(); },
          nb::rv_policy::reference_internal)
      .def_prop_ro("isa", [](BoundProgram& p) { return std::string(p.program.isa()); })
      .def_prop_ro("weight_bytes", [](BoundProgram& p) { return p.program.weight_bytes(); })
      .def_prop_ro("last_forward_s", [](BoundProgram& p) { return p.program.last_forward_s(); });
}

}  // namespace tellin

// Python API of the sampler. Arrays are checked here: every index a row uses lies inside the arrays it is
// for.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "bindings.h"
#include "tellin/philox.h"
#include "tellin/sampler.h"

namespace nb = nanobind;

namespace tellin {
namespace {

template <typename T>
using Rows = nb::ndarray<T, nb::ndim<2>, nb::device::cpu>;
template <typename T>
using Column = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

template <typename Array>
void require_rows(const Array& array, const char* message) {
  // NumPy gives arrays without elements arbitrary strides
  require(array.shape(0) == 0 || array.shape(1) <= 1 || array.stride(1) == 1, message);
}

void require_below(const Column<const int32_t>& indices, int64_t least, int64_t bound, const char* message) {
  for (size_t i = 0; i < indices.shape(0); ++i) {
    require(indices.data()[i] >= least && indices.data()[i] < bound, message);
  }
}

void set_slot(Sampler& sampler, int64_t slot, float temperature, double top_p, int32_t top_k, float min_p,
              float repetition_penalty, float frequency_penalty, float presence_penalty, uint64_t rng_key,
              int32_t min_tokens, int32_t num_logprobs, std::optional<std::vector<int32_t>> allowed_ids,
              std::vector<int32_t> stop_ids, std::vector<int32_t> bias_ids, std::vector<float> bias_values,
              std::vector<std::vector<int32_t>> bad_words, std::vector<int32_t> logprob_ids) {
  require(bias_ids.size() == bias_values.size(), "bias_ids and bias_values must have the same length");
  for (const std::vector<int32_t>& word : bad_words)
    require(!word.empty(), "a bad word must have at least one id");
  SlotParams p;
  p.temperature = temperature;
  p.top_p = top_p;
  p.top_k = top_k;
  p.min_p = min_p;
  p.repetition_penalty = repetition_penalty;
  p.frequency_penalty = frequency_penalty;
  p.presence_penalty = presence_penalty;
  p.rng_key = rng_key;
  p.min_tokens = min_tokens;
  p.num_logprobs = num_logprobs;
  p.has_allowed_ids = allowed_ids.has_value();
  if (allowed_ids) p.allowed_ids = std::move(*allowed_ids);
  p.stop_ids = std::move(stop_ids);
  p.bias_ids = std::move(bias_ids);
  p.bias_values = std::move(bias_values);
  p.bad_words = std::move(bad_words);
  p.logprob_ids = std::move(logprob_ids);
  sampler.set_slot(slot, std::move(p));
}

void check_rows(const Sampler& sampler, const Rows<float>& logits, const Column<const int32_t>& slots,
                const Column<const int32_t>& logits_rows, const Column<const int32_t>& history_lens,
                const Column<const int32_t>& prompt_lens, const Rows<const int32_t>& history) {
  const size_t n = slots.shape(0);
  require_rows(logits, "rows of logits must be contiguous");
  require_rows(history, "rows of history must be contiguous");
  require(static_cast<int64_t>(logits.shape(1)) >= sampler.num_ids(),
          "logits have fewer columns than there are ids");
  require(logits_rows.shape(0) == n && history_lens.shape(0) == n && prompt_lens.shape(0) == n,
          "the row arrays must have the same length");
  require_below(logits_rows, 0, static_cast<int64_t>(logits.shape(0)), "a logits row is out of range");
  require_below(slots, 0, static_cast<int64_t>(history.shape(0)), "a slot is out of range");
  require_below(history_lens, 0, static_cast<int64_t>(history.shape(1)) + 1,
                "a history length is out of range");
  for (size_t i = 0; i < n; ++i) {
    require(prompt_lens.data()[i] >= 0 && prompt_lens.data()[i] <= history_lens.data()[i],
            "a prompt is longer than its history");
    require(sampler.slot(slots.data()[i]) != nullptr, "a slot was never set");
  }
}

// Block maxima of rows of logits: where each row's begin, and how far apart.
struct Maxima {
  const float* data = nullptr;
  int64_t stride = 0;
};

template <typename Logits>
Maxima checked_maxima(const Sampler& sampler, const Logits& logits,
                      const std::optional<Rows<const float>>& maxima) {
  if (!maxima) return {};
  require_rows(*maxima, "rows of maxima must be contiguous");
  const int64_t blocks = (sampler.num_ids() + kSampleBlock - 1) / kSampleBlock;
  require(maxima->shape(0) == logits.shape(0) && static_cast<int64_t>(maxima->shape(1)) >= blocks,
          "maxima must have a row per row of logits, and an entry per block");
  return {maxima->data(), maxima->stride(0)};
}

void sample(Sampler& sampler, Rows<float> logits, Column<const int32_t> slots,
            Column<const int32_t> logits_rows, Column<const int32_t> history_lens,
            Column<const int32_t> prompt_lens, Rows<const int32_t> history, Column<int32_t> tokens,
            Column<int32_t> status, int32_t stages, std::optional<Rows<const int32_t>> bitmask,
            std::optional<Column<const int32_t>> bitmask_rows, std::optional<Rows<const float>> raw,
            std::optional<Column<const int32_t>> raw_rows, std::optional<Rows<int32_t>> logprob_ids,
            std::optional<Rows<float>> logprobs, std::optional<Column<int32_t>> ranks, ThreadTeam* team,
            std::optional<Rows<const float>> maxima) {
  const size_t n = slots.shape(0);
  check_rows(sampler, logits, slots, logits_rows, history_lens, prompt_lens, history);
  require(tokens.shape(0) == n && status.shape(0) == n, "tokens and status must have one entry per row");
  SampleBatch batch = {};
  batch.logits = logits.data();
  batch.logits_stride = logits.stride(0);
  batch.num_rows = static_cast<int64_t>(n);
  batch.slots = slots.data();
  batch.logits_rows = logits_rows.data();
  batch.history_lens = history_lens.data();
  batch.prompt_lens = prompt_lens.data();
  batch.history = history.data();
  batch.history_stride = history.stride(0);
  batch.stages = stages;
  batch.tokens = tokens.data();
  batch.status = status.data();
  if (bitmask) {
    require(bitmask_rows.has_value() && bitmask_rows->shape(0) == n,
            "bitmask_rows must have one entry per row");
    require_rows(*bitmask, "rows of the bitmask must be contiguous");
    require(static_cast<int64_t>(bitmask->shape(1)) * 32 >= sampler.num_ids(),
            "the bitmask has too few words");
    require_below(*bitmask_rows, -1, static_cast<int64_t>(bitmask->shape(0)),
                  "a bitmask row is out of range");
    batch.bitmask = bitmask->data();
    batch.bitmask_stride = bitmask->stride(0);
    batch.bitmask_rows = bitmask_rows->data();
  }
  if (raw) {
    require(raw_rows.has_value() && raw_rows->shape(0) == n, "raw_rows must have one entry per row");
    require_rows(*raw, "rows of raw must be contiguous");
    require(static_cast<int64_t>(raw->shape(1)) >= sampler.num_ids(),
            "raw has fewer columns than there are ids");
    require_below(*raw_rows, -1, static_cast<int64_t>(raw->shape(0)), "a raw row is out of range");
    batch.raw = raw->data();
    batch.raw_stride = raw->stride(0);
    batch.raw_rows = raw_rows->data();
  }
  const Maxima known = checked_maxima(sampler, logits, maxima);
  batch.maxima = known.data;
  batch.maxima_stride = known.stride;
  if (logprob_ids) {
    require(logprobs.has_value() && ranks.has_value(), "logprob_ids needs logprobs and ranks");
    require(logprob_ids->shape(0) == n && logprobs->shape(0) == n && ranks->shape(0) == n &&
                logprob_ids->shape(1) == logprobs->shape(1) && logprob_ids->stride(0) == logprobs->stride(0),
            "the log-probability arrays must have the same shape, one row per row");
    require_rows(*logprob_ids, "rows of logprob_ids must be contiguous");
    require_rows(*logprobs, "rows of logprobs must be contiguous");
    for (size_t i = 0; i < n; ++i) {
      require(sampler.num_logprob_columns(slots.data()[i]) <= static_cast<int64_t>(logprob_ids->shape(1)),
              "the log-probability arrays have too few columns");
    }
    batch.logprob_ids = logprob_ids->data();
    batch.logprobs = logprobs->data();
    batch.logprob_stride = logprob_ids->stride(0);
    batch.ranks = ranks->data();
  }
  nb::gil_scoped_release release;
  sampler.run(batch, team);
}

void prompt_logprobs(Sampler& sampler, Rows<const float> logits, Column<const int32_t> ids, int64_t k,
                     Rows<int32_t> out_ids, Rows<float> out_values, Column<int32_t> ranks,
                     Column<int32_t> status, ThreadTeam* team, std::optional<Rows<const float>> maxima) {
  const size_t n = ids.shape(0);
  require_rows(logits, "rows of logits must be contiguous");
  require_rows(out_ids, "rows of out_ids must be contiguous");
  require_rows(out_values, "rows of out_values must be contiguous");
  require(static_cast<int64_t>(logits.shape(1)) >= sampler.num_ids(),
          "logits have fewer columns than there are ids");
  require(logits.shape(0) == n && out_ids.shape(0) == n && out_values.shape(0) == n && ranks.shape(0) == n &&
              status.shape(0) == n,
          "all arrays must have one row per id");
  const int64_t columns = 1 + std::min(k, sampler.num_ids());
  require(k >= 0 && static_cast<int64_t>(out_ids.shape(1)) >= columns &&
              static_cast<int64_t>(out_values.shape(1)) >= columns &&
              out_ids.stride(0) == out_values.stride(0),
          "the output arrays must have k + 1 columns");
  require_below(ids, 0, sampler.num_ids(), "an id is out of range");
  const Maxima known = checked_maxima(sampler, logits, maxima);
  nb::gil_scoped_release release;
  sampler.prompt_logprobs(logits.data(), logits.stride(0), known.data, known.stride, static_cast<int64_t>(n),
                          ids.data(), k, out_ids.data(), out_values.data(), out_ids.stride(0), ranks.data(),
                          status.data(), team);
}

}  // namespace

void bind_sampler(nb::module_& m) {
  nb::class_<Sampler>(m, "Sampler")
      .def(
          "__init__",
          [](Sampler* self, int64_t num_ids, int32_t mode, std::optional<std::string> isa) {
            require(num_ids > 0 && num_ids <= int64_t{1} << (63 - kWeightBits), "num_ids is out of range");
            require(mode >= 0 && mode <= 3, "unknown log-probability mode");
            const SamplingKernels* kernels = sampling_kernels(isa ? isa->c_str() : nullptr);
            require(kernels != nullptr, "unknown instruction set, or this machine does not have it");
            new (self) Sampler(num_ids, static_cast<LogprobsMode>(mode), kernels);
          },
          nb::arg("num_ids"), nb::arg("mode"), nb::arg("isa").none() = nb::none())
      .def("set_slot", &set_slot, nb::arg("slot"), nb::kw_only(), nb::arg("temperature"), nb::arg("top_p"),
           nb::arg("top_k"), nb::arg("min_p"), nb::arg("repetition_penalty"), nb::arg("frequency_penalty"),
           nb::arg("presence_penalty"), nb::arg("rng_key"), nb::arg("min_tokens"), nb::arg("num_logprobs"),
           nb::arg("allowed_ids").none(), nb::arg("stop_ids"), nb::arg("bias_ids"), nb::arg("bias_values"),
           nb::arg("bad_words"), nb::arg("logprob_ids"))
      .def("sample", &sample, nb::arg("logits"), nb::arg("slots"), nb::arg("logits_rows"),
           nb::arg("history_lens"), nb::arg("prompt_lens"), nb::arg("history"), nb::arg("tokens"),
           nb::arg("status"), nb::arg("stages"), nb::arg("bitmask").none() = nb::none(),
           nb::arg("bitmask_rows").none() = nb::none(), nb::arg("raw").none() = nb::none(),
           nb::arg("raw_rows").none() = nb::none(), nb::arg("logprob_ids").none() = nb::none(),
           nb::arg("logprobs").none() = nb::none(), nb::arg("ranks").none() = nb::none(),
           nb::arg("team").none() = nb::none(), nb::arg("maxima").none() = nb::none())
      .def("prompt_logprobs", &prompt_logprobs, nb::arg("logits"), nb::arg("ids"), nb::arg("k"),
           nb::arg("out_ids"), nb::arg("out_values"), nb::arg("ranks"), nb::arg("status"),
           nb::arg("team").none() = nb::none(), nb::arg("maxima").none() = nb::none())
      .def("num_logprob_columns", &Sampler::num_logprob_columns, nb::arg("slot"))
      .def_prop_ro("isa", [](const Sampler& self) { return self.kernels().isa; })
      .def_prop_ro("num_ids", &Sampler::num_ids);
  m.def(
      "mass_range",
      [](Column<const float> row, float temperature, float nats, const std::string& isa, float listed_nats) {
        const SamplingKernels* kernels = sampling_kernels(isa.c_str());
        require(kernels != nullptr, "unknown instruction set, or this machine does not have it");
        require(row.shape(0) > 0 && row.shape(0) <= size_t{1} << (63 - kWeightBits), "bad number of entries");
        const MassRange range = mass_range(*kernels, row.data(), static_cast<int64_t>(row.shape(0)),
                                           1.0f / temperature, nats, listed_nats);
        return std::vector<uint64_t>{range.least, range.exact, range.most};
      },
      nb::arg("row"), nb::arg("temperature"), nb::arg("nats"), nb::arg("isa"), nb::arg("listed_nats"),
      "Lower bound, exact value and upper bound of a row's integer mass; for tests.");
  m.def(
      "philox4x32",
      [](uint64_t key, uint32_t index, uint32_t purpose) {
        const PhiloxBlock c = philox4x32(key, index, static_cast<RandomPurpose>(purpose));
        return std::vector<uint32_t>(c.word, c.word + 4);
      },
      nb::arg("key"), nb::arg("index"), nb::arg("purpose"),
      "Four words of Philox4x32-10 for the counter (index, purpose, 0, 0).");
}

}  // namespace tellin

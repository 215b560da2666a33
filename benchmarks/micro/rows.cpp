// Kernels of one row: norms, sums, activations, rotary embedding, and quantising for linear layers.
#include "micro.h"
#include "tellin/linear.h"
#include "tellin/mapped_memory.h"
#include "tellin/vector_kernels.h"

namespace tellin::micro {
namespace {

constexpr int64_t kWidth = 2048;
constexpr int64_t kHeadDim = 64;

// Calls f(x, y, out), rows of kWidth values.
template <class F>
void add(const std::string& name, F f) {
  const auto run = [f](benchmark::State& state) {
    const std::vector<float> x = values(kWidth), y = values(kWidth);
    std::vector<float> out(kWidth);
    for (auto _ : state) {
      f(x.data(), y.data(), out.data());
      benchmark::ClobberMemory();
    }
    state.SetItemsProcessed(state.iterations() * kWidth);
  };
  benchmark::RegisterBenchmark(name.c_str(), run);
}

void quantize(benchmark::State& state, const LinearKernels* kernels, ActPrecision precision) {
  const std::vector<float> x = values(kWidth);
  const size_t row_bytes = kernels->quantized_row_bytes(kWidth, precision);
  const MappedMemory memory(row_bytes, /*huge_pages=*/false);
  const QuantizedRows rows{memory.data(), static_cast<int64_t>(row_bytes)};
  for (auto _ : state) {
    kernels->quantize_row(precision, x.data(), kWidth, 0, rows);
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * kWidth);
}

}  // namespace

void add_rows(const std::string& isa) {
  const VectorKernels& k = *vector_kernels(isa.c_str());
  const std::string prefix = "rows/" + isa + "/";
  add(prefix + "rms_norm",
      [&k](const float* x, const float* w, float* out) { k.rms_norm(x, w, kWidth, 1e-5f, out); });
  add(prefix + "layer_norm",
      [&k](const float* x, const float* w, float* out) { k.layer_norm(x, w, w, kWidth, 1e-5f, out); });
  add(prefix + "add", [&k](const float* x, const float* y, float* out) { k.add(x, y, kWidth, out); });
  add(prefix + "scale", [&k](const float* x, const float*, float* out) { k.scale(x, 0.5f, kWidth, out); });
  add(prefix + "softcap",
      [&k](const float* x, const float*, float* out) { k.softcap(x, 30.0f, kWidth, out); });
  const std::pair<const char*, Activation> activations[] = {{"silu", Activation::kSilu},
                                                            {"gelu", Activation::kGelu},
                                                            {"gelu_tanh", Activation::kGeluTanh},
                                                            {"relu", Activation::kRelu}};
  for (const auto& [name, act] : activations) {
    add(prefix + name,
        [&k, act = act](const float* x, const float*, float* out) { k.activation(act, x, kWidth, out); });
    add(prefix + name + "_mul",
        [&k, act = act](const float* x, const float* y, float* out) { k.act_mul(act, x, y, kWidth, out); });
  }
  for (const bool interleaved : {false, true}) {
    add(prefix + (interleaved ? "rope_interleaved" : "rope"),
        [&k, interleaved](const float* x, const float* y, float* out) {
          for (int64_t d = 0; d < kWidth; d += kHeadDim) k.rope(out + d, x, y, kHeadDim / 2, interleaved);
        });
  }
  const LinearKernels* const linear = linear_kernels(isa.c_str());
  benchmark::RegisterBenchmark((prefix + "quantize_int8").c_str(), quantize, linear, ActPrecision::kInt8);
  benchmark::RegisterBenchmark((prefix + "quantize_int16").c_str(), quantize, linear, ActPrecision::kInt16);
}

}  // namespace tellin::micro

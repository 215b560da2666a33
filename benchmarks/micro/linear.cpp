// Linear layers: every storage type and activation precision, from one token to a prefill. Cached: one core
// on a matrix that stays in its cache. Streamed: every thread walks over weights of its own in memory.
#include "tellin/linear.h"

#include <algorithm>
#include <memory>
#include <thread>

#include "micro.h"

namespace tellin::micro {
namespace {

constexpr size_t kCacheBytes = 384 << 10;
constexpr size_t kStreamBytes = 2 << 20;  // of a call that streams

struct Type {
  const char* name;
  QuantType type;
  bool is_float;
};
constexpr Type kTypes[] = {{"F32", QuantType::F32, true},        {"F16", QuantType::F16, true},
                           {"BF16", QuantType::BF16, true},      {"Q4_0", QuantType::Q4_0, false},
                           {"Q4_1", QuantType::Q4_1, false},     {"Q5_0", QuantType::Q5_0, false},
                           {"Q5_1", QuantType::Q5_1, false},     {"Q8_0", QuantType::Q8_0, false},
                           {"Q2_K", QuantType::Q2_K, false},     {"Q3_K", QuantType::Q3_K, false},
                           {"Q4_K", QuantType::Q4_K, false},     {"Q5_K", QuantType::Q5_K, false},
                           {"Q6_K", QuantType::Q6_K, false},     {"IQ4_NL", QuantType::IQ4_NL, false},
                           {"IQ4_XS", QuantType::IQ4_XS, false}, {"MXFP4", QuantType::MXFP4, false}};
struct Precision {
  const char* name;
  ActPrecision precision;
};
constexpr Precision kPrecisions[] = {
    {"int8", ActPrecision::kInt8}, {"int16", ActPrecision::kInt16}, {"f32", ActPrecision::kFloat32}};

// A matrix as large as the arena, and rows to multiply it with.
class Layer {
 public:
  Layer(const LinearKernels& kernels, QuantType type, ActPrecision precision, int64_t features, int tokens)
      : kernels_(kernels), precision_(precision), tokens_(tokens), features_(features) {
    const size_t group_bytes = kernels.packed_group_bytes(type, features, precision);
    const auto groups = static_cast<int64_t>(kArenaBytes / group_bytes);
    const int32_t layout = kernels.layout_id(type, precision);
    weights_ = {type, layout, groups * kGroupRows, features, groups, group_bytes, arena()};
    x_ = values(static_cast<size_t>(features * tokens));
    if (precision != ActPrecision::kFloat32) {
      const size_t row_bytes = kernels.quantized_row_bytes(features, precision);
      const auto bytes = row_bytes * static_cast<size_t>(tokens);
      quantized_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, bytes)));
      rows_ = {quantized_.get(), static_cast<int64_t>(row_bytes)};
      for (int m = 0; m < tokens; ++m) kernels.quantize_row(precision, &x_[m * features], features, m, rows_);
    }
  }

  // Groups of at most `bytes`, whole tasks of them.
  int64_t groups_of(size_t bytes) const {
    const auto groups = static_cast<int64_t>(bytes / weights_.group_bytes);
    return std::max<int64_t>(kGroupsPerTask, groups / kGroupsPerTask * kGroupsPerTask);
  }
  int64_t num_groups() const { return weights_.num_groups; }
  double macs(int64_t groups) const { return static_cast<double>(groups * kGroupRows * features_ * tokens_); }
  double bytes(int64_t groups) const {
    return static_cast<double>(groups) * static_cast<double>(weights_.group_bytes);
  }

  // Multiplies groups [g0, g1); results of a row lie behind each other.
  void run(int64_t g0, int64_t g1, std::vector<float>& out) const {
    const int64_t ldo = (g1 - g0) * kGroupRows;
    out.resize(static_cast<size_t>(ldo * tokens_));
    float* const origin = out.data() - g0 * kGroupRows;
    if (precision_ == ActPrecision::kFloat32) {
      kernels_.linear_f32(weights_, x_.data(), features_, 0, tokens_, g0, g1, origin, ldo);
    } else if (precision_ == ActPrecision::kInt8) {
      kernels_.linear_int8(weights_, rows_, 0, tokens_, g0, g1, origin, ldo);
    } else {
      kernels_.linear_int16(weights_, rows_, 0, tokens_, g0, g1, origin, ldo);
    }
  }

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  const LinearKernels& kernels_;
  const ActPrecision precision_;
  const int64_t tokens_, features_;
  PackedMatrix weights_{};
  std::vector<float> x_;
  std::unique_ptr<uint8_t, Free> quantized_;
  QuantizedRows rows_{};
};

void run_cached(benchmark::State& state, const LinearKernels* kernels, QuantType type,
                ActPrecision precision) {
  const Layer layer(*kernels, type, precision, state.range(1), static_cast<int>(state.range(0)));
  const int64_t groups = layer.groups_of(kCacheBytes);
  std::vector<float> out;
  for (auto _ : state) layer.run(0, groups, out);
  state.counters["MAC"] = rate(layer.macs(groups));
}

void run_streamed(benchmark::State& state, const LinearKernels* kernels, QuantType type,
                  ActPrecision precision) {
  const Layer layer(*kernels, type, precision, state.range(1), static_cast<int>(state.range(0)));
  const int64_t step = layer.groups_of(kStreamBytes);
  const int64_t share = layer.num_groups() / state.threads() / step;
  int64_t round = 0;
  std::vector<float> out;
  for (auto _ : state) {
    const int64_t g = (state.thread_index() * share + round++ % share) * step;
    layer.run(g, g + step, out);
  }
  state.SetBytesProcessed(static_cast<int64_t>(static_cast<double>(state.iterations()) * layer.bytes(step)));
}

}  // namespace

void add_linear(const std::string& isa) {
  const LinearKernels* const kernels = linear_kernels(isa.c_str());
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  for (const Type& type : kTypes) {
    for (const Precision& p : kPrecisions) {
      if (type.is_float && p.precision != ActPrecision::kFloat32) continue;
      const std::string name = "linear/" + isa + "/" + type.name + "/" + p.name;
      auto* cached = benchmark::RegisterBenchmark((name + "/cached").c_str(), run_cached, kernels, type.type,
                                                  p.precision);
      auto* streamed = benchmark::RegisterBenchmark((name + "/streamed").c_str(), run_streamed, kernels,
                                                    type.type, p.precision);
      for (const int64_t features : {576, 1536, 2048}) {  // of rows of a small model, and of a larger one
        if (kernels->packed_group_bytes(type.type, features, p.precision) == 0) continue;
        cached->ArgsProduct({{1, 2, 4, 8, 16, 64, 512}, {features}});
      }
      cached->ArgNames({"tokens", "features"});
      streamed->ArgNames({"tokens", "features"})->ArgsProduct({{1, 2, 4, 8, 16}, {2048}});
      streamed->Threads(cores)->UseRealTime();
    }
  }
}

}  // namespace tellin::micro

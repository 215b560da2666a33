// Sampling: the loops over a row of logits, and whole rows through the sampler on one thread.
#include <algorithm>
#include <cmath>

#include "micro.h"
#include "tellin/sampler.h"

namespace tellin::micro {
namespace {

// Logits of a text's kind: most far below the few that count.
std::vector<float> logits(int64_t n) {
  std::vector<float> row = values(static_cast<size_t>(n));
  for (float& x : row) x = -2.0f * std::log((1.0f + x) / 2.0f + 1e-6f) - 8.0f;
  return row;
}

void block_max(benchmark::State& state, const SamplingKernels* k) {
  const int64_t n = state.range(0);
  const std::vector<float> row = logits(n);
  std::vector<float> maxima(static_cast<size_t>(n / kSampleBlock + 1));
  for (auto _ : state) benchmark::DoNotOptimize(k->block_max(row.data(), n, maxima.data()));
  state.SetItemsProcessed(state.iterations() * n);
}

void block_mass(benchmark::State& state, const SamplingKernels* k) {
  const int64_t n = state.range(0);
  const std::vector<float> row = logits(n);
  std::vector<float> maxima(static_cast<size_t>(n / kSampleBlock + 1));
  std::vector<uint64_t> masses(maxima.size());
  k->block_max(row.data(), n, maxima.data());
  const float largest = *std::max_element(row.begin(), row.end());
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        k->block_mass(row.data(), n, maxima.data(), largest, 1.25f, -INFINITY, masses.data()));
  }
  state.SetItemsProcessed(state.iterations() * n);
}

void estimate_blocks(benchmark::State& state, const SamplingKernels* k) {
  const int64_t n = state.range(0);
  const std::vector<float> row = logits(n);
  std::vector<float> maxima(static_cast<size_t>(n / kSampleBlock + 1));
  k->block_max(row.data(), n, maxima.data());
  const float largest = *std::max_element(row.begin(), row.end());
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        k->estimate_blocks(row.data(), n, maxima.data(), -INFINITY, INFINITY, largest, 1.25f));
  }
  state.SetItemsProcessed(state.iterations() * n);
}

void apply_bitmask(benchmark::State& state, const SamplingKernels* k) {
  const int64_t n = state.range(0);
  std::vector<float> row = logits(n);
  const std::vector<int32_t> mask(static_cast<size_t>((n + 31) / 32), 0x5a5a5a5a);
  for (auto _ : state) {
    k->apply_bitmask(row.data(), n, mask.data());
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * n);
}

void sample_row(benchmark::State& state, const SamplingKernels* k, SlotParams params) {
  constexpr int32_t kHistory = 256;
  const int64_t n = state.range(0);
  std::vector<float> row = logits(n);
  const std::vector<float> fresh = row;
  const bool is_changed = params.repetition_penalty != 1.0f || params.frequency_penalty != 0.0f;
  Sampler sampler(n, LogprobsMode::kRawLogprobs, k);
  sampler.set_slot(0, std::move(params));
  const int64_t columns = std::max<int64_t>(1, sampler.num_logprob_columns(0));
  const int32_t zero = 0, history_len = kHistory, prompt_len = kHistory / 2;
  std::vector<int32_t> history(kHistory), ids(static_cast<size_t>(columns));
  for (int32_t i = 0; i < kHistory; ++i) history[static_cast<size_t>(i)] = 37 * i;
  std::vector<float> logprobs(static_cast<size_t>(columns));
  int32_t token = 0, status = 0, rank = 0;
  const bool has_logprobs = sampler.num_logprob_columns(0) > 0;
  std::vector<float> maxima(static_cast<size_t>(n / kSampleBlock + 1));
  k->block_max(row.data(), n, maxima.data());
  SampleBatch batch{};
  batch.logits = row.data();
  batch.logits_stride = n;
  batch.num_rows = 1;
  batch.slots = batch.logits_rows = &zero;
  batch.history_lens = &history_len;
  batch.prompt_lens = &prompt_len;
  batch.history = history.data();
  batch.history_stride = kHistory;
  batch.maxima = maxima.data();  // the head's tasks find them
  batch.maxima_stride = n / kSampleBlock + 1;
  batch.stages = kStageDefault;
  batch.tokens = &token;
  batch.status = &status;
  batch.logprob_ids = has_logprobs ? ids.data() : nullptr;
  batch.logprobs = logprobs.data();
  batch.logprob_stride = columns;
  batch.ranks = &rank;
  for (auto _ : state) {
    if (is_changed) row = fresh;  // penalties write into the row
    status = kRowOk;
    sampler.run(batch, nullptr);
    benchmark::DoNotOptimize(token);
  }
}

}  // namespace

void add_sampling(const std::string& isa) {
  if (isa == "avxvnni") return;  // has the loops of AVX2
  const SamplingKernels* const k = sampling_kernels(isa.c_str());
  const std::string prefix = "sampling/" + isa + "/";
  const auto sizes = [](benchmark::internal::Benchmark* cases) {
    cases->ArgName("ids")->Arg(49152)->Arg(262144);
  };
  sizes(benchmark::RegisterBenchmark((prefix + "block_max").c_str(), block_max, k));
  sizes(benchmark::RegisterBenchmark((prefix + "block_mass").c_str(), block_mass, k));
  sizes(benchmark::RegisterBenchmark((prefix + "estimate_blocks").c_str(), estimate_blocks, k));
  sizes(benchmark::RegisterBenchmark((prefix + "apply_bitmask").c_str(), apply_bitmask, k));
  SlotParams greedy, random, top_k, top_p, min_p, penalties, logprobs;
  random.temperature = top_k.temperature = top_p.temperature = min_p.temperature = 0.8f;
  top_k.top_k = 50;
  top_p.top_p = 0.95;
  min_p.min_p = 0.05f;
  penalties.repetition_penalty = 1.1f;
  penalties.frequency_penalty = penalties.presence_penalty = 0.1f;
  logprobs.num_logprobs = 5;
  const std::pair<const char*, SlotParams> rows[] = {
      {"greedy", greedy}, {"temperature", random},  {"top_k", top_k},      {"top_p", top_p},
      {"min_p", min_p},   {"penalties", penalties}, {"logprobs", logprobs}};
  for (const auto& [name, params] : rows) {
    sizes(benchmark::RegisterBenchmark((prefix + "row_" + name).c_str(), sample_row, k, params));
  }
}

}  // namespace tellin::micro

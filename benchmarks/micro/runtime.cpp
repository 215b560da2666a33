// Micro-benchmark of what the plan executor is made of: stage hand-over, row kernels, attention kernels.
//
//   cmake --build build/dev --target bench_runtime && build/dev/bench_runtime [isa ...]
//
// One thread (but for the hand-over), data in cache, best of many repetitions by the thread's CPU time, so
// that neighbours on the machine disturb little. Rates: values or multiply-adds per nanosecond.
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "tellin/kv_pool.h"
#include "tellin/linear.h"
#include "tellin/thread_team.h"
#include "tellin/vector_kernels.h"

namespace {

using namespace tellin;

double now_ns(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return 1e9 * static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec);
}

// Best nanoseconds per call of f.
template <class F>
double best_ns(F&& f, clockid_t clock = CLOCK_THREAD_CPUTIME_ID) {
  double best = 1e18;
  int calls = 1;
  for (int round = 0; round < 30; ++round) {
    const double start = now_ns(clock);
    for (int i = 0; i < calls; ++i) f();
    const double elapsed = now_ns(clock) - start;
    best = std::min(best, elapsed / calls);
    calls = std::max(1, static_cast<int>(2e6 / best));  // rounds of 2 ms
  }
  return best;
}

std::vector<float> values(size_t count) {
  std::vector<float> v(count);
  uint32_t state = 1;
  for (float& x : v) {
    state = state * 1664525u + 1013904223u;
    x = static_cast<float>(static_cast<int32_t>(state)) / 2147483648.0f;
  }
  return v;
}

// Every stage has one task per thread, and none ends before all have begun: the whole team takes part.
void bench_team() {
  constexpr int kStages = 2000;
  struct Stages final : ThreadTeam::Job {
    int left = kStages;
    int threads = 1;
    std::atomic<int> begun{0};
    int64_t next_stage() noexcept override {
      begun.store(0, std::memory_order_relaxed);
      return left-- > 0 ? threads : 0;
    }
    void run_task(int64_t, int) noexcept override {
      begun.fetch_add(1);
      while (begun.load() < threads) {
      }
    }
  };
  for (int threads : {1, 2}) {
    ThreadTeam team(threads);
    double best = 1e18;
    for (int round = 0; round < 30; ++round) {
      Stages job;
      job.threads = threads;
      const double start = now_ns(CLOCK_MONOTONIC);
      team.run(job);
      best = std::min(best, (now_ns(CLOCK_MONOTONIC) - start) / kStages);
    }
    std::printf("%-44s %8.0f ns\n", ("hand-over between stages, threads " + std::to_string(threads)).c_str(),
                best);
  }
}

void bench_rows(const char* isa) {
  const VectorKernels& k = *vector_kernels(isa);
  const int64_t n = 2048;
  const std::vector<float> x = values(n), y = values(n), w = values(n);
  std::vector<float> out(n);
  const auto report = [&](const char* name, double ns) {
    std::printf("%-10s %-33s %8.0f ns  %6.2f values/ns\n", isa, name, ns, static_cast<double>(n) / ns);
  };
  report("rms_norm 2048", best_ns([&] { k.rms_norm(x.data(), w.data(), n, 1e-5f, out.data()); }));
  report("layer_norm 2048",
         best_ns([&] { k.layer_norm(x.data(), w.data(), y.data(), n, 1e-5f, out.data()); }));
  report("add 2048", best_ns([&] { k.add(x.data(), y.data(), n, out.data()); }));
  report("silu_mul 2048", best_ns([&] { k.act_mul(Activation::kSilu, x.data(), y.data(), n, out.data()); }));
  report("gelu_mul 2048", best_ns([&] { k.act_mul(Activation::kGelu, x.data(), y.data(), n, out.data()); }));
  report("softcap 2048", best_ns([&] { k.softcap(x.data(), 30.0f, n, out.data()); }));
  report("rope 32 x 64", best_ns([&] {
           for (int h = 0; h < 32; ++h) k.rope(out.data() + 64 * h, x.data(), y.data(), 32, false);
         }));
  const LinearKernels& linear = *linear_kernels(isa);
  for (ActPrecision precision : {ActPrecision::kInt8, ActPrecision::kInt16}) {
    const size_t row_bytes = linear.quantized_row_bytes(n, precision);
    const MappedMemory memory(row_bytes, /*huge_pages=*/false);
    const QuantizedRows rows{memory.data(), static_cast<int64_t>(row_bytes)};
    report(precision == ActPrecision::kInt8 ? "quantize to int8 2048" : "quantize to int16 2048",
           best_ns([&] { linear.quantize_row(precision, x.data(), n, 0, rows); }));
  }
}

// One full partition (256 positions) for `rows` query rows of one kv head.
void bench_attention(const char* isa, KvDtype dtype, int64_t head_dim, int64_t rows, bool expanded) {
  const AttentionKernels& k = *attention_kernels(isa);
  const KvLayout layout = kv_layout(dtype, head_dim);
  const KvLayout panel_layout = expanded_layout(layout);
  const std::vector<float> q = values(static_cast<size_t>(rows * head_dim));
  MappedMemory cache(static_cast<size_t>(layout.tile_bytes * kPartitionTiles), false);
  MappedMemory panel(static_cast<size_t>(panel_layout.tile_bytes * kPartitionTiles), false);
  const std::vector<float> kv = values(static_cast<size_t>(head_dim));
  const uint8_t* tiles[kPartitionTiles];
  const uint8_t* panels[kPartitionTiles];
  for (int64_t t = 0; t < kPartitionTiles; ++t) {
    uint8_t* tile = cache.data() + t * layout.tile_bytes;
    for (int64_t lane = 0; lane < kTilePositions; ++lane)
      k.kv_store(layout, kv.data(), kv.data(), lane, tile);
    tiles[t] = tile;
    panels[t] = panel.data() + t * panel_layout.tile_bytes;
  }
  const auto expand = [&] {
    for (int64_t t = 0; t < kPartitionTiles; ++t) {
      k.kv_expand(layout, tiles[t], panel_layout, panel.data() + t * panel_layout.tile_bytes);
    }
  };
  expand();
  std::vector<int32_t> begin(static_cast<size_t>(rows), 0), end(static_cast<size_t>(rows), 256);
  std::vector<float> scores(kScratchRows * kPartition),
      states(static_cast<size_t>(rows * (head_dim + kStatePadding)));
  const AttentionRows query{q.data(), rows, begin.data(), end.data(), 0.0f, expanded ? panels : tiles};
  const double ns = best_ns([&] {
    k.attend(expanded ? panel_layout : layout, expanded ? panels : tiles, query, scores.data(),
             states.data());
  });
  const char* name = dtype == KvDtype::kFloat32 ? "f32" : (dtype == KvDtype::kFloat16 ? "f16" : "int8");
  const double macs = static_cast<double>(2 * rows * head_dim * kPartition);
  std::printf("%-10s attend %-4s head_dim %-3ld rows %-3ld %-8s %8.0f ns  %6.1f GMAC/s\n", isa, name,
              static_cast<long>(head_dim), static_cast<long>(rows), expanded ? "expanded" : "direct", ns,
              macs / ns);
  if (expanded)
    std::printf("%-10s expand %-4s head_dim %-3ld %26.0f ns\n", isa, name, static_cast<long>(head_dim),
                best_ns(expand));
}

void bench_isa(const char* isa) {
  bench_rows(isa);
  for (int64_t head_dim : {64, 128}) {
    for (int64_t rows : {1, 3, 4, 8}) bench_attention(isa, KvDtype::kFloat16, head_dim, rows, false);
    bench_attention(isa, KvDtype::kInt8, head_dim, 4, false);
    bench_attention(isa, KvDtype::kFloat16, head_dim, 96, true);
  }
}

}  // namespace

int main(int argc, char** argv) {
  bench_team();
  for (int i = 1; i < argc; ++i) {
    if (tellin::linear_kernels(argv[i]) == nullptr) {
      std::fprintf(stderr, "isa %s cannot run here\n", argv[i]);
      return 1;
    }
    bench_isa(argv[i]);
  }
  if (argc > 1) return 0;
  for (int i = 0; i < tellin::num_linear_variants(); ++i) bench_isa(tellin::linear_variant(i)->isa);
  return 0;
}

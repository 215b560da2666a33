// The thread team: what it costs to hand a stage over.
#include <atomic>
#include <thread>

#include "micro.h"
#include "tellin/thread_team.h"

namespace tellin::micro {
namespace {

constexpr int kStages = 2000;

// Every stage has one task per thread, and none ends before all have begun: the whole team takes part.
struct Stages final : ThreadTeam::Job {
  explicit Stages(int num_threads) : threads(num_threads) {}
  const int threads;
  int left = kStages;
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

void hand_over(benchmark::State& state) {
  const auto threads = static_cast<int>(state.range(0));
  ThreadTeam team(threads);
  for (auto _ : state) {
    Stages job(threads);
    team.run(job);
  }
  state.counters["s_per_stage"] = benchmark::Counter(
      kStages, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

}  // namespace

void add_team() {
  const auto cores = static_cast<int64_t>(std::thread::hardware_concurrency());
  auto* const cases =
      benchmark::RegisterBenchmark("team/hand_over", hand_over)->ArgName("threads")->UseRealTime();
  cases->Arg(1);
  if (cores > 1) cases->Arg(cores);
}

}  // namespace tellin::micro

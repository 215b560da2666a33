// Micro-benchmarks of every kind of kernel, and of what the machine can do, with Google Benchmark.
//
//   make microbench MICROBENCH_ARGS="--benchmark_filter=linear/avx2/Q4_0"
//
// Cases are named part/isa/what/parameters; --benchmark_list_tests lists them. Data lie in cache unless the
// name says "streamed". Times are processor time of one thread, which neighbours on the machine disturb
// little; cases of several threads need a quiet machine. --benchmark_repetitions=5 gives medians.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "micro.h"
#include "tellin/linear.h"

int main(int argc, char** argv) {
  using namespace tellin;
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);  // denormals are zero, as in the thread team
#endif
  std::string variants;
  micro::add_team();
  for (int i = 0; i < num_linear_variants(); ++i) {
    const std::string isa = linear_variant(i)->isa;
    micro::add_ceilings(isa);
    micro::add_linear(isa);
    micro::add_rows(isa);
    micro::add_attention(isa);
    micro::add_sampling(isa);
    variants += (i == 0 ? "" : ", ") + isa;
  }
  benchmark::AddCustomContext("tellin_variants", variants);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}

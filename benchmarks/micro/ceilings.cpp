// What the machine can do: multiply-accumulates of one core, and bytes read from memory by several.
#include <thread>

#include "micro.h"

namespace tellin::micro {
namespace {

#if defined(__x86_64__)
constexpr int kChains = 12;
constexpr int kRepeats = 1000;
#define TELLIN_CHAINS(op) op(0) op(1) op(2) op(3) op(4) op(5) op(6) op(7) op(8) op(9) op(10) op(11)
#define TELLIN_DOT512(i) "vpdpbusd %%zmm12, %%zmm13, %%zmm" #i "\n\t"
#define TELLIN_FMA512(i) "vfmadd231ps %%zmm12, %%zmm13, %%zmm" #i "\n\t"
#define TELLIN_DOT256(i) "vpmaddubsw %%ymm12, %%ymm13, %%ymm" #i "\n\t"
#define TELLIN_DOTVEX(i) "%{vex%} vpdpbusd %%ymm12, %%ymm13, %%ymm" #i "\n\t"
#define TELLIN_FMA256(i) "vfmadd231ps %%ymm12, %%ymm13, %%ymm" #i "\n\t"
#define TELLIN_CEILING(name, body)                                                                     \
  void name(benchmark::State& state, double macs) {                                                    \
    for (auto _ : state) {                                                                             \
      for (int i = 0; i < kRepeats; ++i) {                                                             \
        __asm__ volatile(body::                                                                        \
                             : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", \
                               "xmm9", "xmm10", "xmm11");                                              \
      }                                                                                                \
    }                                                                                                  \
    state.counters["MAC"] = rate(macs * kChains * kRepeats);                                           \
  }
TELLIN_CEILING(dot512, TELLIN_CHAINS(TELLIN_DOT512))
TELLIN_CEILING(fma512, TELLIN_CHAINS(TELLIN_FMA512))
TELLIN_CEILING(dot256, TELLIN_CHAINS(TELLIN_DOT256))
TELLIN_CEILING(dotvex, TELLIN_CHAINS(TELLIN_DOTVEX))
TELLIN_CEILING(fma256, TELLIN_CHAINS(TELLIN_FMA256))

void add_products(const std::string& isa) {
  const std::string name = "ceiling/" + isa;
  if (isa == "avx512" || isa == "amx") {
    benchmark::RegisterBenchmark((name + "/int8").c_str(), dot512, 64.0);
    benchmark::RegisterBenchmark((name + "/float32").c_str(), fma512, 16.0);
  } else if (isa == "avx2" || isa == "avxvnni") {
    benchmark::RegisterBenchmark((name + "/int8").c_str(), isa == "avx2" ? dot256 : dotvex, 32.0);
    benchmark::RegisterBenchmark((name + "/float32").c_str(), fma256, 8.0);
  }
}
#else
void add_products(const std::string&) {}  // not measured here
#endif

// Every thread reads another part of the arena, four streams side by side.
void read_memory(benchmark::State& state) {
  constexpr size_t kPiece = 2 << 20;
  constexpr size_t kStream = kPiece / 4 / sizeof(uint64_t);
  const size_t share = kArenaBytes / static_cast<size_t>(state.threads()) / kPiece;
  const size_t first = static_cast<size_t>(state.thread_index()) * share;
  const uint8_t* const memory = arena();
  size_t round = 0;
  uint64_t sum[8] = {};
  for (auto _ : state) {
    const auto* p = reinterpret_cast<const uint64_t*>(memory + (first + round++ % share) * kPiece);
    for (size_t i = 0; i < kStream; i += 8) {
      for (size_t s = 0; s < 4; ++s) {
        const uint64_t* line = p + s * kStream + i;
        __builtin_prefetch(line + 256, 0, 3);
        for (int j = 0; j < 8; ++j) sum[j] += line[j];
      }
    }
    benchmark::DoNotOptimize(sum);
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(kPiece));
}

}  // namespace

void add_ceilings(const std::string& isa) {
  static const bool is_added = [] {
    const auto cores = static_cast<int>(std::thread::hardware_concurrency());
    benchmark::RegisterBenchmark("ceiling/memory_read", read_memory)->ThreadRange(1, cores)->UseRealTime();
    return true;
  }();
  static_cast<void>(is_added);
  add_products(isa);
}

}  // namespace tellin::micro

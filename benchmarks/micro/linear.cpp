// Micro-benchmark of the linear kernels, against what this machine can do, measured in the same run.
//
//   cmake --build build/dev --target bench_linear && build/dev/bench_linear [isa [threads [type/act ...]]]
//
// for example: bench_linear avx512 2 Q4_0/int8 Q4_1/int16.
//
// For each storage type, activation precision and number of tokens: one core's multiply-accumulates per
// second on a matrix that stays in its cache, as a share of the widest multiply-accumulate instruction's
// rate; and the bytes of weights that all threads together stream from memory, as a share of the read
// bandwidth. Medians of many short
// repetitions by processor time: neighbours disturb the first little; the second needs a quiet machine.
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "tellin/linear.h"

namespace {

using namespace tellin;

constexpr int64_t kFeatures = 2048;
constexpr size_t kCacheBytes = 384 << 10;
constexpr size_t kMemoryBytes = 256 << 20;
constexpr int kTokens[] = {1, 2, 4, 8, 16, 64, 512};
constexpr int kMaxTokens = 512;
constexpr double kSecondsPerCase = 0.15;

struct Type {
  const char* name;
  QuantType type;
  bool is_float;
};
constexpr Type kTypes[] = {
    {"F32", QuantType::F32, true},    {"F16", QuantType::F16, true},    {"BF16", QuantType::BF16, true},
    {"Q4_0", QuantType::Q4_0, false}, {"Q4_1", QuantType::Q4_1, false}, {"Q5_0", QuantType::Q5_0, false},
    {"Q5_1", QuantType::Q5_1, false}, {"Q8_0", QuantType::Q8_0, false}, {"Q2_K", QuantType::Q2_K, false},
    {"Q3_K", QuantType::Q3_K, false}, {"Q4_K", QuantType::Q4_K, false}, {"Q5_K", QuantType::Q5_K, false},
    {"Q6_K", QuantType::Q6_K, false}};
struct Precision {
  const char* name;
  ActPrecision precision;
};
constexpr Precision kPrecisions[] = {
    {"int8", ActPrecision::kInt8}, {"int16", ActPrecision::kInt16}, {"f32", ActPrecision::kFloat32}};

double cpu_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Median processor time of a call of f(0), f(1), ...: neighbours on the machine disturb it little.
double median_seconds(const std::function<void(int)>& f) {
  std::vector<double> seconds;
  const double start = cpu_seconds();
  for (int round = 0; round < 5 || cpu_seconds() - start < kSecondsPerCase; ++round) {
    const double begin = cpu_seconds();
    f(round);
    seconds.push_back(cpu_seconds() - begin);
  }
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
}

// Calls per second of all threads together, each thread t calling f(round, t) over and over.
double calls_per_second(int num_threads, const std::function<void(int, int)>& f) {
  std::vector<double> rates(static_cast<size_t>(num_threads));
  const auto work = [&](int t) {
    rates[static_cast<size_t>(t)] = 1 / median_seconds([&](int round) { f(round, t); });
  };
  std::vector<std::thread> team;
  for (int t = 1; t < num_threads; ++t) team.emplace_back(work, t);
  work(0);
  for (std::thread& thread : team) thread.join();
  double sum = 0;
  for (const double rate : rates) sum += rate;
  return sum;
}

// Memory backed by huge pages where the system gives them.
class Arena {
 public:
  explicit Arena(size_t bytes) : bytes_(bytes) {
    base_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) std::abort();
#if defined(MADV_HUGEPAGE)
    madvise(base_, bytes_, MADV_HUGEPAGE);
#endif
    std::memset(base_, 0x11, bytes_);
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { munmap(base_, bytes_); }
  uint8_t* data() const { return static_cast<uint8_t*>(base_); }

 private:
  void* base_;
  size_t bytes_;
};

// ---- ceilings ----

#if defined(__x86_64__)
constexpr int64_t kRepeats = 20000;
#define TELLIN_CHAINS(op) op(0) op(1) op(2) op(3) op(4) op(5) op(6) op(7) op(8) op(9) op(10) op(11)
#define TELLIN_DOT512(i) "vpdpbusd %%zmm12, %%zmm13, %%zmm" #i "\n\t"
#define TELLIN_FMA512(i) "vfmadd231ps %%zmm12, %%zmm13, %%zmm" #i "\n\t"
#define TELLIN_DOT256(i) "vpmaddubsw %%ymm12, %%ymm13, %%ymm" #i "\n\t"
#define TELLIN_DOTVEX(i) "%{vex%} vpdpbusd %%ymm12, %%ymm13, %%ymm" #i "\n\t"
#define TELLIN_FMA256(i) "vfmadd231ps %%ymm12, %%ymm13, %%ymm" #i "\n\t"
#define TELLIN_LOOP(body)                                                                                    \
  [] {                                                                                                       \
    for (int64_t i = 0; i < kRepeats; ++i) {                                                                 \
      __asm__ volatile(body::                                                                                \
                           : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", \
                             "xmm10", "xmm11");                                                              \
    }                                                                                                        \
  }

// Multiply-accumulates per second of one core: {integer, float32}.
std::pair<double, double> mac_ceilings(const std::string& isa) {
  const auto rate = [](double per_instruction, const std::function<void()>& loop) {
    return 12 * kRepeats * per_instruction / median_seconds([&](int) { loop(); });
  };
  if (isa == "avx512") {
    return {rate(64, TELLIN_LOOP(TELLIN_CHAINS(TELLIN_DOT512))),
            rate(16, TELLIN_LOOP(TELLIN_CHAINS(TELLIN_FMA512)))};
  }
  const double f32 = rate(8, TELLIN_LOOP(TELLIN_CHAINS(TELLIN_FMA256)));
  if (isa == "avxvnni") return {rate(32, TELLIN_LOOP(TELLIN_CHAINS(TELLIN_DOTVEX))), f32};
  return {rate(32, TELLIN_LOOP(TELLIN_CHAINS(TELLIN_DOT256))), f32};
}
#else
std::pair<double, double> mac_ceilings(const std::string&) {
  return {0, 0};
}  // not measured here
#endif

double read_bandwidth(const Arena& arena, int num_threads) {
  constexpr size_t kPiece = 2 << 20;
  const size_t share = kMemoryBytes / static_cast<size_t>(num_threads) / kPiece;
  const double rate = calls_per_second(num_threads, [&](int round, int t) {
    const size_t piece = static_cast<size_t>(t) * share + static_cast<size_t>(round) % share;
    const auto* p = reinterpret_cast<const uint64_t*>(arena.data() + piece * kPiece);
    constexpr size_t kStream = kPiece / 4 / sizeof(uint64_t);
    uint64_t sum[8] = {};
    for (size_t i = 0; i < kStream; i += 8) {
      for (size_t s = 0; s < 4; ++s) {
        const uint64_t* line = p + s * kStream + i;
        __builtin_prefetch(line + 256, 0, 3);
        for (int j = 0; j < 8; ++j) sum[j] += line[j];
      }
    }
    volatile uint64_t sink = sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
    static_cast<void>(sink);
  });
  return rate * kPiece;
}

// ---- cases ----

class Case {
 public:
  Case(const LinearKernels& kernels, const Type& type, ActPrecision precision, const Arena& arena)
      : kernels_(kernels),
        precision_(precision),
        group_bytes_(kernels.packed_group_bytes(type.type, kFeatures, precision)) {
    const auto groups = static_cast<int64_t>(kMemoryBytes / group_bytes_);
    const int32_t layout = kernels.layout_id(type.type, precision);
    weights_ = {type.type, layout, groups * kGroupRows, kFeatures, groups, group_bytes_, arena.data()};
    for (size_t i = 0; i < x_.size(); ++i)
      x_[i] = static_cast<float>(static_cast<int>(i * 2654435761u >> 20) % 101 - 50);
    if (precision != ActPrecision::kFloat32) {
      const size_t row_bytes = kernels.quantized_row_bytes(kFeatures, precision);
      quantized_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, row_bytes * kMaxTokens)), std::free);
      rows_ = {quantized_.get(), static_cast<int64_t>(row_bytes)};
      for (int m = 0; m < kMaxTokens; ++m)
        kernels.quantize_row(precision, &x_[m * kFeatures], kFeatures, m, rows_);
    }
  }

  double cached_macs(int tokens) {
    const int64_t groups =
        std::max<int64_t>(kGroupsPerTask, kCacheBytes / group_bytes_ / kGroupsPerTask * kGroupsPerTask);
    out_.resize(static_cast<size_t>(kMaxTokens * groups * kGroupRows));
    const double seconds =
        median_seconds([&](int) { run(tokens, 0, groups, out_.data(), groups * kGroupRows); });
    return static_cast<double>(tokens * groups * kGroupRows * kFeatures) / seconds;
  }

  // Bytes per second that all threads together stream: every call takes other groups.
  double streamed_bytes(int tokens, int num_threads) {
    const int64_t step = std::max<int64_t>(
        kGroupsPerTask, (2 << 20) / static_cast<int64_t>(group_bytes_) / kGroupsPerTask * kGroupsPerTask);
    const int64_t share = weights_.num_groups / num_threads / step;
    std::vector<std::vector<float>> outs(static_cast<size_t>(num_threads),
                                         std::vector<float>(static_cast<size_t>(tokens * step * kGroupRows)));
    const double rate = calls_per_second(num_threads, [&](int round, int t) {
      const int64_t g = (t * share + round % share) * step;
      run(tokens, g, g + step, outs[static_cast<size_t>(t)].data() - g * kGroupRows, step * kGroupRows);
    });
    return rate * static_cast<double>(step) * static_cast<double>(group_bytes_);
  }

 private:
  void run(int tokens, int64_t g0, int64_t g1, float* out, int64_t ldo) const {
    if (precision_ == ActPrecision::kFloat32) {
      kernels_.linear_f32(weights_, x_.data(), kFeatures, 0, tokens, g0, g1, out, ldo);
    } else if (precision_ == ActPrecision::kInt8) {
      kernels_.linear_int8(weights_, rows_, 0, tokens, g0, g1, out, ldo);
    } else {
      kernels_.linear_int16(weights_, rows_, 0, tokens, g0, g1, out, ldo);
    }
  }

  const LinearKernels& kernels_;
  ActPrecision precision_;
  size_t group_bytes_;
  PackedMatrix weights_{};
  std::vector<float> x_ = std::vector<float>(static_cast<size_t>(kMaxTokens * kFeatures));
  std::vector<float> out_;
  std::shared_ptr<uint8_t> quantized_;
  QuantizedRows rows_{};
};

}  // namespace

int main(int argc, char** argv) {
  const LinearKernels* kernels = linear_kernels(argc > 1 ? argv[1] : nullptr);
  const int num_threads =
      argc > 2 ? std::atoi(argv[2]) : static_cast<int>(std::thread::hardware_concurrency());
  if (kernels == nullptr || num_threads < 1) {
    std::fprintf(stderr, "usage: bench_linear [isa [threads [type/act ...]]]; this machine has:");
    for (int i = 0; i < num_linear_variants(); ++i) std::fprintf(stderr, " %s", linear_variant(i)->isa);
    std::fprintf(stderr, "\n");
    return 2;
  }
  const Arena arena(kMemoryBytes + (1 << 20));
  const auto [int_ceiling, float_ceiling] = mac_ceilings(kernels->isa);
  const double bandwidth = read_bandwidth(arena, num_threads);
  std::printf("%s, %d threads; one core %.0f GMAC/s int8, %.0f GMAC/s float32; read %.1f GB/s\n",
              kernels->isa, num_threads, int_ceiling * 1e-9, float_ceiling * 1e-9, bandwidth * 1e-9);
  std::printf("%-6s%-6s%7s%14s%8s%16s%8s\n", "type", "act", "tokens", "GMAC/s, core", "share",
              "GB/s, streamed", "share");
  const auto wanted = [&](const Type& type, const Precision& p) {
    const std::string name = std::string(type.name) + "/" + p.name;
    return argc <= 3 || std::find(argv + 3, argv + argc, name) != argv + argc;
  };
  for (const Type& type : kTypes) {
    for (const Precision& p : kPrecisions) {
      if (type.is_float && p.precision != ActPrecision::kFloat32) continue;
      if (!wanted(type, p)) continue;
      Case c(*kernels, type, p.precision, arena);
      // Two planes of activations take two products.
      const double ceiling = p.precision == ActPrecision::kFloat32 ? float_ceiling
                             : p.precision == ActPrecision::kInt16 ? int_ceiling / 2
                                                                   : int_ceiling;
      for (const int tokens : kTokens) {
        const double macs = c.cached_macs(tokens);
        std::printf("%-6s%-6s%7d%14.1f%7.0f%%", type.name, p.name, tokens, macs * 1e-9, 100 * macs / ceiling);
        if (tokens <= 16) {
          const double bytes = c.streamed_bytes(tokens, num_threads);
          std::printf("%16.1f%7.0f%%", bytes * 1e-9, 100 * bytes / bandwidth);
        }
        std::printf("\n");
        std::fflush(stdout);
      }
    }
  }
  return 0;
}

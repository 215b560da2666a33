// Ceilings of this machine, as JSON: how fast all cores together can read memory and multiply.
//
// Read bandwidth: every thread streams its own part of a large, huge-page backed array, in several
// sequential streams with prefetch; the best variant counts. Multiply-accumulate rates: independent chains
// of the widest instruction that the compiler may use here (built with -march=native), operands in
// registers, so the figure is what no kernel can exceed. One multiply-accumulate = one product added.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRounds = 7;
constexpr int kChains = 12;  // enough to hide 4-5 cycles of latency at two or three per cycle

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Runs work(thread) on all threads at once; wall-clock seconds of the whole, best of kRounds.
template <typename Work>
double best_seconds(int num_threads, Work work) {
  double best = 1e30;
  for (int round = 0; round < kRounds; ++round) {
    std::atomic<int> ready{0};
    std::atomic<bool> go{false};
    std::vector<std::thread> team;
    for (int t = 0; t < num_threads; ++t) {
      team.emplace_back([&, t] {
        ++ready;
        while (!go.load(std::memory_order_acquire)) {
        }
        work(t);
      });
    }
    while (ready.load() < num_threads) {
    }
    const auto start = Clock::now();
    go.store(true, std::memory_order_release);
    for (auto& thread : team) thread.join();
    best = std::min(best, seconds_since(start));
  }
  return best;
}

std::atomic<uint64_t> sink{0};

// Sums [begin, begin + bytes) in `streams` parallel sequential streams.
template <int streams>
uint64_t read_streams(const uint8_t* begin, size_t bytes, size_t prefetch_ahead) {
  const size_t part = bytes / streams / 256 * 256;
  uint64_t sums[8] = {};
  for (size_t offset = 0; offset < part; offset += 64) {
    for (int s = 0; s < streams; ++s) {
      const uint8_t* line = begin + s * part + offset;
      __builtin_prefetch(line + prefetch_ahead, 0, 0);
      uint64_t words[8];
      std::memcpy(words, line, sizeof words);
      for (int i = 0; i < 8; ++i) sums[i] += words[i];
    }
  }
  uint64_t total = 0;
  for (uint64_t sum : sums) total += sum;
  return total;
}

double read_bandwidth(int num_threads, size_t bytes) {
  constexpr size_t kHuge = size_t{2} << 20;
  void* map = mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return 0;
  auto* data = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(map) + kHuge - 1) / kHuge * kHuge);
#if defined(MADV_HUGEPAGE)
  madvise(data, bytes, MADV_HUGEPAGE);
#endif
  const size_t share = bytes / num_threads / kHuge * kHuge;
  best_seconds(num_threads, [&](int t) { std::memset(data + t * share, t + 1, share); });
  double best = 0;
  for (size_t ahead : {size_t{512}, size_t{1024}, size_t{4096}}) {
    const auto rate = [&](auto reader) {
      const double seconds =
          best_seconds(num_threads, [&](int t) { sink += reader(data + t * share, share, ahead); });
      best = std::max(best, static_cast<double>(share) * num_threads / seconds);
    };
    rate(read_streams<1>);
    rate(read_streams<4>);
    rate(read_streams<8>);
  }
  munmap(map, bytes + kHuge);
  return best;
}

// ------------------------------------------------------------------ multiply-accumulate

#if defined(__AVX512F__)
using FloatVector = __m512;
constexpr int kFloatLanes = 16;
inline FloatVector fma(FloatVector a, FloatVector b, FloatVector c) {
  return _mm512_fmadd_ps(a, b, c);
}
inline FloatVector splat(float x) {
  return _mm512_set1_ps(x);
}
#elif defined(__FMA__)
using FloatVector = __m256;
constexpr int kFloatLanes = 8;
inline FloatVector fma(FloatVector a, FloatVector b, FloatVector c) {
  return _mm256_fmadd_ps(a, b, c);
}
inline FloatVector splat(float x) {
  return _mm256_set1_ps(x);
}
#elif defined(__aarch64__)
using FloatVector = float32x4_t;
constexpr int kFloatLanes = 4;
inline FloatVector fma(FloatVector a, FloatVector b, FloatVector c) {
  return vfmaq_f32(c, a, b);
}
inline FloatVector splat(float x) {
  return vdupq_n_f32(x);
}
#else
using FloatVector = float;
constexpr int kFloatLanes = 1;
inline FloatVector fma(FloatVector a, FloatVector b, FloatVector c) {
  return a * b + c;
}
inline FloatVector splat(float x) {
  return x;
}
#endif

// int8_step adds the products of one vector of unsigned and one of signed bytes to acc.
#if defined(__AVX512VNNI__)
using ByteVector = __m512i;
constexpr int kByteLanes = 64;
constexpr const char* kByteInstruction = "vpdpbusd zmm";
inline ByteVector bytes_of(int x) {
  return _mm512_set1_epi8(static_cast<char>(x));
}
inline void int8_step(ByteVector& acc, ByteVector& a, ByteVector b) {
  acc = _mm512_dpbusd_epi32(acc, a, b);
}
#elif defined(__AVXVNNI__)
using ByteVector = __m256i;
constexpr int kByteLanes = 32;
constexpr const char* kByteInstruction = "vpdpbusd ymm";
inline ByteVector bytes_of(int x) {
  return _mm256_set1_epi8(static_cast<char>(x));
}
inline void int8_step(ByteVector& acc, ByteVector& a, ByteVector b) {
  acc = _mm256_dpbusd_avx_epi32(acc, a, b);
}
#elif defined(__AVX2__)
using ByteVector = __m256i;
constexpr int kByteLanes = 32;
constexpr const char* kByteInstruction = "vpmaddubsw ymm";
inline ByteVector bytes_of(int x) {
  return _mm256_set1_epi8(static_cast<char>(x));
}
inline void int8_step(ByteVector& acc, ByteVector& a, ByteVector b) {
  asm volatile("" : "+x"(a));  // the product does not change: it must not leave the loop
  acc = _mm256_add_epi16(acc, _mm256_maddubs_epi16(a, b));
}
#elif defined(__ARM_FEATURE_DOTPROD)
using ByteVector = int32x4_t;
constexpr int kByteLanes = 16;
constexpr const char* kByteInstruction = "sdot";
inline ByteVector bytes_of(int x) {
  return vreinterpretq_s32_s8(vdupq_n_s8(static_cast<int8_t>(x)));
}
inline void int8_step(ByteVector& acc, ByteVector& a, ByteVector b) {
  acc = vdotq_s32(acc, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b));
}
#else
using ByteVector = int32_t;
constexpr int kByteLanes = 1;
constexpr const char* kByteInstruction = "scalar";
inline ByteVector bytes_of(int x) {
  return x;
}
inline void int8_step(ByteVector& acc, ByteVector& a, ByteVector b) {
  asm volatile("" : "+r"(a));
  acc += a * b;
}
#endif

template <typename Vector>
void keep(const Vector* chains) {
  asm volatile("" : : "g"(chains) : "memory");
}

double float32_rate(int num_threads) {
  constexpr int kSteps = 4000000;
  const double seconds = best_seconds(num_threads, [&](int t) {
    FloatVector acc[kChains];
    for (int i = 0; i < kChains; ++i) acc[i] = splat(static_cast<float>(i + t));
    const FloatVector a = splat(1e-3f), b = splat(1e-3f);
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 16
      for (int i = 0; i < kChains; ++i) acc[i] = fma(a, b, acc[i]);
    }
    keep(acc);
  });
  return static_cast<double>(num_threads) * kSteps * kChains * kFloatLanes / seconds;
}

double int8_rate(int num_threads) {
  constexpr int kSteps = 4000000;
  const double seconds = best_seconds(num_threads, [&](int t) {
    ByteVector acc[kChains];
    for (int i = 0; i < kChains; ++i) acc[i] = bytes_of(i + t);
    ByteVector a = bytes_of(1);
    const ByteVector b = bytes_of(t + 1);
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 16
      for (int i = 0; i < kChains; ++i) int8_step(acc[i], a, b);
    }
    keep(acc);
  });
  return static_cast<double>(num_threads) * kSteps * kChains * kByteLanes / seconds;
}

}  // namespace

int main(int argc, char** argv) {
  const int num_threads = argc > 1 ? std::max(1, std::atoi(argv[1])) : 1;
  const size_t bytes = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : size_t{1} << 30;
  std::printf(
      "{\"num_threads\": %d, \"read_bytes_per_s\": %.4g, \"int8_mac_per_s\": %.4g, \"float32_mac_per_s\": "
      "%.4g, "
      "\"int8_instruction\": \"%s\", \"float32_lanes\": %d}\n",
      num_threads, read_bandwidth(num_threads, bytes), int8_rate(num_threads), float32_rate(num_threads),
      kByteInstruction, kFloatLanes);
  return 0;
}

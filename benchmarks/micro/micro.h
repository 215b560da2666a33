// What the micro-benchmarks share. Google Benchmark calls them; see main.cpp for how to run them.
#pragma once
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace tellin::micro {

// Each adds the cases of its part of the kernels; `isa` is a variant that this machine runs.
void add_ceilings(const std::string& isa);
void add_linear(const std::string& isa);
void add_rows(const std::string& isa);
void add_attention(const std::string& isa);
void add_sampling(const std::string& isa);
void add_team();

// Fixed pseudo-random values in [-1, 1).
inline std::vector<float> values(size_t count) {
  std::vector<float> v(count);
  uint32_t state = 1;
  for (float& x : v) {
    state = state * 1664525u + 1013904223u;
    x = static_cast<float>(static_cast<int32_t>(state)) / 2147483648.0f;
  }
  return v;
}

// So many of them per second, or per second and thread.
inline benchmark::Counter rate(double per_iteration) {
  return benchmark::Counter(per_iteration, benchmark::Counter::kIsIterationInvariantRate);
}

// Weights too many for any cache, in huge pages where the system gives them; shared by all cases.
constexpr size_t kArenaBytes = 256 << 20;

inline const uint8_t* arena() {
  static const uint8_t* const base = [] {
    constexpr size_t kSlack = 1 << 20;  // kernels prefetch beyond what they read
    void* p = mmap(nullptr, kArenaBytes + kSlack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) std::abort();
#if defined(MADV_HUGEPAGE)
    madvise(p, kArenaBytes + kSlack, MADV_HUGEPAGE);
#endif
    std::memset(p, 0x11, kArenaBytes + kSlack);
    return static_cast<const uint8_t*>(p);
  }();
  return base;
}

}  // namespace tellin::micro

// Processor features: what the processor has and the operating system saves.
#include "linear_core.h"

#if defined(__x86_64__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace tellin {

#if defined(__x86_64__)
namespace {

uint64_t read_xcr0() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

bool bit(uint32_t word, int index) {
  return (word >> index) & 1;
}

}  // namespace
#endif

namespace {

CpuFeatures find_features() {
  CpuFeatures features{};
#if defined(__x86_64__)
  // Source: Intel SDM volume 2A, CPUID leaves 1 and 7 (subleaves 0 and 1); XCR0 bits 1-2 (SSE, AVX), 5-7
  // (AVX-512 state) and 17-18 (tiles).
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return features;
  const bool osxsave = bit(c, 27), avx = bit(c, 28), fma = bit(c, 12), f16c = bit(c, 29);
  if (!osxsave || !avx) return features;
  const uint64_t xcr0 = read_xcr0();
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return features;
  features.avx2 = (xcr0 & 0x06) == 0x06 && fma && f16c && bit(b, 5) && bit(b, 8);
  const bool avx512 = bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31) && bit(c, 11);
  const uint32_t max_subleaf = a;
  [[maybe_unused]] const bool tiles = bit(d, 24) && bit(d, 25) && (xcr0 & 0x60000) == 0x60000;
  features.avx512 = features.avx2 && (xcr0 & 0xe6) == 0xe6 && avx512;
#ifdef TELLIN_EMULATE_TILES
  features.amx = features.amx_bf16 = features.avx512;
#else
  features.amx = features.avx512 && tiles;
  features.amx_bf16 = features.amx && bit(d, 22);
#endif
  if (max_subleaf >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d))
    features.avxvnni = features.avx2 && bit(a, 4);
#elif defined(__aarch64__) && defined(__linux__)
  features.neon = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(__aarch64__) && defined(__APPLE__)
  features.neon = true;  // every Apple arm64 processor with a desktop operating system has dot products
#endif
  return features;
}

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = find_features();
  return features;
}

bool may_use_tiles() {
#ifdef TELLIN_EMULATE_TILES
  return true;
#elif defined(__x86_64__) && defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool may = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return may;
#else
  return false;
#endif
}

}  // namespace tellin

// AVX-512: how codes that are read once are fetched best, which hangs on the processor's make.
#pragma once
#include <cstdint>

#include "codes.h"

namespace tellin {
namespace {

// AMD's fetch them past the caches (prefetchnta), in one stream per core for one or two rows: 48 GB/s instead
// of 41 on a Zen 5. Intel's keep lines so fetched in a twelfth of L1, where two groups' displace each other
// before they are used: a Sapphire Rapids streams 5 to 12 GB/s of them for 3 to 6 rows, and 17 to 27 when
// they go to all caches; one or two rows are then fastest with two groups side by side, too (22 instead of
// 20).
struct Streaming {
  bool past_caches;
  int single_tokens;  // up to as many are computed group by group
};

inline const Streaming& streaming() {
  static const Streaming traits = [] {
    __builtin_cpu_init();
    return __builtin_cpu_is("amd") ? Streaming{true, 2} : Streaming{false, 0};
  }();
  return traits;
}

TELLIN_INLINE void fetch_line(const uint8_t* line, bool past_caches) {
  if (past_caches) {
    __builtin_prefetch(line, 0, 0);
  } else {
    __builtin_prefetch(line, 0, 3);
  }
}

}  // namespace
}  // namespace tellin

// Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC11).
//
// A draw is a pure function of (key, index, purpose): there is no generator state, so the order in which
// requests run, chunking and preemption cannot change it.
#pragma once
#include <cstdint>

namespace tellin {

enum class RandomPurpose : uint32_t { kSample = 0, kAcceptTest = 1, kRecovered = 2, kDraft = 3 };

struct PhiloxBlock {
  uint32_t word[4];
};

// Ten rounds over the counter (index, purpose, 0, 0) with the two halves of `key`, low half first.
inline PhiloxBlock philox4x32(uint64_t key, uint32_t index, RandomPurpose purpose) {
  constexpr uint64_t kMul0 = 0xD2511F53, kMul1 = 0xCD9E8D57;
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  PhiloxBlock c{{index, static_cast<uint32_t>(purpose), 0, 0}};
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = kMul0 * c.word[0], p1 = kMul1 * c.word[2];
    c = {{static_cast<uint32_t>(p1 >> 32) ^ c.word[1] ^ k0, static_cast<uint32_t>(p1),
          static_cast<uint32_t>(p0 >> 32) ^ c.word[3] ^ k1, static_cast<uint32_t>(p0)}};
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return c;
}

// The first or second 64 bits of a block.
inline uint64_t philox_u64(const PhiloxBlock& c, int half) {
  return static_cast<uint64_t>(c.word[2 * half + 1]) << 32 | c.word[2 * half];
}

}  // namespace tellin

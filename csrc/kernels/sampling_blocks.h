// A row of logits as blocks of kSampleBlock entries, for sampling_vector.h and sampling_lists.h: which blocks
// matter, and walking over them.
#pragma once
#include "sampling_exp.h"

namespace tellin {
namespace {

int64_t num_blocks_of(int64_t n) {
  return (n + kSampleBlock - 1) / kSampleBlock;
}

// The last, short block of a row, padded with -infinity.
TELLIN_INLINE void pad_block(const float* x, int64_t n, float* block) {
  for (int64_t i = 0; i < kSampleBlock; ++i) block[i] = i < n ? x[i] : kNegInf;
}

// Bit i: whether lowest <= x[i] <= highest, for a full block.
TELLIN_INLINE uint64_t hits_of_block(const float* x, float lowest, float highest) {
  uint64_t bits = 0;
#if TELLIN_SAMPLING_WIDTH == 16 && defined(__AVX512F__)
  const __m512 least = _mm512_set1_ps(lowest), most = _mm512_set1_ps(highest);
  for (int64_t i = 0; i < kSampleBlock; i += kLanes) {
    const __m512 v = _mm512_loadu_ps(x + i);
    const __mmask16 hit =
        _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(v, least, _CMP_GE_OQ), v, most, _CMP_LE_OQ);
    bits |= static_cast<uint64_t>(hit) << i;
  }
#elif TELLIN_SAMPLING_WIDTH == 8 && defined(__AVX2__)
  const __m256 least = _mm256_set1_ps(lowest), most = _mm256_set1_ps(highest);
  for (int64_t i = 0; i < kSampleBlock; i += kLanes) {
    const __m256 v = _mm256_loadu_ps(x + i);
    const __m256 hit = _mm256_and_ps(_mm256_cmp_ps(v, least, _CMP_GE_OQ), _mm256_cmp_ps(v, most, _CMP_LE_OQ));
    bits |= static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_ps(hit))) << i;
  }
#else
  alignas(8) uint8_t hit[kSampleBlock];
  for (int64_t i = 0; i < kSampleBlock; ++i) hit[i] = (x[i] >= lowest) & (x[i] <= highest);
  for (int64_t i = 0; i < kSampleBlock; i += 8) {
    uint64_t eight;  // bytes 0 or 1, gathered in the top byte of the product
    std::memcpy(&eight, hit + i, sizeof eight);
    bits |= (eight * 0x0102040810204080ULL >> 56) << i;
  }
#endif
  return bits;
}

TELLIN_INLINE void fetch_block(const float* x, int64_t b) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < kSampleBlock; i += 16) __builtin_prefetch(x + b * kSampleBlock + i);
}

// Lists the blocks from *begin to num_blocks whose maximum lies in [lowest, highest], at most kFoundBlocks;
// *begin is where it stopped.
constexpr int64_t kFoundBlocks = 1024;

TELLIN_INLINE int64_t find_blocks(const float* maxima, int64_t num_blocks, int64_t* begin, float lowest,
                                  float highest, int32_t* found) {
  int64_t count = 0, first = *begin;
  float padded[kSampleBlock];
  for (; first < num_blocks && count + kSampleBlock <= kFoundBlocks; first += kSampleBlock) {
    const float* chunk = maxima + first;
    const int64_t left = num_blocks - first;
    if (left < kSampleBlock) {
      pad_block(chunk, left, padded);
      chunk = padded;
    }
    uint64_t bits = hits_of_block(chunk, lowest, highest);
    if (left < kSampleBlock) bits &= (uint64_t{1} << left) - 1;
    for (; bits != 0; bits &= bits - 1) found[count++] = static_cast<int32_t>(first + __builtin_ctzll(bits));
  }
  *begin = first;
  return count;
}

// Calls f for every block whose maximum lies in [lowest, highest]. Blocks of x that follow are fetched ahead:
// they lie anywhere.
template <class F>
TELLIN_INLINE void for_blocks(const float* x, const float* maxima, int64_t num_blocks, float lowest,
                              float highest, F&& f) {
  constexpr int64_t kAheadBlocks = 12;
  int32_t found[kFoundBlocks + kAheadBlocks];
  for (int64_t begin = 0; begin < num_blocks;) {
    const int64_t count = find_blocks(maxima, num_blocks, &begin, lowest, highest, found);
    for (int64_t i = 0; i < kAheadBlocks; ++i) found[count + i] = count > 0 ? found[count - 1] : 0;
    for (int64_t i = 0; i < count && i < kAheadBlocks; ++i) fetch_block(x, found[i]);
    for (int64_t i = 0; i < count; ++i) {
      fetch_block(x, found[i + kAheadBlocks]);
      f(static_cast<int64_t>(found[i]));
    }
  }
}

// The entries of block b, padded if it is short.
TELLIN_INLINE const float* block_entries(const float* x, int64_t n, int64_t b, float* padded) {
  const int64_t begin = b * kSampleBlock;
  if (n - begin >= kSampleBlock) return x + begin;
  pad_block(x + begin, n - begin, padded);
  return padded;
}

}  // namespace
}  // namespace tellin

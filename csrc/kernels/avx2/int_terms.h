// AVX2: what the integer kernels share.
#pragma once
#include "codes.h"
#include "tellin/linear.h"

namespace tellin {
namespace {

constexpr int kChunkBlocks = 8;  // 256 features
// Tokens of a tile: 2 x 4 int16 sums, 2 code registers, 1 activation and the products fill 16 registers. With
// vpdpbusd there are no products to hold; on Zen 5 6 tokens are 6 % faster than 4 there, and 2 % slower
// without.
#if defined(__AVXVNNI__)
constexpr int kMaxTile = 6;
#else
constexpr int kMaxTile = 4;
#endif
constexpr int kMaxTokens = 256;     // tokens that share an unpacked chunk: 16 KiB of accumulators
constexpr int kPrefetchChunks = 2;  // how far ahead of its use a chunk of codes is fetched

// In-place operations: the compiler would re-associate sums of intrinsics into trees and spill.
TELLIN_INLINE void add_int16(__m256i& sum, __m256i v) {
  asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(v));
}
TELLIN_INLINE void add_int32(__m256i& sum, __m256i v) {
  asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(v));
}
TELLIN_INLINE __m256i broadcast_word(const void* p) {
  __m256i v;
  asm("vpbroadcastd %1, %0" : "=x"(v) : "m"(*static_cast<const int32_t*>(p)));
  return v;
}

// The record of row t of a tile.
template <class Act>
TELLIN_INLINE const Act* act_row(const Act* x, int t, int64_t row_bytes) {
  return reinterpret_cast<const Act*>(reinterpret_cast<const uint8_t*>(x) + t * row_bytes);
}

TELLIN_INLINE __m256 broadcast_float(const float* p) {
  return _mm256_broadcast_ss(p);
}

// Adds the terms of the activations' zero and of the codes' zero point to the sums of a block or half (pair
// 0: block; 1, 2: halves).
template <QuantType T, int kTokens>
TELLIN_INLINE void add_zero_terms(const Act8* x, int64_t row_bytes, int pair, const int32_t* code_pair,
                                  __m256i (&sum)[2][kTokens]) {
  const auto* pairs = reinterpret_cast<const __m256i*>(code_pair);
#pragma GCC unroll 6
  for (int t = 0; t < kTokens; ++t) {
    const __m256i zero = broadcast_word(act_row(x, t, row_bytes)->zero_pair[pair]);
    add_int32(sum[0][t], _mm256_madd_epi16(zero, _mm256_load_si256(pairs)));
    add_int32(sum[1][t], _mm256_madd_epi16(zero, _mm256_load_si256(pairs + 1)));
  }
}

template <QuantType T, int kTokens>
TELLIN_INLINE void add_zero_terms(const Act16* x, int64_t row_bytes, int pair, const int32_t*,
                                  __m256i (&sum)[2][kTokens]) {
  constexpr PackedFormat kFormat = format_of(T);
  if constexpr (kFormat.zero_point_log2 >= 0) {
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) {
      const Act16* block = act_row(x, t, row_bytes);
      __m256i term = broadcast_word(&block->neg_sums[pair == 2 ? 1 : 0]);
      if (pair == 0) add_int32(term, broadcast_word(&block->neg_sums[1]));
      term = _mm256_slli_epi32(term, kFormat.zero_point_log2);
      add_int32(sum[0][t], term);
      add_int32(sum[1][t], term);
    }
  }
}

}  // namespace
}  // namespace tellin

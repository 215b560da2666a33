// AVX2: packed codes x quantised activations of one or two planes.
//
// Work is cut into chunks of 256 features of one group (16 rows). A chunk's codes are unpacked once to bytes
// in L1 and its scales to floats, then every tile of tokens runs over the chunk, its float accumulators
// parked in L1. So a chunk is read from memory once for all tokens, and memory streams while tiles compute.
//
// A value is the same sequence of roundings as in the AVX-512 variant (see avx512/linear_int.h).
#pragma once
#include "linear_few.h"
#include "linear_tables.h"
#include "linear_words.h"

namespace tellin {
namespace {

// One unpacked chunk. Offsets differ modulo 4 KiB from the activations' by the records' odd size.
struct Chunk {
  alignas(64) uint8_t codes[kChunkBlocks][8][kVectorBytes];
  alignas(64) float scale[2 * kChunkBlocks][kRows];
  alignas(64) float minimum[2 * kChunkBlocks][kRows];
  alignas(64) int32_t code_pair[2 * kChunkBlocks][kRows];  // see code_pair_of; for 8-bit activations
};

// Adds quads [kQuad, kEnd) of a block to int16 sums: sum[half][token] = or += products.
template <int kQuad, int kEnd, int kTokens>
TELLIN_INLINE void add_quads(const uint8_t (*codes)[kVectorBytes], const int8_t* x, int64_t row_bytes,
                             bool is_first, __m256i (&sum)[2][kTokens]) {
  if constexpr (kQuad < kEnd) {
    const __m256i w0 = load_half(codes[kQuad]), w1 = load_half(codes[kQuad] + kHalfBytes);
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) {
      const __m256i y = broadcast_word(x + t * row_bytes + 4 * kQuad);
      add_product(w0, y, is_first, sum[0][t]);
      add_product(w1, y, is_first, sum[1][t]);
    }
    asm volatile("" ::: "memory");  // keeps the loads of later quads from being hoisted
    add_quads<kQuad + 1, kEnd>(codes, x, row_bytes, false, sum);
  }
}

// 8-bit codes: products of the low and high nibbles of half kHalf.
template <int kQuad, int kTokens>
TELLIN_INLINE void add_nibble_quads(const uint8_t* codes, const int8_t* x, int64_t row_bytes,
                                    __m256i (&low)[kTokens], __m256i (&high)[kTokens]) {
  if constexpr (kQuad < 8) {
    const __m256i w = load_half(codes + kVectorBytes * kQuad), m15 = _mm256_set1_epi8(15);
    const __m256i w_low = _mm256_and_si256(w, m15), w_high = _mm256_and_si256(_mm256_srli_epi16(w, 4), m15);
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) {
      const __m256i y = broadcast_word(x + t * row_bytes + 4 * kQuad);
      add_product(w_low, y, kQuad == 0, low[t]);
      add_product(w_high, y, kQuad == 0, high[t]);
    }
    asm volatile("" ::: "memory");
    add_nibble_quads<kQuad + 1>(codes, x, row_bytes, low, high);
  }
}

#if defined(__AVXVNNI__)
// vpdpbusd widens by itself: 8-bit codes need no splitting and nothing overflows.
template <QuantType T, int kQuad, int kEnd, int kTokens>
TELLIN_INLINE void plane_sums(const uint8_t (*codes)[kVectorBytes], const int8_t* x, int64_t row_bytes,
                              __m256i (&sum)[2][kTokens]) {
#pragma GCC unroll 8
  for (int q = kQuad; q < kEnd; ++q) {
    const __m256i w0 = load_half(codes[q]), w1 = load_half(codes[q] + kHalfBytes);
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) {
      const __m256i y = broadcast_word(x + t * row_bytes + 4 * q);
      add_product(w0, y, q == kQuad, sum[0][t]);
      add_product(w1, y, q == kQuad, sum[1][t]);
    }
    asm volatile("" ::: "memory");  // keeps the loads of later quads from being hoisted
  }
}
#else
// Exact int32 sums over quads [kQuad, kEnd) of a block.
template <QuantType T, int kQuad, int kEnd, int kTokens>
TELLIN_INLINE void plane_sums(const uint8_t (*codes)[kVectorBytes], const int8_t* x, int64_t row_bytes,
                              __m256i (&sum)[2][kTokens]) {
  constexpr int kBits = format_of(T).code_bits();
  const __m256i one = _mm256_set1_epi16(1);
  if constexpr (kBits == 8) {
    const __m256i sixteen = _mm256_set1_epi16(16);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      __m256i low[kTokens], high[kTokens];
      add_nibble_quads<0>(codes[0] + half * kHalfBytes, x, row_bytes, low, high);
#pragma GCC unroll 6
      for (int t = 0; t < kTokens; ++t) {
        sum[half][t] = _mm256_madd_epi16(low[t], one);
        add_int32(sum[half][t], _mm256_madd_epi16(high[t], sixteen));
      }
    }
  } else {
    constexpr int kStep = int16_quads(kBits);
    constexpr int kStop = kQuad + kStep < kEnd ? kQuad + kStep : kEnd;
    add_quads<kQuad, kStop>(codes, x, row_bytes, true, sum);
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) {
      sum[0][t] = _mm256_madd_epi16(sum[0][t], one);
      sum[1][t] = _mm256_madd_epi16(sum[1][t], one);
    }
    if constexpr (kStop < kEnd) {
      __m256i rest[2][kTokens];
      plane_sums<T, kStop, kEnd>(codes, x, row_bytes, rest);
#pragma GCC unroll 6
      for (int t = 0; t < kTokens; ++t) {
        add_int32(sum[0][t], rest[0][t]);
        add_int32(sum[1][t], rest[1][t]);
      }
    }
  }
}

#endif

// Exact int32 sums of codes x whole activations over quads [kQuad, kEnd) of a block.
template <QuantType T, int kQuad, int kEnd, class Act, int kTokens>
TELLIN_INLINE void block_sums(const uint8_t (*codes)[kVectorBytes], const uint8_t* x, int64_t row_bytes,
                              __m256i (&sum)[2][kTokens]) {
  const auto* block = reinterpret_cast<const Act*>(x);
  plane_sums<T, kQuad, kEnd>(codes, block->q[0], row_bytes, sum);
  if constexpr (Act::kPlanes == 2) {
    __m256i low[2][kTokens];
    plane_sums<T, kQuad, kEnd>(codes, block->q[1], row_bytes, low);
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) {
      sum[0][t] = _mm256_slli_epi32(sum[0][t], kPlaneShift);
      sum[1][t] = _mm256_slli_epi32(sum[1][t], kPlaneShift);
      add_int32(sum[0][t], low[0][t]);
      add_int32(sum[1][t], low[1][t]);
    }
  }
}

// Exact int32 sums of (codes - zero point) x whole activations over the block, or over half kHalf of it.
template <QuantType T, int kHalf, class Act, int kTokens>
TELLIN_INLINE void whole_sums(const uint8_t (*codes)[kVectorBytes], const uint8_t* x, int64_t row_bytes,
                              const int32_t* code_pair, __m256i (&sum)[2][kTokens]) {
  constexpr int kBegin = kHalf == 1 ? 4 : 0, kEnd = kHalf == 0 ? 4 : 8;
  block_sums<T, kBegin, kEnd, Act>(codes, x, row_bytes, sum);
  const auto* pairs = reinterpret_cast<const __m256i*>(code_pair);
  const __m256i pair[2] = {_mm256_load_si256(pairs), _mm256_load_si256(pairs + 1)};
  add_zero_terms<T>(reinterpret_cast<const Act*>(x), row_bytes, kHalf + 1, pair, sum);
}

// One 32-feature block added to acc [kTokens][16].
template <QuantType T, class Act, int kTokens>
TELLIN_INLINE void add_block(const uint8_t (*codes)[kVectorBytes], const uint8_t* x, int64_t row_bytes,
                             const float (*scale)[kRows], const float (*minimum)[kRows],
                             const int32_t (*code_pair)[kRows], float* acc) {
  __m256i sum[2][kTokens];
  __m256 product[2][kTokens];
  const auto* rows = reinterpret_cast<const Act*>(x);
  if constexpr (format_of(T).per16()) {
    whole_sums<T, 0, Act>(codes, x, row_bytes, code_pair[0], sum);
    scale_half(rows, row_bytes, scale[0], sum, product, acc);
    whole_sums<T, 1, Act>(codes, x, row_bytes, code_pair[1], sum);
  } else {
    whole_sums<T, -1, Act>(codes, x, row_bytes, code_pair[0], sum);
  }
  scale_sums<T>(rows, row_bytes, scale, minimum, sum, product, acc);
}

// Runs a tile over the blocks of a chunk. acc: [kTokens][16], 32-byte aligned.
template <QuantType T, class Act, int kTokens>
__attribute__((noinline)) void run_tile(const Chunk& chunk, const uint8_t (*codes)[8][kVectorBytes],
                                        CodeStream* ahead, int num_blocks, const uint8_t* x,
                                        int64_t row_bytes, float* acc) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kSums = kFormat.per16() ? 2 : 1;
  constexpr int kStep = kFormat.super_bytes() / kFormat.blocks();
  for (int b = 0; b < num_blocks; ++b) {
    if (ahead != nullptr) ahead->fetch<kStep>();
    add_block<T, Act, kTokens>(codes[b], x, row_bytes, chunk.scale + b * kSums, chunk.minimum + b * kSums,
                               chunk.code_pair + b * kSums, acc);
    x += sizeof(Act);
  }
}

// Unpacks quads [kQuad, kEnd) of half `half` of a block, and adds up the codes from quad kBegin on (see
// code_pair_of).
template <QuantType T, int kBegin, int kQuad, int kEnd>
TELLIN_INLINE void unpack_quads(const uint8_t* block, int half, uint8_t (*codes)[kVectorBytes],
                                __m256i& code_sum) {
  if constexpr (kQuad < kEnd) {
    const __m256i quad = load_quad<T, kQuad>(block + half * kHalfBytes);
    _mm256_store_si256(reinterpret_cast<__m256i*>(codes[kQuad] + half * kHalfBytes), quad);
    if constexpr (format_of(T).code_bits() < 8) {
      add_codes(quad, kQuad == kBegin, code_sum);
    } else {
      const __m256i words = _mm256_maddubs_epi16(quad, _mm256_set1_epi8(1));
      const __m256i sum = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
      code_sum = kQuad == kBegin ? sum : _mm256_add_epi32(code_sum, sum);
    }
    unpack_quads<T, kBegin, kQuad + 1, kEnd>(block, half, codes, code_sum);
  }
}

// Unpacks the block, or half kHalf of its features.
template <QuantType T, int kHalf>
TELLIN_INLINE void unpack_block(const uint8_t* block, uint8_t (*codes)[kVectorBytes], int32_t* code_pair) {
  constexpr int kBegin = kHalf == 1 ? 4 : 0, kEnd = kHalf == 0 ? 4 : 8;
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    __m256i code_sum;
    unpack_quads<T, kBegin, kBegin, kEnd>(block, half, codes, code_sum);
    const __m256i pair = code_pair_of<T>(code_sum, 4 * (kEnd - kBegin));
    _mm256_store_si256(reinterpret_cast<__m256i*>(code_pair + half * kHalfRows), pair);
  }
}

template <QuantType T>
void unpack_chunk(const uint8_t* w, int num_supers, Chunk* chunk) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kSums = kFormat.per16() ? 2 : 1;
  for (int s = 0; s < num_supers; ++s, w += kFormat.super_bytes()) {
    const int first = s * kFormat.blocks();
    expand_scales<T>(w, chunk->scale + first * kSums, chunk->minimum + first * kSums);
    for (int b = 0; b < kFormat.blocks(); ++b) {
      const uint8_t* block = w + kFormat.header_bytes() + b * kFormat.block_bytes();
      uint8_t (*const codes)[kVectorBytes] = chunk->codes[first + b];
      int32_t (*const pairs)[kRows] = chunk->code_pair + (first + b) * kSums;
      unpack_block<T, kSums == 2 ? 0 : -1>(block, codes, pairs[0]);
      if constexpr (kSums == 2) unpack_block<T, 1>(block, codes, pairs[1]);
    }
  }
}

// How run_group unpacks a chunk and runs a tile over it, from block `first` of rows x on.
template <QuantType T, class Act>
struct PlainTiles {
  using Unpacked = Chunk;
  static void unpack(const uint8_t* w, int num_supers, Chunk* chunk) {
    unpack_chunk<T>(w, num_supers, chunk);
  }
  template <int kTokens>
  static void run(const Chunk& chunk, CodeStream* ahead, int num_blocks, const uint8_t* x, int64_t row_bytes,
                  int64_t first, float* acc) {
    x += first * static_cast<int64_t>(sizeof(Act));
    run_tile<T, Act, kTokens>(chunk, chunk.codes, ahead, num_blocks, x, row_bytes, acc);
  }
};

template <QuantType T>
struct TableTiles {
  using Unpacked = TableBlock<T>[kChunkBlocks];
  static void unpack(const uint8_t* w, int num_supers, Unpacked* chunk) {
    unpack_table_chunk<T>(w, num_supers, *chunk);
  }
  template <int kTokens>
  static void run(const Unpacked& chunk, CodeStream* ahead, int num_blocks, const uint8_t* x,
                  int64_t row_bytes, int64_t first, float* acc) {
    run_table_tile<T, kTokens>(chunk, ahead, num_blocks, x, row_bytes, first, acc);
  }
};

// From how many tokens on tables are worth building for a chunk (Zen 5): a tile gains 4 % of formats with
// minima, 8 % of Q4_0, 15 to 20 % of what has more bits and a zero point. With vpdpbusd scales per 16
// features gain nothing.
constexpr int kNever = kMaxTokens + 1;
template <class Act>
constexpr int table_tokens([[maybe_unused]] const PackedFormat& format) {
  if (!format.is_quantized() || Act::kPlanes == 2) return kNever;
#if defined(__AVXVNNI__)
  return format.per16() ? kNever : format.has_min ? 40 : 24;
#else
  if (format.code_bits() == 8) return kNever;  // words
  return format.has_min ? 24 : format.code_bits() == 4 ? 20 : 10;
#endif
}

// Tokens [m0, m0 + tokens) x group g, tokens <= kMaxTokens. The group at `after` is read next.
template <QuantType T, class Act, class Tiles>
void run_group(const IntProblem& p, int64_t m0, int tokens, int64_t g, const uint8_t* after) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kChunkSupers = kChunkBlocks / kFormat.blocks();
  alignas(64) float acc[kMaxTokens * kRows];
  typename Tiles::Unpacked chunk;
  const int64_t num_supers = static_cast<int64_t>(p.w.group_bytes / kFormat.super_bytes());
  const int num_tiles = (tokens + kMaxTile - 1) / kMaxTile;
  const uint8_t* w = p.w.data + g * p.w.group_bytes;
  CodeStream ahead(w, p.w.group_bytes, after, kPrefetchChunks * kChunkSupers * kFormat.super_bytes());
  const uint8_t* const x = p.x.data + m0 * p.x.row_bytes;
  int64_t first = 0;
  __builtin_memset(acc, 0, sizeof(float) * kRows * static_cast<size_t>(tokens));
  for (int64_t s0 = 0; s0 < num_supers; s0 += kChunkSupers) {
    const int supers = static_cast<int>(num_supers - s0 < kChunkSupers ? num_supers - s0 : kChunkSupers);
    Tiles::unpack(w, supers, &chunk);
    for (int i = 0; i < num_tiles; ++i) {
      const int t0 = tokens * i / num_tiles, t1 = tokens * (i + 1) / num_tiles;
      const uint8_t* const rows = x + t0 * p.x.row_bytes;
      switch (t1 - t0) {
#define TELLIN_TILE(n)                                                                                       \
  case n:                                                                                                    \
    Tiles::template run<n>(chunk, i == 0 ? &ahead : nullptr, supers * kFormat.blocks(), rows, p.x.row_bytes, \
                           first, acc + t0 * kRows);                                                         \
    break;
        TELLIN_TILE(1)
        TELLIN_TILE(2)
        TELLIN_TILE(3)
        TELLIN_TILE(4)
        TELLIN_TILE(5)
#if defined(__AVXVNNI__)
        TELLIN_TILE(6)
#endif
#undef TELLIN_TILE
      }
    }
    w += supers * kFormat.super_bytes();
    first += supers * kFormat.blocks();
  }
  for (int t = 0; t < tokens; ++t) {
    store_rows(acc + t * kRows, p.w.n - g * kRows, p.out + (m0 + t) * p.ldo + g * kRows);
  }
}

// Most tokens of a pass over the groups: as many as stay in a second-level cache of 1 MiB beside the weights,
// if that is enough to make unpacking cheap.
template <QuantType T, class Act>
int64_t pass_tokens(int64_t row_bytes) {
  constexpr int64_t kPassBytes = 600 << 10, kLeast = 64;
  const bool reads_records = Act::kPlanes == 1 && !TableBlock<T>::kTable.is_signed();
  const int64_t tokens = kPassBytes / (reads_records ? shifted_offset(row_bytes) : row_bytes);
  return tokens < kLeast ? kMaxTokens : std::min<int64_t>(tokens, kMaxTokens);
}

template <QuantType T, class Act>
void linear_int(const PackedMatrix& w, const QuantizedRows& x, int64_t m0, int64_t m1, int64_t g0, int64_t g1,
                float* out, int64_t ldo) {
  const IntProblem problem = {w, x, out, ldo};
  const int64_t most = pass_tokens<T, Act>(x.row_bytes);
  const int64_t num_passes = (m1 - m0 + most - 1) / most;
  for (int64_t i = 0; i < num_passes; ++i) {
    const int64_t begin = m0 + (m1 - m0) * i / num_passes, end = m0 + (m1 - m0) * (i + 1) / num_passes;
    const auto tokens = static_cast<int>(end - begin);
    if constexpr (has_few_path(format_of(T))) {
      if (tokens <= few_tokens(format_of(T), Act::kPlanes)) {
        linear_few<T, Act>(w, x, begin, tokens, g0, g1, out, ldo);
        continue;
      }
    }
    if constexpr (has_word_path<Act>(format_of(T))) {
      if (tokens >= kWordTokens) {
        for (int64_t g = g0; g < g1; g += word_groups(T)) {
          const auto groups = static_cast<int>(g1 - g < word_groups(T) ? g1 - g : word_groups(T));
          run_word_groups<T, Act>(problem, begin, tokens, g, groups, g1);
        }
        continue;
      }
    }
    for (int64_t g = g0; g < g1; ++g) {
      const uint8_t* const after = codes_after(w, g + 1, g1);
      if constexpr (table_tokens<Act>(format_of(T)) < kNever) {
        if (tokens >= table_tokens<Act>(format_of(T)) && can_make_tables<T>(w, g)) {
          run_group<T, Act, TableTiles<T>>(problem, begin, tokens, g, after);
          continue;
        }
      }
      run_group<T, Act, PlainTiles<T, Act>>(problem, begin, tokens, g, after);
    }
  }
}

}  // namespace
}  // namespace tellin

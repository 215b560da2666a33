// AVX2: packed codes x quantised activations of one or two planes.
//
// Work is cut into chunks of 256 features of one group (16 rows). A chunk's codes are unpacked once to bytes
// in L1 and its scales to floats, then every tile of tokens runs over the chunk, its float accumulators
// parked in L1. So a chunk is read from memory once for all tokens, and memory streams while tiles compute.
//
// vpmaddubsw adds two products of an unsigned code and a signed activation in int16. How many such results
// fit into int16: codes up to 15: 8 results (8 * 2 * 15 * 128 = 30720); up to 31: 4 (31744); up to 63: 2
// (32256). 8-bit codes are multiplied as two nibbles. So sums stay exact and are
// widened as rarely as possible.
//
// A value is the same sequence of roundings as in the AVX-512 variant (see avx512/linear_int.h).
#pragma once
#include "linear_few.h"

namespace tellin {
namespace {

// One unpacked chunk. Offsets differ modulo 4 KiB from the activations' by the records' odd size.
struct Chunk {
  alignas(64) uint8_t codes[kChunkBlocks][8][kVectorBytes];
  alignas(64) float scale[2 * kChunkBlocks][kRows];
  alignas(64) float minimum[2 * kChunkBlocks][kRows];
  alignas(64) int32_t code_pair[2 * kChunkBlocks][kRows];  // see store_code_pairs; for 8-bit activations
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
      const __m256i p0 = _mm256_maddubs_epi16(w0, y), p1 = _mm256_maddubs_epi16(w1, y);
      if (is_first) {
        sum[0][t] = p0;
        sum[1][t] = p1;
      } else {
        add_int16(sum[0][t], p0);
        add_int16(sum[1][t], p1);
      }
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
      const __m256i p_low = _mm256_maddubs_epi16(w_low, y), p_high = _mm256_maddubs_epi16(w_high, y);
      if (kQuad == 0) {
        low[t] = p_low;
        high[t] = p_high;
      } else {
        add_int16(low[t], p_low);
        add_int16(high[t], p_high);
      }
    }
    asm volatile("" ::: "memory");
    add_nibble_quads<kQuad + 1>(codes, x, row_bytes, low, high);
  }
}

#if defined(__AVXVNNI__)
// vpdpbusd widens by itself: 8-bit codes need no splitting and nothing overflows.
template <int kBits, int kQuad, int kEnd, int kTokens>
TELLIN_INLINE void plane_sums(const uint8_t (*codes)[kVectorBytes], const int8_t* x, int64_t row_bytes,
                              __m256i (&sum)[2][kTokens]) {
#pragma GCC unroll 8
  for (int q = kQuad; q < kEnd; ++q) {
    const __m256i w0 = load_half(codes[q]), w1 = load_half(codes[q] + kHalfBytes);
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) {
      const __m256i y = broadcast_word(x + t * row_bytes + 4 * q);
      sum[0][t] = _mm256_dpbusd_avx_epi32(q == kQuad ? _mm256_setzero_si256() : sum[0][t], w0, y);
      sum[1][t] = _mm256_dpbusd_avx_epi32(q == kQuad ? _mm256_setzero_si256() : sum[1][t], w1, y);
    }
    asm volatile("" ::: "memory");  // keeps the loads of later quads from being hoisted
  }
}
#else
// Exact int32 sums over quads [kQuad, kEnd) of a block.
template <int kBits, int kQuad, int kEnd, int kTokens>
TELLIN_INLINE void plane_sums(const uint8_t (*codes)[kVectorBytes], const int8_t* x, int64_t row_bytes,
                              __m256i (&sum)[2][kTokens]) {
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
    constexpr int kStep = kBits <= 4 ? 8 : kBits == 5 ? 4 : 2;
    constexpr int kStop = kQuad + kStep < kEnd ? kQuad + kStep : kEnd;
    add_quads<kQuad, kStop>(codes, x, row_bytes, true, sum);
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) {
      sum[0][t] = _mm256_madd_epi16(sum[0][t], one);
      sum[1][t] = _mm256_madd_epi16(sum[1][t], one);
    }
    if constexpr (kStop < kEnd) {
      __m256i rest[2][kTokens];
      plane_sums<kBits, kStop, kEnd>(codes, x, row_bytes, rest);
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
template <int kBits, int kQuad, int kEnd, class Act, int kTokens>
TELLIN_INLINE void block_sums(const uint8_t (*codes)[kVectorBytes], const uint8_t* x, int64_t row_bytes,
                              __m256i (&sum)[2][kTokens]) {
  const auto* block = reinterpret_cast<const Act*>(x);
  plane_sums<kBits, kQuad, kEnd>(codes, block->q[0], row_bytes, sum);
  if constexpr (Act::kPlanes == 2) {
    __m256i low[2][kTokens];
    plane_sums<kBits, kQuad, kEnd>(codes, block->q[1], row_bytes, low);
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) {
      sum[0][t] = _mm256_slli_epi32(sum[0][t], kPlaneShift);
      sum[1][t] = _mm256_slli_epi32(sum[1][t], kPlaneShift);
      add_int32(sum[0][t], low[0][t]);
      add_int32(sum[1][t], low[1][t]);
    }
  }
}

// One 32-feature block added to acc [kTokens][16].
template <QuantType T, class Act, int kTokens>
TELLIN_INLINE void add_block(const uint8_t (*codes)[kVectorBytes], const uint8_t* x, int64_t row_bytes,
                             const float (*scale)[kRows], const float (*minimum)[kRows],
                             const int32_t (*code_pair)[kRows], float* acc) {
  constexpr PackedFormat kFormat = format_of(T);
  const auto* first = reinterpret_cast<const Act*>(x);
  constexpr int kLast = kFormat.per16() ? 1 : 0;
  __m256i sum[2][kTokens];
  __m256 product[2][kTokens];
  if constexpr (kFormat.per16()) {
    block_sums<kFormat.bits, 0, 4, Act>(codes, x, row_bytes, sum);
    add_zero_terms<T>(first, row_bytes, 1, code_pair[0], sum);
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m256 s = _mm256_load_ps(scale[0] + h * kHalfRows);
#pragma GCC unroll 6
      for (int t = 0; t < kTokens; ++t) product[h][t] = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[h][t]), s);
    }
    block_sums<kFormat.bits, 4, 8, Act>(codes, x, row_bytes, sum);
  } else {
    block_sums<kFormat.bits, 0, 8, Act>(codes, x, row_bytes, sum);
  }
  add_zero_terms<T>(first, row_bytes, 2 * kLast, code_pair[kLast], sum);
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const __m256 s = _mm256_load_ps(scale[kLast] + h * kHalfRows);
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) {
      const Act* block = act_row(first, t, row_bytes);
      float* const a = acc + t * kRows + h * kHalfRows;
      const __m256 value = _mm256_cvtepi32_ps(sum[h][t]);
      const __m256 p = kFormat.per16() ? _mm256_fmadd_ps(value, s, product[h][t]) : _mm256_mul_ps(value, s);
      __m256 result = _mm256_fmadd_ps(p, broadcast_float(&block->scale), _mm256_load_ps(a));
      if constexpr (kFormat.has_min) {
#pragma GCC unroll 2
        for (int i = 0; i <= kLast; ++i) {
          const __m256 x_sum = broadcast_float(kFormat.per16() ? &block->half_sum[i] : &block->sum);
          result = _mm256_fmadd_ps(_mm256_load_ps(minimum[i] + h * kHalfRows), x_sum, result);
        }
      }
      _mm256_store_ps(a, result);
    }
  }
  asm volatile("" ::: "memory");
}

// Runs a tile over the blocks of a chunk. acc: [kTokens][16], 32-byte aligned.
template <QuantType T, class Act, int kTokens>
__attribute__((noinline)) void run_tile(const Chunk& chunk, const uint8_t (*codes)[8][kVectorBytes],
                                        const uint8_t* prefetch, int num_blocks, const uint8_t* x,
                                        int64_t row_bytes, float* acc) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kSums = kFormat.per16() ? 2 : 1;
  constexpr int kStep = kFormat.super_bytes() / kFormat.blocks();
  for (int b = 0; b < num_blocks; ++b) {
    if (prefetch != nullptr) {
#pragma GCC unroll 10
      for (int i = 0; i < kStep; i += 64) __builtin_prefetch(prefetch + i, 0, 3);
      prefetch += kStep;
    }
    add_block<T, Act, kTokens>(codes[b], x, row_bytes, chunk.scale + b * kSums, chunk.minimum + b * kSums,
                               chunk.code_pair + b * kSums, acc);
    x += sizeof(Act);
  }
}

template <int kBits, int kQuad>
TELLIN_INLINE void unpack_quads(const uint8_t* block, uint8_t (*codes)[kVectorBytes]) {
  if constexpr (kQuad < 8) {
    for (int half = 0; half < 2; ++half) {
      const __m256i quad = load_quad<kBits, kQuad>(block + half * kHalfBytes);
      _mm256_store_si256(reinterpret_cast<__m256i*>(codes[kQuad] + half * kHalfBytes), quad);
    }
    unpack_quads<kBits, kQuad + 1>(block, codes);
  }
}

// Pairs (sum of codes - features * zero point, zero point) of kQuads quads, for the 16 rows.
template <int kBits, int kQuads>
TELLIN_INLINE void store_code_pairs(const uint8_t (*codes)[kVectorBytes], int zero_point, int32_t* pairs) {
  const __m256i one16 = _mm256_set1_epi16(1), one8 = _mm256_set1_epi8(1);
  for (int half = 0; half < 2; ++half) {
    constexpr int kStep = kBits == 8 ? 1 : kQuads;  // sums of quads that fit a byte: 8 x 31, 4 x 63
    __m256i sum = _mm256_set1_epi32(-4 * kQuads * zero_point);
#pragma GCC unroll 8
    for (int q = 0; q < kQuads; q += kStep) {
      __m256i bytes = load_half(codes[q] + half * kHalfBytes);
#pragma GCC unroll 8
      for (int i = 1; i < kStep; ++i)
        bytes = _mm256_add_epi8(bytes, load_half(codes[q + i] + half * kHalfBytes));
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(bytes, one8), one16));
    }
    const __m256i pair = _mm256_blend_epi16(sum, _mm256_set1_epi32(zero_point << 16), 0xaa);
    _mm256_store_si256(reinterpret_cast<__m256i*>(pairs + half * kHalfRows), pair);
  }
}

template <QuantType T, class Act>
void unpack_chunk(const uint8_t* w, int num_supers, Chunk* chunk) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kSums = kFormat.per16() ? 2 : 1;
  for (int s = 0; s < num_supers; ++s, w += kFormat.super_bytes()) {
    const int first = s * kFormat.blocks();
    expand_scales<T>(w, chunk->scale + first * kSums, chunk->minimum + first * kSums);
    for (int b = 0; b < kFormat.blocks(); ++b) {
      uint8_t (*const codes)[kVectorBytes] = chunk->codes[first + b];
      unpack_quads<kFormat.bits, 0>(w + kFormat.header_bytes() + b * kFormat.block_bytes(), codes);
      if constexpr (Act::kPlanes == 1) {
        int32_t (*const pairs)[kRows] = chunk->code_pair + (first + b) * kSums;
        store_code_pairs<kFormat.bits, 8 / kSums>(codes, kFormat.zero_point(), pairs[0]);
        if (kSums == 2) store_code_pairs<kFormat.bits, 4>(codes + 4, kFormat.zero_point(), pairs[1]);
      }
    }
  }
}

struct IntProblem {
  const PackedMatrix& w;
  const QuantizedRows& x;
  float* out;
  int64_t ldo;
};

// Tokens [m0, m0 + tokens) x group g, tokens <= kMaxTokens.
template <QuantType T, class Act>
void run_group(const IntProblem& p, int64_t m0, int tokens, int64_t g) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kChunkSupers = kChunkBlocks / kFormat.blocks();
  alignas(64) float acc[kMaxTokens * kRows];
  Chunk chunk;
  const int64_t num_supers = static_cast<int64_t>(p.w.group_bytes / kFormat.super_bytes());
  const int num_tiles = (tokens + kMaxTile - 1) / kMaxTile;
  const uint8_t* w = p.w.data + g * p.w.group_bytes;
  const uint8_t* x = p.x.data + m0 * p.x.row_bytes;
  __builtin_memset(acc, 0, sizeof(float) * kRows * static_cast<size_t>(tokens));
  for (int64_t s0 = 0; s0 < num_supers; s0 += kChunkSupers) {
    const int supers = static_cast<int>(num_supers - s0 < kChunkSupers ? num_supers - s0 : kChunkSupers);
    unpack_chunk<T, Act>(w, supers, &chunk);
    const uint8_t* const ahead = w + kPrefetchChunks * kChunkSupers * kFormat.super_bytes();
    for (int i = 0; i < num_tiles; ++i) {
      const int t0 = tokens * i / num_tiles, t1 = tokens * (i + 1) / num_tiles;
      const uint8_t* const rows = x + t0 * p.x.row_bytes;
      switch (t1 - t0) {
#define TELLIN_TILE(n)                                                                                 \
  case n:                                                                                              \
    run_tile<T, Act, n>(chunk, chunk.codes, i == 0 ? ahead : nullptr, supers * kFormat.blocks(), rows, \
                        p.x.row_bytes, acc + t0 * kRows);                                              \
    break;
        TELLIN_TILE(1)
        TELLIN_TILE(2)
        TELLIN_TILE(3)
        TELLIN_TILE(4)
#if defined(__AVXVNNI__)
        TELLIN_TILE(5)
        TELLIN_TILE(6)
#endif
#undef TELLIN_TILE
      }
    }
    w += supers * kFormat.super_bytes();
    x += supers * kFormat.blocks() * sizeof(Act);
  }
  for (int t = 0; t < tokens; ++t) {
    store_rows(acc + t * kRows, p.w.n - g * kRows, p.out + (m0 + t) * p.ldo + g * kRows);
  }
}

template <QuantType T, class Act>
void linear_int(const PackedMatrix& w, const QuantizedRows& x, int64_t m0, int64_t m1, int64_t g0, int64_t g1,
                float* out, int64_t ldo) {
  const IntProblem problem = {w, x, out, ldo};
  const int64_t num_passes = (m1 - m0 + kMaxTokens - 1) / kMaxTokens;
  for (int64_t i = 0; i < num_passes; ++i) {
    const int64_t begin = m0 + (m1 - m0) * i / num_passes, end = m0 + (m1 - m0) * (i + 1) / num_passes;
    const auto tokens = static_cast<int>(end - begin);
    if constexpr (has_few_path(format_of(T))) {
      if (tokens <= kFewTokens) {
        linear_few<T, Act>(w, x, begin, tokens, g0, g1, out, ldo);
        continue;
      }
    }
    for (int64_t g = g0; g < g1; ++g) run_group<T, Act>(problem, begin, tokens, g);
  }
}

}  // namespace
}  // namespace tellin

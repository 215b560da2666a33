// AVX-512 VNNI: packed codes x quantised activations of one or two planes.
//
// Work is cut into chunks of 256 or 512 features of kGroups groups (16 rows each): scales are expanded once
// per chunk, then every tile of tokens runs over the chunk with its float accumulators parked in L1 between
// chunks. So a chunk of codes is read from memory once and stays in L1 for all tokens. The first tile also
// fetches the codes of a later chunk, so memory streams while tiles compute.
//
// A value is, for each block of 32 features in order: t = float(int32 sum) * scale (per 16: a second product
// fused on); acc = fma(t, activation scale, acc); acc = fma(minimum, activation sum, acc) (per 16: two).
// Nothing in it depends on the tile, so rows are equal bit for bit whatever else is computed. Integer
// sums are exact (int_sums.h).
#pragma once
#include "int_sums.h"

namespace tellin {
namespace {

// Blocks of a chunk. On Zen 5 long chunks are 5 % faster for 13 to 24 tokens, 3 % slower from 32 on, and for
// fewer tokens, and where chunks would be of unequal length, they stream worse. Groups of few blocks are one
// chunk.
constexpr int kShortChunk = 8;
constexpr int kLongChunk = 16;
constexpr int kLargestChunk = 24;
constexpr int kMaxTile = 6;  // tokens of a tile: 2 x 6 integer and 2 x 6 float accumulators fill 32 registers
constexpr int kMaxTokens = 192;      // tokens that share a pass over the weights: 24 KiB of accumulators
constexpr int kPrefetchBlocks = 16;  // how far ahead of its use a block of codes is fetched

// Up to this many tokens wait for memory, which is read fastest in one stream per core: one group at a time
// (Zen 5 beside busy neighbours: 48 GB/s for one token, with two groups 41).
constexpr int kSingleTokens = 2;

// Codes of a later chunk that a tile fetches while it computes: bytes [begin, end) of each group.
struct CodePrefetch {
  const uint8_t* begin;
  const uint8_t* end;
  int lines_per_block;
  bool is_only_tile;  // fetches all of it, and no copy needs to stay in L2
};

// Fetches what is due with a block (kBytes: a block's share of a chunk) of kGroups groups.
template <int kBytes, int kGroups>
TELLIN_INLINE void prefetch_codes(CodePrefetch& ahead, size_t group_bytes) {
  if (ahead.is_only_tile) {
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 10
      for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(ahead.begin + g * group_bytes + i, 0, 0);
    }
    ahead.begin += kBytes;
  } else {
    for (int i = 0; i < ahead.lines_per_block && ahead.begin < ahead.end; ++i, ahead.begin += 64) {
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) __builtin_prefetch(ahead.begin + g * group_bytes, 0, 3);
    }
  }
}

// Expanded scales and code sums of one chunk, [sum][group][16].
struct ChunkScales {
  alignas(64) float scale[2 * kLargestChunk][2][kRows];
  alignas(64) float minimum[2 * kLargestChunk][2][kRows];
  alignas(64) int32_t code_pair[2 * kLargestChunk][2][kRows];  // see first_sums; for 8-bit activations
};

// One 32-feature block: acc[group][token] += scaled integer sums (and minima).
template <QuantType T, class Act, bool kIsFirst, int kGroups, int kTokens>
TELLIN_INLINE void add_block(const uint8_t* codes, size_t group_bytes, const ActRows<Act, kTokens>& x,
                             const float (*scale)[2][kRows], const float (*minimum)[2][kRows],
                             int32_t (*code_pair)[2][kRows], __m512 (&acc)[kGroups][kTokens]) {
  constexpr PackedFormat kFormat = format_of(T);
  __m512i sum[kGroups][kTokens];
  if constexpr (!kFormat.per16()) {
    block_sums<T, kIsFirst, -1>(codes, group_bytes, x, code_pair[0], sum);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      const auto* block = x.block(t);
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[g][t]), _mm512_load_ps(scale[0][g]));
        acc[g][t] = _mm512_fmadd_ps(product, broadcast_float(&block->scale), acc[g][t]);
        if constexpr (kFormat.has_min) {
          acc[g][t] = _mm512_fmadd_ps(_mm512_load_ps(minimum[0][g]), broadcast_float(&block->sum), acc[g][t]);
        }
      }
    }
  } else {
    block_sums<T, kIsFirst, 0>(codes, group_bytes, x, code_pair[0], sum);
    __m512 product[kGroups][kTokens];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        product[g][t] = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[g][t]), _mm512_load_ps(scale[0][g]));
      }
    }
    block_sums<T, kIsFirst, 1>(codes, group_bytes, x, code_pair[1], sum);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      const auto* block = x.block(t);
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        const __m512 p =
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[g][t]), _mm512_load_ps(scale[1][g]), product[g][t]);
        acc[g][t] = _mm512_fmadd_ps(p, broadcast_float(&block->scale), acc[g][t]);
        if constexpr (kFormat.has_min) {
#pragma GCC unroll 2
          for (int h = 0; h < 2; ++h) {
            acc[g][t] = _mm512_fmadd_ps(_mm512_load_ps(minimum[h][g]), broadcast_float(&block->half_sum[h]),
                                        acc[g][t]);
          }
        }
      }
    }
  }
}

// Runs a tile over `num_supers` super-blocks of a chunk. acc: [kTokens][kGroups][16], 64-byte aligned.
template <QuantType T, class Act, bool kIsFirst, int kGroups, int kTokens>
__attribute__((noinline)) void run_tile(const uint8_t* w, CodePrefetch ahead, size_t group_bytes,
                                        int num_supers, const uint8_t* x, int64_t row_bytes,
                                        ChunkScales* scales, bool is_first, float* acc_io) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kSums = kFormat.per16() ? 2 : 1;
  __m512 acc[kGroups][kTokens];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      acc[g][t] = is_first ? _mm512_setzero_ps() : _mm512_load_ps(acc_io + (t * kGroups + g) * kRows);
    }
  }
  ActRows<Act, kTokens> rows(x, row_bytes);
  const float (*scale)[2][kRows] = scales->scale;
  const float (*minimum)[2][kRows] = scales->minimum;
  int32_t (*code_pair)[2][kRows] = scales->code_pair;
  for (int s = 0; s < num_supers; ++s) {
    const uint8_t* codes = w + kFormat.header_bytes();
    for (int b = 0; b < kFormat.blocks(); ++b) {
      prefetch_codes<kFormat.super_bytes() / kFormat.blocks(), kGroups>(ahead, group_bytes);
      add_block<T, Act, kIsFirst>(codes, group_bytes, rows, scale, minimum, code_pair, acc);
      codes += kFormat.block_bytes();
      rows.advance();
      scale += kSums;
      minimum += kSums;
      code_pair += kSums;
    }
    w += kFormat.super_bytes();
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) _mm512_store_ps(acc_io + (t * kGroups + g) * kRows, acc[g][t]);
  }
}

template <QuantType T, class Act, bool kIsFirst, int kGroups>
void run_tile_of(int tokens, const uint8_t* w, CodePrefetch ahead, size_t group_bytes, int num_supers,
                 const uint8_t* x, int64_t row_bytes, ChunkScales* scales, bool is_first, float* acc) {
#define TELLIN_TILE(n)                                                                                     \
  case n:                                                                                                  \
    return run_tile<T, Act, kIsFirst, kGroups, n>(w, ahead, group_bytes, num_supers, x, row_bytes, scales, \
                                                  is_first, acc);
  switch (tokens) {
    TELLIN_TILE(1)
    TELLIN_TILE(2)
    TELLIN_TILE(3)
    TELLIN_TILE(4)
    TELLIN_TILE(5)
    TELLIN_TILE(6)
  }
#undef TELLIN_TILE
}

struct IntProblem {
  const PackedMatrix& w;
  const QuantizedRows& x;
  float* out;
  int64_t ldo;
};

// Tokens [m0, m0 + tokens) x groups [g0, g0 + kGroups), tokens <= kMaxTokens. Groups at `after` are read
// next.
template <QuantType T, class Act, int kGroups>
void run_groups(const IntProblem& p, int64_t m0, int tokens, int64_t g0, const uint8_t* after) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kSums = kFormat.per16() ? 2 : 1;
  alignas(64) float acc[kMaxTokens * kGroups * kRows];
  ChunkScales scales;
  const size_t group_bytes = p.w.group_bytes;
  const int64_t num_supers = static_cast<int64_t>(group_bytes / kFormat.super_bytes());
  const int num_tiles = (tokens + kMaxTile - 1) / kMaxTile;
  // Chunks are equal but for the first, which may be shorter: so the code that is fetched with a chunk ends
  // with the group or before it.
  const bool is_whole = num_supers * kFormat.blocks() <= kLargestChunk;
  const bool is_long =
      (num_tiles == 3 || num_tiles == 4) && num_supers % (kLongChunk / kFormat.blocks()) == 0;
  const int64_t chunk_supers =
      is_whole ? num_supers : (is_long ? kLongChunk : kShortChunk) / kFormat.blocks();
  const int64_t ahead_supers = is_whole ? num_supers : kPrefetchBlocks / kFormat.blocks();
  const uint8_t* const group = p.w.data + g0 * group_bytes;
  const uint8_t* w = group;
  const uint8_t* x = p.x.data + m0 * p.x.row_bytes;
  int64_t chunk_end = (num_supers - 1) % chunk_supers + 1;
  for (int64_t s0 = 0; s0 < num_supers; s0 = chunk_end, chunk_end += chunk_supers) {
    const int chunk = static_cast<int>(chunk_end - s0);
    for (int g = 0; g < kGroups; ++g) {
      for (int s = 0; s < chunk; ++s) {
        const int first = s * kFormat.blocks() * kSums;
        expand_scales<T>(w + g * group_bytes + s * kFormat.super_bytes(), 2 * kRows, scales.scale[first][g],
                         scales.minimum[first][g]);
      }
    }
    const int64_t next = s0 + ahead_supers;
    const uint8_t* fetch = next < num_supers ? group + next * kFormat.super_bytes()
                                             : after + (next - num_supers) * kFormat.super_bytes();
    const int num_lines = chunk * kFormat.super_bytes() / 64;
    const int tile_blocks = num_tiles * chunk * kFormat.blocks();
    const int lines_per_block = (num_lines + tile_blocks - 1) / tile_blocks;
    for (int i = 0; i < num_tiles; ++i) {
      const int t0 = tokens * i / num_tiles, t1 = tokens * (i + 1) / num_tiles;
      const CodePrefetch ahead = {fetch + 64 * (num_lines * i / num_tiles),
                                  fetch + 64 * (num_lines * (i + 1) / num_tiles), lines_per_block,
                                  num_tiles == 1};
      const auto run = i == 0 ? run_tile_of<T, Act, true, kGroups> : run_tile_of<T, Act, false, kGroups>;
      run(t1 - t0, w, ahead, group_bytes, chunk, x + t0 * p.x.row_bytes, p.x.row_bytes, &scales, s0 == 0,
          acc + t0 * kGroups * kRows);
    }
    w += chunk * kFormat.super_bytes();
    x += chunk * kFormat.blocks() * sizeof(Act);
  }
  for (int t = 0; t < tokens; ++t) {
    for (int g = 0; g < kGroups; ++g) {
      const int64_t column = (g0 + g) * kRows;
      const int64_t left = p.w.n - column;
      const auto mask = static_cast<__mmask16>(left >= kRows ? 0xffff : (1 << left) - 1);
      _mm512_mask_storeu_ps(p.out + (m0 + t) * p.ldo + column, mask,
                            _mm512_load_ps(acc + (t * kGroups + g) * kRows));
    }
  }
}

template <QuantType T, class Act>
void linear_int(const PackedMatrix& w, const QuantizedRows& x, int64_t m0, int64_t m1, int64_t g0, int64_t g1,
                float* out, int64_t ldo) {
  const IntProblem problem = {w, x, out, ldo};
  const int64_t num_passes = (m1 - m0 + kMaxTokens - 1) / kMaxTokens;
  for (int64_t i = 0; i < num_passes; ++i) {
    const int64_t begin = m0 + (m1 - m0) * i / num_passes, end = m0 + (m1 - m0) * (i + 1) / num_passes;
    const int tokens = static_cast<int>(end - begin);
    const int64_t step = tokens <= kSingleTokens ? 1 : 2;
    for (int64_t g = g0; g < g1; g += step) {
      const uint8_t* after = w.data + (g + step) * w.group_bytes;
      if (g + step >= g1 && w.follow != nullptr) after = w.follow;
      if (step == 2 && g + 2 <= g1) {
        run_groups<T, Act, 2>(problem, begin, tokens, g, after);
      } else {
        run_groups<T, Act, 1>(problem, begin, tokens, g, after);
      }
    }
  }
}

}  // namespace
}  // namespace tellin

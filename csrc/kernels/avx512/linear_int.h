// AVX-512 VNNI: packed codes x quantised activations of one or two planes.
//
// Work is cut into chunks of 256 features of kGroups groups (16 rows each): scales are expanded once per
// chunk, then every tile of tokens runs over the chunk with its float accumulators parked in L1 between
// chunks. So a chunk of codes is read from memory once and stays in L1 for all tokens, and memory streams
// while tiles compute.
//
// A value is, for each block of 32 features in order: t = float(int32 sum) * scale (per 16: a second product
// fused on); acc = fma(t, activation scale, acc); acc = fma(minimum, activation sum, acc) (per 16: two).
// Nothing in it depends on the tile, so rows are equal bit for bit whatever else is computed. With two planes
// the integer sum is that of the high plane, shifted, plus that of the low plane: exact (32 * 127 * 255 * 128
// < 2^31).
#pragma once
#include "codes.h"
#include "tellin/linear.h"

namespace tellin {
namespace {

constexpr int kChunkBlocks = 8;  // 256 features
constexpr int kMaxTile = 6;  // tokens of a tile: 2 x 6 integer and 2 x 6 float accumulators fill 32 registers
constexpr int kMaxTokens = 192;     // tokens that share a pass over the weights: 24 KiB of accumulators
constexpr int kPrefetchChunks = 2;  // how far ahead of its use a chunk of codes is fetched

// Expanded scales and code sums of one chunk, [sum][group][16].
struct ChunkScales {
  alignas(64) float scale[2 * kChunkBlocks][4][kRows];
  alignas(64) float minimum[2 * kChunkBlocks][4][kRows];
  alignas(64) int32_t code_pair[2 * kChunkBlocks][4][kRows];  // see code_sum_pairs; for 8-bit activations
};

TELLIN_INLINE __m512i broadcast_word(const void* p) {
  int32_t word;
  __builtin_memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}

// The current records of a tile's rows. Rows 3 apart get a pointer each, the two between are reached by
// index: half the registers (the empty asm keeps the compiler from undoing this).
template <class Act, int kTokens>
struct ActRows {
  const char* base[(kTokens + 2) / 3];
  int64_t stride;

  TELLIN_INLINE ActRows(const uint8_t* x, int64_t row_bytes) : stride(row_bytes) {
    asm("" : "+r"(stride));
#pragma GCC unroll 2
    for (int i = 0; i < (kTokens + 2) / 3; ++i) {
      base[i] = reinterpret_cast<const char*>(x + 3 * i * row_bytes);
      asm("" : "+r"(base[i]));
    }
  }
  TELLIN_INLINE const Act* block(int t) const {
    return reinterpret_cast<const Act*>(base[t / 3] + t % 3 * stride);
  }
  TELLIN_INLINE void advance() {
#pragma GCC unroll 2
    for (int i = 0; i < (kTokens + 2) / 3; ++i) base[i] += sizeof(Act);
  }
};

// Adds quad kQuad of a block's codes x plane kPlane of the activations to the integer sums.
template <QuantType T, int kPlane, int kQuad, class Act, int kGroups, int kTokens>
TELLIN_INLINE void add_quad(const uint8_t* codes, size_t group_bytes, const ActRows<Act, kTokens>& x,
                            __m512i (&sum)[kGroups][kTokens]) {
  __m512i w[kGroups];
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; ++g) w[g] = load_quad<format_of(T).bits, kQuad>(codes + g * group_bytes);
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
    const __m512i y = broadcast_word(x.block(t)->q[kPlane] + 4 * kQuad);
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) sum[g][t] = _mm512_dpbusd_epi32(sum[g][t], w[g], y);
  }
}

// What the integer sums of a block or half (pair 0: block; 1, 2: halves) start with: the terms of the
// activations' zero and of the codes' zero point.
template <QuantType T, int kGroups, int kTokens>
TELLIN_INLINE void begin_sums(const ActRows<Act8, kTokens>& x, int pair, const int32_t (&code_pair)[4][kRows],
                              __m512i (&sum)[kGroups][kTokens]) {
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
    const __m512i zero = broadcast_word(x.block(t)->zero_pair[pair]);
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) sum[g][t] = _mm512_madd_epi16(zero, _mm512_load_si512(code_pair[g]));
  }
}

template <QuantType T, int kGroups, int kTokens>
TELLIN_INLINE void begin_sums(const ActRows<Act16, kTokens>& x, int pair, const int32_t (&)[4][kRows],
                              __m512i (&sum)[kGroups][kTokens]) {
  constexpr PackedFormat kFormat = format_of(T);
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
    __m512i start = _mm512_setzero_si512();
    if constexpr (kFormat.zero_point_log2 >= 0) {
      const Act16* block = x.block(t);
      start = broadcast_word(&block->neg_sums[pair == 2 ? 1 : 0]);
      if (pair == 0) start = _mm512_add_epi32(start, broadcast_word(&block->neg_sums[1]));
      start = _mm512_slli_epi32(start, kFormat.zero_point_log2);
    }
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) sum[g][t] = start;
  }
}

// Between the planes: what was summed counts 128-fold, and the start is added that one plane begins with.
template <QuantType T, class Act, int kGroups, int kTokens>
TELLIN_INLINE void shift_sums(const ActRows<Act, kTokens>& x, int pair, const int32_t (&code_pair)[4][kRows],
                              __m512i (&sum)[kGroups][kTokens]) {
  __m512i start[kGroups][kTokens];
  begin_sums<T>(x, pair, code_pair, start);
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      sum[g][t] = _mm512_add_epi32(_mm512_slli_epi32(sum[g][t], kPlaneShift), start[g][t]);
    }
  }
}

// All quads of a 32-feature block (kHalf < 0), or those of its half kHalf. Low and high nibbles of a vector
// follow each other.
template <QuantType T, int kPlane, int kHalf, class Act, int kGroups, int kTokens>
TELLIN_INLINE void add_quads(const uint8_t* codes, size_t group_bytes, const ActRows<Act, kTokens>& x,
                             __m512i (&sum)[kGroups][kTokens]) {
  constexpr int kFirst = kHalf > 0 ? 4 : 0;
  add_quad<T, kPlane, kFirst>(codes, group_bytes, x, sum);
  if constexpr (kHalf < 0) add_quad<T, kPlane, 4>(codes, group_bytes, x, sum);
  add_quad<T, kPlane, kFirst + 1>(codes, group_bytes, x, sum);
  if constexpr (kHalf < 0) add_quad<T, kPlane, 5>(codes, group_bytes, x, sum);
  add_quad<T, kPlane, kFirst + 2>(codes, group_bytes, x, sum);
  if constexpr (kHalf < 0) add_quad<T, kPlane, 6>(codes, group_bytes, x, sum);
  add_quad<T, kPlane, kFirst + 3>(codes, group_bytes, x, sum);
  if constexpr (kHalf < 0) add_quad<T, kPlane, 7>(codes, group_bytes, x, sum);
}

// Exact integer sums of codes x whole activations of a block or of a half.
template <QuantType T, int kHalf, class Act, int kGroups, int kTokens>
TELLIN_INLINE void integer_sums(const uint8_t* codes, size_t group_bytes, const ActRows<Act, kTokens>& x,
                                const int32_t (&code_pair)[4][kRows], __m512i (&sum)[kGroups][kTokens]) {
  constexpr int kPair = kHalf + 1;
  if constexpr (Act::kPlanes == 1) {
    begin_sums<T>(x, kPair, code_pair, sum);
    add_quads<T, 0, kHalf>(codes, group_bytes, x, sum);
  } else {
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) sum[g][t] = _mm512_setzero_si512();
    }
    add_quads<T, 0, kHalf>(codes, group_bytes, x, sum);
    shift_sums<T>(x, kPair, code_pair, sum);
    add_quads<T, 1, kHalf>(codes, group_bytes, x, sum);
  }
}

// One 32-feature block: acc[group][token] += scaled integer sums (and minima).
template <QuantType T, class Act, int kGroups, int kTokens>
TELLIN_INLINE void add_block(const uint8_t* codes, size_t group_bytes, const ActRows<Act, kTokens>& x,
                             const float (*scale)[4][kRows], const float (*minimum)[4][kRows],
                             const int32_t (*code_pair)[4][kRows], __m512 (&acc)[kGroups][kTokens]) {
  constexpr PackedFormat kFormat = format_of(T);
  __m512i sum[kGroups][kTokens];
  if constexpr (!kFormat.per16()) {
    integer_sums<T, -1>(codes, group_bytes, x, code_pair[0], sum);
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
    integer_sums<T, 0>(codes, group_bytes, x, code_pair[0], sum);
    __m512 product[kGroups][kTokens];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        product[g][t] = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[g][t]), _mm512_load_ps(scale[0][g]));
      }
    }
    integer_sums<T, 1>(codes, group_bytes, x, code_pair[1], sum);
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
template <QuantType T, class Act, int kGroups, int kTokens>
__attribute__((noinline)) void run_tile(const uint8_t* w, const uint8_t* prefetch, size_t group_bytes,
                                        int num_supers, const uint8_t* x, int64_t row_bytes,
                                        const ChunkScales& scales, bool is_first, float* acc_io) {
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
  const float (*scale)[4][kRows] = scales.scale;
  const float (*minimum)[4][kRows] = scales.minimum;
  const int32_t (*code_pair)[4][kRows] = scales.code_pair;
  for (int s = 0; s < num_supers; ++s) {
    const uint8_t* codes = w + kFormat.header_bytes();
    for (int b = 0; b < kFormat.blocks(); ++b) {
      if (prefetch != nullptr) {
        constexpr int kStep = kFormat.super_bytes() / kFormat.blocks();
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 10
          for (int i = 0; i < (kStep + 63) / 64; ++i)
            __builtin_prefetch(prefetch + g * group_bytes + 64 * i, 0, 3);
        }
        prefetch += kStep;
      }
      add_block<T>(codes, group_bytes, rows, scale, minimum, code_pair, acc);
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

template <QuantType T, class Act, int kGroups>
void run_tile_of(int tokens, const uint8_t* w, const uint8_t* prefetch, size_t group_bytes, int num_supers,
                 const uint8_t* x, int64_t row_bytes, const ChunkScales& scales, bool is_first, float* acc) {
#define TELLIN_TILE(n)                                                                              \
  case n:                                                                                           \
    return run_tile<T, Act, kGroups, n>(w, prefetch, group_bytes, num_supers, x, row_bytes, scales, \
                                        is_first, acc);
  if constexpr (kGroups == 4) {
    switch (tokens) {
      TELLIN_TILE(1)
      TELLIN_TILE(2)
    }
  } else {
    switch (tokens) {
      TELLIN_TILE(1)
      TELLIN_TILE(2)
      TELLIN_TILE(3)
      TELLIN_TILE(4)
      TELLIN_TILE(5)
      TELLIN_TILE(6)
    }
  }
#undef TELLIN_TILE
}

// Scales, minima and code sums of one super-block of group g, from sum `first` of the chunk.
template <QuantType T, class Act>
void expand_super(const uint8_t* super_block, int first, int g, ChunkScales* out) {
  constexpr PackedFormat kFormat = format_of(T);
  expand_scales<T>(super_block, 4 * kRows, out->scale[first][g], out->minimum[first][g]);
  if constexpr (Act::kPlanes == 1) {
    const uint8_t* codes = super_block + kFormat.header_bytes();
    for (int b = 0; b < kFormat.blocks(); ++b, codes += kFormat.block_bytes()) {
      if constexpr (kFormat.per16()) {
        _mm512_store_si512(out->code_pair[first + 2 * b][g], code_sum_pairs<T, 0, 4>(codes));
        _mm512_store_si512(out->code_pair[first + 2 * b + 1][g], code_sum_pairs<T, 4, 8>(codes));
      } else {
        _mm512_store_si512(out->code_pair[first + b][g], code_sum_pairs<T, 0, 8>(codes));
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

// Tokens [m0, m0 + tokens) x groups [g, g + kGroups), tokens <= kMaxTokens.
template <QuantType T, class Act, int kGroups>
void run_groups(const IntProblem& p, int64_t m0, int tokens, int64_t g0) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kChunkSupers = kChunkBlocks / kFormat.blocks();
  constexpr int kSums = kFormat.per16() ? 2 : 1;
  alignas(64) float acc[kMaxTokens * kGroups * kRows];
  ChunkScales scales;
  const size_t group_bytes = p.w.group_bytes;
  const int64_t num_supers = static_cast<int64_t>(group_bytes / kFormat.super_bytes());
  const int num_tiles = (tokens + kMaxTile - 1) / kMaxTile;
  const uint8_t* const group = p.w.data + g0 * group_bytes;
  const uint8_t* w = group;
  const uint8_t* x = p.x.data + m0 * p.x.row_bytes;
  for (int64_t s0 = 0; s0 < num_supers; s0 += kChunkSupers) {
    const int chunk = static_cast<int>(num_supers - s0 < kChunkSupers ? num_supers - s0 : kChunkSupers);
    for (int g = 0; g < kGroups; ++g) {
      for (int s = 0; s < chunk; ++s) {
        expand_super<T, Act>(w + g * group_bytes + s * kFormat.super_bytes(), s * kFormat.blocks() * kSums, g,
                             &scales);
      }
    }
    const int64_t ahead = s0 + kPrefetchChunks * kChunkSupers;
    const uint8_t* prefetch = group + ahead * kFormat.super_bytes();
    if (ahead >= num_supers) prefetch += (kGroups - 1) * group_bytes;
    for (int i = 0; i < num_tiles; ++i) {
      const int t0 = tokens * i / num_tiles, t1 = tokens * (i + 1) / num_tiles;
      const uint8_t* rows = x + t0 * p.x.row_bytes;
      float* tile_acc = acc + t0 * kGroups * kRows;
      run_tile_of<T, Act, kGroups>(t1 - t0, w, i == 0 ? prefetch : nullptr, group_bytes, chunk, rows,
                                   p.x.row_bytes, scales, s0 == 0, tile_acc);
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
    int64_t g = g0;
    if (tokens <= 2) {
      for (; g + 4 <= g1; g += 4) run_groups<T, Act, 4>(problem, begin, tokens, g);
    }
    for (; g + 2 <= g1; g += 2) run_groups<T, Act, 2>(problem, begin, tokens, g);
    if (g < g1) run_groups<T, Act, 1>(problem, begin, tokens, g);
  }
}

}  // namespace
}  // namespace tellin

// AVX2: packed codes x quantised activations as products of 16-bit words.
//
// Codes less their zero point and whole activations (with their zero, or both planes put together) fit into
// int16, so vpmaddwd gives exact int32 sums with no terms for zeros and nothing to widen: 36 multiplications
// per 32 features of 16 rows where 8-bit codes as two nibbles take 42, and 12 operations to split them. Codes
// are unpacked once per chunk, activations once per tile. The roundings are those of linear_int.h.
#pragma once
#include "int_terms.h"

namespace tellin {
namespace {

// Formats whose products take fewer operations as words, from kWordTokens on.
template <class Act>
constexpr bool has_word_path([[maybe_unused]] const PackedFormat& format) {
#if defined(__AVXVNNI__)
  return false;
#else
  return format.is_quantized() && (format.code_bits() == 8 || (Act::kPlanes == 2 && format.code_bits() > 4));
#endif
}
constexpr int kWordTokens = 3;

// Chunks take several groups, so that activations are expanded once for all of them; the words of a chunk
// fill half of a small L1 cache.
constexpr int kWordBlocks = 16;
constexpr int word_blocks(QuantType type) {
  return format_of(type).blocks() < 4 ? 4 : format_of(type).blocks();
}
constexpr int word_groups(QuantType type) {
  return kWordBlocks / word_blocks(type);
}

// Words of the blocks of one group of an unpacked chunk. Word i of lane `row` is feature 4 * quad + parity +
// 2 * i.
template <QuantType T>
struct WordChunk {
  alignas(64) int16_t codes[word_blocks(T)][8][2][2][kRows];  // [quad][parity][half][8 rows x 2]
  alignas(64) float scale[2 * word_blocks(T)][kRows];
  alignas(64) float minimum[2 * word_blocks(T)][kRows];
};

// Activations of one row over a chunk.
template <QuantType T>
struct WordRow {
  alignas(64) int16_t v[word_blocks(T)][2][kBlockK / 2];  // [parity][8 quads x 2]
};

template <QuantType T, int kQuad>
TELLIN_INLINE void unpack_words(const uint8_t* packed, int16_t (*words)[2][2][kRows]) {
  constexpr PackedFormat kFormat = format_of(T);
  if constexpr (kQuad < 8) {
    const __m256i zero = _mm256_set1_epi16(kFormat.zero_point()), low = _mm256_set1_epi16(255);
    for (int half = 0; half < 2; ++half) {
      const __m256i codes = load_quad<T, kQuad>(packed + half * kHalfBytes);
      const __m256i even = _mm256_sub_epi16(_mm256_and_si256(codes, low), zero);
      const __m256i odd = _mm256_sub_epi16(_mm256_srli_epi16(codes, 8), zero);
      _mm256_store_si256(reinterpret_cast<__m256i*>(words[kQuad][0][half]), even);
      _mm256_store_si256(reinterpret_cast<__m256i*>(words[kQuad][1][half]), odd);
    }
    unpack_words<T, kQuad + 1>(packed, words);
  }
}

TELLIN_INLINE void split_words(__m256i bytes, __m256i (&words)[2]) {
  words[0] = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
  words[1] = _mm256_srai_epi16(bytes, 8);
}

TELLIN_INLINE __m256i load_bytes(const int8_t* q) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
}

// Whole activations of a block.
TELLIN_INLINE void expand_words(const Act8* x, __m256i (&words)[2]) {
  split_words(load_bytes(x->q[0]), words);
  const __m256i zero = _mm256_set1_epi16(x->zero_pair[0][0]);
  for (__m256i& w : words) w = _mm256_add_epi16(w, zero);
}

TELLIN_INLINE void expand_words(const Act16* x, __m256i (&words)[2]) {
  __m256i low[2];
  split_words(load_bytes(x->q[0]), words);
  split_words(load_bytes(x->q[1]), low);
  for (int i = 0; i < 2; ++i) words[i] = _mm256_add_epi16(_mm256_slli_epi16(words[i], kPlaneShift), low[i]);
}

// Adds quads [kQuad, kEnd) of a block, exactly: sum[half][token], which begin with quad kBegin.
template <QuantType T, int kBegin, int kQuad, int kEnd, int kTokens>
TELLIN_INLINE void add_word_quads(const int16_t (*codes)[2][2][kRows], const WordRow<T>* x, int block,
                                  __m256i (&sum)[2][kTokens]) {
  if constexpr (kQuad < kEnd) {
#pragma GCC unroll 2
    for (int parity = 0; parity < 2; ++parity) {
      const auto* w = reinterpret_cast<const __m256i*>(codes[kQuad][parity]);
      const __m256i w0 = _mm256_load_si256(w), w1 = _mm256_load_si256(w + 1);
#pragma GCC unroll 6
      for (int t = 0; t < kTokens; ++t) {
        const __m256i y = broadcast_word(x[t].v[block][parity] + 2 * kQuad);
        const __m256i p0 = _mm256_madd_epi16(w0, y), p1 = _mm256_madd_epi16(w1, y);
        if (kQuad == kBegin && parity == 0) {
          sum[0][t] = p0;
          sum[1][t] = p1;
        } else {
          add_int32(sum[0][t], p0);
          add_int32(sum[1][t], p1);
        }
      }
      asm volatile("" ::: "memory");  // keeps the loads of later quads from being hoisted
    }
    add_word_quads<T, kBegin, kQuad + 1, kEnd>(codes, x, block, sum);
  }
}

// Runs a tile over the blocks of a chunk of `num_groups` groups. acc: [num_groups][kTokens][16], groups
// `acc_stride` apart, 32-byte aligned.
template <QuantType T, class Act, int kTokens>
__attribute__((noinline)) void run_word_tile(const WordChunk<T>* chunk, CodeStream* ahead, int num_groups,
                                             int num_blocks, const uint8_t* x, int64_t row_bytes, float* acc,
                                             int64_t acc_stride) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kSums = kFormat.per16() ? 2 : 1;
  constexpr int kStep = kFormat.super_bytes() / kFormat.blocks();
  WordRow<T> rows[kTokens];
  for (int t = 0; t < kTokens; ++t) {
    const auto* blocks = reinterpret_cast<const Act*>(x + t * row_bytes);
#pragma GCC unroll 1
    for (int b = 0; b < num_blocks; ++b) {
      __m256i words[2];
      expand_words(blocks + b, words);
      auto* to = reinterpret_cast<__m256i*>(rows[t].v[b]);
      _mm256_store_si256(to, words[0]);
      _mm256_store_si256(to + 1, words[1]);
    }
  }
  for (int g = 0; g < num_groups; ++g, ++chunk, acc += acc_stride) {
    const auto* blocks = reinterpret_cast<const Act*>(x);
#pragma GCC unroll 1
    for (int b = 0; b < num_blocks; ++b) {
      if (ahead != nullptr) ahead[g].fetch<kStep>();
      __m256i sum[2][kTokens];
      __m256 product[2][kTokens];
      const float (*scale)[kRows] = chunk->scale + b * kSums;
      if constexpr (kFormat.per16()) {
        add_word_quads<T, 0, 0, 4>(chunk->codes[b], rows, b, sum);
        scale_half(blocks + b, row_bytes, scale[0], sum, product, acc);
        add_word_quads<T, 4, 4, 8>(chunk->codes[b], rows, b, sum);
      } else {
        add_word_quads<T, 0, 0, 8>(chunk->codes[b], rows, b, sum);
      }
      scale_sums<T>(blocks + b, row_bytes, scale, chunk->minimum + b * kSums, sum, product, acc);
    }
  }
}

// Unpacks `num_supers` super-blocks.
template <QuantType T>
TELLIN_INLINE void unpack_word_chunk(const uint8_t* w, int num_supers, WordChunk<T>* chunk) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kSums = kFormat.per16() ? 2 : 1;
  for (int s = 0; s < num_supers; ++s, w += kFormat.super_bytes()) {
    const int first = s * kFormat.blocks();
    expand_scales<T>(w, chunk->scale + first * kSums, chunk->minimum + first * kSums);
    for (int b = 0; b < kFormat.blocks(); ++b) {
      unpack_words<T, 0>(w + kFormat.header_bytes() + b * kFormat.block_bytes(), chunk->codes[first + b]);
    }
  }
}

// Tokens [m0, m0 + tokens) x groups [g0, g0 + num_groups), tokens <= kMaxTokens, in a call that
// ends with group g1.
template <QuantType T, class Act>
void run_word_groups(const IntProblem& p, int64_t m0, int tokens, int64_t g0, int num_groups, int64_t g1) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kChunkSupers = word_blocks(T) / kFormat.blocks();
  constexpr int kAhead = kPrefetchChunks * kChunkSupers * kFormat.super_bytes();
  alignas(64) float acc[word_groups(T) * kMaxTokens * kRows];
  WordChunk<T> chunk[word_groups(T)];
  CodeStream ahead[word_groups(T)];
  const int64_t acc_stride = tokens * kRows;
  const int64_t num_supers = static_cast<int64_t>(p.w.group_bytes / kFormat.super_bytes());
  const int num_tiles = (tokens + kMaxTile - 1) / kMaxTile;
  const uint8_t* w = p.w.data + g0 * p.w.group_bytes;
  const uint8_t* x = p.x.data + m0 * p.x.row_bytes;
  for (int g = 0; g < num_groups; ++g) {
    const uint8_t* const after = codes_after(p.w, g0 + num_groups + g, g1);
    ahead[g] = CodeStream(w + g * p.w.group_bytes, p.w.group_bytes, after, kAhead);
  }
  __builtin_memset(acc, 0, sizeof(float) * static_cast<size_t>(num_groups * acc_stride));
  for (int64_t s0 = 0; s0 < num_supers; s0 += kChunkSupers) {
    const int supers = static_cast<int>(num_supers - s0 < kChunkSupers ? num_supers - s0 : kChunkSupers);
    const int num_blocks = supers * kFormat.blocks();
    for (int g = 0; g < num_groups; ++g) unpack_word_chunk<T>(w + g * p.w.group_bytes, supers, chunk + g);
    for (int i = 0; i < num_tiles; ++i) {
      const int t0 = tokens * i / num_tiles, t1 = tokens * (i + 1) / num_tiles;
      const uint8_t* const rows = x + t0 * p.x.row_bytes;
      float* const out = acc + t0 * kRows;
      switch (t1 - t0) {
#define TELLIN_TILE(n)                                                                                     \
  case n:                                                                                                  \
    run_word_tile<T, Act, n>(chunk, i == 0 ? ahead : nullptr, num_groups, num_blocks, rows, p.x.row_bytes, \
                             out, acc_stride);                                                             \
    break;
        TELLIN_TILE(1)
        TELLIN_TILE(2)
        TELLIN_TILE(3)
        TELLIN_TILE(4)
        TELLIN_TILE(5)
#undef TELLIN_TILE
      }
    }
    w += supers * kFormat.super_bytes();
    x += num_blocks * sizeof(Act);
  }
  for (int g = 0; g < num_groups; ++g) {
    const int64_t column = (g0 + g) * kRows;
    for (int t = 0; t < tokens; ++t) {
      store_rows(acc + g * acc_stride + t * kRows, p.w.n - column, p.out + (m0 + t) * p.ldo + column);
    }
  }
}

}  // namespace
}  // namespace tellin

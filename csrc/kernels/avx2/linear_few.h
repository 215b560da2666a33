// AVX2: packed codes x quantised activations of few tokens.
//
// All tokens make one tile, so codes are multiplied and summed as they are unpacked, without a stay in L1.
// The roundings are those of linear_int.h.
#pragma once
#include "int_terms.h"

namespace tellin {
namespace {

// Up to as many tokens as leave no register spilled, both halves of the rows share the loads of activations;
// more tokens take one half after the other.
#if defined(__AVXVNNI__)
constexpr int kWholeTokens = 5;
constexpr int kWideTokens = 4;  // at most, of 8-bit codes
#else
constexpr int kWholeTokens = 4;
constexpr int kWideTokens = 2;
#endif

template <QuantType T, int kTokens>
constexpr bool takes_whole() {
#if !defined(__AVXVNNI__)
  if (format_of(T).code_bits() == 8) return false;
#endif
  return kTokens <= kWholeTokens;
}

// As many tokens as are faster here (Zen 5): without a zero point their terms take less than in linear_int.h;
// two planes of 6-bit codes are better multiplied as words.
constexpr int few_tokens(const PackedFormat& format, [[maybe_unused]] int planes) {
  if (format.zero_point_log2 < 0) return 7;
  if (format.code_bits() == 8) return kWideTokens;
#if !defined(__AVXVNNI__)
  if (format.code_bits() == 6 && planes == 2) return 2;
#endif
  return kWholeTokens;
}

// 8-bit codes as they are stored need no unpacking.
constexpr bool has_few_path(const PackedFormat& format) {
  return format.is_quantized() && format.bits <= 6;
}

// Adds quads [kQuad, kEnd) of a packed block to integer sums (int16, or int32 with vpdpbusd) that begin with
// quad kBegin, and to the sums of codes (8 bits: int32, else bytes), which begin with quad kSumBegin.
template <QuantType T, int kSumBegin, int kBegin, int kQuad, int kEnd, bool kSumCodes, int kHalves,
          int kTokens>
TELLIN_INLINE void add_packed_quads(const uint8_t* block, const int8_t* x, int64_t row_bytes,
                                    __m256i (&sum)[kHalves][kTokens], __m256i (&code_sum)[kHalves]) {
  if constexpr (kQuad < kEnd) {
    __m256i w[kHalves];
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h) {
      w[h] = load_quad<T, kQuad>(block + h * kHalfBytes);
      if constexpr (kSumCodes && format_of(T).code_bits() == 8) {
        add_product(w[h], _mm256_set1_epi8(1), kQuad == kSumBegin, code_sum[h]);
      } else if constexpr (kSumCodes) {
        add_codes(w[h], kQuad == kSumBegin, code_sum[h]);
      }
    }
#pragma GCC unroll 7
    for (int t = 0; t < kTokens; ++t) {
      const __m256i y = broadcast_word(x + t * row_bytes + 4 * kQuad);
#pragma GCC unroll 2
      for (int h = 0; h < kHalves; ++h) add_product(w[h], y, kQuad == kBegin, sum[h][t]);
    }
    add_packed_quads<T, kSumBegin, kBegin, kQuad + 1, kEnd, kSumCodes>(block, x, row_bytes, sum, code_sum);
  }
}

#if !defined(__AVXVNNI__)
// 8-bit codes: products of the low and high nibbles, which are looked up apart, in int16; and in bytes sums
// of the nibbles.
template <QuantType T, int kQuad, bool kSumCodes, int kTokens>
TELLIN_INLINE void add_packed_nibbles(const uint8_t* block, const int8_t* x, int64_t row_bytes,
                                      __m256i (&low)[kTokens], __m256i (&high)[kTokens],
                                      __m256i (&nibble_sum)[2]) {
  if constexpr (kQuad < 8) {
    const __m256i w_low = load_quad<T, kQuad, CodePart::kLowNibble>(block);
    const __m256i w_high = load_quad<T, kQuad, CodePart::kHighNibble>(block);
    if constexpr (kSumCodes) {
      add_codes(w_low, kQuad == 0, nibble_sum[0]);
      add_codes(w_high, kQuad == 0, nibble_sum[1]);
    }
#pragma GCC unroll 2
    for (int t = 0; t < kTokens; ++t) {
      const __m256i y = broadcast_word(x + t * row_bytes + 4 * kQuad);
      add_product(w_low, y, kQuad == 0, low[t]);
      add_product(w_high, y, kQuad == 0, high[t]);
    }
    add_packed_nibbles<T, kQuad + 1, kSumCodes>(block, x, row_bytes, low, high, nibble_sum);
  }
}

// Exact int32 sums of one half of the rows, and of their codes.
template <QuantType T, bool kSumCodes, int kTokens>
TELLIN_INLINE void packed_nibble_sums(const uint8_t* block, const int8_t* x, int64_t row_bytes,
                                      __m256i (&sum)[kTokens], __m256i& code_sum) {
  __m256i low[kTokens], high[kTokens], nibble_sum[2];
  add_packed_nibbles<T, 0, kSumCodes>(block, x, row_bytes, low, high, nibble_sum);
  const __m256i one = _mm256_set1_epi16(1), sixteen = _mm256_set1_epi16(16);
#pragma GCC unroll 2
  for (int t = 0; t < kTokens; ++t) {
    sum[t] = _mm256_madd_epi16(low[t], one);
    add_int32(sum[t], _mm256_madd_epi16(high[t], sixteen));
  }
  if constexpr (kSumCodes) {
    const __m256i ones = _mm256_set1_epi8(1);
    const __m256i low_sum = _mm256_madd_epi16(_mm256_maddubs_epi16(nibble_sum[0], ones), one);
    code_sum = _mm256_madd_epi16(_mm256_maddubs_epi16(nibble_sum[1], ones), sixteen);
    add_int32(code_sum, low_sum);
  }
}
#endif

// Exact int32 sums of a packed block's codes x one plane of activations, over quads [kQuad, kEnd).
template <QuantType T, int kSumBegin, int kQuad, int kEnd, bool kSumCodes, int kHalves, int kTokens>
TELLIN_INLINE void packed_plane_sums(const uint8_t* block, const int8_t* x, int64_t row_bytes,
                                     __m256i (&sum)[kHalves][kTokens], __m256i (&code_sum)[kHalves]) {
#if defined(__AVXVNNI__)
  add_packed_quads<T, kSumBegin, kQuad, kQuad, kEnd, kSumCodes>(block, x, row_bytes, sum, code_sum);
#else
  constexpr int kBits = format_of(T).code_bits();
  if constexpr (kBits == 8) {
    static_assert(kHalves == 1 && kQuad == 0 && kEnd == 8, "all features of one half of the rows");
    packed_nibble_sums<T, kSumCodes>(block, x, row_bytes, sum[0], code_sum[0]);
  } else {
    constexpr int kStop = kQuad + int16_quads(kBits) < kEnd ? kQuad + int16_quads(kBits) : kEnd;
    const __m256i one = _mm256_set1_epi16(1);
    add_packed_quads<T, kSumBegin, kQuad, kQuad, kStop, kSumCodes>(block, x, row_bytes, sum, code_sum);
#pragma GCC unroll 7
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 2
      for (int h = 0; h < kHalves; ++h) sum[h][t] = _mm256_madd_epi16(sum[h][t], one);
    }
    if constexpr (kStop < kEnd) {
      __m256i rest[kHalves][kTokens];
      packed_plane_sums<T, kSumBegin, kStop, kEnd, kSumCodes>(block, x, row_bytes, rest, code_sum);
#pragma GCC unroll 7
      for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) add_int32(sum[h][t], rest[h][t]);
      }
    }
  }
#endif
}

// Exact int32 sums of (codes - zero point) x whole activations over a packed block, or half kHalf of it.
template <QuantType T, class Act, int kHalf, int kHalves, int kTokens>
TELLIN_INLINE void packed_sums(const uint8_t* block, const Act* first, int64_t row_bytes,
                               __m256i (&sum)[kHalves][kTokens]) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kBegin = kHalf == 1 ? 4 : 0, kEnd = kHalf == 0 ? 4 : 8;
  __m256i code_sum[kHalves];
  packed_plane_sums<T, kBegin, kBegin, kEnd, Act::kPlanes == 1>(block, first->q[0], row_bytes, sum, code_sum);
  if constexpr (Act::kPlanes == 1 && kFormat.zero_point_log2 < 0) {
    // The term of the activations' zero alone, from sums of pairs of codes.
    const __m256i one = _mm256_set1_epi8(1);
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h) code_sum[h] = _mm256_maddubs_epi16(code_sum[h], one);
#pragma GCC unroll 7
    for (int t = 0; t < kTokens; ++t) {
      const __m256i zero = _mm256_set1_epi16(act_row(first, t, row_bytes)->zero_pair[0][0]);
#pragma GCC unroll 2
      for (int h = 0; h < kHalves; ++h) add_int32(sum[h][t], _mm256_madd_epi16(code_sum[h], zero));
    }
    return;
  }
  __m256i pairs[kHalves];
  if constexpr (Act::kPlanes == 1) {
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h) {
      pairs[h] = code_pair_of<T>(code_sum[h], 4 * (kEnd - kBegin));
    }
  } else {
    __m256i low[kHalves][kTokens];
    packed_plane_sums<T, kBegin, kBegin, kEnd, false>(block, first->q[Act::kPlanes - 1], row_bytes, low,
                                                      code_sum);
#pragma GCC unroll 7
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 2
      for (int h = 0; h < kHalves; ++h) {
        sum[h][t] = _mm256_add_epi32(_mm256_slli_epi32(sum[h][t], kPlaneShift), low[h][t]);
      }
    }
  }
  add_zero_terms<T>(first, row_bytes, kHalf + 1, pairs, sum);
}

// Halves [first, first + kHalves) of the rows of a packed block added to acc. The roundings are those of
// add_block.
template <QuantType T, class Act, int kHalves, int kTokens>
TELLIN_INLINE void add_packed_halves(const uint8_t* block, const uint8_t* x, int64_t row_bytes,
                                     const SuperScales<T>& scales, int b, int first,
                                     __m256 (&acc)[2][kTokens]) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kLast = kFormat.per16() ? 1 : 0;
  const auto* const rows = reinterpret_cast<const Act*>(x);
  block += first * kHalfBytes;
  __m256i sum[kHalves][kTokens];
  __m256 product[kHalves][kTokens];
  if constexpr (kFormat.per16()) {
    packed_sums<T, Act, 0>(block, rows, row_bytes, sum);
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h) {
      const __m256 s = scales.scale(2 * b, first + h);
#pragma GCC unroll 7
      for (int t = 0; t < kTokens; ++t) {
        if constexpr (Act::kPlanes == 1) {
          const __m256 x_scale = broadcast_float(&act_row(rows, t, row_bytes)->scale);
          acc[first + h][t] = add_scaled<Act, true>(sum[h][t], s, x_scale, s, acc[first + h][t]);
        } else {
          product[h][t] = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[h][t]), s);
        }
      }
    }
    packed_sums<T, Act, 1>(block, rows, row_bytes, sum);
  } else {
    packed_sums<T, Act, -1>(block, rows, row_bytes, sum);
  }
#pragma GCC unroll 2
  for (int h = 0; h < kHalves; ++h) {
    const __m256 s = scales.scale((kLast + 1) * b + kLast, first + h);
    __m256 m[2];
    if constexpr (kFormat.has_min) {
#pragma GCC unroll 2
      for (int i = 0; i <= kLast; ++i) m[i] = scales.minimum((kLast + 1) * b + i, first + h);
    }
#pragma GCC unroll 7
    for (int t = 0; t < kTokens; ++t) {
      const Act* row = act_row(rows, t, row_bytes);
      __m256& result = acc[first + h][t];
      result =
          add_scaled<Act, kFormat.per16()>(sum[h][t], s, broadcast_float(&row->scale), product[h][t], result);
      if constexpr (kFormat.has_min) {
#pragma GCC unroll 2
        for (int i = 0; i <= kLast; ++i) {
          const __m256 x_sum = broadcast_float(kFormat.per16() ? &row->half_sum[i] : &row->sum);
          result = _mm256_fmadd_ps(m[i], x_sum, result);
        }
      }
    }
  }
}

// Tokens [m0, m0 + kTokens) x group g. The group at `after` is read next.
template <QuantType T, class Act, int kTokens>
__attribute__((noinline)) void run_few(const PackedMatrix& w, const QuantizedRows& x, float* out, int64_t ldo,
                                       int64_t m0, int64_t g, const uint8_t* after) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kAhead = kPrefetchChunks * kChunkBlocks / kFormat.blocks() * kFormat.super_bytes();
  __m256 acc[2][kTokens];
#pragma GCC unroll 7
  for (int t = 0; t < kTokens; ++t) acc[0][t] = acc[1][t] = _mm256_setzero_ps();
  const uint8_t* super_block = w.data + g * w.group_bytes;
  const uint8_t* const end = super_block + w.group_bytes;
  CodeStream ahead(super_block, w.group_bytes, after, kAhead);
  const uint8_t* row = x.data + m0 * x.row_bytes;
  for (; super_block < end; super_block += kFormat.super_bytes()) {
    const SuperScales<T> scales(super_block);
    const uint8_t* block = super_block + kFormat.header_bytes();
    for (int b = 0; b < kFormat.blocks(); ++b, block += kFormat.block_bytes(), row += sizeof(Act)) {
      ahead.fetch<kFormat.super_bytes() / kFormat.blocks()>();
      if constexpr (takes_whole<T, kTokens>()) {
        add_packed_halves<T, Act, 2>(block, row, x.row_bytes, scales, b, 0, acc);
      } else {
        add_packed_halves<T, Act, 1>(block, row, x.row_bytes, scales, b, 0, acc);
        asm volatile("" ::: "memory");  // keeps loads of the other half from being hoisted
        add_packed_halves<T, Act, 1>(block, row, x.row_bytes, scales, b, 1, acc);
      }
    }
  }
  alignas(32) float rows[kRows];
#pragma GCC unroll 7
  for (int t = 0; t < kTokens; ++t) {
    _mm256_store_ps(rows, acc[0][t]);
    _mm256_store_ps(rows + kHalfRows, acc[1][t]);
    store_rows(rows, w.n - g * kRows, out + (m0 + t) * ldo + g * kRows);
  }
}

// Tokens [m0, m0 + tokens), tokens <= few_tokens(), x groups [g0, g1).
template <QuantType T, class Act>
void linear_few(const PackedMatrix& w, const QuantizedRows& x, int64_t m0, int tokens, int64_t g0, int64_t g1,
                float* out, int64_t ldo) {
  for (int64_t g = g0; g < g1; ++g) {
    const uint8_t* const after = codes_after(w, g + 1, g1);
    switch (tokens) {
#define TELLIN_TILE(n)                                           \
  case n:                                                        \
    if constexpr (n <= few_tokens(format_of(T), Act::kPlanes)) { \
      run_few<T, Act, n>(w, x, out, ldo, m0, g, after);          \
    }                                                            \
    break;
      TELLIN_TILE(1)
      TELLIN_TILE(2)
      TELLIN_TILE(3)
      TELLIN_TILE(4)
      TELLIN_TILE(5)
      TELLIN_TILE(6)
      TELLIN_TILE(7)
#undef TELLIN_TILE
    }
  }
}

}  // namespace
}  // namespace tellin

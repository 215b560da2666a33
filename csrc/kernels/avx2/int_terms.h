// AVX2: what the integer kernels share.
#pragma once
#include "codes.h"
#include "tellin/linear.h"

namespace tellin {
namespace {

constexpr int kChunkBlocks = 8;  // 256 features
// Tokens of a tile: 2 x 5 integer sums, 2 code registers, 1 activation and the products fill 16 registers.
// With vpdpbusd there are no products to hold.
#if defined(__AVXVNNI__)
constexpr int kMaxTile = 6;
#else
constexpr int kMaxTile = 5;
#endif
constexpr int kMaxTokens = 256;  // tokens that share an unpacked chunk: 16 KiB of accumulators
// vpmaddubsw adds two products of an unsigned code and a signed activation in int16. How many such results
// fit into int16: codes up to 15: 8 results (8 * 2 * 15 * 128 = 30720); up to 31: 4 (31744); up to 63: 2
// (32256). 8-bit codes are multiplied as two nibbles. So sums stay exact and are widened as rarely as
// possible.
constexpr int int16_quads(int bits) {
  return bits <= 4 ? 8 : bits == 5 ? 4 : 2;
}
constexpr int kPrefetchChunks = 2;  // how far ahead of its use a chunk of codes is fetched

// Codes that are fetched ahead of their use: a group's, then those at `after`, which are read next.
class CodeStream {
 public:
  CodeStream() = default;
  CodeStream(const uint8_t* group, size_t group_bytes, const uint8_t* after, size_t ahead)
      : at_(group + ahead), end_(group + group_bytes), after_(after) {
    if (ahead >= group_bytes) {
      at_ = after + (ahead - group_bytes);
      end_ = nullptr;
    }
  }

  // Fetches the next kBytes, of which a group is a whole multiple.
  template <int kBytes>
  TELLIN_INLINE void fetch() {
#pragma GCC unroll 10
    for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(at_ + i, 0, 3);
    at_ += kBytes;
    if (at_ == end_) at_ = after_;
  }

 private:
  const uint8_t* at_ = nullptr;
  const uint8_t* end_ = nullptr;
  const uint8_t* after_ = nullptr;
};

// What is read after the groups before g of a call that ends with group g1.
TELLIN_INLINE const uint8_t* codes_after(const PackedMatrix& w, int64_t g, int64_t g1) {
  return g < g1 || w.follow == nullptr ? w.data + g * w.group_bytes : w.follow + (g - g1) * w.group_bytes;
}

// In-place operations: the compiler would re-associate sums of intrinsics into trees and spill.
TELLIN_INLINE void add_int16(__m256i& sum, __m256i v) {
  asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(v));
}
TELLIN_INLINE void add_int32(__m256i& sum, __m256i v) {
  asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(v));
}

// Adds the products of four codes and four activations per row to a sum, or makes them the sum: in int16, or
// with vpdpbusd in int32.
TELLIN_INLINE void add_product(__m256i w, __m256i y, bool is_first, __m256i& sum) {
#if defined(__AVXVNNI__)
  sum = _mm256_dpbusd_avx_epi32(is_first ? _mm256_setzero_si256() : sum, w, y);
#else
  const __m256i product = _mm256_maddubs_epi16(w, y);
  if (is_first) {
    sum = product;
  } else {
    add_int16(sum, product);
  }
#endif
}

// The same for the codes alone, in bytes.
TELLIN_INLINE void add_codes(__m256i w, bool is_first, __m256i& sum) {
  if (is_first) {
    sum = w;
  } else {
    asm("vpaddb %1, %0, %0" : "+x"(sum) : "x"(w));
  }
}

// Pairs (sum of `features` codes - features * zero point, zero point) in the rows' 32-bit lanes. code_sum: in
// bytes, 8 x 31 or 4 x 63 at most; of 8-bit codes in int32.
template <QuantType T>
TELLIN_INLINE __m256i code_pair_of(__m256i code_sum, int features) {
  constexpr int kZeroPoint = format_of(T).zero_point();
  if constexpr (format_of(T).code_bits() < 8) {
    const __m256i words = _mm256_maddubs_epi16(code_sum, _mm256_set1_epi8(1));
    code_sum = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
  }
  const __m256i sum = _mm256_add_epi32(code_sum, _mm256_set1_epi32(-features * kZeroPoint));
  return _mm256_blend_epi16(sum, _mm256_set1_epi32(kZeroPoint << 16), 0xaa);
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
template <QuantType T, int kHalves, int kTokens>
TELLIN_INLINE void add_zero_terms(const Act8* x, int64_t row_bytes, int pair,
                                  const __m256i (&code_pair)[kHalves], __m256i (&sum)[kHalves][kTokens]) {
#pragma GCC unroll 7
  for (int t = 0; t < kTokens; ++t) {
    const __m256i zero = broadcast_word(act_row(x, t, row_bytes)->zero_pair[pair]);
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h) add_int32(sum[h][t], _mm256_madd_epi16(zero, code_pair[h]));
  }
}

template <QuantType T, int kHalves, int kTokens>
TELLIN_INLINE void add_zero_terms(const Act16* x, int64_t row_bytes, int pair, const __m256i (&)[kHalves],
                                  __m256i (&sum)[kHalves][kTokens]) {
  constexpr PackedFormat kFormat = format_of(T);
  if constexpr (kFormat.zero_point_log2 >= 0) {
#pragma GCC unroll 7
    for (int t = 0; t < kTokens; ++t) {
      const Act16* block = act_row(x, t, row_bytes);
      __m256i term = broadcast_word(&block->neg_sums[pair == 2 ? 1 : 0]);
      if (pair == 0) add_int32(term, broadcast_word(&block->neg_sums[1]));
      term = _mm256_slli_epi32(term, kFormat.zero_point_log2);
#pragma GCC unroll 2
      for (int h = 0; h < kHalves; ++h) add_int32(sum[h][t], term);
    }
  }
}

// Of formats that scale per 16 features: what the first half of a block comes to, which 8-bit activations add
// to acc [kTokens][16].
template <class Act, int kTokens>
TELLIN_INLINE void scale_half(const Act* x, int64_t row_bytes, const float (&scale)[kRows],
                              const __m256i (&sum)[2][kTokens], __m256 (&product)[2][kTokens], float* acc) {
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const __m256 s = _mm256_load_ps(scale + h * kHalfRows);
#pragma GCC unroll 7
    for (int t = 0; t < kTokens; ++t) {
      const __m256 value = _mm256_cvtepi32_ps(sum[h][t]);
      if constexpr (Act::kPlanes == 1) {
        const __m256 x_scale = broadcast_float(&act_row(x, t, row_bytes)->scale);
        float* const a = acc + t * kRows + h * kHalfRows;
        _mm256_store_ps(a, _mm256_fmadd_ps(value, _mm256_mul_ps(x_scale, s), _mm256_load_ps(a)));
      } else {
        product[h][t] = _mm256_mul_ps(value, s);
      }
    }
  }
}

// acc + sum * scale * x_scale: exact but for the last addition with 8-bit activations; else with `product`
// (see scale_half) added before x_scale.
template <class Act, bool kPer16>
TELLIN_INLINE __m256 add_scaled(__m256i sum, __m256 scale, __m256 x_scale, __m256 product, __m256 acc) {
  const __m256 value = _mm256_cvtepi32_ps(sum);
  if constexpr (Act::kPlanes == 1) return _mm256_fmadd_ps(value, _mm256_mul_ps(x_scale, scale), acc);
  const __m256 p = kPer16 ? _mm256_fmadd_ps(value, scale, product) : _mm256_mul_ps(value, scale);
  return _mm256_fmadd_ps(p, x_scale, acc);
}

// Scales the integer sums of a block and adds them to acc [kTokens][16]; `product`: see scale_half.
template <QuantType T, class Act, int kTokens>
TELLIN_INLINE void scale_sums(const Act* x, int64_t row_bytes, const float (*scale)[kRows],
                              const float (*minimum)[kRows], const __m256i (&sum)[2][kTokens],
                              const __m256 (&product)[2][kTokens], float* acc) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kLast = kFormat.per16() ? 1 : 0;
  const __m256 s[2] = {_mm256_load_ps(scale[kLast]), _mm256_load_ps(scale[kLast] + kHalfRows)};
#pragma GCC unroll 7
  for (int t = 0; t < kTokens; ++t) {
    const Act* block = act_row(x, t, row_bytes);
    const __m256 x_scale = broadcast_float(&block->scale);
    __m256 x_sum[2];
    if constexpr (kFormat.has_min) {
#pragma GCC unroll 2
      for (int i = 0; i <= kLast; ++i)
        x_sum[i] = broadcast_float(kFormat.per16() ? &block->half_sum[i] : &block->sum);
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      float* const a = acc + t * kRows + h * kHalfRows;
      __m256 result =
          add_scaled<Act, kFormat.per16()>(sum[h][t], s[h], x_scale, product[h][t], _mm256_load_ps(a));
      if constexpr (kFormat.has_min) {
#pragma GCC unroll 2
        for (int i = 0; i <= kLast; ++i)
          result = _mm256_fmadd_ps(_mm256_load_ps(minimum[i] + h * kHalfRows), x_sum[i], result);
      }
      _mm256_store_ps(a, result);
    }
  }
  asm volatile("" ::: "memory");
}

struct IntProblem {
  const PackedMatrix& w;
  const QuantizedRows& x;
  float* out;
  int64_t ldo;
};

}  // namespace
}  // namespace tellin

// AVX-512: tables that spare a tile of many rows of 8-bit activations the multiplications by zeros and
// scales.
//
// The grid of zeros and scales (see Act8) leaves few products of a block's sum of codes and zeros, and of its
// scales and scales of activations. They are made once per chunk of codes, and looked up at the records'
// offsets. Products are exact, so tables change no bit.
#pragma once
#include "codes.h"

namespace tellin {
namespace {

// Of the tiles of one chunk of codes: the only one; the first, which sums the codes, and later ones, which
// read its sums; the first that makes tables as well, and those that read them.
enum class TileKind { kOnly, kFirst, kLater, kMaker, kReader };

// Zeros of formats with two scales per block stay multiplications: twice the tables would not fit into L1.
template <QuantType T>
constexpr bool kHasZeroTable = !format_of(T).per16();

// Of them, those whose codes come of two planes leave them in L1 as they are multiplied: one load instead of
// two, and nothing to shift.
template <QuantType T>
constexpr bool kHasUnpacked = format_of(T).per16() && format_of(T).bits > 2;

// What belongs to a sum over a block of 32 features, or over its half, of two groups: one struct, for a tile
// to walk over with one pointer.
struct SumTables {
  alignas(64) float scale[2][kRows];
  float minimum[2][kRows];
  int32_t code_pair[2][kRows];  // (sum of codes - features * zero point, zero point)
  // zero * (sum of codes - features * zero point), by `zero_offset`: what sums start with.
  int32_t zeros[2][kZeroEntries][kRows];
  // bits(m * scale) - bits(m), by `scale_offset`: with bits(m * 2^e) they make those of the product.
  int32_t scales[2][kScaleEntries][kRows];
  uint8_t codes[2][4][kVectorBytes];  // quads, see kHasUnpacked
};

TELLIN_INLINE __m512i broadcast_word(const void* p) {
  int32_t word;
  __builtin_memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}

// A vector of equal words. kIsHere: it is made where it is used, and takes no register in a loop around it.
template <bool kIsHere>
TELLIN_INLINE __m512i repeat_word(int32_t word) {
  if constexpr (kIsHere) asm volatile("" : "+r"(word));
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

// The entries that no block changes.
inline void begin_tables(SumTables* tables, int count) {
  for (int i = 0; i < count; ++i) {
    for (int g = 0; g < 2; ++g) {
      _mm512_store_si512(tables[i].zeros[g][kMostZeroSteps], _mm512_setzero_si512());
      _mm512_store_si512(tables[i].scales[g][kNanScaleEntry], _mm512_setzero_si512());
    }
  }
}

// `zero_pair` >> this is -sum q * zero point, and a little more if the zero is negative (all bits that stay
// of it), which the tables make up for.
template <QuantType T>
constexpr int kPairShift = 16 - format_of(T).zero_point_log2;

// Entry 3 stays zero (begin_tables).
template <QuantType T>
TELLIN_INLINE void make_zero_table(__m512i code_sum, int32_t (&zero)[kZeroEntries][kRows]) {
  static_assert(kZeroUnit == 32 && kMostZeroSteps == 3, "multiples are shifted and added");
  const __m512i once = _mm512_slli_epi32(code_sum, 5), twice = _mm512_slli_epi32(code_sum, 6);
  const __m512i thrice = _mm512_add_epi32(once, twice);
  constexpr int kZeroPoint = format_of(T).zero_point();
  const __m512i rest = _mm512_set1_epi32(kZeroPoint == 0 ? 0 : 1 - kZeroPoint);
  _mm512_store_si512(zero[0], _mm512_sub_epi32(rest, thrice));
  _mm512_store_si512(zero[1], _mm512_sub_epi32(rest, twice));
  _mm512_store_si512(zero[2], _mm512_sub_epi32(rest, once));
  _mm512_store_si512(zero[4], once);
  _mm512_store_si512(zero[5], twice);
  _mm512_store_si512(zero[6], thrice);
}

TELLIN_INLINE void make_scale_table(const float (&scale)[kRows], int32_t (&table)[kScaleEntries][kRows]) {
  __m512 d = _mm512_load_ps(scale);
  const __mmask16 is_zero = _mm512_cmp_ps_mask(d, _mm512_setzero_ps(), _CMP_EQ_OQ);
  d = _mm512_mask_mov_ps(d, is_zero, _mm512_set1_ps(kZeroScaleStand));
#pragma GCC unroll 4
  for (int i = 0; i < kNanScaleEntry; ++i) {
    const __m512 m = _mm512_set1_ps(kAct8Scale[i]);
    const __m512 product = i == 0 ? d : _mm512_mul_ps(d, m);
    _mm512_store_si512(table[i], _mm512_sub_epi32(_mm512_castps_si512(product), _mm512_castps_si512(m)));
  }
}

// Whether tables may be made of the scales of two groups or one (see kLeastTableScale).
template <QuantType T>
TELLIN_INLINE bool can_make_tables([[maybe_unused]] const SumTables* tables, [[maybe_unused]] int count,
                                   [[maybe_unused]] int num_groups) {
  if constexpr (format_of(T).has_table()) {
    for (int i = 0; i < count; ++i) {
      for (int g = 0; g < num_groups; ++g) {
        const __m512 d = _mm512_abs_ps(_mm512_load_ps(tables[i].scale[g]));
        const __mmask16 fits = _mm512_cmp_ps_mask(d, _mm512_set1_ps(kLeastTableScale), _CMP_GE_OQ) &
                               _mm512_cmp_ps_mask(d, _mm512_set1_ps(kLargestTableScale), _CMP_LE_OQ);
        if (fits != 0xffff) return false;
      }
    }
  }
  return true;
}

// What the integer sums of a block or half (pair 0: block; 1, 2: halves) start with: the terms of the
// activations' zero and of the codes' zero point.
template <QuantType T, int kGroups, int kTokens>
TELLIN_INLINE void look_up_starts(const ActRows<Act8, kTokens>& x, int pair, const SumTables& tables,
                                  __m512i (&sum)[kGroups][kTokens]) {
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
    const Act8* block = x.block(t);
    const char* entry = reinterpret_cast<const char*>(tables.zeros) + block->zero_offset;
    asm volatile("" : "+r"(entry));
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      sum[g][t] = _mm512_load_si512(entry + g * sizeof tables.zeros[0]);
      if constexpr (format_of(T).zero_point_log2 >= 0) {
        const __m512i start = _mm512_srai_epi32(broadcast_word(block->zero_pair[pair]), kPairShift<T>);
        sum[g][t] = _mm512_add_epi32(sum[g][t], start);
      }
    }
  }
}

// acc[group][token] += integer sums x scales of activations and weights.
template <int kGroups, int kTokens>
TELLIN_INLINE void add_looked_up(const ActRows<Act8, kTokens>& x, const __m512i (&sum)[kGroups][kTokens],
                                 const SumTables& tables, __m512 (&acc)[kGroups][kTokens]) {
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
    const Act8* block = x.block(t);
    const char* entry = reinterpret_cast<const char*>(tables.scales) + block->scale_offset;
    asm volatile("" : "+r"(entry));
    const __m512i scale = broadcast_word(&block->scale);
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      const __m512i product = _mm512_add_epi32(scale, _mm512_load_si512(entry + g * sizeof tables.scales[0]));
      acc[g][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[g][t]), _mm512_castsi512_ps(product), acc[g][t]);
    }
  }
}

}  // namespace
}  // namespace tellin

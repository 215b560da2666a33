// AVX-512 VNNI: exact integer sums of codes x quantised activations over a block of 32 features or its half.
//
// The first tile of tokens that meets a block unpacks it once, multiplies it with all planes of its
// activations and sums the codes, which the zero point of 8-bit activations needs; later tiles read those
// sums back. With two planes the sum is that of the high plane, shifted, plus that of the low plane: exact
// (32 * 127 * 255 * 128 < 2^31).
#pragma once
#include "int_tables.h"
#include "streaming.h"
#include "tellin/linear.h"

namespace tellin {
namespace {

// Adds a quad of codes x plane kPlane of the activations to the integer sums.
template <int kPlane, int kQuad, class Act, int kGroups, int kTokens>
TELLIN_INLINE void add_products(const __m512i (&w)[kGroups], const ActRows<Act, kTokens>& x,
                                __m512i (&sum)[kGroups][kTokens]) {
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
    const __m512i y = broadcast_word(x.block(t)->q[kPlane] + 4 * kQuad);
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) sum[g][t] = _mm512_dpbusd_epi32(sum[g][t], w[g], y);
  }
}

// The same of quad kQuad of a block.
template <QuantType T, int kPlane, int kQuad, class Act, int kGroups, int kTokens>
TELLIN_INLINE void add_quad(const uint8_t* codes, size_t group_bytes, const ActRows<Act, kTokens>& x,
                            __m512i (&sum)[kGroups][kTokens]) {
  __m512i w[kGroups];
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; ++g) w[g] = load_quad<T, kQuad>(codes + g * group_bytes);
  add_products<kPlane, kQuad>(w, x, sum);
}

// The same of quads kQuad and kQuad + 4, low and high nibbles of a vector, which is loaded once: loads bound
// a tile of many rows as multiplications do.
template <QuantType T, int kPlane, int kQuad, class Act, int kGroups, int kTokens>
TELLIN_INLINE void add_quad_pair(const uint8_t* codes, size_t group_bytes, const ActRows<Act, kTokens>& x,
                                 __m512i (&sum)[kGroups][kTokens]) {
  __m512i low[kGroups], high[kGroups];
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; ++g) load_quad_pair<T, kQuad>(codes + g * group_bytes, low[g], high[g]);
  add_products<kPlane, kQuad>(low, x, sum);
  add_products<kPlane, kQuad + 4>(high, x, sum);
}

// What the integer sums of a block or half (pair 0: block; 1, 2: halves) start with: the terms of the
// activations' zero and of the codes' zero point.
template <QuantType T, int kGroups, int kTokens>
TELLIN_INLINE void begin_sums(const ActRows<Act8, kTokens>& x, int pair, const SumTables& tables,
                              __m512i (&sum)[kGroups][kTokens]) {
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
    const __m512i zero = broadcast_word(x.block(t)->zero_pair[pair]);
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g)
      sum[g][t] = _mm512_madd_epi16(zero, _mm512_load_si512(tables.code_pair[g]));
  }
}

// What the sums of one row start with for the codes' zero point.
template <QuantType T>
TELLIN_INLINE __m512i zero_point_term(const Act16* block, int pair) {
  constexpr PackedFormat kFormat = format_of(T);
  if constexpr (kFormat.zero_point_log2 < 0) return _mm512_setzero_si512();
  __m512i sum = broadcast_word(&block->neg_sums[pair == 2 ? 1 : 0]);
  if (pair == 0) sum = _mm512_add_epi32(sum, broadcast_word(&block->neg_sums[1]));
  return _mm512_slli_epi32(sum, kFormat.zero_point_log2 < 0 ? 0 : kFormat.zero_point_log2);
}

template <QuantType T, int kGroups, int kTokens>
TELLIN_INLINE void begin_sums(const ActRows<Act16, kTokens>& x, int pair, const SumTables&,
                              __m512i (&sum)[kGroups][kTokens]) {
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
    const __m512i start = zero_point_term<T>(x.block(t), pair);
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) sum[g][t] = start;
  }
}

// Between the planes: what was summed counts 128-fold, and the start is added that one plane begins with.
template <QuantType T, class Act, int kGroups, int kTokens>
TELLIN_INLINE void shift_sums(const ActRows<Act, kTokens>& x, int pair, const SumTables& tables,
                              __m512i (&sum)[kGroups][kTokens]) {
  __m512i start[kGroups][kTokens];
  begin_sums<T>(x, pair, tables, start);
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
  if constexpr (kHalf < 0 && has_nibbles<T>) {
    add_quad_pair<T, kPlane, 0>(codes, group_bytes, x, sum);
    add_quad_pair<T, kPlane, 1>(codes, group_bytes, x, sum);
    add_quad_pair<T, kPlane, 2>(codes, group_bytes, x, sum);
    add_quad_pair<T, kPlane, 3>(codes, group_bytes, x, sum);
  } else {
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
}

// The quads of a half as the tile that made the tables has left them.
template <int kHalf, int kGroups, int kTokens>
TELLIN_INLINE void add_unpacked_quads(const ActRows<Act8, kTokens>& x, const SumTables& tables,
                                      __m512i (&sum)[kGroups][kTokens]) {
  const auto load = [&](int quad, __m512i(&w)[kGroups]) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) w[g] = _mm512_load_si512(tables.codes[g][quad]);
  };
  __m512i w[kGroups];
  load(0, w);
  add_products<0, 4 * kHalf>(w, x, sum);
  load(1, w);
  add_products<0, 4 * kHalf + 1>(w, x, sum);
  load(2, w);
  add_products<0, 4 * kHalf + 2>(w, x, sum);
  load(3, w);
  add_products<0, 4 * kHalf + 3>(w, x, sum);
}

// Sums of a tile that is not the first: `code_pair` is known.
template <QuantType T, int kHalf, class Act, int kGroups, int kTokens>
TELLIN_INLINE void later_sums(const uint8_t* codes, size_t group_bytes, const ActRows<Act, kTokens>& x,
                              const SumTables& tables, __m512i (&sum)[kGroups][kTokens]) {
  constexpr int kPair = kHalf + 1;
  if constexpr (Act::kPlanes == 1) {
    begin_sums<T>(x, kPair, tables, sum);
    add_quads<T, 0, kHalf>(codes, group_bytes, x, sum);
  } else {
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) sum[g][t] = _mm512_setzero_si512();
    }
    add_quads<T, 0, kHalf>(codes, group_bytes, x, sum);
    shift_sums<T>(x, kPair, tables, sum);
    add_quads<T, 1, kHalf>(codes, group_bytes, x, sum);
  }
}

// Whether the only tile fetches codes with each quad instead of each block: 18 lines at once hold up the
// loads that follow (Q8_0, 3 to 5 rows: 29 GB/s instead of 32).
template <QuantType T>
constexpr bool fetches_by_quad(int groups) {
  return format_of(T).bits == 8 && groups == 2;
}

// Whether sums of a block and its codes fill the registers.
template <class Act, int kHalf>
constexpr bool is_tight(int values) {
  return Act::kPlanes == 1 && kHalf < 0 && values >= 10;
}

// The block that is fetched quad by quad; at nullptr: none.
struct QuadFetch {
  const uint8_t* at;
  bool past_caches;
};

// Adds quad kQuad of a block: its codes x every plane of the activations, and the codes themselves (kStarts:
// to nothing). kIsTight: their sum is formed at once, for the compiler likes to keep all codes until the end.
// `fetch`: the block that is fetched meanwhile (see fetches_by_quad). `unpacked`: where the
// codes are left; nullptr: nowhere.
template <QuantType T, int kQuad, bool kStarts, bool kIsTight, class Act, int kGroups, int kTokens>
TELLIN_INLINE void multiply_quad(const uint8_t* codes, size_t group_bytes, const ActRows<Act, kTokens>& x,
                                 __m512i (&sum)[Act::kPlanes][kGroups][kTokens], __m512i (&code_sum)[kGroups],
                                 const QuadFetch& fetch, SumTables* unpacked) {
  constexpr PackedFormat kFormat = format_of(T);
  if constexpr (fetches_by_quad<T>(kGroups)) {
    constexpr int kLines = (kFormat.super_bytes() / kFormat.blocks() + 63) / 64;
    if (fetch.at != nullptr) {
#pragma GCC unroll 2
      for (int i = kQuad * kLines / 8; i < (kQuad + 1) * kLines / 8; ++i) {
#pragma GCC unroll 2
        for (int g = 0; g < kGroups; ++g) fetch_line(fetch.at + g * group_bytes + 64 * i, fetch.past_caches);
      }
    }
  }
  __m512i w[kGroups];
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; ++g) {
    w[g] = load_quad<T, kQuad>(codes + g * group_bytes);
    if (unpacked != nullptr) _mm512_store_si512(unpacked->codes[g][kQuad % 4], w[g]);
    if constexpr (Act::kPlanes == 1) {
      if constexpr (kFormat.code_bits() == 8) {
        code_sum[g] = _mm512_dpbusd_epi32(code_sum[g], w[g], _mm512_set1_epi8(1));
      } else {
        code_sum[g] = kStarts ? w[g] : _mm512_add_epi8(code_sum[g], w[g]);
        if constexpr (kIsTight) asm("" : "+v"(code_sum[g]));
      }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 2
    for (int plane = 0; plane < Act::kPlanes; ++plane) {
      const __m512i y = broadcast_word(x.block(t)->q[plane] + 4 * kQuad);
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        sum[plane][g][t] = _mm512_dpbusd_epi32(sum[plane][g][t], w[g], y);
      }
    }
  }
}

// Sums of the first tile, in one walk over the codes. Leaves to later tiles what they need: tables, or
// `code_pair`: pairs (sum of codes - features * zero point, zero point) in the rows' 32-bit lanes.
template <QuantType T, TileKind kKind, int kHalf, class Act, int kGroups, int kTokens>
TELLIN_INLINE void first_sums(const uint8_t* codes, size_t group_bytes, const ActRows<Act, kTokens>& x,
                              SumTables& tables, __m512i (&out)[kGroups][kTokens], const QuadFetch& fetch) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kPair = kHalf + 1;
  constexpr int kQuads = kHalf < 0 ? 8 : 4;
  constexpr int kFirst = kHalf > 0 ? 4 : 0;
  constexpr bool kIsTight = is_tight<Act, kHalf>(kGroups * kTokens);
  __m512i sum[Act::kPlanes][kGroups][kTokens], code_sum[kGroups];
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; ++g) {
    code_sum[g] = _mm512_set1_epi32(-4 * kQuads * kFormat.zero_point());
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 2
      for (int plane = 0; plane < Act::kPlanes; ++plane) sum[plane][g][t] = _mm512_setzero_si512();
    }
  }
  SumTables* const unpacked = kKind == TileKind::kMaker && kHasUnpacked<T> ? &tables : nullptr;
  multiply_quad<T, kFirst, true, kIsTight>(codes, group_bytes, x, sum, code_sum, fetch, unpacked);
  if constexpr (kHalf < 0)
    multiply_quad<T, 4, false, kIsTight>(codes, group_bytes, x, sum, code_sum, fetch, unpacked);
  multiply_quad<T, kFirst + 1, false, kIsTight>(codes, group_bytes, x, sum, code_sum, fetch, unpacked);
  if constexpr (kHalf < 0)
    multiply_quad<T, 5, false, kIsTight>(codes, group_bytes, x, sum, code_sum, fetch, unpacked);
  multiply_quad<T, kFirst + 2, false, kIsTight>(codes, group_bytes, x, sum, code_sum, fetch, unpacked);
  if constexpr (kHalf < 0)
    multiply_quad<T, 6, false, kIsTight>(codes, group_bytes, x, sum, code_sum, fetch, unpacked);
  multiply_quad<T, kFirst + 3, false, kIsTight>(codes, group_bytes, x, sum, code_sum, fetch, unpacked);
  if constexpr (kHalf < 0)
    multiply_quad<T, 7, false, kIsTight>(codes, group_bytes, x, sum, code_sum, fetch, unpacked);
  if constexpr (Act::kPlanes == 1) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      if constexpr (kFormat.code_bits() < 8) {  // 8 codes of at most 31, or 4 of 63, were added in a byte
        code_sum[g] = _mm512_dpbusd_epi32(repeat_word<kIsTight>(-4 * kQuads * kFormat.zero_point()),
                                          code_sum[g], repeat_word<kIsTight>(0x01010101));
      }
      const __m512i pair =
          _mm512_mask_blend_epi16(0xaaaaaaaa, code_sum[g], repeat_word<kIsTight>(kFormat.zero_point() << 16));
      _mm512_store_si512(tables.code_pair[g], pair);
      if constexpr (kKind == TileKind::kMaker && kHasZeroTable<T>) {
        make_zero_table<T>(code_sum[g], tables.zeros[g]);
      }
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        out[g][t] = _mm512_dpwssd_epi32(sum[0][g][t], broadcast_word(x.block(t)->zero_pair[kPair]), pair);
      }
    }
  } else {
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      const __m512i start = zero_point_term<T>(x.block(t), kPair);
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        const __m512i high = _mm512_slli_epi32(sum[0][g][t], kPlaneShift);
        out[g][t] = _mm512_add_epi32(_mm512_add_epi32(high, sum[Act::kPlanes - 1][g][t]), start);
      }
    }
  }
}

// Exact sums of (codes - zero point) x whole activations over a block (kHalf < 0) or its half kHalf.
template <QuantType T, TileKind kKind, int kHalf, class Act, int kGroups, int kTokens>
TELLIN_INLINE void block_sums(const uint8_t* codes, size_t group_bytes, const ActRows<Act, kTokens>& x,
                              SumTables& tables, __m512i (&sum)[kGroups][kTokens], const QuadFetch& fetch) {
  if constexpr (kKind == TileKind::kReader && kHasZeroTable<T>) {
    look_up_starts<T>(x, kHalf + 1, tables, sum);
    add_quads<T, 0, kHalf>(codes, group_bytes, x, sum);
  } else if constexpr (kKind == TileKind::kReader && kHasUnpacked<T>) {
    begin_sums<T>(x, kHalf + 1, tables, sum);
    add_unpacked_quads<kHalf>(x, tables, sum);
  } else if constexpr (kKind == TileKind::kLater || kKind == TileKind::kReader) {
    later_sums<T, kHalf>(codes, group_bytes, x, tables, sum);
  } else {
    first_sums<T, kKind, kHalf>(codes, group_bytes, x, tables, sum, fetch);
  }
}

}  // namespace
}  // namespace tellin

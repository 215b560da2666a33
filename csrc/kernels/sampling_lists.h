// Lists of entries: those of a row that reach a value, what of a list lies above a value, and the part of a
// list on one side of it. Entries that are taken are moved together within a vector and stored, a whole
// vector at a time; what it holds beyond them is overwritten next.
#pragma once
#include "sampling_blocks.h"

namespace tellin {
namespace {

typedef int32_t HalfIntVec __attribute__((vector_size(2 * TELLIN_SAMPLING_WIDTH)));

#if TELLIN_SAMPLING_WIDTH == 16 && defined(__AVX512F__)
#define TELLIN_STORES_HITS 1

// Stores the lanes of v whose bits are set one after the other. Writes a whole vector.
TELLIN_INLINE void store_hits(const FloatVec& v, uint32_t bits, void* to) {
  _mm512_storeu_ps(
      to, _mm512_maskz_compress_ps(static_cast<__mmask16>(bits), reinterpret_cast<const __m512&>(v)));
}

// The same of 64-bit lanes, of which there are half as many.
TELLIN_INLINE void store_long_hits(const LongVec& v, uint32_t bits, uint64_t* to) {
  _mm512_storeu_si512(
      to, _mm512_maskz_compress_epi64(static_cast<__mmask8>(bits), reinterpret_cast<const __m512i&>(v)));
}
#elif TELLIN_SAMPLING_WIDTH == 8 && defined(__AVX2__)
#define TELLIN_STORES_HITS 1

// For 8 bits: the lanes whose bits are set, in order.
struct SetLanes {
  alignas(8) uint8_t lanes[256][8] = {};

  constexpr SetLanes() {
    for (int bits = 0; bits < 256; ++bits) {
      for (int lane = 0, count = 0; lane < 8; ++lane) {
        if ((bits >> lane & 1) != 0) lanes[bits][count++] = static_cast<uint8_t>(lane);
      }
    }
  }
};
constexpr SetLanes kSetLanes;

TELLIN_INLINE void store_lanes(const __m256i& v, uint32_t bits, void* to) {
  const __m128i lanes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kSetLanes.lanes[bits]));
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(v, _mm256_cvtepu8_epi32(lanes)));
}

TELLIN_INLINE void store_hits(const FloatVec& v, uint32_t bits, void* to) {
  store_lanes(reinterpret_cast<const __m256i&>(v), bits, to);
}

TELLIN_INLINE void store_long_hits(const LongVec& v, uint32_t bits, uint64_t* to) {
  constexpr uint8_t kPairs[16] = {0x00, 0x03, 0x0c, 0x0f, 0x30, 0x33, 0x3c, 0x3f,
                                  0xc0, 0xc3, 0xcc, 0xcf, 0xf0, 0xf3, 0xfc, 0xff};
  store_lanes(reinterpret_cast<const __m256i&>(v), kPairs[bits], to);
}
#else
#define TELLIN_STORES_HITS 0
#endif

constexpr uint32_t kAllLanes = (1u << TELLIN_SAMPLING_WIDTH) - 1;
constexpr uint32_t kAllHalfLanes = (1u << TELLIN_SAMPLING_WIDTH / 2) - 1;

// Adds the entries of a block of a row whose bits are set to a list of `count`; returns how many it then has.
TELLIN_INLINE int64_t add_from_row(const float* entries, int32_t first_id, uint64_t bits,
                                   const EntryArrays& to, int64_t count) {
#if TELLIN_STORES_HITS
  IntVec ids;
  for (int32_t i = 0; i < kLanes; ++i) ids[i] = first_id + i;
#pragma GCC unroll 8
  for (int64_t i = 0; i < kSampleBlock; i += kLanes, bits >>= kLanes, ids += static_cast<int32_t>(kLanes)) {
    const uint32_t hits = static_cast<uint32_t>(bits) & kAllLanes;
    FloatVec v, id_bits;
    load(entries + i, v);
    std::memcpy(&id_bits, &ids, sizeof ids);
    store_hits(v, hits, to.values + count);
    store_hits(id_bits, hits, to.ids + count);
    count += __builtin_popcount(hits);
  }
#else
  for (; bits != 0; bits &= bits - 1, ++count) {
    const int32_t i = __builtin_ctzll(bits);
    to.values[count] = entries[i];
    to.ids[count] = first_id + i;
  }
#endif
  return count;
}

// The same from kSampleBlock entries of a list, of which the first `num_entries` exist. A vector is read
// before anything is written that far, so both may be one list.
TELLIN_INLINE int64_t add_from_list(const EntryArrays& from, int64_t num_entries, uint64_t bits,
                                    const EntryArrays& to, int64_t count) {
#if TELLIN_STORES_HITS
  for (int64_t i = 0; i < num_entries; i += kLanes, bits >>= kLanes) {
    const uint32_t hits = static_cast<uint32_t>(bits) & kAllLanes, low_hits = hits & kAllHalfLanes;
    FloatVec v, id_bits;
    LongVec w[2];
    load(from.values + i, v);
    std::memcpy(&id_bits, from.ids + i, sizeof id_bits);
    std::memcpy(w, from.weights + i, sizeof w);
    store_hits(v, hits, to.values + count);
    store_hits(id_bits, hits, to.ids + count);
    store_long_hits(w[0], low_hits, to.weights + count);
    store_long_hits(w[1], hits >> kHalfLanes, to.weights + count + __builtin_popcount(low_hits));
    count += __builtin_popcount(hits);
  }
#else
  (void)num_entries;
  for (; bits != 0; bits &= bits - 1, ++count) {
    const int64_t i = __builtin_ctzll(bits);
    to.values[count] = from.values[i];
    to.ids[count] = from.ids[i];
    to.weights[count] = from.weights[i];
  }
#endif
  return count;
}

// The values behind the last entry.
TELLIN_INLINE void end_list(const EntryArrays& list, int64_t count) {
  const FloatVec nan = FloatVec{} + std::numeric_limits<float>::quiet_NaN();
  for (int64_t i = 0; i < kSampleBlock; i += kLanes) store(list.values + count + i, nan);
}

template <bool kHasRest>
TELLIN_INLINE int64_t list_blocks(const float* x, int64_t n, const float* maxima, float lowest, float max,
                                  float inv_t, const EntryArrays& out, double* rest) {
  const float scale = inv_t * kLog2E;
  int64_t count = 0;
  float padded[kSampleBlock];
  BlockSum<true> sum;
  for_blocks(x, maxima, num_blocks_of(n), lowest, kPosInf, [&](int64_t b) {
    const int64_t begin = b * kSampleBlock, left = n - begin;
    const float* entries = block_entries(x, n, b, padded);
    uint64_t bits = hits_of_block(entries, lowest, kPosInf);
    if (left < kSampleBlock) bits &= (uint64_t{1} << left) - 1;
    count = add_from_row(entries, static_cast<int32_t>(begin), bits, out, count);
    if (kHasRest) {
      FloatVec t[kBlockVecs];
#pragma GCC unroll 16
      for (int64_t j = 0; j < kBlockVecs; ++j) {
        FloatVec v;
        load(entries + j * kLanes, v);
        t[j] = v < lowest ? (v - max) * scale : FloatVec{} - 64.0f;
      }
      sum.add(t);
    }
  });
  end_list(out, count);
  if (kHasRest) *rest = sum.total();
  return count;
}

int64_t list_entries(const float* x, int64_t n, const float* maxima, float lowest, float max, float inv_t,
                     const EntryArrays& out, double* rest) {
  if (rest != nullptr) return list_blocks<true>(x, n, maxima, lowest, max, inv_t, out, rest);
  return list_blocks<false>(x, n, maxima, lowest, max, inv_t, out, nullptr);
}

EntriesAbove entries_above(const EntryArrays& list, int64_t n, float value) {
  LongVec mass[2] = {};
  EntriesAbove found = {0, 0, 0};
#if TELLIN_SAMPLING_WIDTH == 16 && defined(__AVX512F__)
  const __m512 limit = _mm512_set1_ps(value);
  for (int64_t i = 0; i < n; i += kLanes) {
    const __m512 v = _mm512_loadu_ps(list.values + i);
    const __mmask16 above = _mm512_cmp_ps_mask(v, limit, _CMP_GT_OQ);
    found.count += __builtin_popcount(above);
    found.num_equal += __builtin_popcount(_mm512_cmp_ps_mask(v, limit, _CMP_EQ_OQ));
    for (int64_t half = 0; half < 2; ++half) {
      __m512i& sum = reinterpret_cast<__m512i&>(mass[half]);
      sum = _mm512_mask_add_epi64(sum, static_cast<__mmask8>(above >> 8 * half), sum,
                                  _mm512_loadu_si512(list.weights + i + half * kHalfLanes));
    }
  }
#else
  IntVec count = {}, num_equal = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    FloatVec v;
    load(list.values + i, v);
    const IntVec above = v > value;
    count -= above;
    num_equal -= v == value;
    HalfIntVec halves[2];
    std::memcpy(halves, &above, sizeof halves);
    for (int64_t half = 0; half < 2; ++half) {
      LongVec w;
      std::memcpy(&w, list.weights + i + half * kHalfLanes, sizeof w);
      mass[half] += w & __builtin_convertvector(halves[half], LongVec);
    }
  }
  for (int64_t i = 0; i < kLanes; ++i) {
    found.count += count[i];
    found.num_equal += num_equal[i];
  }
#endif
  found.mass = sum_of_lanes(mass[0] + mass[1]);
  return found;
}

template <Side kSide>
TELLIN_INLINE int64_t copy_side(const EntryArrays& from, int64_t n, float value, const EntryArrays& to) {
  int64_t count = 0;
  for (int64_t begin = 0; begin < n; begin += kSampleBlock) {
    const EntryArrays block = {from.values + begin, from.ids + begin, from.weights + begin};
    uint64_t bits = kSide == Side::kBelow ? hits_of_block(block.values, kNegInf, value)
                                          : hits_of_block(block.values, value, kPosInf);
    if (kSide != Side::kAtLeast) bits &= ~hits_of_block(block.values, value, value);
    count = add_from_list(block, n - begin < kSampleBlock ? n - begin : kSampleBlock, bits, to, count);
  }
  end_list(to, count);
  return count;
}

int64_t copy_entries(const EntryArrays& from, int64_t n, float value, Side side, const EntryArrays& to) {
  if (side == Side::kAtLeast) return copy_side<Side::kAtLeast>(from, n, value, to);
  if (side == Side::kAbove) return copy_side<Side::kAbove>(from, n, value, to);
  return copy_side<Side::kBelow>(from, n, value, to);
}

}  // namespace
}  // namespace tellin

// AVX-512: quantisation of float32 activations to records of one or two planes.
#pragma once
#include "block_walk.h"
#include "codes.h"
#include "tellin/linear.h"

namespace tellin {
namespace {

TELLIN_INLINE void store_plane(__m512i a, __m512i b, int8_t* q) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtepi32_epi8(a));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16), _mm512_cvtepi32_epi8(b));
}

// The high plane of whole values: the rest fits into [-64, 63].
TELLIN_INLINE __m512i high_plane(__m512i v) {
  return _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(1 << (kPlaneShift - 1))), kPlaneShift);
}

// A block that is zero, or that makes all its outputs NaN.
template <class Act>
TELLIN_INLINE void store_special(__m512 a, __m512 b, Act* out) {
  const __m512 largest = _mm512_set1_ps(Act::kPlanes == 1 ? kAct8LargestMagnitude : __FLT_MAX__);
  const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(a), largest, _CMP_LE_OQ) &
                           _mm512_cmp_ps_mask(_mm512_abs_ps(b), largest, _CMP_LE_OQ);
  if (finite == 0xffff) {
    store_zero_record(out);
  } else {
    store_nan_record(out);
  }
}

// ---- 15 bits ----

TELLIN_INLINE void quantize_block(__m512 a, __m512 b, Act16* out) {
  const __m512 abs_a = _mm512_abs_ps(a), abs_b = _mm512_abs_ps(b);
  const __m512 largest = _mm512_set1_ps(__FLT_MAX__);
  const __mmask16 finite =
      _mm512_cmp_ps_mask(abs_a, largest, _CMP_LE_OQ) & _mm512_cmp_ps_mask(abs_b, largest, _CMP_LE_OQ);
  const float magnitude = _mm512_reduce_max_ps(_mm512_max_ps(abs_a, abs_b));
  if (__builtin_expect(finite != 0xffff || !(magnitude >= kTinyAct), 0)) return store_special(a, b, out);
  const __m512 factor = _mm512_set1_ps(kAct16Largest / magnitude);
  const __m512i va = _mm512_cvtps_epi32(_mm512_mul_ps(a, factor));
  const __m512i vb = _mm512_cvtps_epi32(_mm512_mul_ps(b, factor));
  const __m512i ha = high_plane(va), hb = high_plane(vb);
  store_plane(ha, hb, out->q[0]);
  store_plane(_mm512_sub_epi32(va, _mm512_slli_epi32(ha, kPlaneShift)),
              _mm512_sub_epi32(vb, _mm512_slli_epi32(hb, kPlaneShift)), out->q[1]);
  const int32_t sum_a = _mm512_reduce_add_epi32(va), sum_b = _mm512_reduce_add_epi32(vb);
  out->scale = magnitude / kAct16Largest;
  out->sum = out->scale * static_cast<float>(sum_a + sum_b);
  out->half_sum[0] = out->scale * static_cast<float>(sum_a);
  out->half_sum[1] = out->scale * static_cast<float>(sum_b);
  out->neg_sums[0] = -sum_a;
  out->neg_sums[1] = -sum_b;
}

// ---- 8 bits: two blocks side by side, of which lanes [0, 8) and [8, 16) of a vector are ----

// For each block the greatest value (4 lanes) and minus the least (4 lanes).
TELLIN_INLINE __m512 limits_of(__m512 a0, __m512 b0, __m512 a1, __m512 b1) {
  const __m512 sign = _mm512_set1_ps(-0.0f);
  const __m512 high0 = _mm512_max_ps(a0, b0), low0 = _mm512_xor_ps(_mm512_min_ps(a0, b0), sign);
  const __m512 high1 = _mm512_max_ps(a1, b1), low1 = _mm512_xor_ps(_mm512_min_ps(a1, b1), sign);
  const __m512 both0 =
      _mm512_max_ps(_mm512_shuffle_f32x4(high0, low0, 0x44), _mm512_shuffle_f32x4(high0, low0, 0xee));
  const __m512 both1 =
      _mm512_max_ps(_mm512_shuffle_f32x4(high1, low1, 0x44), _mm512_shuffle_f32x4(high1, low1, 0xee));
  __m512 limits =
      _mm512_max_ps(_mm512_shuffle_f32x4(both0, both1, 0x88), _mm512_shuffle_f32x4(both0, both1, 0xdd));
  limits = _mm512_max_ps(limits, _mm512_permute_ps(limits, 0x4e));
  return _mm512_max_ps(limits, _mm512_permute_ps(limits, 0xb1));
}

// The place of m in {1, 1.25, 1.5, 1.75} of scales m * 2^e, from bit 0 on; greater bits are the exponent's.
constexpr int kScalePlaceShift = 21;

// The zeros of the lanes' block, and its scale. `limits`: see limits_of.
struct Grid {
  __m512i zero;
  __m512 scale;
  __m512 magnitude;
};

TELLIN_INLINE Grid grid_of(__m512 limits) {
  const __m512 others = _mm512_shuffle_f32x4(limits, limits, 0xb1);
  // Lanes [0, 4) of a block: of its greatest value; [4, 8): of minus the least, with all signs reversed.
  const __m512 middle =
      _mm512_div_ps(_mm512_mul_ps(_mm512_sub_ps(limits, others), _mm512_set1_ps(kAct8StepsPerMiddle)),
                    _mm512_add_ps(limits, others));
  const __m512 most = _mm512_set1_ps(kMostZeroSteps);
  // The lesser magnitude, with the sign of the first.
  const __m512i steps = _mm512_cvtps_epi32(_mm512_range_ps(middle, most, 2));
  // By the low 4 bits of steps, and of steps + 8 for the least value, whose steps are negative.
  const float* const up = kAct8Up + kMostZeroSteps;
  const float* const down = kAct8Down + kMostZeroSteps;
  const __m512 inverse_ends =
      _mm512_setr_ps(up[0], up[1], up[2], up[3], 0, down[3], down[2], down[1], down[0], down[-1], down[-2],
                     down[-3], 0, up[-3], up[-2], up[-1]);
  const __m512i end = _mm512_setr_epi32(0, 0, 0, 0, 8, 8, 8, 8, 0, 0, 0, 0, 8, 8, 8, 8);
  const __m512 needs =
      _mm512_mul_ps(limits, _mm512_permutexvar_ps(_mm512_add_epi32(steps, end), inverse_ends));
  const __m512i need = _mm512_castps_si512(_mm512_max_ps(needs, _mm512_shuffle_f32x4(needs, needs, 0xb1)));
  const __m512i rest = _mm512_set1_epi32(kAct8ScaleRest);
  const __m512i scale = _mm512_andnot_si512(rest, _mm512_add_epi32(need, rest));
  const __m512i signed_zero = _mm512_slli_epi32(steps, 5);
  static_assert(kZeroUnit == 1 << 5, "zeros are steps, shifted");
  return {_mm512_shuffle_i64x2(signed_zero, signed_zero, 0xa0), _mm512_castsi512_ps(scale),
          _mm512_max_ps(limits, others)};
}

// 1 / scale, correctly rounded as a division: that of m, its exponent less that of the scale.
TELLIN_INLINE __m512 inverse_of(__m512 scale) {
  const auto entry = [](int i) {
    int32_t bits;
    const float inverse = 1.0f / kAct8Scale[i];
    __builtin_memcpy(&bits, &inverse, sizeof bits);
    return bits + (127 << 23) + (i << kScalePlaceShift);
  };
  const __m512i bits = _mm512_castps_si512(scale);
  const __m512i entries = _mm512_set4_epi32(entry(3), entry(2), entry(1), entry(0));
  const __m512 sum =
      _mm512_permutevar_ps(_mm512_castsi512_ps(entries), _mm512_srli_epi32(bits, kScalePlaceShift));
  return _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_castps_si512(sum), bits));
}

// What follows q in both records. q + 128 is given.
TELLIN_INLINE __m512i record_ends(__m512i shifted, const Grid& grid) {
  // Sums of 8, then of 16 values: at dwords 0, 4, 8 and 12, with zeros behind them.
  const __m512i octets = _mm512_sad_epu8(shifted, _mm512_setzero_si512());
  const __m512i halves = _mm512_add_epi64(octets, _mm512_shuffle_epi32(octets, _MM_PERM_BADC));
  const __m512i first = _mm512_setr_epi32(1, 0, 0, 4, 0, 0, 4, 1, 1, 8, 8, 12, 8, 8, 12, 1);
  const __m512i second = _mm512_setr_epi32(1, 4, 1, 1, 4, 1, 1, 1, 1, 12, 1, 1, 12, 1, 1, 1);
  const __m512i sums =
      _mm512_add_epi32(_mm512_permutexvar_epi32(first, halves), _mm512_permutexvar_epi32(second, halves));
  constexpr int kShift = 128 * kBlockK;
  const __m512i shifts =
      _mm512_setr_epi32(-1, kShift, kShift / 2, kShift / 2, kShift, kShift / 2, kShift / 2, 0, -1, kShift,
                        kShift / 2, kShift / 2, kShift, kShift / 2, kShift / 2, 0);
  // (-1, -sum, -sums of the halves), (-sum, -sums of the halves, 0)
  const __m512i negative = _mm512_sub_epi32(shifts, sums);
  const __m512i log2_counts = _mm512_setr_epi32(32, 5, 4, 4, 0, 0, 0, 0, 32, 5, 4, 4, 0, 0, 0, 0);
  const __m512i whole = _mm512_sub_epi32(_mm512_sllv_epi32(grid.zero, log2_counts), negative);
  const __m512i scaled = _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(whole), grid.scale));
  const __m512i pairs = or_masked(_mm512_slli_epi32(negative, 16), grid.zero, _mm512_set1_epi32(0xffff));
  // (scale_offset, zero_offset): 64 times the scale's place, and twice the zero, from the least on.
  const __m512i place = _mm512_srli_epi32(_mm512_castps_si512(grid.scale), kScalePlaceShift - 6);
  const __m512i zeros = _mm512_add_epi32(_mm512_slli_epi32(grid.zero, 17),
                                         _mm512_set1_epi32(kMostZeroSteps * kEntryBytes << 16));
  static_assert(kEntryBytes == 1 << 6 && kEntryBytes == 2 * kZeroUnit, "offsets are shifted");
  const __m512i offsets = or_masked(zeros, place, _mm512_set1_epi32(3 * kEntryBytes));
  return _mm512_mask_blend_epi32(0x8080, _mm512_mask_blend_epi32(0x0f0f, pairs, scaled), offsets);
}

// Values [0, 16) and [16, 32) of two blocks, and where their records are.
struct Pair {
  __m512 a0, b0, a1, b1;
  Act8 *out0, *out1;
};

// The next two blocks of the walk. The last one of an odd number is both.
TELLIN_INLINE Pair next_pair(BlockWalk& walk) {
  const auto record = [&walk] { return reinterpret_cast<Act8*>(walk.records()) + walk.block(); };
  walk.fetch_ahead<Act8>();
  Pair pair;
  pair.a0 = pair.a1 = _mm512_loadu_ps(walk.values());
  pair.b0 = pair.b1 = _mm512_loadu_ps(walk.values() + 16);
  pair.out0 = pair.out1 = record();
  walk.advance();
  if (walk.left() == 0) return pair;
  walk.fetch_ahead<Act8>();
  pair.a1 = _mm512_loadu_ps(walk.values());
  pair.b1 = _mm512_loadu_ps(walk.values() + 16);
  pair.out1 = record();
  walk.advance();
  return pair;
}

TELLIN_INLINE Grid grid_of(const Pair& x) {
  return grid_of(limits_of(x.a0, x.b0, x.a1, x.b1));
}

TELLIN_INLINE void quantize_pair(const Pair& x, const Grid& grid) {
  const __m512 inverse = inverse_of(grid.scale);
  const __m512 factor0 = _mm512_shuffle_f32x4(inverse, inverse, 0x00);
  const __m512 factor1 = _mm512_shuffle_f32x4(inverse, inverse, 0xaa);
  const auto whole = [](__m512 v, __m512 factor) { return _mm512_cvtps_epi32(_mm512_mul_ps(v, factor)); };
  const __m512i words0 = _mm512_packs_epi32(whole(x.a0, factor0), whole(x.b0, factor0));
  const __m512i words1 = _mm512_packs_epi32(whole(x.a1, factor1), whole(x.b1, factor1));
  // Low bytes, modulo 256: the difference from the zero fits.
  const __m512i low_byte = _mm512_set1_epi16(255);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_permutexvar_epi32(
      order, _mm512_packus_epi16(_mm512_and_si512(words0, low_byte), _mm512_and_si512(words1, low_byte)));
  const __m512i q = _mm512_sub_epi8(bytes, _mm512_shuffle_epi8(grid.zero, _mm512_setzero_si512()));
  const __m512i ends = record_ends(_mm512_xor_si512(q, _mm512_set1_epi8(-128)), grid);
  _mm512_storeu_si512(x.out0, _mm512_shuffle_i64x2(q, ends, 0x44));
  _mm512_storeu_si512(x.out1, _mm512_shuffle_i64x2(q, ends, 0xee));

  // Whole values are within +-256, but those of NaN are -2^31; the limits may hide a NaN.
  const __m512i least = _mm512_set1_epi16(-32768);
  const __mmask32 nan0 = _mm512_cmpeq_epi16_mask(words0, least);
  const __mmask32 nan1 = _mm512_cmpeq_epi16_mask(words1, least);
  const __mmask16 outside =
      _mm512_cmp_ps_mask(grid.magnitude, _mm512_set1_ps(kTinyAct8), _CMP_NGE_UQ) |
      _mm512_cmp_ps_mask(grid.magnitude, _mm512_set1_ps(kAct8LargestMagnitude), _CMP_NLE_UQ);
  if (__builtin_expect((nan0 | nan1 | outside) != 0, 0)) {
    if (nan0 != 0 || (outside & 1) != 0) store_special(x.a0, x.b0, x.out0);
    if (nan1 != 0 || outside >> 8 != 0) store_special(x.a1, x.b1, x.out1);
  }
}

// ---- rows ----

template <class Act>
TELLIN_INLINE void quantize_blocks(BlockWalk walk) {
  if (walk.left() == 0) return;
  if constexpr (Act::kPlanes == 1) {
    // A pair's grid is a long chain: it is found beside what the pair before stores.
    Pair next = next_pair(walk);
    Grid next_grid = grid_of(next);
    while (walk.left() > 0) {
      const Pair pair = next;
      const Grid grid = next_grid;
      next = next_pair(walk);
      next_grid = grid_of(next);
      quantize_pair(pair, grid);
    }
    quantize_pair(next, next_grid);
  } else {
    for (; walk.left() > 0; walk.advance()) {
      const float* const x = walk.values();
      quantize_block(_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16),
                     reinterpret_cast<Act*>(walk.records()) + walk.block());
    }
  }
}

template <class Act>
void quantize_records(const float* x, int64_t k, int64_t row, const QuantizedRows& out) {
  auto* blocks = reinterpret_cast<Act*>(out.data + row * out.row_bytes);
  const int64_t num_blocks = (k + 255) / 256 * 8, full = k / kBlockK;
  quantize_blocks<Act>({x, 0, row, row + 1, 0, full, out});
  if (full == num_blocks) return;
  float last[kBlockK] = {};
  __builtin_memcpy(last, x + full * kBlockK, static_cast<size_t>(k % kBlockK) * sizeof(float));
  quantize_blocks<Act>({last - full * kBlockK, 0, row, row + 1, full, full + 1, out});
  for (int64_t b = full + 1; b < num_blocks; ++b) store_zero_record(blocks + b);
}

void quantize_row(ActPrecision precision, const float* x, int64_t k, int64_t row, const QuantizedRows& out) {
  if (precision == ActPrecision::kInt8) {
    quantize_records<Act8>(x, k, row, out);
  } else {
    quantize_records<Act16>(x, k, row, out);
  }
}

void quantize_part(ActPrecision precision, const float* x, int64_t ldx, int64_t m0, int64_t m1, int64_t begin,
                   int64_t end, const QuantizedRows& out) {
  const BlockWalk walk(x, ldx, m0, m1, begin / kBlockK, end / kBlockK, out);
  if (precision == ActPrecision::kInt8) {
    quantize_blocks<Act8>(walk);
  } else {
    quantize_blocks<Act16>(walk);
  }
}

}  // namespace
}  // namespace tellin

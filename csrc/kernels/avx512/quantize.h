// AVX-512: quantisation of float32 activations to records of one or two planes.
#pragma once
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

// A block without a finite value of some size: zero, or all its outputs are NaN.
template <class Act>
TELLIN_INLINE void store_special(__m512 a, __m512 b, Act* out) {
  const __m512 largest = _mm512_set1_ps(__FLT_MAX__);
  const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(a), largest, _CMP_LE_OQ) &
                           _mm512_cmp_ps_mask(_mm512_abs_ps(b), largest, _CMP_LE_OQ);
  __builtin_memset(out, 0, sizeof *out);
  if (finite != 0xffff) out->scale = out->sum = out->half_sum[0] = out->half_sum[1] = __builtin_nanf("");
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

// What follows q in both records. q + 128 is given; zero and scale are those of the lanes' block.
TELLIN_INLINE __m512i record_ends(__m512i shifted, __m512i zero, __m512 scale) {
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
  const __m512i whole = _mm512_sub_epi32(_mm512_sllv_epi32(zero, log2_counts), negative);
  const __m512i scaled = _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(whole), scale));
  const __m512i low_words =
      _mm512_setr_epi32(0, 0, 0, 0, 0xffff, 0xffff, 0xffff, 0, 0, 0, 0, 0, 0xffff, 0xffff, 0xffff, 0);
  const __m512i pairs = or_masked(_mm512_slli_epi32(negative, 16), zero, low_words);
  return _mm512_mask_blend_epi32(0x0f0f, pairs, scaled);
}

// Values [0, 16) and [16, 32) of two blocks; stores `count` records, one or two.
TELLIN_INLINE void quantize_pair(__m512 a0, __m512 b0, __m512 a1, __m512 b1, int count, Act8* out) {
  const __m512 limits = limits_of(a0, b0, a1, b1);
  const __m512 others = _mm512_shuffle_f32x4(limits, limits, 0xb1);
  const __m512 magnitude = _mm512_max_ps(limits, others);
  const __m512 range = _mm512_max_ps(_mm512_add_ps(limits, others),
                                     _mm512_mul_ps(magnitude, _mm512_set1_ps(kAct8Steps / kAct8LargestZero)));
  const __m512 steps = _mm512_set1_ps(kAct8Steps);
  // Lanes [0, 4) of a block: inverse scale; [4, 8): scale.
  const __m512 quotients =
      _mm512_div_ps(_mm512_mask_blend_ps(0xf0f0, steps, range), _mm512_mask_blend_ps(0xf0f0, range, steps));
  const __m512 inverse = _mm512_shuffle_f32x4(quotients, quotients, 0xa0);
  const __m512 negative_low = _mm512_shuffle_f32x4(limits, limits, 0xf5);
  const __m512i zero =
      _mm512_sub_epi32(_mm512_set1_epi32(128), _mm512_cvtps_epi32(_mm512_mul_ps(negative_low, inverse)));

  const __m512 factor0 = _mm512_shuffle_f32x4(quotients, quotients, 0x00);
  const __m512 factor1 = _mm512_shuffle_f32x4(quotients, quotients, 0xaa);
  const auto whole = [](__m512 v, __m512 factor) { return _mm512_cvtps_epi32(_mm512_mul_ps(v, factor)); };
  const __m512i words0 = _mm512_packs_epi32(whole(a0, factor0), whole(b0, factor0));
  const __m512i words1 = _mm512_packs_epi32(whole(a1, factor1), whole(b1, factor1));
  // Low bytes, modulo 256: the difference from the zero fits.
  const __m512i low_byte = _mm512_set1_epi16(255);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_permutexvar_epi32(
      order, _mm512_packus_epi16(_mm512_and_si512(words0, low_byte), _mm512_and_si512(words1, low_byte)));
  const __m512i q = _mm512_sub_epi8(bytes, _mm512_shuffle_epi8(zero, _mm512_setzero_si512()));
  const __m512i ends = record_ends(_mm512_xor_si512(q, _mm512_set1_epi8(-128)), zero,
                                   _mm512_shuffle_f32x4(quotients, quotients, 0xf5));
  _mm512_storeu_si512(out, _mm512_shuffle_i64x2(q, ends, 0x44));
  if (count == 2) _mm512_storeu_si512(out + 1, _mm512_shuffle_i64x2(q, ends, 0xee));

  // Whole values are within +-32001, but for those of NaN and infinities, which are -2^31.
  const __m512i least = _mm512_set1_epi16(-32768);
  const __mmask16 tiny = _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(kTinyAct), _CMP_NGE_UQ);
  const __mmask32 special =
      _mm512_cmpeq_epi16_mask(words0, least) | _mm512_cmpeq_epi16_mask(words1, least) | tiny;
  if (__builtin_expect(special != 0, 0)) {
    if (_mm512_cmpeq_epi16_mask(words0, least) != 0 || (tiny & 1) != 0) store_special(a0, b0, out);
    if (count == 2 && (_mm512_cmpeq_epi16_mask(words1, least) != 0 || tiny >> 8 != 0)) {
      store_special(a1, b1, out + 1);
    }
  }
}

// ---- rows ----

TELLIN_INLINE void quantize_blocks(const float* x, int64_t count, Act8* out) {
  for (; count >= 2; count -= 2, x += 2 * kBlockK, out += 2) {
    quantize_pair(_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16), _mm512_loadu_ps(x + 32),
                  _mm512_loadu_ps(x + 48), 2, out);
  }
  if (count == 1) {
    const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    quantize_pair(a, b, a, b, 1, out);
  }
}

TELLIN_INLINE void quantize_blocks(const float* x, int64_t count, Act16* out) {
  for (int64_t b = 0; b < count; ++b, x += kBlockK) {
    quantize_block(_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16), out + b);
  }
}

template <class Act>
void quantize_records(const float* x, int64_t k, int64_t row, const QuantizedRows& out) {
  auto* blocks = reinterpret_cast<Act*>(out.data + row * out.row_bytes);
  const int64_t num_blocks = (k + 255) / 256 * 8, full = k / kBlockK;
  quantize_blocks(x, full, blocks);
  if (full == num_blocks) return;
  float last[kBlockK] = {};
  __builtin_memcpy(last, x + full * kBlockK, static_cast<size_t>(k % kBlockK) * sizeof(float));
  quantize_blocks(last, 1, blocks + full);
  __builtin_memset(blocks + full + 1, 0, static_cast<size_t>(num_blocks - full - 1) * sizeof(Act));
}

void quantize_row(ActPrecision precision, const float* x, int64_t k, int64_t row, const QuantizedRows& out) {
  if (precision == ActPrecision::kInt8) {
    quantize_records<Act8>(x, k, row, out);
  } else {
    quantize_records<Act16>(x, k, row, out);
  }
}

void quantize_part(ActPrecision precision, const float* x, int64_t begin, int64_t end, int64_t row,
                   const QuantizedRows& out) {
  uint8_t* target = out.data + row * out.row_bytes;
  const int64_t first = begin / kBlockK, count = (end - begin) / kBlockK;
  if (precision == ActPrecision::kInt8) {
    quantize_blocks(x + begin, count, reinterpret_cast<Act8*>(target) + first);
  } else {
    quantize_blocks(x + begin, count, reinterpret_cast<Act16*>(target) + first);
  }
}

}  // namespace
}  // namespace tellin

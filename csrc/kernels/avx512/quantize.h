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

// Scale and sums of a block whose whole values are v + zero.
template <class Act>
TELLIN_INLINE void store_sums(float scale, int32_t zero, int32_t sum0, int32_t sum1, Act* out) {
  out->scale = scale;
  out->sum = scale * static_cast<float>(sum0 + sum1 + kBlockK * zero);
  out->half_sum[0] = scale * static_cast<float>(sum0 + kBlockK / 2 * zero);
  out->half_sum[1] = scale * static_cast<float>(sum1 + kBlockK / 2 * zero);
}

// The greatest and (negated) the least of a block's values.
struct Range {
  float high, negative_low;
};

TELLIN_INLINE Range range_of(__m512 a, __m512 b) {
  const __m512 highs = _mm512_max_ps(a, b);
  const __m512 lows = _mm512_xor_ps(_mm512_min_ps(a, b), _mm512_set1_ps(-0.0f));
  // Each folded to 8 lanes, then both at once, in halves of a vector.
  const __m256 high = _mm256_max_ps(_mm512_castps512_ps256(highs), _mm512_extractf32x8_ps(highs, 1));
  const __m256 low = _mm256_max_ps(_mm512_castps512_ps256(lows), _mm512_extractf32x8_ps(lows, 1));
  __m256 both =
      _mm256_max_ps(_mm256_permute2f128_ps(high, low, 0x20), _mm256_permute2f128_ps(high, low, 0x31));
  both = _mm256_max_ps(both, _mm256_permute_ps(both, 0x4e));
  both = _mm256_max_ps(both, _mm256_permute_ps(both, 0xb1));
  return {_mm256_cvtss_f32(both), _mm_cvtss_f32(_mm256_extractf128_ps(both, 1))};
}

TELLIN_INLINE void quantize_finite(__m512 a, __m512 b, const Range& is, float magnitude, Act8* out) {
  const float low = -is.negative_low;
  const float least = magnitude * (kAct8Steps / kAct8LargestZero);
  const float range = is.high - low > least ? is.high - low : least;
  const float inverse = kAct8Steps / range;
  const int32_t zero = _mm_cvtss_si32(_mm_set_ss(low * inverse)) + 128;
  const __m512 factor = _mm512_set1_ps(inverse);
  const __m512i zeros = _mm512_set1_epi32(zero);
  const __m512i qa = _mm512_sub_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(a, factor)), zeros);
  const __m512i qb = _mm512_sub_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(b, factor)), zeros);
  const __m256i q = _mm256_set_m128i(_mm512_cvtepi32_epi8(qb), _mm512_cvtepi32_epi8(qa));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out->q[0]), q);
  // Sums of 8 values + 128 each.
  const __m256i octets = _mm256_sad_epu8(_mm256_xor_si256(q, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
  const __m256i halves = _mm256_add_epi64(octets, _mm256_shuffle_epi32(octets, 0x4e));
  constexpr int32_t kShift = 128 * kBlockK / 2;
  const int32_t sum_a = _mm_cvtsi128_si32(_mm256_castsi256_si128(halves)) - kShift;
  const int32_t sum_b = _mm_cvtsi128_si32(_mm256_extracti128_si256(halves, 1)) - kShift;
  store_sums(range / kAct8Steps, zero, sum_a, sum_b, out);
  const int32_t sums[3] = {sum_a + sum_b, sum_a, sum_b};
  for (int i = 0; i < 3; ++i) {
    out->zero_pair[i][0] = static_cast<int16_t>(zero);
    out->zero_pair[i][1] = static_cast<int16_t>(-sums[i]);
  }
  out->reserved = 0;
}

TELLIN_INLINE void quantize_finite(__m512 a, __m512 b, const Range&, float magnitude, Act16* out) {
  const __m512 factor = _mm512_set1_ps(kAct16Largest / magnitude);
  const __m512i va = _mm512_cvtps_epi32(_mm512_mul_ps(a, factor));
  const __m512i vb = _mm512_cvtps_epi32(_mm512_mul_ps(b, factor));
  const __m512i ha = high_plane(va), hb = high_plane(vb);
  store_plane(ha, hb, out->q[0]);
  store_plane(_mm512_sub_epi32(va, _mm512_slli_epi32(ha, kPlaneShift)),
              _mm512_sub_epi32(vb, _mm512_slli_epi32(hb, kPlaneShift)), out->q[1]);
  const int32_t sum_a = _mm512_reduce_add_epi32(va), sum_b = _mm512_reduce_add_epi32(vb);
  store_sums(magnitude / kAct16Largest, 0, sum_a, sum_b, out);
  out->neg_sums[0] = -sum_a;
  out->neg_sums[1] = -sum_b;
}

template <class Act>
TELLIN_INLINE void quantize_block(__m512 a, __m512 b, Act* out) {
  const __m512 abs_a = _mm512_abs_ps(a), abs_b = _mm512_abs_ps(b);
  const __m512 largest = _mm512_set1_ps(__FLT_MAX__);
  const __mmask16 finite =
      _mm512_cmp_ps_mask(abs_a, largest, _CMP_LE_OQ) & _mm512_cmp_ps_mask(abs_b, largest, _CMP_LE_OQ);
  const Range range = range_of(a, b);
  const float magnitude = range.high > range.negative_low ? range.high : range.negative_low;
  if (__builtin_expect(finite == 0xffff && magnitude >= kTinyAct, 1)) {
    quantize_finite(a, b, range, magnitude, out);
  } else {
    __builtin_memset(out, 0, sizeof *out);
    if (finite != 0xffff) out->scale = out->sum = out->half_sum[0] = out->half_sum[1] = __builtin_nanf("");
  }
}

template <class Act>
void quantize_records(const float* x, int64_t k, int64_t row, const QuantizedRows& out) {
  auto* blocks = reinterpret_cast<Act*>(out.data + row * out.row_bytes);
  const int64_t num_blocks = (k + 255) / 256 * 8, full = k / kBlockK;
  for (int64_t b = 0; b < full; ++b) {
    quantize_block(_mm512_loadu_ps(x + b * kBlockK), _mm512_loadu_ps(x + b * kBlockK + 16), blocks + b);
  }
  for (int64_t b = full; b < num_blocks; ++b) {
    const int64_t left = k - b * kBlockK;
    const uint32_t mask = left > 0 ? (1u << left) - 1 : 0;
    const __m512 lo = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), x + b * kBlockK);
    const __m512 hi = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), x + b * kBlockK + 16);
    quantize_block(lo, hi, blocks + b);
  }
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
  for (int64_t b = begin / kBlockK; b < end / kBlockK; ++b) {
    if (precision == ActPrecision::kInt8) {
      quantize_block(_mm512_loadu_ps(x + b * kBlockK), _mm512_loadu_ps(x + b * kBlockK + 16),
                     reinterpret_cast<Act8*>(target) + b);
    } else {
      quantize_block(_mm512_loadu_ps(x + b * kBlockK), _mm512_loadu_ps(x + b * kBlockK + 16),
                     reinterpret_cast<Act16*>(target) + b);
    }
  }
}

}  // namespace
}  // namespace tellin

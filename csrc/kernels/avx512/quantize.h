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

template <class Act>
TELLIN_INLINE void quantize_block(__m512 a, __m512 b, Act* out) {
  constexpr float kLargest = Act::kLargest;
  const __m512 abs_a = _mm512_abs_ps(a), abs_b = _mm512_abs_ps(b);
  const __m512 largest = _mm512_set1_ps(__FLT_MAX__);
  const __mmask16 finite =
      _mm512_cmp_ps_mask(abs_a, largest, _CMP_LE_OQ) & _mm512_cmp_ps_mask(abs_b, largest, _CMP_LE_OQ);
  const float amax = _mm512_reduce_max_ps(_mm512_max_ps(abs_a, abs_b));
  float inverse = 0.0f, scale = 0.0f;
  if (__builtin_expect(amax >= 0x1p-100f, 1)) {  // below, the inverse would overflow: zero for every purpose
    inverse = kLargest / amax;
    scale = amax / kLargest;
  }
  if (__builtin_expect(finite != 0xffff, 0)) {
    inverse = 0.0f;
    scale = __builtin_nanf("");
    a = b = _mm512_setzero_ps();
  }
  const __m512 factor = _mm512_set1_ps(inverse);
  const __m512i qa = _mm512_cvtps_epi32(_mm512_mul_ps(a, factor)),
                qb = _mm512_cvtps_epi32(_mm512_mul_ps(b, factor));
  if constexpr (Act::kPlanes == 1) {
    store_plane(qa, qb, out->q[0]);
  } else {
    const __m512i ha = high_plane(qa), hb = high_plane(qb);
    store_plane(ha, hb, out->q[0]);
    store_plane(_mm512_sub_epi32(qa, _mm512_slli_epi32(ha, kPlaneShift)),
                _mm512_sub_epi32(qb, _mm512_slli_epi32(hb, kPlaneShift)), out->q[1]);
  }
  const int32_t sum_a = _mm512_reduce_add_epi32(qa), sum_b = _mm512_reduce_add_epi32(qb);
  out->scale = scale;
  out->scaled_sum = scale * static_cast<float>(sum_a + sum_b);
  out->neg_sums[0] = -sum_a;
  out->neg_sums[1] = -sum_b;
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

}  // namespace
}  // namespace tellin

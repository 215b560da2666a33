// AVX2: quantisation of float32 activations to records of one or two planes.
#pragma once
#include "codes.h"
#include "tellin/linear.h"

namespace tellin {
namespace {

TELLIN_INLINE float horizontal_max(__m256 v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

TELLIN_INLINE int32_t horizontal_sum(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

TELLIN_INLINE void store_plane(const __m256i (&v)[4], int8_t* q) {
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
  const __m256i ordered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), ordered);
}

// Scale and sums of a block whose whole values are v + zero.
template <class Act>
TELLIN_INLINE void store_sums(float scale, int32_t zero, int32_t sum0, int32_t sum1, Act* out) {
  out->scale = scale;
  out->sum = scale * static_cast<float>(sum0 + sum1 + kBlockK * zero);
  out->half_sum[0] = scale * static_cast<float>(sum0 + kBlockK / 2 * zero);
  out->half_sum[1] = scale * static_cast<float>(sum1 + kBlockK / 2 * zero);
}

TELLIN_INLINE void quantize_finite(const __m256 (&v)[4], float magnitude, Act8* out) {
  const __m256 highs = _mm256_max_ps(_mm256_max_ps(v[0], v[1]), _mm256_max_ps(v[2], v[3]));
  const __m256 lows = _mm256_min_ps(_mm256_min_ps(v[0], v[1]), _mm256_min_ps(v[2], v[3]));
  const float high = horizontal_max(highs), low = -horizontal_max(_mm256_xor_ps(lows, _mm256_set1_ps(-0.0f)));
  const float least = magnitude * (kAct8Steps / kAct8LargestZero);
  const float range = high - low > least ? high - low : least;
  const float inverse = kAct8Steps / range;
  const int32_t zero = _mm_cvtss_si32(_mm_set_ss(low * inverse)) + 128;
  const __m256 factor = _mm256_set1_ps(inverse);
  const __m256i zeros = _mm256_set1_epi32(zero);
  __m256i q[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) q[i] = _mm256_sub_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(v[i], factor)), zeros);
  store_plane(q, out->q[0]);
  const int32_t sum0 = horizontal_sum(_mm256_add_epi32(q[0], q[1]));
  const int32_t sum1 = horizontal_sum(_mm256_add_epi32(q[2], q[3]));
  store_sums(range / kAct8Steps, zero, sum0, sum1, out);
  const int32_t sums[3] = {sum0 + sum1, sum0, sum1};
  for (int i = 0; i < 3; ++i) {
    out->zero_pair[i][0] = static_cast<int16_t>(zero);
    out->zero_pair[i][1] = static_cast<int16_t>(-sums[i]);
  }
  out->reserved = 0;
}

TELLIN_INLINE void quantize_finite(const __m256 (&x)[4], float magnitude, Act16* out) {
  const __m256 factor = _mm256_set1_ps(kAct16Largest / magnitude);
  const __m256i half = _mm256_set1_epi32(1 << (kPlaneShift - 1));
  __m256i v[4], high[4], low[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], factor));
    high[i] = _mm256_srai_epi32(_mm256_add_epi32(v[i], half), kPlaneShift);  // leaves a rest within [-64, 63]
    low[i] = _mm256_sub_epi32(v[i], _mm256_slli_epi32(high[i], kPlaneShift));
  }
  store_plane(high, out->q[0]);
  store_plane(low, out->q[1]);
  const int32_t sum0 = horizontal_sum(_mm256_add_epi32(v[0], v[1]));
  const int32_t sum1 = horizontal_sum(_mm256_add_epi32(v[2], v[3]));
  store_sums(magnitude / kAct16Largest, 0, sum0, sum1, out);
  out->neg_sums[0] = -sum0;
  out->neg_sums[1] = -sum1;
}

template <class Act>
TELLIN_INLINE void quantize_block(const float* x, Act* out) {
  __m256 v[4];
  const __m256 sign = _mm256_set1_ps(-0.0f), largest = _mm256_set1_ps(__FLT_MAX__);
  __m256 magnitudes = _mm256_setzero_ps(), finite = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_loadu_ps(x + 8 * i);
    const __m256 a = _mm256_andnot_ps(sign, v[i]);
    finite = _mm256_and_ps(finite, _mm256_cmp_ps(a, largest, _CMP_LE_OQ));
    magnitudes = _mm256_max_ps(magnitudes, a);
  }
  const float magnitude = horizontal_max(magnitudes);
  const bool is_finite = _mm256_movemask_ps(finite) == 0xff;
  if (__builtin_expect(is_finite && magnitude >= kTinyAct, 1)) {
    quantize_finite(v, magnitude, out);
  } else {
    __builtin_memset(out, 0, sizeof *out);
    if (!is_finite) out->scale = out->sum = out->half_sum[0] = out->half_sum[1] = __builtin_nanf("");
  }
}

template <class Act>
void quantize_records(const float* x, int64_t k, int64_t row, const QuantizedRows& out) {
  auto* blocks = reinterpret_cast<Act*>(out.data + row * out.row_bytes);
  const int64_t num_blocks = (k + 255) / 256 * 8, full = k / kBlockK;
  for (int64_t b = 0; b < full; ++b) quantize_block(x + b * kBlockK, blocks + b);
  for (int64_t b = full; b < num_blocks; ++b) {
    float tail[kBlockK] = {};
    for (int64_t i = b * kBlockK; i < k; ++i) tail[i - b * kBlockK] = x[i];
    quantize_block(tail, blocks + b);
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
      quantize_block(x + b * kBlockK, reinterpret_cast<Act8*>(target) + b);
    } else {
      quantize_block(x + b * kBlockK, reinterpret_cast<Act16*>(target) + b);
    }
  }
}

}  // namespace
}  // namespace tellin

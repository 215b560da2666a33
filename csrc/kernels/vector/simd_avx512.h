// Vector of sixteen floats: AVX-512 F.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

struct Simd {
  static constexpr int kWidth = 16;
  static constexpr int kAttendRows = 8;
  static constexpr int kStateVectors = 2;  // of a recurrence's matrix, side by side
  // Vectors side by side in attention: 8 to 24 chains of multiply-adds in 32 registers.
  static constexpr int attend_vectors(int rows) { return rows <= 2 ? 8 : (rows <= 6 ? 4 : 2); }

  using V = __m512;

  static inline V load(const float* p) { return _mm512_loadu_ps(p); }
  static inline void store(float* p, V v) { _mm512_storeu_ps(p, v); }
  static inline __mmask16 mask(int count) { return static_cast<__mmask16>((1u << count) - 1); }
  static inline V load_partial(const float* p, int count) { return _mm512_maskz_loadu_ps(mask(count), p); }
  static inline void store_partial(float* p, V v, int count) { _mm512_mask_storeu_ps(p, mask(count), v); }
  static inline V set1(float x) { return _mm512_set1_ps(x); }
  static inline V zero() { return _mm512_setzero_ps(); }
  static inline V add(V a, V b) { return _mm512_add_ps(a, b); }
  static inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static inline V div(V a, V b) { return _mm512_div_ps(a, b); }
  static inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static inline V fnma(V a, V b, V c) { return _mm512_fnmadd_ps(a, b, c); }
  static inline V max(V a, V b) { return _mm512_max_ps(a, b); }  // b if either is NaN
  static inline V min(V a, V b) { return _mm512_min_ps(a, b); }
  static inline V abs(V a) { return _mm512_abs_ps(a); }
  static inline V copysign(V magnitude, V sign) {
    const __m512i bit = _mm512_set1_epi32(INT32_MIN);
    return _mm512_castsi512_ps(  // bit ? sign : magnitude
        _mm512_ternarylogic_epi32(bit, _mm512_castps_si512(sign), _mm512_castps_si512(magnitude), 0xCA));
  }
  static inline V select_lt(V a, V b, V x, V y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
  }
  static inline V round(V a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static inline V scale_pow2(V a, V n) { return _mm512_scalef_ps(a, n); }
  static inline V add_exponent(V a, V n) {
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23)));
  }
  static inline float reduce_add(V a) {  // halves, then as in eight lanes
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 v = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
  }
  static inline float reduce_max(V a) {
    const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 v = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    v = _mm_max_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)));
  }
  static inline V load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static inline void store_f16(uint16_t* p, V v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  static inline V load_i8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }

  // ---- pairs of 16-bit integers
  static constexpr int kDotRows = 6;
  // Tiles, or vectors of columns, side by side for so many rows.
  static constexpr int dot_tiles(int) { return 4; }
  static constexpr int dot_columns(int) { return 4; }

  using Pairs = __m512i;  // one pair per lane
  using Sums = __m512i;   // of kWidth lanes
  static inline Pairs load_pairs(const int16_t* p) { return _mm512_loadu_si512(p); }
  static inline Pairs set1_pair(const int16_t* p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
  }
  static inline Sums no_sums() { return _mm512_setzero_si512(); }
  // sums + the dot product of each lane's pairs. With intrinsics GCC moves sums about and spills them.
  static inline Sums dot(Sums sums, Pairs a, Pairs b) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    return sums;
  }
  static inline V to_float(Sums sums) { return _mm512_cvtepi32_ps(sums); }
  // Nearest integers, of at most 16 bits.
  static inline void store_codes(int16_t* p, V v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(v)));
  }
  // Codes as the first, or the second, of n pairs; the other stays as it is. n is a multiple of 8.
  static inline void store_halves(int16_t* pairs, bool is_second, const int16_t* codes, int64_t n) {
    const __mmask32 halves = is_second ? 0xaaaaaaaau : 0x55555555u;
    const __m128i shift = _mm_cvtsi32_si128(is_second ? 16 : 0);
    for (int64_t i = 0; i < n; i += kWidth) {
      const __m256i part = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i));
      const __m512i words = _mm512_sll_epi32(_mm512_cvtepi16_epi32(part), shift);
      _mm512_mask_storeu_epi16(pairs + 2 * i, n - i < kWidth ? halves & 0xffff : halves, words);
    }
  }
  // Floats of which the lower, or the upper, half of each word holds the upper 16 bits.
  static inline V load_low_halves(const uint8_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
  }
  static inline V load_high_halves(const uint8_t* p) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(-65536)));
  }
  // Larger of two numbers >= 0; NaN is larger than any.
  static inline V max_or_nan(V a, V b) {
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  }
  static inline float reduce_max_or_nan(V a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m256i half = _mm256_max_epi32(_mm512_castsi512_si256(bits), _mm512_extracti64x4_epi64(bits, 1));
    __m128i v = _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    v = _mm_max_epi32(v, _mm_unpackhi_epi64(v, v));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(v, _mm_shuffle_epi32(v, 1))));
  }
};

}  // namespace

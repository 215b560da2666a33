// Vector of eight floats: AVX2, FMA and F16C.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

struct Simd {
  static constexpr int kWidth = 8;
  static constexpr int kAttendRows = 6;
  static constexpr int kStateVectors = 2;  // of a recurrence's matrix, side by side
  // Vectors side by side in attention: 8 to 12 chains of multiply-adds in 16 registers.
  static constexpr int attend_vectors(int rows) { return rows == 1 ? 8 : (rows <= 4 ? 12 / rows : 2); }

  using V = __m256;

  static inline V load(const float* p) { return _mm256_loadu_ps(p); }
  static inline void store(float* p, V v) { _mm256_storeu_ps(p, v); }
  static inline __m256i mask(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static inline V load_partial(const float* p, int count) { return _mm256_maskload_ps(p, mask(count)); }
  static inline void store_partial(float* p, V v, int count) { _mm256_maskstore_ps(p, mask(count), v); }
  static inline V set1(float x) { return _mm256_set1_ps(x); }
  static inline V zero() { return _mm256_setzero_ps(); }
  static inline V add(V a, V b) { return _mm256_add_ps(a, b); }
  static inline V sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static inline V div(V a, V b) { return _mm256_div_ps(a, b); }
  static inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static inline V fnma(V a, V b, V c) { return _mm256_fnmadd_ps(a, b, c); }
  static inline V max(V a, V b) { return _mm256_max_ps(a, b); }  // b if either is NaN
  static inline V min(V a, V b) { return _mm256_min_ps(a, b); }
  static inline V abs(V a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  static inline V copysign(V magnitude, V sign) {
    const V bit = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_andnot_ps(bit, magnitude), _mm256_and_ps(bit, sign));
  }
  static inline V select_lt(V a, V b, V x, V y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  static inline V round(V a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // a * 2^n for whole n in [-126, 127].
  static inline V scale_pow2(V a, V n) {
    const __m256i exponent =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(exponent));
  }
  // The same for n <= 0 and normal a and results; NaN stays NaN where n is one too.
  static inline V add_exponent(V a, V n) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
  }
  static inline float reduce_add(V a) {
    __m128 v = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
  }
  static inline float reduce_max(V a) {
    __m128 v = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    v = _mm_max_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)));
  }
  static inline V load_f16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static inline void store_f16(uint16_t* p, V v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  static inline V load_i8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }

  // ---- pairs of 16-bit integers
  static constexpr int kDotRows = 6;
  // Tiles, or vectors of columns, side by side for so many rows.
  static constexpr int dot_tiles(int rows) { return rows <= 3 ? 2 : 1; }
  static constexpr int dot_columns(int rows) { return rows <= 3 ? 4 : 2; }

  using Pairs = __m256i;  // one pair per lane
  using Sums = __m256i;   // of kWidth lanes
  static inline Pairs load_pairs(const int16_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static inline Pairs set1_pair(const int16_t* p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return _mm256_set1_epi32(pair);
  }
  static inline Sums no_sums() { return _mm256_setzero_si256(); }
  // sums + the dot product of each lane's pairs. With intrinsics GCC moves sums about and spills them.
  static inline Sums dot(Sums sums, Pairs a, Pairs b) {
#ifdef __AVXVNNI__
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sums) : "x"(a), "x"(b));
#else
    asm("vpaddd %1, %0, %0" : "+x"(sums) : "x"(_mm256_madd_epi16(a, b)));
#endif
    return sums;
  }
  static inline V to_float(Sums sums) { return _mm256_cvtepi32_ps(sums); }
  // Nearest integers, of at most 16 bits.
  static inline void store_codes(int16_t* p, V v) {
    const __m256i codes = _mm256_cvtps_epi32(v);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1)));
  }
  // Codes as the first, or the second, of n pairs; the other stays as it is.
  static inline void store_halves(int16_t* pairs, bool is_second, const int16_t* codes, int64_t n) {
    for (int64_t i = 0; i < n; ++i) pairs[2 * i + is_second] = codes[i];
  }
  // Floats of which the lower, or the upper, half of each word holds the upper 16 bits.
  static inline V load_low_halves(const uint8_t* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 16));
  }
  static inline V load_high_halves(const uint8_t* p) {
    return _mm256_castsi256_ps(
        _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_set1_epi32(-65536)));
  }
  // Larger of two numbers >= 0; NaN is larger than any.
  static inline V max_or_nan(V a, V b) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
  }
  static inline float reduce_max_or_nan(V a) {
    const __m256i bits = _mm256_castps_si256(a);
    __m128i v = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    v = _mm_max_epi32(v, _mm_unpackhi_epi64(v, v));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(v, _mm_shuffle_epi32(v, 1))));
  }
};

}  // namespace

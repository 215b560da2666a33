// Vector of floats for machines without a better variant: four lanes through the compiler's vector extension,
// which is SSE2 on x86-64 and plain code elsewhere. No fused multiply-add: the ABI floor has none.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace {

struct Simd {
  static constexpr int kWidth = 4;
  static constexpr int kAttendRows = 4;
  static constexpr int kStateVectors = 4;  // of a recurrence's matrix, side by side
  // Vectors side by side in attention: 8 to 12 chains in 16 registers.
  static constexpr int attend_vectors(int rows) { return rows == 1 ? 8 : 12 / rows; }

  typedef float V __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));

  static inline V load(const float* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static inline void store(float* p, V v) { std::memcpy(p, &v, sizeof v); }
  static inline V load_partial(const float* p, int count) {
    V v = zero();
    for (int i = 0; i < count; ++i) v[i] = p[i];
    return v;
  }
  static inline void store_partial(float* p, V v, int count) {
    for (int i = 0; i < count; ++i) p[i] = v[i];
  }
  static inline V set1(float x) { return V{x, x, x, x}; }
  static inline V zero() { return set1(0.0f); }
  static inline V add(V a, V b) { return a + b; }
  static inline V sub(V a, V b) { return a - b; }
  static inline V mul(V a, V b) { return a * b; }
  static inline V div(V a, V b) { return a / b; }
  static inline V fma(V a, V b, V c) { return a * b + c; }
  static inline V fnma(V a, V b, V c) { return c - a * b; }
  static inline V blend(I mask, V a, V b) { return (V)((mask & (I)a) | (~mask & (I)b)); }
  static inline V max(V a, V b) { return blend(a > b, a, b); }  // b if either is NaN, as SSE does
  static inline V min(V a, V b) { return blend(a < b, a, b); }
  static inline V abs(V a) { return (V)((I)a & 0x7fffffff); }
  static inline V copysign(V magnitude, V sign) {
    return (V)(((I)magnitude & 0x7fffffff) | ((I)sign & ~I{0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff}));
  }
  static inline V select_lt(V a, V b, V x, V y) { return blend(a < b, x, y); }
  // Nearest integer; |a| < 2^22. Adding 1.5 * 2^23 leaves no room for a fraction.
  static inline V round(V a) {
    const V magic = set1(12582912.0f);
    return (a + magic) - magic;
  }
  // a * 2^n for whole n in [-126, 127].
  static inline V scale_pow2(V a, V n) {
    const I exponent = ((I)(n + set1(12582912.0f)) - 0x4b400000 + 127) << 23;
    return a * (V)exponent;
  }
  static inline V add_exponent(V a, V n) { return scale_pow2(a, n); }
  static inline float reduce_add(V a) { return (a[0] + a[2]) + (a[1] + a[3]); }
  static inline float reduce_max(V a) {
    const float lo = a[0] > a[2] ? a[0] : a[2];
    const float hi = a[1] > a[3] ? a[1] : a[3];
    return lo > hi ? lo : hi;
  }

  static inline float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
    const uint32_t magnitude = h & 0x7fff;
    uint32_t bits = (magnitude << 13) + 0x38000000;                  // exponent bias 15 -> 127
    if (magnitude >= 0x7c00) bits = (magnitude << 13) | 0x7f800000;  // infinity or NaN
    float value;
    if (magnitude < 0x400) {
      // A denormal half. Float denormals are flushed to zero here, so no intermediate may be one.
      bits += 0x00800000;
      std::memcpy(&value, &bits, sizeof value);
      value -= 6.103515625e-05f;  // 2^-14
      std::memcpy(&bits, &value, sizeof bits);
    }
    bits |= sign;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  static inline uint16_t float_to_half(float x) {  // round to nearest even; |x| <= 65504 or NaN
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = (bits >> 16) & 0x8000;
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (magnitude < 0x38800000) {  // denormal half: let the float adder round at 2^-24
      float value;
      std::memcpy(&value, &magnitude, sizeof value);
      value += 0.5f;
      uint32_t rounded;
      std::memcpy(&rounded, &value, sizeof rounded);
      return static_cast<uint16_t>(sign | (rounded - 0x3f000000));
    }
    const uint32_t odd = (magnitude >> 13) & 1;
    return static_cast<uint16_t>(sign | ((magnitude - 0x38000000 + 0xfff + odd) >> 13));
  }
  static inline V load_f16(const uint16_t* p) {
    return V{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
  }
  static inline void store_f16(uint16_t* p, V v) {
    for (int i = 0; i < 4; ++i) p[i] = float_to_half(v[i]);
  }
  static inline V load_i8(const int8_t* p) {
    return V{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]),
             static_cast<float>(p[3])};
  }

  // ---- pairs of 16-bit integers
  static constexpr int kDotRows = 3;
  // Tiles, or vectors of columns, side by side for so many rows.
  static constexpr int dot_tiles(int) { return 1; }
  static constexpr int dot_columns(int) { return 4; }

  using Pairs = I;  // one pair per lane, the first below
  using Sums = I;   // of kWidth lanes
  static inline Pairs load_pairs(const int16_t* p) {
    Pairs pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    return pairs;
  }
  static inline Pairs set1_pair(const int16_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    return I{pair, pair, pair, pair};
  }
  static inline Sums no_sums() { return I{0, 0, 0, 0}; }
  // sums + the dot product of each lane's pairs
  static inline Sums dot(Sums sums, Pairs a, Pairs b) {
#ifdef __SSE2__
    return sums + (I)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return sums + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
  }
  static inline V to_float(Sums sums) { return __builtin_convertvector(sums, V); }
  // Nearest integers, of at most 16 bits.
  static inline void store_codes(int16_t* p, V v) {
    const I codes = (I)(v + set1(12582912.0f)) - 0x4b400000;
    int16_t words[4];
    for (int i = 0; i < 4; ++i) words[i] = static_cast<int16_t>(codes[i]);
    std::memcpy(p, words, sizeof words);
  }
  // Codes as the first, or the second, of n pairs; the other stays as it is.
  static inline void store_halves(int16_t* pairs, bool is_second, const int16_t* codes, int64_t n) {
    for (int64_t i = 0; i < n; ++i) pairs[2 * i + is_second] = codes[i];
  }
  // Floats of which the lower, or the upper, half of each word holds the upper 16 bits.
  static inline V load_low_halves(const uint8_t* p) {
    I words;
    std::memcpy(&words, p, sizeof words);
    return (V)(words << 16);
  }
  static inline V load_high_halves(const uint8_t* p) {
    I words;
    std::memcpy(&words, p, sizeof words);
    return (V)(words & -65536);
  }
  // Larger of two numbers >= 0; NaN is larger than any.
  static inline V max_or_nan(V a, V b) {
    const I larger = (I)a > (I)b;
    return (V)((larger & (I)a) | (~larger & (I)b));
  }
  static inline float reduce_max_or_nan(V a) {
    const V two = max_or_nan(a, V{a[2], a[3], a[2], a[3]});
    return max_or_nan(two, V{two[1], two[1], two[1], two[1]})[0];
  }
};

}  // namespace

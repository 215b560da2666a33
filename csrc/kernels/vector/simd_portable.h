// Vector of floats for machines without a better variant: four lanes through the compiler's vector extension,
// which is SSE2 on x86-64 and plain code elsewhere. No fused multiply-add: the ABI floor has none.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct Simd {
  static constexpr int kWidth = 4;
  static constexpr int kAttendRows = 4;
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
};

}  // namespace

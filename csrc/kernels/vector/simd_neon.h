// Vector of four floats: Advanced SIMD of AArch64, which has fused multiply-add and float16 conversion.
#pragma once
#include <arm_neon.h>

#include <cstdint>

namespace {

struct Simd {
  static constexpr int kWidth = 4;
  static constexpr int kAttendRows = 6;
  static constexpr int kStateVectors = 4;  // of a recurrence's matrix, side by side
  // Vectors side by side in attention: 8 to 24 chains of multiply-adds in 32 registers.
  static constexpr int attend_vectors(int rows) { return rows <= 2 ? 8 : 4; }

  using V = float32x4_t;

  static inline V load(const float* p) { return vld1q_f32(p); }
  static inline void store(float* p, V v) { vst1q_f32(p, v); }
  static inline V load_partial(const float* p, int count) {
    float values[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int i = 0; i < count; ++i) values[i] = p[i];
    return vld1q_f32(values);
  }
  static inline void store_partial(float* p, V v, int count) {
    float values[4];
    vst1q_f32(values, v);
    for (int i = 0; i < count; ++i) p[i] = values[i];
  }
  static inline V set1(float x) { return vdupq_n_f32(x); }
  static inline V zero() { return vdupq_n_f32(0.0f); }
  static inline V add(V a, V b) { return vaddq_f32(a, b); }
  static inline V sub(V a, V b) { return vsubq_f32(a, b); }
  static inline V mul(V a, V b) { return vmulq_f32(a, b); }
  static inline V div(V a, V b) { return vdivq_f32(a, b); }
  static inline V fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
  static inline V fnma(V a, V b, V c) { return vfmsq_f32(c, a, b); }
  static inline V max(V a, V b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // b if either is NaN, as on x86
  static inline V min(V a, V b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
  static inline V abs(V a) { return vabsq_f32(a); }
  static inline V copysign(V magnitude, V sign) {
    return vbslq_f32(vdupq_n_u32(0x80000000u), sign, magnitude);
  }
  static inline V select_lt(V a, V b, V x, V y) { return vbslq_f32(vcltq_f32(a, b), x, y); }
  static inline V round(V a) { return vrndnq_f32(a); }
  // a * 2^n for whole n in [-126, 127].
  static inline V scale_pow2(V a, V n) {
    const int32x4_t exponent = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
    return vmulq_f32(a, vreinterpretq_f32_s32(exponent));
  }
  // The same for n <= 0 and normal a and results; NaN stays NaN where n is one too.
  static inline V add_exponent(V a, V n) {
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a), vshlq_n_s32(vcvtq_s32_f32(n), 23)));
  }
  static inline float reduce_add(V a) {
    const float32x2_t v = vadd_f32(vget_low_f32(a), vget_high_f32(a));
    return vget_lane_f32(v, 0) + vget_lane_f32(v, 1);
  }
  static inline float reduce_max(V a) { return vmaxvq_f32(a); }
  static inline V load_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
  static inline void store_f16(uint16_t* p, V v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
  static inline V load_i8(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    const int8x8_t bytes = vreinterpret_s8_s32(vdup_n_s32(four));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))));
  }

  // ---- pairs of 16-bit integers
  static constexpr int kDotRows = 3;
  // Tiles, or vectors of columns, side by side for so many rows.
  static constexpr int dot_tiles(int) { return 1; }
  static constexpr int dot_columns(int) { return 4; }

  using Pairs = int16x8_t;   // one pair per lane
  using Sums = int32x4x2_t;  // of twice kWidth lanes: neighbours are added in the end
  static inline Pairs load_pairs(const int16_t* p) { return vld1q_s16(p); }
  static inline Pairs set1_pair(const int16_t* p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return vreinterpretq_s16_s32(vdupq_n_s32(pair));
  }
  static inline Sums no_sums() { return {{vdupq_n_s32(0), vdupq_n_s32(0)}}; }
  // sums + the dot product of each lane's pairs
  static inline Sums dot(Sums sums, Pairs a, Pairs b) {
    return {{vmlal_s16(sums.val[0], vget_low_s16(a), vget_low_s16(b)), vmlal_high_s16(sums.val[1], a, b)}};
  }
  static inline V to_float(Sums sums) { return vcvtq_f32_s32(vpaddq_s32(sums.val[0], sums.val[1])); }
  // Nearest integers, of at most 16 bits.
  static inline void store_codes(int16_t* p, V v) {
    const int16x4_t codes = vqmovn_s32(vcvtnq_s32_f32(v));
    __builtin_memcpy(p, &codes, sizeof codes);
  }
  // Codes as the first, or the second, of n pairs; the other stays as it is.
  static inline void store_halves(int16_t* pairs, bool is_second, const int16_t* codes, int64_t n) {
    for (int64_t i = 0; i < n; ++i) pairs[2 * i + is_second] = codes[i];
  }
  // Floats of which the lower, or the upper, half of each word holds the upper 16 bits.
  static inline V load_low_halves(const uint8_t* p) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(vld1q_u8(p)), 16));
  }
  static inline V load_high_halves(const uint8_t* p) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(vld1q_u8(p)), vdupq_n_u32(0xffff0000u)));
  }
  // Larger of two numbers >= 0; NaN is larger than any.
  static inline V max_or_nan(V a, V b) {
    return vreinterpretq_f32_s32(vmaxq_s32(vreinterpretq_s32_f32(a), vreinterpretq_s32_f32(b)));
  }
  static inline float reduce_max_or_nan(V a) {
    return vgetq_lane_f32(vreinterpretq_f32_s32(vdupq_n_s32(vmaxvq_s32(vreinterpretq_s32_f32(a)))), 0);
  }
};

}  // namespace

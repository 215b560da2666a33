// NEON: quantisation of float32 activations to records of one or two planes.
#pragma once
#include "codes.h"
#include "tellin/linear.h"

namespace tellin {
namespace {

constexpr int kRegisters = kBlockK / 4;

// Scale and sums of a block whose whole values are v + zero.
template <class Act>
TELLIN_INLINE void store_sums(float scale, int32_t zero, int32_t sum0, int32_t sum1, Act* out) {
  out->scale = scale;
  out->sum = scale * static_cast<float>(sum0 + sum1 + kBlockK * zero);
  out->half_sum[0] = scale * static_cast<float>(sum0 + kBlockK / 2 * zero);
  out->half_sum[1] = scale * static_cast<float>(sum1 + kBlockK / 2 * zero);
}

TELLIN_INLINE void store_plane(const int32x4_t (&v)[kRegisters], int8_t* q) {
  for (int i = 0; i < kRegisters; i += 4) {
    const int16x8_t low = vcombine_s16(vmovn_s32(v[i]), vmovn_s32(v[i + 1]));
    const int16x8_t high = vcombine_s16(vmovn_s32(v[i + 2]), vmovn_s32(v[i + 3]));
    vst1q_s8(q + 4 * i, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
  }
}

TELLIN_INLINE int32_t half_sum(const int32x4_t* v) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(v[0], v[1]), vaddq_s32(v[2], v[3])));
}

TELLIN_INLINE void quantize_finite(const float32x4_t (&x)[kRegisters], float, Act8* out) {
  float32x4_t lows = x[0], highs = x[0];
  for (int i = 1; i < kRegisters; ++i) {
    lows = vminq_f32(lows, x[i]);
    highs = vmaxq_f32(highs, x[i]);
  }
  const float low = vminvq_f32(lows), high = vmaxvq_f32(highs);
  constexpr float kMost = kMostZeroSteps;
  const float middle = (high + low) * kAct8StepsPerMiddle / (high - low);
  const int32_t steps = vcvtns_s32_f32(middle < -kMost ? -kMost : middle > kMost ? kMost : middle);
  const int32_t zero = kZeroUnit * steps, entry = steps + kMostZeroSteps;
  const float need_high = high * kAct8Up[entry], need_low = -low * kAct8Down[entry];
  const float need = need_high > need_low ? need_high : need_low;
  uint32_t bits;
  __builtin_memcpy(&bits, &need, sizeof bits);
  bits = (bits + kAct8ScaleRest) & ~kAct8ScaleRest;
  float scale;
  __builtin_memcpy(&scale, &bits, sizeof scale);
  const float inverse = 1.0f / scale;
  int32x4_t q[kRegisters];
  for (int i = 0; i < kRegisters; ++i) {
    q[i] = vsubq_s32(vcvtnq_s32_f32(vmulq_n_f32(x[i], inverse)), vdupq_n_s32(zero));
  }
  store_plane(q, out->q[0]);
  const int32_t sum0 = half_sum(q), sum1 = half_sum(q + 4);
  store_sums(scale, zero, sum0, sum1, out);
  const int32_t sums[3] = {sum0 + sum1, sum0, sum1};
  for (int i = 0; i < 3; ++i) {
    out->zero_pair[i][0] = static_cast<int16_t>(zero);
    out->zero_pair[i][1] = static_cast<int16_t>(-sums[i]);
  }
  out->scale_offset = static_cast<uint16_t>((bits >> 21 & 3) * kEntryBytes);
  out->zero_offset = static_cast<uint16_t>(entry * kEntryBytes);
}

TELLIN_INLINE void quantize_finite(const float32x4_t (&x)[kRegisters], float magnitude, Act16* out) {
  const float inverse = kAct16Largest / magnitude;
  int32x4_t v[kRegisters], high[kRegisters], low[kRegisters];
  for (int i = 0; i < kRegisters; ++i) {
    v[i] = vcvtnq_s32_f32(vmulq_n_f32(x[i], inverse));
    high[i] = vrshrq_n_s32(v[i], kPlaneShift);  // leaves a rest within [-64, 63]
    low[i] = vsubq_s32(v[i], vshlq_n_s32(high[i], kPlaneShift));
  }
  store_plane(high, out->q[0]);
  store_plane(low, out->q[1]);
  const int32_t sum0 = half_sum(v), sum1 = half_sum(v + 4);
  store_sums(magnitude / kAct16Largest, 0, sum0, sum1, out);
  out->neg_sums[0] = -sum0;
  out->neg_sums[1] = -sum1;
}

template <class Act>
TELLIN_INLINE void quantize_block(const float* x, Act* out) {
  constexpr bool kEight = Act::kPlanes == 1;
  constexpr float kLargest = kEight ? kAct8LargestMagnitude : __FLT_MAX__;
  float32x4_t v[kRegisters], magnitudes = vdupq_n_f32(0);
  uint32x4_t finite = vdupq_n_u32(0xffffffffu);
  for (int i = 0; i < kRegisters; ++i) {
    v[i] = vld1q_f32(x + 4 * i);
    const float32x4_t a = vabsq_f32(v[i]);
    finite = vandq_u32(finite, vcleq_f32(a, vdupq_n_f32(kLargest)));
    magnitudes = vmaxq_f32(magnitudes, a);
  }
  const float magnitude = vmaxvq_f32(magnitudes);
  const bool is_finite = vminvq_u32(finite) != 0;
  if (__builtin_expect(is_finite && magnitude >= (kEight ? kTinyAct8 : kTinyAct), 1)) {
    quantize_finite(v, magnitude, out);
  } else if (is_finite) {
    store_zero_record(out);
  } else {
    store_nan_record(out);
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

void quantize_part(ActPrecision precision, const float* x, int64_t ldx, int64_t m0, int64_t m1, int64_t begin,
                   int64_t end, const QuantizedRows& out) {
  for (int64_t m = m0; m < m1; ++m) {
    const float* row = x + m * ldx;
    uint8_t* target = out.data + m * out.row_bytes;
    for (int64_t b = begin / kBlockK; b < end / kBlockK; ++b) {
      if (precision == ActPrecision::kInt8) {
        quantize_block(row + b * kBlockK, reinterpret_cast<Act8*>(target) + b);
      } else {
        quantize_block(row + b * kBlockK, reinterpret_cast<Act16*>(target) + b);
      }
    }
  }
}

}  // namespace
}  // namespace tellin

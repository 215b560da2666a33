// NEON: packed weights x float32 activations.
//
// A chunk of kPanelK features of one group (16 rows) is expanded to float32 in L1, then tiles of tokens run
// an outer product over it. A value is one chain of fused multiply-adds over the features in order, whatever
// the tile.
#pragma once
#include "codes.h"
#include "tellin/linear.h"

namespace tellin {
namespace {

constexpr int kPanelK = 256;       // 16 rows x 256 features x 4 bytes = 16 KiB
constexpr int kFloatTile = 6;      // 4 x 6 accumulators, 4 weights
constexpr int kFloatTokens = 192;  // tokens that share an expanded panel

template <QuantType T, int kQuad>
TELLIN_INLINE void expand_quads(const uint8_t* codes, const float (*scale)[kRows],
                                const float (*minimum)[kRows], float* panel) {
  constexpr PackedFormat kFormat = format_of(T);
  if constexpr (kQuad < 8) {
    constexpr int kSum = kFormat.per16() ? kQuad / 4 : 0;
    for (int i = 0; i < kQuarters; ++i) {
      const int32x4_t quad = vreinterpretq_s32_s8(load_quad<T, kQuad>(codes + kQuarterBytes * i));
      const float32x4_t s = vld1q_f32(scale[kSum] + kQuarterRows * i);
#pragma GCC unroll 4
      for (int f = 0; f < 4; ++f) {
        const int32x4_t code =
            vshrq_n_s32(vshlq_s32(quad, vdupq_n_s32(24 - 8 * f)), 24);  // sign-extended byte f
        const float32x4_t value = vcvtq_f32_s32(vsubq_s32(code, vdupq_n_s32(quad_zero_point<T>())));
        const float32x4_t weight = kFormat.has_min
                                       ? vfmaq_f32(vld1q_f32(minimum[kSum] + kQuarterRows * i), value, s)
                                       : vmulq_f32(value, s);
        vst1q_f32(panel + (4 * kQuad + f) * kRows + kQuarterRows * i, weight);
      }
    }
    expand_quads<T, kQuad + 1>(codes, scale, minimum, panel);
  }
}

// Features [k0, k0 + count) of a group to panel[feature][16]; k0 is a multiple of kPanelK. Codes of E4M3
// begin at codes_offset.
template <QuantType T>
void expand_panel(const uint8_t* group, [[maybe_unused]] size_t codes_offset, int64_t k0, int count,
                  float* panel) {
  constexpr PackedFormat kFormat = format_of(T);
  if constexpr (kFormat.is_quantized()) {
    constexpr int kSums = kFormat.per16() ? 2 : 1;
    alignas(16) float scale[16][kRows], minimum[16][kRows];
    for (int done = 0; done < count;) {
      const uint8_t* super_block = group + (k0 + done) / kFormat.super_k() * kFormat.super_bytes();
      expand_scales<T>(super_block, scale, minimum);
      for (int b = 0; b < kFormat.blocks() && done < count; ++b, done += kBlockK) {
        expand_quads<T, 0>(super_block + kFormat.header_bytes() + b * kFormat.block_bytes(),
                           scale + b * kSums, minimum + b * kSums, panel + done * kRows);
      }
    }
  } else if constexpr (T == QuantType::F32) {
    __builtin_memcpy(panel, group + k0 * kRows * 4, static_cast<size_t>(count) * kRows * 4);
  } else if constexpr (T == QuantType::F16) {
    const auto* p = reinterpret_cast<const __fp16*>(group) + k0 * kRows;
    for (int i = 0; i < count * kRows; i += 4) vst1q_f32(panel + i, vcvt_f32_f16(vld1_f16(p + i)));
  } else if constexpr (T == QuantType::E4M3) {
    const uint8_t* p = group + codes_offset + k0 * kRows;
    const auto* scale = reinterpret_cast<const float*>(group) + k0 / kE4m3K * kRows;
    for (int first = 0; first < count; first += kE4m3K, scale += kRows) {
      for (int i = first * kRows; i < (first + kE4m3K) * kRows; i += 8) {
        const int16x8_t high = vreinterpretq_s16_u16(vshll_n_u8(vld1_u8(p + i), 8));
        const uint16x8_t half = vandq_u16(vreinterpretq_u16_s16(vshrq_n_s16(high, 1)), vdupq_n_u16(0xbf80));
        const float16x8_t value = vreinterpretq_f16_u16(half);
        const float* s = scale + i % kRows;
        vst1q_f32(panel + i, vmulq_f32(vcvt_f32_f16(vget_low_f16(value)), vld1q_f32(s)));
        vst1q_f32(panel + i + 4, vmulq_f32(vcvt_f32_f16(vget_high_f16(value)), vld1q_f32(s + 4)));
      }
    }
  } else {
    const uint8_t* p = group + k0 * kRows * 2;
    for (int i = 0; i < count; i += 2) {
      for (int j = 0; j < kQuarters; ++j) {
        const uint32x4_t pair = vreinterpretq_u32_u8(vld1q_u8(p + i * kRows * 2 + kQuarterBytes * j));
        float* const to = panel + i * kRows + kQuarterRows * j;
        vst1q_f32(to, vreinterpretq_f32_u32(vshlq_n_u32(pair, 16)));
        vst1q_f32(to + kRows, vreinterpretq_f32_u32(vandq_u32(pair, vdupq_n_u32(0xffff0000u))));
      }
    }
  }
}

// acc[token][16] += panel x activations.
template <int kTokens>
__attribute__((noinline)) void run_float_tile(const float* panel, int count, const float* x, int64_t ldx,
                                              float* acc_io) {
  float32x4_t acc[kTokens][kQuarters];
#pragma GCC unroll 6
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
    for (int i = 0; i < kQuarters; ++i) acc[t][i] = vld1q_f32(acc_io + t * kRows + kQuarterRows * i);
  }
  for (int k = 0; k < count; ++k) {
    float32x4_t w[kQuarters];
#pragma GCC unroll 4
    for (int i = 0; i < kQuarters; ++i) w[i] = vld1q_f32(panel + k * kRows + kQuarterRows * i);
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) {
      const float y = x[t * ldx + k];
#pragma GCC unroll 4
      for (int i = 0; i < kQuarters; ++i) acc[t][i] = vfmaq_n_f32(acc[t][i], w[i], y);
    }
  }
#pragma GCC unroll 6
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
    for (int i = 0; i < kQuarters; ++i) vst1q_f32(acc_io + t * kRows + kQuarterRows * i, acc[t][i]);
  }
}

void run_float_tile_of(int tokens, const float* panel, int count, const float* x, int64_t ldx, float* acc) {
  switch (tokens) {
#define TELLIN_TILE(n) \
  case n:              \
    return run_float_tile<n>(panel, count, x, ldx, acc);
    TELLIN_TILE(1)
    TELLIN_TILE(2)
    TELLIN_TILE(3)
    TELLIN_TILE(4)
    TELLIN_TILE(5)
    TELLIN_TILE(6)
#undef TELLIN_TILE
  }
}

struct FloatProblem {
  const PackedMatrix& w;
  const float* x;
  int64_t ldx;
  float* out;
  int64_t ldo;
};

template <QuantType T>
void run_float_group(const FloatProblem& p, int64_t m0, int tokens, int64_t g) {
  alignas(64) float acc[kFloatTokens * kRows];
  alignas(64) float panel[kPanelK * kRows];
  const int num_tiles = (tokens + kFloatTile - 1) / kFloatTile;
  const uint8_t* const group = p.w.data + g * p.w.group_bytes;
  __builtin_memset(acc, 0, sizeof(float) * kRows * static_cast<size_t>(tokens));
  for (int64_t k0 = 0; k0 < p.w.k; k0 += kPanelK) {
    const int count = static_cast<int>(p.w.k - k0 < kPanelK ? p.w.k - k0 : kPanelK);
    expand_panel<T>(group, e4m3_codes_offset(p.w.k), k0, count, panel);
    for (int i = 0; i < num_tiles; ++i) {
      const int t0 = tokens * i / num_tiles, t1 = tokens * (i + 1) / num_tiles;
      run_float_tile_of(t1 - t0, panel, count, p.x + (m0 + t0) * p.ldx + k0, p.ldx, acc + t0 * kRows);
    }
  }
  for (int t = 0; t < tokens; ++t) {
    store_rows(acc + t * kRows, p.w.n - g * kRows, p.out + (m0 + t) * p.ldo + g * kRows);
  }
}

template <QuantType T>
void linear_f32(const PackedMatrix& w, const float* x, int64_t ldx, int64_t m0, int64_t m1, int64_t g0,
                int64_t g1, float* out, int64_t ldo) {
  const FloatProblem problem = {w, x, ldx, out, ldo};
  const int64_t num_passes = (m1 - m0 + kFloatTokens - 1) / kFloatTokens;
  for (int64_t i = 0; i < num_passes; ++i) {
    const int64_t begin = m0 + (m1 - m0) * i / num_passes, end = m0 + (m1 - m0) * (i + 1) / num_passes;
    for (int64_t g = g0; g < g1; ++g) run_float_group<T>(problem, begin, static_cast<int>(end - begin), g);
  }
}

}  // namespace
}  // namespace tellin

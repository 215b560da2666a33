// AVX2: packed weights x float32 activations.
//
// A chunk of kPanelK features of one group (16 rows) is expanded to float32 in L1, then tiles of tokens run
// an outer product over it. A value is one chain of fused multiply-adds over the features in order, whatever
// the tile.
#pragma once
#include "codes.h"
#include "tellin/linear.h"

namespace tellin {
namespace {

constexpr int kPanelK = 256;          // 16 rows x 256 features x 4 bytes = 16 KiB, half of L1
constexpr int kFloatTile = 6;         // 2 x 6 accumulators, 2 weights, 1 activation
constexpr int kFloatTokens = 192;     // tokens that share an expanded panel
constexpr int kFloatPrefetchK = 512;  // how far ahead of its use a feature's weights are fetched

template <QuantType T, int kQuad>
TELLIN_INLINE void expand_quads(const uint8_t* codes, const float (*scale)[kRows],
                                const float (*minimum)[kRows], float* panel) {
  constexpr PackedFormat kFormat = format_of(T);
  if constexpr (kQuad < 8) {
    constexpr int kSum = kFormat.per16() ? kQuad / 4 : 0;
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m256i quad = load_quad<kFormat.bits, kQuad>(codes + h * kHalfBytes);
      const __m256 s = _mm256_load_ps(scale[kSum] + h * kHalfRows);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m256i code = _mm256_and_si256(_mm256_srli_epi32(quad, 8 * i), _mm256_set1_epi32(255));
        const __m256 value =
            _mm256_cvtepi32_ps(_mm256_sub_epi32(code, _mm256_set1_epi32(kFormat.zero_point())));
        const __m256 weight = kFormat.has_min
                                  ? _mm256_fmadd_ps(value, s, _mm256_load_ps(minimum[kSum] + h * kHalfRows))
                                  : _mm256_mul_ps(value, s);
        _mm256_store_ps(panel + (4 * kQuad + i) * kRows + h * kHalfRows, weight);
      }
    }
    expand_quads<T, kQuad + 1>(codes, scale, minimum, panel);
  }
}

// Features [k0, k0 + count) of a group to panel[feature][16]; k0 is a multiple of kPanelK.
template <QuantType T>
void expand_panel(const uint8_t* group, int64_t k0, int count, float* panel) {
  constexpr PackedFormat kFormat = format_of(T);
  if constexpr (kFormat.is_quantized()) {
    constexpr int kSums = kFormat.per16() ? 2 : 1;
    alignas(32) float scale[16][kRows], minimum[16][kRows];
    for (int done = 0; done < count;) {
      const uint8_t* super_block = group + (k0 + done) / kFormat.super_k() * kFormat.super_bytes();
      expand_scales<T>(super_block, scale, minimum);
      for (int b = 0; b < kFormat.blocks() && done < count; ++b, done += kBlockK) {
        expand_quads<T, 0>(super_block + kFormat.header_bytes() + b * kFormat.block_bytes(),
                           scale + b * kSums, minimum + b * kSums, panel + done * kRows);
      }
    }
  } else if constexpr (T == QuantType::F32) {
    const auto* p = reinterpret_cast<const float*>(group) + k0 * kRows;
    for (int i = 0; i < count * kRows; i += 8) _mm256_store_ps(panel + i, _mm256_loadu_ps(p + i));
  } else if constexpr (T == QuantType::F16) {
    const auto* p = reinterpret_cast<const uint16_t*>(group) + k0 * kRows;
    for (int i = 0; i < count * kRows; i += 8) _mm256_store_ps(panel + i, half_to_float8(p + i));
  } else {
    const uint8_t* p = group + k0 * kRows * 2;
    for (int i = 0; i < count; i += 2) {
      for (int h = 0; h < 2; ++h) {
        const __m256i pair = load_half(p + i * kRows * 2 + h * kHalfBytes);
        const __m256i odd = _mm256_and_si256(pair, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
        float* const to = panel + i * kRows + h * kHalfRows;
        _mm256_store_ps(to, _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)));
        _mm256_store_ps(to + kRows, _mm256_castsi256_ps(odd));
      }
    }
  }
}

// acc[token][16] += panel x activations. While it computes, `prefetch` (if not null) is fetched at `step`
// bytes for every 4 features.
template <int kTokens>
__attribute__((noinline)) void run_float_tile(const float* panel, int count, const float* x, int64_t ldx,
                                              const uint8_t* prefetch, int step, float* acc_io) {
  __m256 acc[2][kTokens];
#pragma GCC unroll 6
  for (int t = 0; t < kTokens; ++t) {
    acc[0][t] = _mm256_load_ps(acc_io + t * kRows);
    acc[1][t] = _mm256_load_ps(acc_io + t * kRows + kHalfRows);
  }
  for (int i = 0; i < count;) {
    if (prefetch != nullptr) {
      for (int at = 0; at < step; at += 64) __builtin_prefetch(prefetch + at, 0, 3);
      prefetch += step;
    }
    for (const int end = i + 4 < count ? i + 4 : count; i < end; ++i) {
      const __m256 w0 = _mm256_load_ps(panel + i * kRows), w1 = _mm256_load_ps(panel + i * kRows + kHalfRows);
#pragma GCC unroll 6
      for (int t = 0; t < kTokens; ++t) {
        const __m256 y = _mm256_broadcast_ss(x + t * ldx + i);
        acc[0][t] = _mm256_fmadd_ps(w0, y, acc[0][t]);
        acc[1][t] = _mm256_fmadd_ps(w1, y, acc[1][t]);
      }
    }
  }
#pragma GCC unroll 6
  for (int t = 0; t < kTokens; ++t) {
    _mm256_store_ps(acc_io + t * kRows, acc[0][t]);
    _mm256_store_ps(acc_io + t * kRows + kHalfRows, acc[1][t]);
  }
}

void run_float_tile_of(int tokens, const float* panel, int count, const float* x, int64_t ldx,
                       const uint8_t* prefetch, int step, float* acc) {
  switch (tokens) {
#define TELLIN_TILE(n) \
  case n:              \
    return run_float_tile<n>(panel, count, x, ldx, prefetch, step, acc);
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
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kBytesOf4 =
      kFormat.is_quantized() ? kFormat.super_bytes() * 4 / kFormat.super_k() : kFormat.bits / 2 * kRows;
  alignas(64) float acc[kFloatTokens * kRows];
  alignas(64) float panel[kPanelK * kRows];
  const int num_tiles = (tokens + kFloatTile - 1) / kFloatTile;
  const uint8_t* const group = p.w.data + g * p.w.group_bytes;
  __builtin_memset(acc, 0, sizeof(float) * kRows * static_cast<size_t>(tokens));
  for (int64_t k0 = 0; k0 < p.w.k; k0 += kPanelK) {
    const int count = static_cast<int>(p.w.k - k0 < kPanelK ? p.w.k - k0 : kPanelK);
    expand_panel<T>(group, k0, count, panel);
    const uint8_t* const ahead = group + (k0 + kFloatPrefetchK) * kBytesOf4 / 4;
    for (int i = 0; i < num_tiles; ++i) {
      const int t0 = tokens * i / num_tiles, t1 = tokens * (i + 1) / num_tiles;
      run_float_tile_of(t1 - t0, panel, count, p.x + (m0 + t0) * p.ldx + k0, p.ldx, i == 0 ? ahead : nullptr,
                        kBytesOf4, acc + t0 * kRows);
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

// AVX2: packed weights x float32 activations.
//
// A chunk of kPanelK features of one group (16 rows) is expanded to float32 in L1, then tiles of tokens run
// an outer product over it. Float weights of few tokens are converted as they are loaded instead. A value is
// one chain of fused multiply-adds over the features in order, whatever the tile.
#pragma once
#include "codes.h"
#include "tellin/linear.h"

namespace tellin {
namespace {

constexpr int kPanelK = 256;          // 16 rows x 256 features x 4 bytes = 16 KiB, half of L1
constexpr int kFloatTile = 6;         // 2 x 6 accumulators, 2 weights, 1 activation
constexpr int kFloatTokens = 192;     // tokens that share an expanded panel
constexpr int kFloatPrefetchK = 512;  // how far ahead of its use a feature's weights are fetched

// Float weights of up to so many tokens are used as they are stored (6 run no faster than from a panel), and
// fetched so far ahead.
constexpr int kStoredTokens = 5;
constexpr int kAheadBytes = 4096;

template <QuantType T, int kQuad>
TELLIN_INLINE void expand_quads(const uint8_t* codes, const float (*scale)[kRows],
                                const float (*minimum)[kRows], float* panel) {
  constexpr PackedFormat kFormat = format_of(T);
  if constexpr (kQuad < 8) {
    constexpr int kSum = kFormat.per16() ? kQuad / 4 : 0;
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m256i quad = load_quad<T, kQuad>(codes + h * kHalfBytes);
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

// E4M3 of 8 rows, without its scale.
TELLIN_INLINE __m256 e4m3_to_float8(const uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i high = _mm_unpacklo_epi8(_mm_setzero_si128(), bytes);
  const __m128i half = _mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16(static_cast<int16_t>(0xbf80)));
  return _mm256_cvtph_ps(half);
}

// Features [k0, k0 + count) of a group to panel[feature][16]; k0 is a multiple of kPanelK. Codes of E4M3
// begin at codes_offset.
template <QuantType T>
void expand_panel(const uint8_t* group, [[maybe_unused]] size_t codes_offset, int64_t k0, int count,
                  float* panel) {
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
  } else if constexpr (T == QuantType::E4M3) {
    const uint8_t* p = group + codes_offset + k0 * kRows;
    const auto* scale = reinterpret_cast<const float*>(group) + k0 / kE4m3K * kRows;
    for (int first = 0; first < count; first += kE4m3K, scale += kRows) {
      const __m256 s[2] = {_mm256_loadu_ps(scale), _mm256_loadu_ps(scale + kHalfRows)};
      for (int i = first * kRows; i < (first + kE4m3K) * kRows; i += kRows) {
        _mm256_store_ps(panel + i, _mm256_mul_ps(e4m3_to_float8(p + i), s[0]));
        _mm256_store_ps(panel + i + kHalfRows, _mm256_mul_ps(e4m3_to_float8(p + i + kHalfRows), s[1]));
      }
    }
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

// 8 of the 16 rows of a stored feature; BF16 lies in pairs of features. `p` is the group at an even feature.
template <QuantType T>
TELLIN_INLINE __m256 load_stored(const uint8_t* p, int feature, int half) {
  if constexpr (T == QuantType::F32) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(p) + feature * kRows + half * kHalfRows);
  } else if constexpr (T == QuantType::F16) {
    return half_to_float8(reinterpret_cast<const uint16_t*>(p) + feature * kRows + half * kHalfRows);
  } else {
    const __m256i pair = load_half(p + feature / 2 * 2 * kRows * 2 + half * kHalfBytes);
    const __m256i odd = _mm256_and_si256(pair, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
    return _mm256_castsi256_ps(feature % 2 == 0 ? _mm256_slli_epi32(pair, 16) : odd);
  }
}

struct FloatProblem {
  const PackedMatrix& w;
  const float* x;
  int64_t ldx;
  float* out;
  int64_t ldo;
};

// One tile of tokens with float weights, which go from memory to registers. Groups at `after` are read next.
template <QuantType T, int kGroups, int kTokens>
__attribute__((noinline)) void run_stored(const FloatProblem& p, int64_t m0, int64_t g0,
                                          const uint8_t* after) {
  constexpr int kBytesOf4 = format_of(T).bits / 2 * kRows;
  constexpr int64_t kAheadK = kAheadBytes * 4 / kBytesOf4;
  constexpr int kHalves = 2 * kGroups;
  constexpr int kUnrolled = kTokens < 5 ? 4 : 2;  // loads of more features would take too many registers
  const size_t group_bytes = p.w.group_bytes;
  const uint8_t* w = p.w.data + g0 * group_bytes;
  // Rows 3 apart get a pointer each, the two between are reached by index (the empty asm keeps the compiler
  // from undoing this).
  const char* base[2] = {reinterpret_cast<const char*>(p.x + m0 * p.ldx),
                         reinterpret_cast<const char*>(p.x + (m0 + (kTokens > 3 ? 3 : 0)) * p.ldx)};
  int64_t stride = p.ldx * static_cast<int64_t>(sizeof(float));
  asm("" : "+r"(base[0]), "+r"(base[1]), "+r"(stride));
  const auto activation = [&](int t, int i) __attribute__((always_inline)) {
    return _mm256_broadcast_ss(reinterpret_cast<const float*>(base[t / 3] + t % 3 * stride) + i);
  };
  __m256 acc[kHalves][kTokens];
#pragma GCC unroll 4
  for (int h = 0; h < kHalves; ++h) {
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) acc[h][t] = _mm256_setzero_ps();
  }
  // The fewer of weights and activations stay in registers for a feature: with the others' one at a time and
  // 12 accumulators that is all there are.
  const auto add_feature = [&](int i) __attribute__((always_inline)) {
    if constexpr (kHalves < kTokens) {
      __m256 weight[kHalves];
#pragma GCC unroll 4
      for (int h = 0; h < kHalves; ++h) weight[h] = load_stored<T>(w + h / 2 * group_bytes, i, h % 2);
#pragma GCC unroll 6
      for (int t = 0; t < kTokens; ++t) {
        const __m256 y = activation(t, i);
#pragma GCC unroll 4
        for (int h = 0; h < kHalves; ++h) acc[h][t] = _mm256_fmadd_ps(weight[h], y, acc[h][t]);
      }
    } else {
      __m256 y[kTokens];
#pragma GCC unroll 6
      for (int t = 0; t < kTokens; ++t) y[t] = activation(t, i);
#pragma GCC unroll 4
      for (int h = 0; h < kHalves; ++h) {
        const __m256 weight = load_stored<T>(w + h / 2 * group_bytes, i, h % 2);
#pragma GCC unroll 6
        for (int t = 0; t < kTokens; ++t) acc[h][t] = _mm256_fmadd_ps(weight, y[t], acc[h][t]);
      }
    }
  };
  const auto run = [&](int64_t quads, const uint8_t* fetch) __attribute__((always_inline)) {
    for (; quads > 0; --quads) {
#pragma GCC unroll 4
      for (int at = 0; at < kBytesOf4; at += 64) {
#pragma GCC unroll 2
        for (int g = 0; g < kGroups; ++g) __builtin_prefetch(fetch + g * group_bytes + at, 0, 0);
      }
      fetch += kBytesOf4;
#pragma GCC unroll 1
      for (int i = 0; i < 4; i += kUnrolled) {
#pragma GCC unroll 4
        for (int j = 0; j < kUnrolled; ++j) add_feature(j);
        w += kUnrolled * kBytesOf4 / 4;
        base[0] += kUnrolled * sizeof(float);
        base[1] += kUnrolled * sizeof(float);
      }
    }
  };
  const int64_t near = p.w.k > kAheadK ? (p.w.k - kAheadK) / 4 : 0;  // quads that fetch from their own group
  run(near, w + kAheadBytes);
  run(p.w.k / 4 - near, after);
  for (int i = 0; i < p.w.k % 4; ++i) add_feature(i);
#pragma GCC unroll 2
  for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) {
      alignas(32) float rows[kRows];
      _mm256_store_ps(rows, acc[2 * g][t]);
      _mm256_store_ps(rows + kHalfRows, acc[2 * g + 1][t]);
      store_rows(rows, p.w.n - (g0 + g) * kRows, p.out + (m0 + t) * p.ldo + (g0 + g) * kRows);
    }
  }
}

// Float weights and at most kStoredTokens tokens: two groups side by side where registers suffice, to have
// enough multiplications under way.
template <QuantType T>
void linear_stored(const FloatProblem& p, int64_t m0, int tokens, int64_t g0, int64_t g1) {
  const int64_t step = tokens <= 3 ? 2 : 1;
  for (int64_t g = g0; g < g1; g += step) {
    const bool is_pair = step == 2 && g + 2 <= g1;
    const uint8_t* after =
        g + step >= g1 && p.w.follow != nullptr ? p.w.follow : p.w.data + (g + step) * p.w.group_bytes;
    switch (tokens) {
#define TELLIN_TILE(n)                                     \
  case n:                                                  \
    if (is_pair) {                                         \
      run_stored<T, (n) <= 3 ? 2 : 1, n>(p, m0, g, after); \
    } else {                                               \
      run_stored<T, 1, n>(p, m0, g, after);                \
    }                                                      \
    break;
      TELLIN_TILE(1)
      TELLIN_TILE(2)
      TELLIN_TILE(3)
      TELLIN_TILE(4)
      TELLIN_TILE(5)
#undef TELLIN_TILE
    }
  }
}

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
    expand_panel<T>(group, e4m3_codes_offset(p.w.k), k0, count, panel);
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
    const int tokens = static_cast<int>(end - begin);
    if constexpr (!format_of(T).is_quantized() && T != QuantType::E4M3) {
      if (tokens <= kStoredTokens) {
        linear_stored<T>(problem, begin, tokens, g0, g1);
        continue;
      }
    }
    for (int64_t g = g0; g < g1; ++g) run_float_group<T>(problem, begin, tokens, g);
  }
}

}  // namespace
}  // namespace tellin

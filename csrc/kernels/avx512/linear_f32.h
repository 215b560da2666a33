// AVX-512: packed weights x float32 activations.
//
// Tiles of tokens run an outer product with two groups of weights, a chunk of features at a time. Float
// weights are converted as they are loaded; quantised ones are first expanded to float32 in L1. A value is
// one chain of fused multiply-adds over the features in order, whatever the tile.
#pragma once
#include "codes.h"
#include "streaming.h"
#include "tellin/linear.h"

namespace tellin {
namespace {

// Features expanded at a time. Few tokens: 32 rows x 128 features x 4 bytes = 16 KiB, a third of L1, so that
// stored weights stream through beside it. Many tokens: twice that, for half as many passes over the
// accumulators.
constexpr int kSmallPanelK = 128;
constexpr int kLargePanelK = 256;
constexpr int kFewTokens = 24;
constexpr int kFloatTile = 12;     // 2 x 12 accumulators
constexpr int kFloatTokens = 192;  // tokens that share a pass over the weights

// Float weights: bytes of a group that all tiles of tokens use from L1, and how far ahead of its use a weight
// is fetched.
constexpr int kStoredBytes = 8192;
constexpr int kAheadBytes = 4096;

template <QuantType T, int kQuad>
TELLIN_INLINE void expand_quad(const uint8_t* codes, __m512i zero, __m512 scale, __m512 minimum, bool has_min,
                               float* panel, int stride) {
  const __m512i quad = load_quad<T, kQuad>(codes);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i code = _mm512_and_si512(_mm512_srli_epi32(quad, 8 * i), _mm512_set1_epi32(255));
    const __m512 value = _mm512_cvtepi32_ps(_mm512_sub_epi32(code, zero));
    const __m512 weight = has_min ? _mm512_fmadd_ps(value, scale, minimum) : _mm512_mul_ps(value, scale);
    _mm512_store_ps(panel + (4 * kQuad + i) * stride, weight);
  }
}

template <QuantType T, int kQuad>
TELLIN_INLINE void expand_quads(const uint8_t* codes, const float (*scale)[kRows],
                                const float (*minimum)[kRows], float* panel, int stride) {
  constexpr PackedFormat kFormat = format_of(T);
  if constexpr (kQuad < 8) {
    constexpr int kSum = kFormat.per16() ? kQuad / 4 : 0;
    const __m512 low = kFormat.has_min ? _mm512_load_ps(minimum[kSum]) : _mm512_setzero_ps();
    expand_quad<T, kQuad>(codes, _mm512_set1_epi32(kFormat.zero_point()), _mm512_load_ps(scale[kSum]), low,
                          kFormat.has_min, panel, stride);
    expand_quads<T, kQuad + 1>(codes, scale, minimum, panel, stride);
  }
}

// Quantised features [k0, k0 + count) of a group to panel[feature * stride + row]; k0 is a multiple of
// kSmallPanelK.
template <QuantType T>
void expand_panel(const uint8_t* group, int64_t k0, int count, float* panel, int stride) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kSums = kFormat.per16() ? 2 : 1;
  alignas(64) float scale[16][kRows], minimum[16][kRows];
  for (int done = 0; done < count;) {
    const int64_t k = k0 + done;
    const uint8_t* super_block = group + k / kFormat.super_k() * kFormat.super_bytes();
    expand_scales<T>(super_block, kRows, scale[0], minimum[0]);
    const int first = static_cast<int>(k % kFormat.super_k()) / kBlockK;
    for (int b = first; b < kFormat.blocks() && done < count; ++b, done += kBlockK) {
      expand_quads<T, 0>(super_block + kFormat.header_bytes() + b * kFormat.block_bytes(), scale + b * kSums,
                         minimum + b * kSums, panel + done * stride, stride);
    }
  }
}

// Weights of kGroups groups in an expanded panel.
template <int kGroups>
struct PanelWeights {
  const float* p;

  TELLIN_INLINE __m512 load(int group, int feature) const {
    return _mm512_load_ps(p + (feature * kGroups + group) * kRows);
  }
  TELLIN_INLINE void advance(int features) { p += features * kGroups * kRows; }
};

// Float weights of kGroups groups as they are stored, converted as they are loaded. Steps are even: BF16 lies
// in pairs of features.
template <QuantType T, int kGroups>
struct StoredWeights {
  const uint8_t* p;
  size_t group_bytes;

  TELLIN_INLINE __m512 load(int group, int feature) const {
    const uint8_t* w = p + group * group_bytes;
    if constexpr (T == QuantType::F32) {
      return _mm512_loadu_ps(w + feature * kRows * 4);
    } else if constexpr (T == QuantType::F16) {
      return half_to_float16(reinterpret_cast<const uint16_t*>(w) + feature * kRows);
    } else {
      const __m512i pair = load_vector(w + feature / 2 * 2 * kRows * 2);
      const __m512i odd = _mm512_and_si512(pair, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
      return _mm512_castsi512_ps(feature % 2 == 0 ? _mm512_slli_epi32(pair, 16) : odd);
    }
  }
  TELLIN_INLINE void advance(int features) { p += features * (format_of(T).bits / 8) * kRows; }
};

// E4M3: k begins at a multiple of 4, and scales change every kE4m3K features.
template <int kGroups>
struct StoredWeights<QuantType::E4M3, kGroups> {
  const uint8_t* p;       // codes of the next feature
  const uint8_t* scales;  // of its block, in the first group
  size_t group_bytes;
  int left;  // features of the block
  __m512 scale[kGroups];

  StoredWeights(const uint8_t* group, int64_t width, int64_t k0, size_t bytes)
      : p(group + e4m3_codes_offset(width) + k0 * kRows),
        scales(group + static_cast<size_t>(k0 / kE4m3K) * kRows * sizeof(float)),
        group_bytes(bytes),
        left(static_cast<int>(kE4m3K - k0 % kE4m3K)) {
    load_scales();
  }
  TELLIN_INLINE void load_scales() {
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g) scale[g] = _mm512_loadu_ps(scales + g * group_bytes);
  }
  TELLIN_INLINE __m512 load(int group, int feature) const {
    const auto* at = reinterpret_cast<const __m128i*>(p + group * group_bytes + feature * kRows);
    const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(at)), 8);
    const __m256i sign_and_rest = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
    const __m256i half = _mm256_and_si256(_mm256_srai_epi16(high, 1), sign_and_rest);
    return _mm512_mul_ps(_mm512_cvtph_ps(half), scale[group]);
  }
  TELLIN_INLINE void advance(int features) {
    p += features * kRows;
    left -= features;
    if (left == 0) {
      left = kE4m3K;
      scales += kRows * sizeof(float);
      load_scales();
    }
  }
};

template <QuantType T, int kGroups>
StoredWeights<T, kGroups> stored_weights(const uint8_t* group, [[maybe_unused]] int64_t width, int64_t k0,
                                         size_t group_bytes) {
  if constexpr (T == QuantType::E4M3) {
    return StoredWeights<T, kGroups>(group, width, k0, group_bytes);
  } else {
    return {group + k0 * (format_of(T).bits / 8) * kRows, group_bytes};
  }
}

// What a tile fetches while it computes: weights that are needed later, `step` bytes of each group for every
// 4 features (0: nothing). If they are `streamed` no copy needs to stay in L2.
struct Prefetch {
  const uint8_t* p;
  size_t group_bytes;
  int step;
  bool streamed;
};

template <int kGroups>
TELLIN_INLINE void prefetch_step(Prefetch& ahead) {
  for (int at = 0; at < ahead.step; at += 64) {
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g) {
      const uint8_t* line = ahead.p + g * ahead.group_bytes + at;
      if (ahead.streamed) {
        __builtin_prefetch(line, 0, 0);
      } else {
        __builtin_prefetch(line, 0, 3);
      }
    }
  }
  ahead.p += ahead.step;
}

template <int kGroups, int kTokens, class Weights>
__attribute__((noinline)) void run_float_tile(Weights weights, int count, const float* x, int64_t ldx,
                                              bool is_first, Prefetch ahead, float* acc_io) {
  __m512 acc[kGroups][kTokens];
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g) {
      acc[g][t] = is_first ? _mm512_setzero_ps() : _mm512_load_ps(acc_io + (t * kGroups + g) * kRows);
    }
  }
  // Rows 3 apart get a pointer each, the two between are reached by index: 4 pointers and a stride instead of
  // 12 pointers (the empty asm keeps the compiler from undoing this).
  constexpr int kBases = (kTokens + 2) / 3;
  const char* base[kBases];
#pragma GCC unroll 4
  for (int i = 0; i < kBases; ++i) {
    base[i] = reinterpret_cast<const char*>(x + 3 * i * ldx);
    asm("" : "+r"(base[i]));
  }
  int64_t stride = ldx * static_cast<int64_t>(sizeof(float));
  asm("" : "+r"(stride));
  const auto add_feature = [&](int i) __attribute__((always_inline)) {
    __m512 w[kGroups];
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g) w[g] = weights.load(g, i);
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
      const __m512 y = broadcast_float(reinterpret_cast<const float*>(base[t / 3] + t % 3 * stride) + i);
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) acc[g][t] = _mm512_fmadd_ps(w[g], y, acc[g][t]);
    }
  };
  for (int i = count / 4; i > 0; --i) {
    prefetch_step<kGroups>(ahead);
    add_feature(0);
    add_feature(1);
    add_feature(2);
    add_feature(3);
    weights.advance(4);
#pragma GCC unroll 4
    for (int j = 0; j < kBases; ++j) base[j] += 4 * sizeof(float);
  }
  for (int i = 0; i < count % 4; ++i) add_feature(i);
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g) _mm512_store_ps(acc_io + (t * kGroups + g) * kRows, acc[g][t]);
  }
}

template <int kGroups, class Weights>
void run_float_tile_of(int tokens, const Weights& weights, int count, const float* x, int64_t ldx,
                       bool is_first, const Prefetch& ahead, float* acc) {
  switch (tokens) {
#define TELLIN_TILE(n) \
  case n:              \
    return run_float_tile<kGroups, n>(weights, count, x, ldx, is_first, ahead, acc);
    TELLIN_TILE(1)
    TELLIN_TILE(2)
    TELLIN_TILE(3)
    TELLIN_TILE(4)
    TELLIN_TILE(5)
    TELLIN_TILE(6)
    TELLIN_TILE(7)
    TELLIN_TILE(8)
    TELLIN_TILE(9)
    TELLIN_TILE(10)
    TELLIN_TILE(11)
    TELLIN_TILE(12)
#undef TELLIN_TILE
  }
}

struct FloatProblem {
  const PackedMatrix& w;
  const float* x;
  int64_t ldx;
  float* out;
  int64_t ldo;

  // acc: [tokens][kGroups][16]
  template <int kGroups>
  void store(const float* acc, int64_t m0, int tokens, int64_t g0) const {
    for (int t = 0; t < tokens; ++t) {
      for (int g = 0; g < kGroups; ++g) {
        const int64_t column = (g0 + g) * kRows;
        const int64_t left = w.n - column;
        const auto mask = static_cast<__mmask16>(left >= kRows ? 0xffff : (1 << left) - 1);
        _mm512_mask_storeu_ps(out + (m0 + t) * ldo + column, mask,
                              _mm512_load_ps(acc + (t * kGroups + g) * kRows));
      }
    }
  }
};

template <QuantType T, int kGroups, int kPanelK>
void run_panels(const FloatProblem& p, int64_t m0, int tokens, int64_t g0) {
  alignas(64) float acc[kFloatTokens * kGroups * kRows];
  alignas(64) float panel[kPanelK * kGroups * kRows];
  const int num_tiles = (tokens + kFloatTile - 1) / kFloatTile;
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kBytesOf4 = kFormat.super_bytes() * 4 / kFormat.super_k();
  for (int64_t k0 = 0; k0 < p.w.k; k0 += kPanelK) {
    const int count = static_cast<int>(p.w.k - k0 < kPanelK ? p.w.k - k0 : kPanelK);
    for (int g = 0; g < kGroups; ++g) {
      expand_panel<T>(p.w.data + (g0 + g) * p.w.group_bytes, k0, count, panel + g * kRows, kGroups * kRows);
    }
    Prefetch ahead = {nullptr, p.w.group_bytes, 0, false};
    const int64_t next = k0 + 2 * kPanelK < p.w.k ? k0 + 2 * kPanelK : k0 + 2 * kPanelK - p.w.k;
    ahead.p = p.w.data + (g0 + (next > k0 ? 0 : kGroups)) * p.w.group_bytes + next * kBytesOf4 / 4;
    for (int i = 0; i < num_tiles; ++i) {
      ahead.step = i == 0 ? kBytesOf4 : 0;
      const int t0 = tokens * i / num_tiles, t1 = tokens * (i + 1) / num_tiles;
      run_float_tile_of<kGroups>(t1 - t0, PanelWeights<kGroups>{panel}, count, p.x + (m0 + t0) * p.ldx + k0,
                                 p.ldx, k0 == 0, ahead, acc + t0 * kGroups * kRows);
    }
  }
  p.store<kGroups>(acc, m0, tokens, g0);
}

// Groups at `after` are read next.
template <QuantType T, int kGroups>
void run_stored(const FloatProblem& p, int64_t m0, int tokens, int64_t g0, const uint8_t* after) {
  constexpr int kBytesOf4 = format_of(T).bits / 2 * kRows;
  constexpr int64_t kAheadK = kAheadBytes * 4 / kBytesOf4;
  alignas(64) float acc[kFloatTokens * kGroups * kRows];
  const int num_tiles = (tokens + kFloatTile - 1) / kFloatTile;
  const uint8_t* const group = p.w.data + g0 * p.w.group_bytes;
  const int64_t chunk = num_tiles == 1 ? p.w.k : kStoredBytes * 4 / kBytesOf4;
  const int64_t last =
      p.w.k > kAheadK ? (p.w.k - kAheadK) / 4 * 4 : 0;  // from here on it fetches from `after`
  for (int64_t k0 = 0, k1; k0 < p.w.k; k0 = k1) {
    k1 = k0 >= last ? p.w.k : k0 + chunk < last ? k0 + chunk : last;
    const int64_t bytes = k0 / 4 * kBytesOf4;
    Prefetch ahead = {k0 < last ? group + bytes + kAheadBytes : after + (bytes - last / 4 * kBytesOf4),
                      p.w.group_bytes, kBytesOf4, num_tiles == 1 && streaming().past_caches};
    for (int i = 0; i < num_tiles; ++i) {
      if (i > 0) ahead.step = 0;
      const int t0 = tokens * i / num_tiles, t1 = tokens * (i + 1) / num_tiles;
      run_float_tile_of<kGroups>(t1 - t0, stored_weights<T, kGroups>(group, p.w.k, k0, p.w.group_bytes),
                                 static_cast<int>(k1 - k0), p.x + (m0 + t0) * p.ldx + k0, p.ldx, k0 == 0,
                                 ahead, acc + t0 * kGroups * kRows);
    }
  }
  p.store<kGroups>(acc, m0, tokens, g0);
}

template <QuantType T, int kGroups>
void run_float_groups(const FloatProblem& p, int64_t m0, int tokens, int64_t g0, const uint8_t* after) {
  if constexpr (!format_of(T).is_quantized()) {
    run_stored<T, kGroups>(p, m0, tokens, g0, after);
  } else if (tokens <= kFewTokens || kGroups == 1) {
    run_panels<T, kGroups, kSmallPanelK>(p, m0, tokens, g0);
  } else {
    run_panels<T, kGroups, kLargePanelK>(p, m0, tokens, g0);
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
    for (int64_t g = g0; g < g1; g += 2) {
      const uint8_t* after = g + 2 >= g1 && w.follow != nullptr ? w.follow : w.data + (g + 2) * w.group_bytes;
      if (g + 2 <= g1) {
        run_float_groups<T, 2>(problem, begin, tokens, g, after);
      } else {
        run_float_groups<T, 1>(problem, begin, tokens, g, after);
      }
    }
  }
}

}  // namespace
}  // namespace tellin

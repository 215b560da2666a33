// NEON with dot products: packed codes x quantised activations of one or two planes.
//
// Work is cut into chunks of 256 features of one group (16 rows). A chunk's codes are unpacked once to bytes
// in L1 and its scales to floats, then every tile of tokens runs over the chunk, its float accumulators
// parked in L1. 16 bytes of activations serve four quads: sdot takes its second operand from a lane.
//
// A value is the same sequence of roundings as in the other variants with vectors.
#pragma once
#include "codes.h"
#include "tellin/linear.h"

namespace tellin {
namespace {

constexpr int kChunkBlocks = 8;     // 256 features
constexpr int kMaxTile = 4;         // tokens: 4 x 4 sums, 4 registers of codes, 4 of activations
constexpr int kMaxTokens = 256;     // tokens that share an unpacked chunk: 16 KiB of accumulators
constexpr int kPrefetchChunks = 2;  // how far ahead of its use a chunk of codes is fetched

struct Chunk {
  alignas(64) int8_t codes[kChunkBlocks][8][kVectorBytes];
  alignas(64) float scale[2 * kChunkBlocks][kRows];
  alignas(64) float minimum[2 * kChunkBlocks][kRows];
  alignas(64) int32_t code_sum[2 * kChunkBlocks][kRows];  // sum of (code - zero point)
};

// A register lane as a compile-time constant.
template <int kLane>
struct Lane {
  static constexpr int value = kLane;
};

template <class Act>
TELLIN_INLINE const Act* act_row(const Act* x, int t, int64_t row_bytes) {
  return reinterpret_cast<const Act*>(reinterpret_cast<const uint8_t*>(x) + t * row_bytes);
}

// sum += four quads of codes x 16 activations (half kHalf of plane kPlane) of every token.
template <int kPlane, int kHalf, class Act, int kTokens>
TELLIN_INLINE void add_half(const int8_t (*codes)[kVectorBytes], const Act* x, int64_t row_bytes,
                            int32x4_t (&sum)[kTokens][kQuarters]) {
  int8x16_t y[kTokens];
#pragma GCC unroll 4
  for (int t = 0; t < kTokens; ++t) y[t] = vld1q_s8(act_row(x, t, row_bytes)->q[kPlane] + 16 * kHalf);
  const auto add_quad = [&](auto lane) __attribute__((always_inline)) {
    constexpr int kLane = decltype(lane)::value;
#pragma GCC unroll 4
    for (int i = 0; i < kQuarters; ++i) {
      const int8x16_t w = vld1q_s8(codes[4 * kHalf + kLane] + kQuarterBytes * i);
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) sum[t][i] = vdotq_laneq_s32(sum[t][i], w, y[t], kLane);
    }
  };
  add_quad(Lane<0>());
  add_quad(Lane<1>());
  add_quad(Lane<2>());
  add_quad(Lane<3>());
}

// The terms of the activations' zero and of the codes' zero point of a block or half (pair 0: block; 1, 2:
// halves).
template <QuantType T>
TELLIN_INLINE int32x4_t zero_terms(const Act8* block, int pair, const int32_t* code_sum) {
  const int32x4_t start = vdupq_n_s32(block->zero_pair[pair][1] * quad_zero_point<T>());
  return vmlaq_n_s32(start, vld1q_s32(code_sum), block->zero_pair[pair][0]);
}

template <QuantType T>
TELLIN_INLINE int32x4_t zero_terms(const Act16* block, int pair, const int32_t*) {
  const int32_t neg_sum = pair == 0 ? block->neg_sums[0] + block->neg_sums[1] : block->neg_sums[pair - 1];
  return vdupq_n_s32(neg_sum * quad_zero_point<T>());
}

// Exact integer sums of codes x whole activations of a block (kHalf < 0) or of a half.
template <QuantType T, int kHalf, class Act, int kTokens>
TELLIN_INLINE void integer_sums(const int8_t (*codes)[kVectorBytes], const Act* x, int64_t row_bytes,
                                const int32_t* code_sum, int32x4_t (&sum)[kTokens][kQuarters]) {
  constexpr int kPair = kHalf + 1;
  constexpr bool kTwo = Act::kPlanes == 2;
#pragma GCC unroll 4
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
    for (int i = 0; i < kQuarters; ++i) {
      sum[t][i] =
          kTwo ? vdupq_n_s32(0) : zero_terms<T>(act_row(x, t, row_bytes), kPair, code_sum + kQuarterRows * i);
    }
  }
  if constexpr (kHalf <= 0) add_half<0, 0>(codes, x, row_bytes, sum);
  if constexpr (kHalf != 0) add_half<0, 1>(codes, x, row_bytes, sum);
  if constexpr (kTwo) {
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
      for (int i = 0; i < kQuarters; ++i) {
        const int32x4_t start = zero_terms<T>(act_row(x, t, row_bytes), kPair, code_sum);
        sum[t][i] = vaddq_s32(vshlq_n_s32(sum[t][i], kPlaneShift), start);
      }
    }
    if constexpr (kHalf <= 0) add_half<1, 0>(codes, x, row_bytes, sum);
    if constexpr (kHalf != 0) add_half<1, 1>(codes, x, row_bytes, sum);
  }
}

// One 32-feature block added to acc [kTokens][16].
template <QuantType T, class Act, int kTokens>
TELLIN_INLINE void add_block(const int8_t (*codes)[kVectorBytes], const Act* x, int64_t row_bytes,
                             const float (*scale)[kRows], const float (*minimum)[kRows],
                             const int32_t (*code_sum)[kRows], float* acc) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kLast = kFormat.per16() ? 1 : 0;
  constexpr bool kExact = Act::kPlanes == 1;  // the product of the scales is
  int32x4_t sum[kTokens][kQuarters];
  float32x4_t product[kTokens][kQuarters];  // of the first half; exact: acc with it
  if constexpr (kFormat.per16()) {
    integer_sums<T, 0>(codes, x, row_bytes, code_sum[0], sum);
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
      for (int i = 0; i < kQuarters; ++i) {
        const float32x4_t value = vcvtq_f32_s32(sum[t][i]), s = vld1q_f32(scale[0] + kQuarterRows * i);
        if constexpr (kExact) {
          const float32x4_t a = vld1q_f32(acc + t * kRows + kQuarterRows * i);
          product[t][i] = vfmaq_f32(a, value, vmulq_n_f32(s, act_row(x, t, row_bytes)->scale));
        } else {
          product[t][i] = vmulq_f32(value, s);
        }
      }
    }
    integer_sums<T, 1>(codes, x, row_bytes, code_sum[1], sum);
  } else {
    integer_sums<T, -1>(codes, x, row_bytes, code_sum[0], sum);
  }
#pragma GCC unroll 4
  for (int t = 0; t < kTokens; ++t) {
    const Act* block = act_row(x, t, row_bytes);
#pragma GCC unroll 4
    for (int i = 0; i < kQuarters; ++i) {
      float* const a = acc + t * kRows + kQuarterRows * i;
      const float32x4_t value = vcvtq_f32_s32(sum[t][i]), s = vld1q_f32(scale[kLast] + kQuarterRows * i);
      float32x4_t result;
      if constexpr (kExact) {
        const float32x4_t before = kFormat.per16() ? product[t][i] : vld1q_f32(a);
        result = vfmaq_f32(before, value, vmulq_n_f32(s, block->scale));
      } else {
        const float32x4_t p = kFormat.per16() ? vfmaq_f32(product[t][i], value, s) : vmulq_f32(value, s);
        result = vfmaq_n_f32(vld1q_f32(a), p, block->scale);
      }
      if constexpr (kFormat.has_min) {
        for (int h = 0; h <= kLast; ++h) {
          const float x_sum = kFormat.per16() ? block->half_sum[h] : block->sum;
          result = vfmaq_n_f32(result, vld1q_f32(minimum[h] + kQuarterRows * i), x_sum);
        }
      }
      vst1q_f32(a, result);
    }
  }
}

// Runs a tile over the blocks of a chunk. acc: [kTokens][16].
template <QuantType T, class Act, int kTokens>
__attribute__((noinline)) void run_tile(const Chunk& chunk, const uint8_t* prefetch, int num_blocks,
                                        const uint8_t* x, int64_t row_bytes, float* acc) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kSums = kFormat.per16() ? 2 : 1;
  constexpr int kStep = kFormat.super_bytes() / kFormat.blocks();
  for (int b = 0; b < num_blocks; ++b) {
    if (prefetch != nullptr) {
      for (int i = 0; i < kStep; i += 64) __builtin_prefetch(prefetch + i, 0, 3);
      prefetch += kStep;
    }
    add_block<T, Act, kTokens>(chunk.codes[b], reinterpret_cast<const Act*>(x), row_bytes,
                               chunk.scale + b * kSums, chunk.minimum + b * kSums, chunk.code_sum + b * kSums,
                               acc);
    x += sizeof(Act);
  }
}

// Unpacks quads [kQuad, 8) of quarter i and adds up their codes: sum of each half.
template <QuantType T, int kQuad>
TELLIN_INLINE void unpack_quads(const uint8_t* block, int i, int8_t (*codes)[kVectorBytes],
                                int32x4_t (&sum)[2]) {
  if constexpr (kQuad < 8) {
    const int8x16_t quad = load_quad<T, kQuad>(block + kQuarterBytes * i);
    vst1q_s8(codes[kQuad] + kQuarterBytes * i, quad);
    sum[kQuad / 4] = vdotq_s32(sum[kQuad / 4], quad, vdupq_n_s8(1));
    unpack_quads<T, kQuad + 1>(block, i, codes, sum);
  }
}

template <QuantType T>
void unpack_chunk(const uint8_t* w, int num_supers, Chunk* chunk) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kSums = kFormat.per16() ? 2 : 1;
  for (int s = 0; s < num_supers; ++s, w += kFormat.super_bytes()) {
    const int first = s * kFormat.blocks();
    expand_scales<T>(w, chunk->scale + first * kSums, chunk->minimum + first * kSums);
    for (int b = 0; b < kFormat.blocks(); ++b) {
      const uint8_t* block = w + kFormat.header_bytes() + b * kFormat.block_bytes();
      int32_t (*const code_sum)[kRows] = chunk->code_sum + (first + b) * kSums;
      for (int i = 0; i < kQuarters; ++i) {
        const int32x4_t start = vdupq_n_s32(-16 * quad_zero_point<T>());
        int32x4_t sum[2] = {start, start};
        unpack_quads<T, 0>(block, i, chunk->codes[first + b], sum);
        if (kSums == 2) {
          vst1q_s32(code_sum[0] + kQuarterRows * i, sum[0]);
          vst1q_s32(code_sum[1] + kQuarterRows * i, sum[1]);
        } else {
          vst1q_s32(code_sum[0] + kQuarterRows * i, vaddq_s32(sum[0], sum[1]));
        }
      }
    }
  }
}

struct IntProblem {
  const PackedMatrix& w;
  const QuantizedRows& x;
  float* out;
  int64_t ldo;
};

// Tokens [m0, m0 + tokens) x group g, tokens <= kMaxTokens.
template <QuantType T, class Act>
void run_group(const IntProblem& p, int64_t m0, int tokens, int64_t g) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kChunkSupers = kChunkBlocks / kFormat.blocks();
  alignas(64) float acc[kMaxTokens * kRows];
  Chunk chunk;
  const int64_t num_supers = static_cast<int64_t>(p.w.group_bytes / kFormat.super_bytes());
  const int num_tiles = (tokens + kMaxTile - 1) / kMaxTile;
  const uint8_t* w = p.w.data + g * p.w.group_bytes;
  const uint8_t* x = p.x.data + m0 * p.x.row_bytes;
  __builtin_memset(acc, 0, sizeof(float) * kRows * static_cast<size_t>(tokens));
  for (int64_t s0 = 0; s0 < num_supers; s0 += kChunkSupers) {
    const int supers = static_cast<int>(num_supers - s0 < kChunkSupers ? num_supers - s0 : kChunkSupers);
    unpack_chunk<T>(w, supers, &chunk);
    const uint8_t* const ahead = w + kPrefetchChunks * kChunkSupers * kFormat.super_bytes();
    for (int i = 0; i < num_tiles; ++i) {
      const int t0 = tokens * i / num_tiles, t1 = tokens * (i + 1) / num_tiles;
      switch (t1 - t0) {
#define TELLIN_TILE(n)                                                                                      \
  case n:                                                                                                   \
    run_tile<T, Act, n>(chunk, i == 0 ? ahead : nullptr, supers * kFormat.blocks(), x + t0 * p.x.row_bytes, \
                        p.x.row_bytes, acc + t0 * kRows);                                                   \
    break;
        TELLIN_TILE(1)
        TELLIN_TILE(2)
        TELLIN_TILE(3)
        TELLIN_TILE(4)
#undef TELLIN_TILE
      }
    }
    w += supers * kFormat.super_bytes();
    x += supers * kFormat.blocks() * sizeof(Act);
  }
  for (int t = 0; t < tokens; ++t) {
    store_rows(acc + t * kRows, p.w.n - g * kRows, p.out + (m0 + t) * p.ldo + g * kRows);
  }
}

template <QuantType T, class Act>
void linear_int(const PackedMatrix& w, const QuantizedRows& x, int64_t m0, int64_t m1, int64_t g0, int64_t g1,
                float* out, int64_t ldo) {
  const IntProblem problem = {w, x, out, ldo};
  const int64_t num_passes = (m1 - m0 + kMaxTokens - 1) / kMaxTokens;
  for (int64_t i = 0; i < num_passes; ++i) {
    const int64_t begin = m0 + (m1 - m0) * i / num_passes, end = m0 + (m1 - m0) * (i + 1) / num_passes;
    for (int64_t g = g0; g < g1; ++g) run_group<T, Act>(problem, begin, static_cast<int>(end - begin), g);
  }
}

}  // namespace
}  // namespace tellin

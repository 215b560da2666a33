// Attention over tiles of 16-bit codes, whose products are integers: two multiply-adds per lane and
// instruction where floats have one. Include a simd_*.h first.
//
//   scores  s[r][j] = (sum over d of q[r][d] * k[d][j]) * (scale of q[r] * scale of k[j])
//   softmax as of floats; t[r][j] = p[r][j] * scale of v[j], as codes of 14 bits in units of their largest
//   values  acc[r][d] = (sum over j of t[r][j] * v[j][d]) * unit of t[r]
// Sums of 128 features, or of 32 positions from a multiple of 32 on, are exact in 32 bits; such sums are
// added as floats in order. So no blocking of rows or vectors can change a bit, nor how a lane adds its
// pairs. What a row does not see has code 0 and may hold anything: blocks of rows need not see the same.
#pragma once

#include "vector/attention_parts.h"

namespace {

constexpr int64_t kExactFeatures = 128, kExactPositions = 32;
constexpr float kWeightTop = 16383.0f;
alignas(64) constexpr float kNothing[Simd::kWidth] = {};

// Scores of R rows against kTiles tiles from `first` on. kPieces: head_dim is more than one exact sum.
template <int R, int kTiles, bool kFetch, bool kPieces>
inline void dot_keys(const KvLayout& layout, const Tiles& tiles, int64_t first, const int16_t* q,
                     const float* q_scales, float* scores) {
  constexpr int kVectors = kTiles * kTileVectors;
  const int64_t head_dim = layout.head_dim;
  const int16_t* keys[kTiles];
  const int16_t* next[kTiles];
#pragma GCC unroll 8
  for (int t = 0; t < kTiles; ++t) {
    keys[t] = reinterpret_cast<const int16_t*>(tiles.now[first + t]);
    next[t] = reinterpret_cast<const int16_t*>(tiles.next[first + t]);
    if (kFetch) {
      __builtin_prefetch(tiles.next[first + t] + layout.scale_offset, 0, 3);
    }
  }
  for (int64_t piece = 0; piece < head_dim; piece += kExactFeatures) {
    typename Simd::Sums sums[R][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) sums[r][i] = Simd::no_sums();
    }
    const int64_t stop = smaller(head_dim, piece + kExactFeatures);
    for (int64_t d = piece; d < stop; d += 2) {
      const int64_t at = d * kTilePositions;
      if (kFetch) {
#pragma GCC unroll 8
        for (int t = 0; t < kTiles; ++t) __builtin_prefetch(next[t] + at, 0, 3);
      }
      if constexpr (R < kVectors) {
        typename Simd::Pairs values[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) values[r] = Simd::set1_pair(q + d + r * kQueryStride);
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) {
          const auto k =
              Simd::load_pairs(keys[i / kTileVectors] + at + i % kTileVectors * (2 * Simd::kWidth));
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) sums[r][i] = Simd::dot(sums[r][i], values[r], k);
        }
      } else {
        typename Simd::Pairs k[kVectors];
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i)
          k[i] = Simd::load_pairs(keys[i / kTileVectors] + at + i % kTileVectors * (2 * Simd::kWidth));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const auto value = Simd::set1_pair(q + d + r * kQueryStride);
#pragma GCC unroll 8
          for (int i = 0; i < kVectors; ++i) sums[r][i] = Simd::dot(sums[r][i], value, k[i]);
        }
      }
    }
    const bool is_last = stop == head_dim;
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      const uint8_t* scales = tiles.now[first + i / kTileVectors] + layout.scale_offset;
      const V key_scales = Simd::load_low_halves(scales + i % kTileVectors * Simd::kWidth * 4);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        float* out = scores + r * kPartition + (first * kTileVectors + i) * Simd::kWidth;
        V score = Simd::to_float(sums[r][i]);
        if constexpr (kPieces) {
          if (piece > 0) score = Simd::add(Simd::load(out), score);
        }
        if (!kPieces || is_last) score = Simd::mul(score, Simd::mul(Simd::set1(q_scales[r]), key_scales));
        Simd::store(out, score);
      }
    }
  }
}

// Positions that a row sees, and the whole tiles that hold them.
struct RowRange {
  int64_t begin, end;
  int64_t first, last;
};

// Turns the scores of one row into weights, as softmax_row does, times the scales of values. Lanes that the
// row does not see become 0. The largest is returned.
inline float scaled_weights(const KvLayout& layout, const uint8_t* const* tiles, const RowRange& row,
                            float row_max, float* scores, float* total) {
  const V shift = Simd::set1(row_max);
  V sums[kTileVectors], tops[kTileVectors];
  for (int i = 0; i < kTileVectors; ++i) sums[i] = tops[i] = Simd::zero();
  const auto weigh = [&](int64_t j, bool is_edge) {
    const uint8_t* scales = tiles[j / kTilePositions] + layout.scale_offset;
    for (int i = 0; i < kTileVectors; ++i) {
      float* p = scores + j + i * Simd::kWidth;
      const V weight = vexp2_down(Simd::sub(Simd::load(p), shift));
      sums[i] = Simd::add(sums[i], weight);
      V scaled = Simd::mul(weight, Simd::load_high_halves(scales + i * Simd::kWidth * 4));
      if (is_edge) scaled = visible(scaled, j + i * Simd::kWidth, row.begin, row.end, 0.0f);
      tops[i] = Simd::max_or_nan(tops[i], scaled);
      Simd::store(p, scaled);
    }
  };
  int64_t j = row.first;
  if (j < row.begin) {
    weigh(j, true);
    j += kTilePositions;
  }
  const int64_t whole = row.end < row.last ? row.last - kTilePositions : row.last;
  for (; j < whole; j += kTilePositions) weigh(j, false);
  if (j < row.last) weigh(j, true);
  V top = tops[0];
  for (int i = 1; i < kTileVectors; ++i) top = Simd::max_or_nan(top, tops[i]);
  *total = add_lanes(sums);
  return Simd::reduce_max_or_nan(top);
}

// Codes of such weights, in place; tiles that only others see get zeros.
inline void encode_weights(const RowRange& row, int64_t block_first, int64_t block_last, float top,
                           float* weights) {
  const V factor = Simd::set1(top >= kLeastTop ? kWeightTop / top : 0.0f);
  auto* codes = reinterpret_cast<int16_t*>(weights);
  const auto clear = [&](int64_t from, int64_t to) {
    __builtin_memset(codes + from, 0, static_cast<size_t>(to - from) * sizeof(int16_t));
  };
  if (block_first < row.first) clear(block_first, row.first);
  for (int64_t j = row.first; j < row.last; j += Simd::kWidth) {
    Simd::store_codes(codes + j, Simd::mul(Simd::load(weights + j), factor));
  }
  if (row.last < block_last) clear(row.last, block_last);
}

// acc[r][column .. column + C vectors) = weights of positions [begin, end), both even, times their values.
// Each kExactPositions are an integer sum, exact in 32 bits.
template <int R, int C, bool kFetch, bool kTail = false>
inline void dot_values(const KvLayout& layout, const Tiles& tiles, int64_t begin, int64_t end,
                       const int16_t* codes, const float* units, int64_t column, float* acc,
                       int64_t acc_stride, int tail = 0) {
  constexpr int64_t kColumnBytes = C * Simd::kWidth * 2 * sizeof(int16_t);
  constexpr int64_t kRowCodes = 2 * kPartition;  // a row of scores holds codes in its first half
  const int64_t row_codes = 2 * layout.value_dim;
  const int64_t offset = layout.value_offset + column * 4;
  const int64_t line = -offset & (kLine - 1);  // to the first line that begins in these columns
  for (int64_t j = begin; j < end;) {
    typename Simd::Sums sums[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sums[r][c] = Simd::no_sums();
    }
    const bool is_first = j == begin;
    const int64_t stop = smaller(end, (j / kExactPositions + 1) * kExactPositions);
    while (j < stop) {
      const uint64_t lane = static_cast<uint64_t>(j) % kTilePositions;
      const uint64_t tile = static_cast<uint64_t>(j) / kTilePositions;
      const int64_t at = offset + static_cast<int64_t>(lane) * row_codes;  // half a row of pairs, in bytes
      const auto* v = reinterpret_cast<const int16_t*>(tiles.now[tile] + at);
      const uint8_t* next = (line < kColumnBytes ? tiles.next[tile] + line : tiles.now[tile]) + at;
      const int16_t* w = codes + j;
      const int64_t count = smaller(stop - j, kTilePositions - static_cast<int64_t>(lane));
      j += count;
      for (const int16_t* last = w + count; w != last; w += 2, v += row_codes, next += 2 * row_codes) {
        if (kFetch) {
          for (int64_t b = 0; b < kColumnBytes; b += kLine) __builtin_prefetch(next + b, 0, 3);
        }
        if constexpr (R < C) {
          typename Simd::Pairs weights[R];
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) weights[r] = Simd::set1_pair(w + r * kRowCodes);
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) {
            const auto value = Simd::load_pairs(v + c * 2 * Simd::kWidth);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[r][c] = Simd::dot(sums[r][c], weights[r], value);
          }
        } else {
          typename Simd::Pairs values[C];
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) values[c] = Simd::load_pairs(v + c * 2 * Simd::kWidth);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const auto weight = Simd::set1_pair(w + r * kRowCodes);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) sums[r][c] = Simd::dot(sums[r][c], weight, values[c]);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const V unit = Simd::set1(j == end ? units[r] : 1.0f);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        float* p = acc + r * acc_stride + column + c * Simd::kWidth;
        const float* before = is_first ? kNothing : p;  // no branch
        const V part = Simd::to_float(sums[r][c]);
        if constexpr (kTail) {
          Simd::store_partial(p, Simd::mul(Simd::add(Simd::load_partial(before, tail), part), unit), tail);
        } else {
          Simd::store(p, Simd::mul(Simd::add(Simd::load(before), part), unit));
        }
      }
    }
  }
}

// One block of R neighbouring rows, all of which see something.
template <int R, bool kFetch>
void attend_int16_block(const KvLayout& layout, const Tiles& tiles, const AttentionRows& rows, int64_t first,
                        float* scores, float* states) {
  const int64_t value_dim = layout.value_dim;
  const int64_t stride = value_dim + kStatePadding;
  int64_t lowest = kPartition, highest = 0;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    lowest = smaller(lowest, rows.begin[first + r]);
    highest = larger(highest, rows.end[first + r]);
  }
  const int64_t first_tile = lowest / kTilePositions;
  const int64_t last_tile = (highest + kTilePositions - 1) / kTilePositions;
  for_pieces<Simd::dot_tiles(R)>(first_tile, last_tile, [&](int64_t at, auto n) {
    const int16_t* q = rows.q_codes + first * kQueryStride;
    if (layout.head_dim <= kExactFeatures) {
      dot_keys<R, n.value, kFetch, false>(layout, tiles, at, q, rows.q_scales + first, scores);
    } else {
      dot_keys<R, n.value, kFetch, true>(layout, tiles, at, q, rows.q_scales + first, scores);
    }
  });
  float* out = states + first * stride;
  float units[R];
  RowRange ranges[R];
  // Step by step for all rows: the reduction that ends a row's step overlaps with the next row's work.
  for (int r = 0; r < R; ++r) {
    const int64_t row_begin = rows.begin[first + r], row_end = rows.end[first + r];
    ranges[r] = {row_begin, row_end, row_begin / kTilePositions * kTilePositions,
                 (row_end + kTilePositions - 1) / kTilePositions * kTilePositions};
    out[r * stride + value_dim] = mask_scores(scores + r * kPartition, row_begin, row_end, ranges[r].first,
                                              ranges[r].last, rows.softcap);
  }
  for (int r = 0; r < R; ++r) {
    float* state = out + r * stride + value_dim;
    units[r] = scaled_weights(layout, tiles.now, ranges[r], state[0], scores + r * kPartition, state + 1);
  }
  for (int r = 0; r < R; ++r) {
    encode_weights(ranges[r], first_tile * kTilePositions, last_tile * kTilePositions, units[r],
                   scores + r * kPartition);
    units[r] *= 1.0f / kWeightTop;
  }
  const auto* codes = reinterpret_cast<const int16_t*>(scores);
  const int64_t begin = lowest / 2 * 2, end = (highest + 1) / 2 * 2;
  const int64_t vectors = value_dim / Simd::kWidth;
  for_pieces<Simd::dot_columns(R)>(0, vectors, [&](int64_t at, auto n) {
    dot_values<R, n.value, kFetch>(layout, tiles, begin, end, codes, units, at * Simd::kWidth, out, stride);
  });
  const int64_t column = vectors * Simd::kWidth;
  if (column < value_dim) {
    dot_values<R, 1, kFetch, true>(layout, tiles, begin, end, codes, units, column, out, stride,
                                   static_cast<int>(value_dim - column));
  }
}

void attend_int16(const KvLayout& layout, const uint8_t* const* tiles, const AttentionRows& rows,
                  float* scratch, float* states) {
  for_blocks<Simd::kDotRows>(layout, tiles, rows, states, [&](const Tiles& both, int64_t first, auto n) {
    if (both.next == tiles) {
      attend_int16_block<n.value, false>(layout, both, rows, first, scratch, states);
    } else {
      attend_int16_block<n.value, true>(layout, both, rows, first, scratch, states);
    }
  });
}

}  // namespace

// Attention kernels, written once against Simd. Include a simd_*.h first.
//
// One partition of 256 positions, one kv head, up to kAttendRows query rows at a time:
//   scores  s[r][j] = sum over d, in order, of q[r][d] * k[d][j]      lanes = positions, q broadcast
//   softmax m[r] = max s, p[r][j] = exp(s - m), l[r] = sum p          16 running sums, folded by a fixed tree
//   values  acc[r][d] = sum over j, in order, of p[r][j] * v[j][d]    lanes = head_dim, p broadcast
// The loops over d and j are single chains, so blocking rows, tiles or columns cannot change a bit. Positions
// a row does not see take no part in its values: they may hold anything.
#pragma once

#include "tellin/vector_kernels.h"
#include "vector/math.h"

namespace {

using tellin::AttentionRows;
using tellin::kPartition;
using tellin::kPartitionTiles;
using tellin::kStatePadding;
using tellin::kTilePositions;
using tellin::KvDtype;
using tellin::KvLayout;

constexpr int kTileVectors = static_cast<int>(kTilePositions) / Simd::kWidth;
constexpr float kMinusInfinity = -__builtin_inff();

inline int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}
inline int64_t larger(int64_t a, int64_t b) {
  return a > b ? a : b;
}

// How one storage type is read: a vector of values from element index i of a K or V array.
struct ReadFloat32 {
  static constexpr int64_t kBytes = 4;
  static constexpr bool kPrefetch = false;  // mostly panels that were just made
  static inline V load(const uint8_t* p) { return Simd::load(reinterpret_cast<const float*>(p)); }
};
struct ReadFloat16 {
  static constexpr int64_t kBytes = 2;
  static constexpr bool kPrefetch = true;
  static inline V load(const uint8_t* p) { return Simd::load_f16(reinterpret_cast<const uint16_t*>(p)); }
};
struct ReadInt8 {
  static constexpr int64_t kBytes = 1;
  static constexpr bool kPrefetch = true;
  static inline V load(const uint8_t* p) { return Simd::load_i8(reinterpret_cast<const int8_t*>(p)); }
};

// Scores of R rows against T neighbouring tiles. Tiles lie apart in memory, so the hardware does not see the
// next one coming: while these are read, later keys and the values of these are fetched.
template <class Read, int R, int T>
inline void score_tiles(const KvLayout& layout, const uint8_t* const* tiles, const uint8_t* const* ahead,
                        const float* q, float* scores) {
  constexpr int kN = T * kTileVectors;
  constexpr int64_t kRowBytes = kTilePositions * Read::kBytes;
  const int64_t head_dim = layout.head_dim;
  V acc[R][kN];
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < kN; ++i) acc[r][i] = Simd::zero();
  }
  for (int64_t d = 0; d < head_dim; ++d) {
    if (Read::kPrefetch && d * kRowBytes % 64 == 0) {
      for (int i = 0; i < T; ++i) {
        __builtin_prefetch(ahead[i] + d * kRowBytes, 0, 3);
        __builtin_prefetch(tiles[i] + layout.value_offset + d * kRowBytes, 0, 2);
      }
    }
    V k[kN];
    for (int i = 0; i < kN; ++i) {
      k[i] = Read::load(tiles[i / kTileVectors] + d * kRowBytes +
                        (i % kTileVectors) * Simd::kWidth * Read::kBytes);
    }
    for (int r = 0; r < R; ++r) {
      const V value = Simd::set1(q[r * head_dim + d]);
      for (int i = 0; i < kN; ++i) acc[r][i] = Simd::fma(value, k[i], acc[r][i]);
    }
  }
  for (int i = 0; i < kN; ++i) {
    if (layout.scale_offset != 0) {
      const float* scales = reinterpret_cast<const float*>(tiles[i / kTileVectors] + layout.scale_offset);
      const V s = Simd::load(scales + (i % kTileVectors) * Simd::kWidth);
      for (int r = 0; r < R; ++r) acc[r][i] = Simd::mul(acc[r][i], s);
    }
    for (int r = 0; r < R; ++r) Simd::store(scores + r * kPartition + i * Simd::kWidth, acc[r][i]);
  }
}

template <class Read, int R>
void score_rows(const KvLayout& layout, const uint8_t* const* tiles, int64_t tile_begin, int64_t tile_end,
                const float* q, float* scores) {
  constexpr int kT = Simd::kAttendTiles;
  constexpr int64_t kAhead = 2;
  int64_t t = tile_begin;
  for (; t + kT <= tile_end; t += kT) {
    const int64_t ahead = smaller(t + kAhead * kT, tile_end - kT);
    score_tiles<Read, R, kT>(layout, tiles + t, tiles + ahead, q, scores + t * kTilePositions);
  }
  for (; t < tile_end; ++t) {
    score_tiles<Read, R, 1>(layout, tiles + t, tiles + t, q, scores + t * kTilePositions);
  }
}

// Turns the scores of one row into weights, in place, and gives their maximum and sum. Lanes of the tiles
// touched by [begin, end) that lie outside it become 0.
inline void softmax_row(float* scores, int64_t begin, int64_t end, float softcap, float* maximum,
                        float* total) {
  const int64_t first = begin / kTilePositions * kTilePositions;
  const int64_t last = (end + kTilePositions - 1) / kTilePositions * kTilePositions;
  if (softcap > 0.0f) {
    const V cap = Simd::set1(softcap);
    for (int64_t j = first; j < last; j += Simd::kWidth) {
      Simd::store(scores + j, Simd::mul(cap, vtanh(Simd::div(Simd::load(scores + j), cap))));
    }
  }
  for (int64_t j = first; j < begin; ++j) scores[j] = kMinusInfinity;
  for (int64_t j = end; j < last; ++j) scores[j] = kMinusInfinity;
  V top = Simd::set1(kMinusInfinity);
  for (int64_t j = first; j < last; j += Simd::kWidth) top = Simd::max(Simd::load(scores + j), top);
  const float row_max = Simd::reduce_max(top);
  const V shift = Simd::set1(row_max);
  V sums[kTileVectors];
  for (int i = 0; i < kTileVectors; ++i) sums[i] = Simd::zero();
  for (int64_t j = first; j < last; j += kTilePositions) {
    for (int i = 0; i < kTileVectors; ++i) {
      float* p = scores + j + i * Simd::kWidth;
      const V weight = vexp(Simd::sub(Simd::load(p), shift));
      Simd::store(p, weight);
      sums[i] = Simd::add(sums[i], weight);
    }
  }
  for (int i = 1; i < kTileVectors; ++i) sums[0] = Simd::add(sums[0], sums[i]);
  *maximum = row_max;
  *total = Simd::reduce_add(sums[0]);
}

inline void scale_weights(const KvLayout& layout, const uint8_t* const* tiles, int64_t begin, int64_t end,
                          float* weights) {
  for (int64_t t = begin / kTilePositions; t * kTilePositions < end; ++t) {
    const float* scales = reinterpret_cast<const float*>(tiles[t] + layout.scale_offset) + kTilePositions;
    float* w = weights + t * kTilePositions;
    for (int i = 0; i < kTileVectors; ++i) {
      const int64_t at = i * Simd::kWidth;
      Simd::store(w + at, Simd::mul(Simd::load(w + at), Simd::load(scales + at)));
    }
  }
}

// acc[r][column .. column + C vectors) += weights of positions [begin, end). With a `tail` shorter than a
// vector, only that many columns count; what is read beyond them lies inside the tile (see kv_pool.cpp).
template <class Read, int R, int C, bool kTail = false>
inline void value_columns(const KvLayout& layout, const uint8_t* const* tiles, int64_t begin, int64_t end,
                          const float* weights, int64_t column, float* acc, int64_t acc_stride,
                          int tail = 0) {
  V sums[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      const float* p = acc + r * acc_stride + column + c * Simd::kWidth;
      sums[r][c] = kTail ? Simd::load_partial(p, tail) : Simd::load(p);
    }
  }
  const int64_t row_bytes = layout.head_dim * Read::kBytes;
  const int64_t offset = layout.value_offset + column * Read::kBytes;
  const float* w = weights + begin;
  for (int64_t j = begin; j < end;) {
    const uint64_t lane = static_cast<uint64_t>(j) % kTilePositions;
    const uint8_t* v = tiles[static_cast<uint64_t>(j) / kTilePositions] + offset + lane * row_bytes;
    const int64_t count = smaller(end - j, kTilePositions - static_cast<int64_t>(lane));
    j += count;
    for (const float* stop = w + count; w != stop; ++w, v += row_bytes) {
      V values[C];
      for (int c = 0; c < C; ++c) values[c] = Read::load(v + c * Simd::kWidth * Read::kBytes);
      for (int r = 0; r < R; ++r) {
        const V weight = Simd::set1(w[r * kPartition]);
        for (int c = 0; c < C; ++c) sums[r][c] = Simd::fma(weight, values[c], sums[r][c]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      float* p = acc + r * acc_stride + column + c * Simd::kWidth;
      if (kTail) {
        Simd::store_partial(p, sums[r][c], tail);
      } else {
        Simd::store(p, sums[r][c]);
      }
    }
  }
}

template <class Read, int R>
void value_rows(const KvLayout& layout, const uint8_t* const* tiles, int64_t begin, int64_t end,
                const float* weights, float* acc, int64_t acc_stride) {
  if (begin >= end) return;
  constexpr int kC =
      2 * R <= Simd::kAttendRows ? 2 * Simd::kAttendCols : Simd::kAttendCols;  // fewer rows, more columns
  int64_t column = 0;
  for (; column + kC * Simd::kWidth <= layout.head_dim; column += kC * Simd::kWidth) {
    value_columns<Read, R, kC>(layout, tiles, begin, end, weights, column, acc, acc_stride);
  }
  for (; column + Simd::kWidth <= layout.head_dim; column += Simd::kWidth) {
    value_columns<Read, R, 1>(layout, tiles, begin, end, weights, column, acc, acc_stride);
  }
  if (column < layout.head_dim) {
    value_columns<Read, R, 1, true>(layout, tiles, begin, end, weights, column, acc, acc_stride,
                                    static_cast<int>(layout.head_dim - column));
  }
}

// One block of R neighbouring rows, all of which see something.
template <class Read, int R>
void attend_block(const KvLayout& layout, const uint8_t* const* tiles, const AttentionRows& rows,
                  int64_t first, float* scores, float* states) {
  const int32_t* begin = rows.begin + first;
  const int32_t* end = rows.end + first;
  const int64_t head_dim = layout.head_dim;
  const int64_t stride = head_dim + kStatePadding;
  int64_t lowest = begin[0], highest = end[0], common_begin = begin[0], common_end = end[0];
  for (int r = 1; r < R; ++r) {
    lowest = smaller(lowest, begin[r]);
    highest = larger(highest, end[r]);
    common_begin = larger(common_begin, begin[r]);
    common_end = smaller(common_end, end[r]);
  }
  score_rows<Read, R>(layout, tiles, lowest / kTilePositions, (highest + kTilePositions - 1) / kTilePositions,
                      rows.q + first * head_dim, scores);
  float* out = states + first * stride;
  for (int r = 0; r < R; ++r) {
    float* state = out + r * stride;
    softmax_row(scores + r * kPartition, begin[r], end[r], rows.softcap, state + head_dim,
                state + head_dim + 1);
    if (layout.scale_offset != 0) scale_weights(layout, tiles, begin[r], end[r], scores + r * kPartition);
    for (int64_t d = 0; d < head_dim; ++d) state[d] = 0.0f;
  }
  if (common_begin >= common_end) {
    for (int r = 0; r < R; ++r) {
      value_rows<Read, 1>(layout, tiles, begin[r], end[r], scores + r * kPartition, out + r * stride, stride);
    }
    return;
  }
  for (int r = 0; r < R; ++r) {
    value_rows<Read, 1>(layout, tiles, begin[r], common_begin, scores + r * kPartition, out + r * stride,
                        stride);
  }
  value_rows<Read, R>(layout, tiles, common_begin, common_end, scores, out, stride);
  for (int r = 0; r < R; ++r) {
    value_rows<Read, 1>(layout, tiles, common_end, end[r], scores + r * kPartition, out + r * stride, stride);
  }
}

template <class Read, int R>
inline void attend_rest(const KvLayout& layout, const uint8_t* const* tiles, const AttentionRows& rows,
                        int64_t first, int64_t count, float* scores, float* states) {
  if constexpr (R > 0) {
    if (count == R) return attend_block<Read, R>(layout, tiles, rows, first, scores, states);
    attend_rest<Read, R - 1>(layout, tiles, rows, first, count, scores, states);
  }
}

template <class Read>
void attend_as(const KvLayout& layout, const uint8_t* const* tiles, const AttentionRows& rows, float* scratch,
               float* states) {
  constexpr int kR = Simd::kAttendRows;
  const int64_t stride = layout.head_dim + kStatePadding;
  int64_t first = 0;
  while (first < rows.num_rows) {
    if (rows.begin[first] >= rows.end[first]) {
      states[first * stride + layout.head_dim] = kMinusInfinity;
      states[first * stride + layout.head_dim + 1] = 0.0f;
      ++first;
      continue;
    }
    int64_t count = 1;
    while (count < kR && first + count < rows.num_rows &&
           rows.begin[first + count] < rows.end[first + count]) {
      ++count;
    }
    attend_rest<Read, kR>(layout, tiles, rows, first, count, scratch, states);
    first += count;
  }
}

void attend(const KvLayout& layout, const uint8_t* const* tiles, const AttentionRows& rows, float* scratch,
            float* states) {
  switch (layout.dtype) {
    case KvDtype::kFloat32:
      return attend_as<ReadFloat32>(layout, tiles, rows, scratch, states);
    case KvDtype::kFloat16:
      return attend_as<ReadFloat16>(layout, tiles, rows, scratch, states);
    case KvDtype::kInt8:
      return attend_as<ReadInt8>(layout, tiles, rows, scratch, states);
  }
}

void fold(int64_t num_rows, int64_t head_dim, const float* states, float* running) {
  const int64_t stride = head_dim + kStatePadding;
  for (int64_t r = 0; r < num_rows; ++r) {
    const float* part = states + r * stride;
    float* all = running + r * stride;
    const float part_max = part[head_dim], part_sum = part[head_dim + 1];
    const float all_max = all[head_dim], all_sum = all[head_dim + 1];
    if (part_sum == 0.0f) continue;
    if (all_sum == 0.0f) {
      for (int64_t d = 0; d < head_dim + 2; ++d) all[d] = part[d];
      continue;
    }
    const float new_max = all_max > part_max ? all_max : part_max;
    float factors[Simd::kWidth] = {all_max - new_max, part_max - new_max};
    Simd::store(factors, vexp(Simd::load(factors)));
    const V a = Simd::set1(factors[0]), b = Simd::set1(factors[1]);
    const auto merge = [&](V running_acc, V part_acc) {
      return Simd::fma(running_acc, a, Simd::mul(part_acc, b));
    };
    int64_t d = 0;
    for (; d + Simd::kWidth <= head_dim; d += Simd::kWidth) {
      Simd::store(all + d, merge(Simd::load(all + d), Simd::load(part + d)));
    }
    if (d < head_dim) {
      const int count = static_cast<int>(head_dim - d);
      Simd::store_partial(
          all + d, merge(Simd::load_partial(all + d, count), Simd::load_partial(part + d, count)), count);
    }
    all[head_dim] = new_max;
    all[head_dim + 1] = all_sum * factors[0] + part_sum * factors[1];
  }
}

void finish(int64_t head_dim, const float* running, float* out) {
  const float total = running[head_dim + 1];
  if (total == 0.0f) {
    for (int64_t d = 0; d < head_dim; ++d) out[d] = 0.0f;
    return;
  }
  const V inverse = Simd::set1(1.0f / total);
  int64_t d = 0;
  for (; d + Simd::kWidth <= head_dim; d += Simd::kWidth) {
    Simd::store(out + d, Simd::mul(Simd::load(running + d), inverse));
  }
  if (d < head_dim) {
    const int count = static_cast<int>(head_dim - d);
    Simd::store_partial(out + d, Simd::mul(Simd::load_partial(running + d, count), inverse), count);
  }
}

// Finite values beyond the range of float16 become its largest, so that one outlier cannot turn into
// infinity.
inline V clamp_half(V x) {
  return Simd::max(Simd::set1(-65504.0f), Simd::min(Simd::set1(65504.0f), x));
}

// Largest magnitude / 127, and the row in units of it, rounded to nearest even.
inline float quantize_head(const float* x, int64_t head_dim, int8_t* out, int64_t out_stride) {
  float top = 0.0f;
  for (int64_t d = 0; d < head_dim; ++d) {
    const float magnitude = __builtin_fabsf(x[d]);
    top = magnitude > top ? magnitude : top;
  }
  const float scale = top / 127.0f;
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  for (int64_t d = 0; d < head_dim; ++d) {
    const float value = x[d] * inverse;
    const float bounded = value > 127.0f ? 127.0f : (value > -127.0f ? value : -127.0f);
    out[d * out_stride] = static_cast<int8_t>(__builtin_nearbyintf(bounded));
  }
  return scale;
}

void kv_store(const KvLayout& layout, const float* k, const float* v, int64_t lane, uint8_t* tile) {
  const int64_t head_dim = layout.head_dim;
  uint8_t* value_tile = tile + layout.value_offset;
  switch (layout.dtype) {
    case KvDtype::kFloat32: {
      float* k_out = reinterpret_cast<float*>(tile) + lane;
      float* v_out = reinterpret_cast<float*>(value_tile) + lane * head_dim;
      for (int64_t d = 0; d < head_dim; ++d) k_out[d * kTilePositions] = k[d];
      for (int64_t d = 0; d < head_dim; ++d) v_out[d] = v[d];
      return;
    }
    case KvDtype::kFloat16: {
      uint16_t* k_out = reinterpret_cast<uint16_t*>(tile) + lane;
      uint16_t* v_out = reinterpret_cast<uint16_t*>(value_tile) + lane * head_dim;
      for (int64_t d = 0; d < head_dim; d += 8) {
        float part[16] = {0};
        uint16_t halves[16];
        for (int i = 0; i < 8; ++i) {
          part[i] = k[d + i];
          part[8 + i] = v[d + i];
        }
        for (int i = 0; i < 16; i += Simd::kWidth)
          Simd::store_f16(halves + i, clamp_half(Simd::load(part + i)));
        for (int i = 0; i < 8; ++i) {
          k_out[(d + i) * kTilePositions] = halves[i];
          v_out[d + i] = halves[8 + i];
        }
      }
      return;
    }
    case KvDtype::kInt8: {
      float* scales = reinterpret_cast<float*>(tile + layout.scale_offset);
      scales[lane] = quantize_head(k, head_dim, reinterpret_cast<int8_t*>(tile) + lane, kTilePositions);
      scales[kTilePositions + lane] =
          quantize_head(v, head_dim, reinterpret_cast<int8_t*>(value_tile) + lane * head_dim, 1);
      return;
    }
  }
}

template <class Read>
inline void expand_as(const KvLayout& layout, const uint8_t* tile, const KvLayout& out_layout, uint8_t* out) {
  const int64_t count = layout.head_dim * kTilePositions;
  float* k = reinterpret_cast<float*>(out);
  float* v = reinterpret_cast<float*>(out + out_layout.value_offset);
  for (int64_t i = 0; i < count; i += Simd::kWidth) Simd::store(k + i, Read::load(tile + i * Read::kBytes));
  const uint8_t* values = tile + layout.value_offset;
  for (int64_t i = 0; i < count; i += Simd::kWidth) Simd::store(v + i, Read::load(values + i * Read::kBytes));
  if (layout.scale_offset == 0) return;
  const float* scales = reinterpret_cast<const float*>(tile + layout.scale_offset);
  float* out_scales = reinterpret_cast<float*>(out + out_layout.scale_offset);
  for (int64_t i = 0; i < 2 * kTilePositions; ++i) out_scales[i] = scales[i];
}

void kv_expand(const KvLayout& layout, const uint8_t* tile, const KvLayout& out_layout, uint8_t* out) {
  switch (layout.dtype) {
    case KvDtype::kFloat32:
      return expand_as<ReadFloat32>(layout, tile, out_layout, out);
    case KvDtype::kFloat16:
      return expand_as<ReadFloat16>(layout, tile, out_layout, out);
    case KvDtype::kInt8:
      return expand_as<ReadInt8>(layout, tile, out_layout, out);
  }
}

}  // namespace

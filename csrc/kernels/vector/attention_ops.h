// Attention kernels, written once against Simd. Include a simd_*.h first.
//
// One partition of 256 positions, one kv head, up to kAttendRows query rows at a time:
//   scores  s[r][j] = sum over d, in order, of q[r][d] * k[d][j]      lanes = positions, q broadcast
//   softmax m[r] = max s, p[r][j] = 2^(s - m), l[r] = sum p           16 running sums, folded by a fixed tree
//   values  acc[r][d] = sum over j, in order, of p[r][j] * v[j][d]    lanes = value_dim, p broadcast
// Scores are in units of log2(e): the factor comes with q, or with the soft cap. The loops over d and j are
// single chains of multiply-adds, four cycles each, so R rows x N vectors of positions (or of value_dim) run
// side by side, at least ten where registers allow. Blocking rows or vectors cannot change a bit. Positions a
// row does not see take no part in its values: they may hold anything.
#pragma once

#include "vector/attention_int16.h"
#include "vector/attention_parts.h"

namespace {

// Scores of R rows against N vectors of positions, from vector `first` of the partition on. kShared
// neighbouring ones lie in the same tile: fewer pointers.
template <class Read, int R, int N, int kShared>
inline void score_vectors(const KvLayout& layout, const Tiles& tiles, int64_t first, const float* q,
                          float* scores) {
  constexpr int64_t kRowBytes = kTilePositions * Read::kBytes;
  constexpr int64_t kStep = kRowBytes < kLine ? kLine / kRowBytes : 1;
  constexpr int kPointers = N / kShared;
  const int64_t head_dim = layout.head_dim;
  const uint8_t* keys[kPointers];
  const uint8_t* next[kPointers];
  for (int i = 0; i < kPointers; ++i) {
    const auto vector = static_cast<uint64_t>(first + i * kShared);
    const uint64_t offset = vector % kTileVectors * (Simd::kWidth * Read::kBytes);
    keys[i] = tiles.now[vector / kTileVectors] + offset;
    // Once per line: what has been read costs nothing to fetch.
    next[i] = vector % kTileVectors == 0 ? tiles.next[vector / kTileVectors] : keys[i];
  }
  V acc[R][N];
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < N; ++i) acc[r][i] = Simd::zero();
  }
  const auto key = [&](int64_t at, int i) {
    return Read::load(keys[i / kShared] + at + (i % kShared) * (Simd::kWidth * Read::kBytes));
  };
  int64_t at = 0;  // bytes into the tile
  for (int64_t d = 0; d < head_dim; d += kStep, at += kStep * kRowBytes) {
    if (Read::kPrefetch) {
      for (int i = 0; i < kPointers; ++i) __builtin_prefetch(next[i] + at, 0, 3);
    }
    for (int step = 0; step < kStep; ++step) {
      const float* value = q + d + step;
      const int64_t row = at + step * kRowBytes;
      if constexpr (R < N) {
        V values[R];
        for (int r = 0; r < R; ++r) values[r] = Simd::set1(value[r * head_dim]);
        for (int i = 0; i < N; ++i) {
          const V k = key(row, i);
          for (int r = 0; r < R; ++r) acc[r][i] = Simd::fma(values[r], k, acc[r][i]);
        }
      } else {
        V k[N];
        for (int i = 0; i < N; ++i) k[i] = key(row, i);
        for (int r = 0; r < R; ++r) {
          const V v = Simd::set1(value[r * head_dim]);
          for (int i = 0; i < N; ++i) acc[r][i] = Simd::fma(v, k[i], acc[r][i]);
        }
      }
    }
  }
  for (int i = 0; i < N; ++i) {
    const auto vector = static_cast<uint64_t>(first + i);
    if (layout.scale_offset != 0) {
      const auto* scales =
          reinterpret_cast<const float*>(tiles.now[vector / kTileVectors] + layout.scale_offset);
      const V s = Simd::load(scales + vector % kTileVectors * Simd::kWidth);
      for (int r = 0; r < R; ++r) acc[r][i] = Simd::mul(acc[r][i], s);
    }
    for (int r = 0; r < R; ++r) Simd::store(scores + r * kPartition + vector * Simd::kWidth, acc[r][i]);
  }
}

// Turns the scores of one row into weights, in place, and gives their maximum and sum. Lanes of the tiles
// touched by [begin, end) that lie outside it become 2^-126, which no sum (at least 1) notices.
inline void softmax_row(float* scores, int64_t begin, int64_t end, float softcap, float* maximum,
                        float* total) {
  const int64_t first = begin / kTilePositions * kTilePositions;
  const int64_t last = (end + kTilePositions - 1) / kTilePositions * kTilePositions;
  const float row_max = mask_scores(scores, begin, end, first, last, softcap);
  const V shift = Simd::set1(row_max);
  V sums[kTileVectors];
  for (int i = 0; i < kTileVectors; ++i) sums[i] = Simd::zero();
  for (int64_t j = first; j < last; j += kTilePositions) {
    for (int i = 0; i < kTileVectors; ++i) {
      float* p = scores + j + i * Simd::kWidth;
      const V weight = vexp2_down(Simd::sub(Simd::load(p), shift));
      Simd::store(p, weight);
      sums[i] = Simd::add(sums[i], weight);
    }
  }
  *maximum = row_max;
  *total = add_lanes(sums);
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
inline void value_columns(const KvLayout& layout, const Tiles& tiles, int64_t begin, int64_t end,
                          const float* weights, int64_t column, float* acc, int64_t acc_stride,
                          int tail = 0) {
  constexpr int64_t kColumnBytes = C * Simd::kWidth * Read::kBytes;
  V sums[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      const float* p = acc + r * acc_stride + column + c * Simd::kWidth;
      sums[r][c] = kTail ? Simd::load_partial(p, tail) : Simd::load(p);
    }
  }
  const int64_t row_bytes = layout.value_dim * Read::kBytes;
  const int64_t offset = layout.value_offset + column * Read::kBytes;
  const float* w = weights + begin;
  const int64_t line = -offset & (kLine - 1);  // to the first line that begins in these columns
  for (int64_t j = begin; j < end;) {
    const uint64_t lane = static_cast<uint64_t>(j) % kTilePositions;
    const uint64_t tile = static_cast<uint64_t>(j) / kTilePositions;
    const int64_t at = offset + static_cast<int64_t>(lane) * row_bytes;
    const uint8_t* v = tiles.now[tile] + at;
    const uint8_t* next = line < kColumnBytes ? tiles.next[tile] + at + line : v;
    const int64_t count = smaller(end - j, kTilePositions - static_cast<int64_t>(lane));
    j += count;
    for (const float* stop = w + count; w != stop; ++w, v += row_bytes, next += row_bytes) {
      if (Read::kPrefetch) {
        for (int64_t b = 0; b < kColumnBytes; b += kLine) __builtin_prefetch(next + b, 0, 3);
      }
      if constexpr (R < C) {
        V values[R];
        for (int r = 0; r < R; ++r) values[r] = Simd::set1(w[r * kPartition]);
        for (int c = 0; c < C; ++c) {
          const V value = Read::load(v + c * Simd::kWidth * Read::kBytes);
          for (int r = 0; r < R; ++r) sums[r][c] = Simd::fma(values[r], value, sums[r][c]);
        }
      } else {
        V values[C];
        for (int c = 0; c < C; ++c) values[c] = Read::load(v + c * Simd::kWidth * Read::kBytes);
        for (int r = 0; r < R; ++r) {
          const V weight = Simd::set1(w[r * kPartition]);
          for (int c = 0; c < C; ++c) sums[r][c] = Simd::fma(weight, values[c], sums[r][c]);
        }
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
void value_rows(const KvLayout& layout, const Tiles& tiles, int64_t begin, int64_t end, const float* weights,
                float* acc, int64_t acc_stride) {
  if (begin >= end) return;
  const int64_t vectors = layout.value_dim / Simd::kWidth;
  for_pieces<Simd::attend_vectors(R)>(0, vectors, [&](int64_t at, auto n) {
    value_columns<Read, R, n.value>(layout, tiles, begin, end, weights, at * Simd::kWidth, acc, acc_stride);
  });
  const int64_t column = vectors * Simd::kWidth;
  if (column < layout.value_dim) {
    value_columns<Read, R, 1, true>(layout, tiles, begin, end, weights, column, acc, acc_stride,
                                    static_cast<int>(layout.value_dim - column));
  }
}

// The same where rows differ in what they see: neighbours that do not go together.
template <class Read, int R>
void value_runs(const KvLayout& layout, const Tiles& tiles, const int64_t* begin, const int64_t* end,
                const float* weights, float* acc, int64_t acc_stride) {
  for (int64_t r = 0; r < R;) {
    int64_t n = 1;
    while (r + n < R && begin[r + n] == begin[r] && end[r + n] == end[r]) ++n;
    with_count<R>(n, [&](auto count) {
      value_rows<Read, count.value>(layout, tiles, begin[r], end[r], weights + r * kPartition,
                                    acc + r * acc_stride, acc_stride);
    });
    r += n;
  }
}

// One block of R neighbouring rows, all of which see something.
template <class Read, int R>
void attend_block(const KvLayout& layout, const Tiles& tiles, const AttentionRows& rows, int64_t first,
                  float* scores, float* states) {
  const int64_t head_dim = layout.head_dim, value_dim = layout.value_dim;
  const int64_t stride = value_dim + kStatePadding;
  int64_t begin[R], end[R];
  int64_t lowest = kPartition, highest = 0, common_begin = 0, common_end = kPartition;
  for (int r = 0; r < R; ++r) {
    begin[r] = rows.begin[first + r];
    end[r] = rows.end[first + r];
    lowest = smaller(lowest, begin[r]);
    highest = larger(highest, end[r]);
    common_begin = larger(common_begin, begin[r]);
    common_end = smaller(common_end, end[r]);
  }
  // One or two rows take whole tiles, having so many vectors side by side.
  constexpr int kMost = Simd::attend_vectors(R);
  constexpr int kShared = R <= 2 && kMost % kTileVectors == 0 ? kTileVectors : 1;
  constexpr int64_t kUnit = kShared * Simd::kWidth;
  for_pieces<kMost / kShared>(lowest / kUnit, (highest + kUnit - 1) / kUnit, [&](int64_t at, auto n) {
    score_vectors<Read, R, n.value * kShared, kShared>(layout, tiles, at * kShared, rows.q + first * head_dim,
                                                       scores);
  });
  float* out = states + first * stride;
  for (int r = 0; r < R; ++r) {
    float* state = out + r * stride;
    float* weights = scores + r * kPartition;
    softmax_row(weights, begin[r], end[r], rows.softcap, state + value_dim, state + value_dim + 1);
    if (layout.scale_offset != 0) scale_weights(layout, tiles.now, begin[r], end[r], weights);
    for (int64_t d = 0; d < value_dim; ++d) state[d] = 0.0f;
  }
  if (common_begin >= common_end) {
    return value_runs<Read, R>(layout, tiles, begin, end, scores, out, stride);
  }
  int64_t common[R];
  if (lowest < common_begin) {
    for (int r = 0; r < R; ++r) common[r] = common_begin;
    value_runs<Read, R>(layout, tiles, begin, common, scores, out, stride);
  }
  value_rows<Read, R>(layout, tiles, common_begin, common_end, scores, out, stride);
  if (common_end < highest) {
    for (int r = 0; r < R; ++r) common[r] = common_end;
    value_runs<Read, R>(layout, tiles, common, end, scores, out, stride);
  }
}

template <class Read>
void attend_as(const KvLayout& layout, const uint8_t* const* tiles, const AttentionRows& rows, float* scratch,
               float* states) {
  for_blocks<Simd::kAttendRows>(layout, tiles, rows, states, [&](const Tiles& both, int64_t first, auto n) {
    attend_block<Read, n.value>(layout, both, rows, first, scratch, states);
  });
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
    case KvDtype::kInt16:
      return attend_int16(layout, tiles, rows, scratch, states);
  }
}

void fold(int64_t num_rows, int64_t value_dim, const float* states, float* running) {
  const int64_t stride = value_dim + kStatePadding;
  for (int64_t r = 0; r < num_rows; ++r) {
    const float* part = states + r * stride;
    float* all = running + r * stride;
    const float part_max = part[value_dim], part_sum = part[value_dim + 1];
    const float all_max = all[value_dim], all_sum = all[value_dim + 1];
    if (part_sum == 0.0f) continue;
    if (all_sum == 0.0f) {
      for (int64_t d = 0; d < value_dim + 2; ++d) all[d] = part[d];
      continue;
    }
    const float new_max = all_max > part_max ? all_max : part_max;
    float factors[Simd::kWidth] = {all_max - new_max, part_max - new_max};
    Simd::store(factors, vexp2_down(Simd::load(factors)));
    const V a = Simd::set1(factors[0]), b = Simd::set1(factors[1]);
    const auto merge = [&](V running_acc, V part_acc) {
      return Simd::fma(running_acc, a, Simd::mul(part_acc, b));
    };
    int64_t d = 0;
    for (; d + Simd::kWidth <= value_dim; d += Simd::kWidth) {
      Simd::store(all + d, merge(Simd::load(all + d), Simd::load(part + d)));
    }
    if (d < value_dim) {
      const int count = static_cast<int>(value_dim - d);
      Simd::store_partial(
          all + d, merge(Simd::load_partial(all + d, count), Simd::load_partial(part + d, count)), count);
    }
    all[value_dim] = new_max;
    all[value_dim + 1] = all_sum * factors[0] + part_sum * factors[1];
  }
}

void finish(int64_t value_dim, const float* running, float* out) {
  const float total = running[value_dim + 1];
  if (total == 0.0f) {
    for (int64_t d = 0; d < value_dim; ++d) out[d] = 0.0f;
    return;
  }
  const V inverse = Simd::set1(1.0f / total);
  int64_t d = 0;
  for (; d + Simd::kWidth <= value_dim; d += Simd::kWidth) {
    Simd::store(out + d, Simd::mul(Simd::load(running + d), inverse));
  }
  if (d < value_dim) {
    const int count = static_cast<int>(value_dim - d);
    Simd::store_partial(out + d, Simd::mul(Simd::load_partial(running + d, count), inverse), count);
  }
}

}  // namespace

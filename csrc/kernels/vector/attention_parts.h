// What the attention kernels share, whatever the cache holds: pieces of work, tiles, masks. Include a
// simd_*.h first.
#pragma once

#include "tellin/vector_kernels.h"
#include "vector/kv_ops.h"
#include "vector/math.h"

namespace {

using tellin::AttentionRows;
using tellin::kPartition;
using tellin::kPartitionTiles;
using tellin::kStatePadding;

constexpr int kTileVectors = static_cast<int>(kTilePositions) / Simd::kWidth;
constexpr float kMinusInfinity = -__builtin_inff();
constexpr int64_t kLine = 64;  // bytes of a cache line

inline int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}
inline int64_t larger(int64_t a, int64_t b) {
  return a > b ? a : b;
}

template <int N>
struct Count {
  static constexpr int value = N;
};

// f(Count<n>) for 1 <= n <= N.
template <int N, class F>
inline void with_count(int64_t n, F&& f) {
  if constexpr (N == 1) {
    f(Count<1>{});
  } else {
    if (n == N) return f(Count<N>{});
    with_count<N - 1>(n, f);
  }
}

// f(at, Count<n>) for pieces of [begin, end), as equal as can be, of at most N.
template <int N, class F>
inline void for_pieces(int64_t begin, int64_t end, F&& f) {
  if (begin >= end) return;
  const auto count = static_cast<uint32_t>(end - begin);
  const uint32_t pieces = (count + N - 1) / N;
  const uint32_t size = (count + pieces - 1) / pieces;
  const int64_t full = begin + static_cast<int64_t>(size * (count - (size - 1) * pieces));
  with_count<N>(size, [&](auto n) {
    for (; begin < full; begin += n.value) f(begin, n);
  });
  if (begin == end) return;
  with_count<N>(size - 1, [&](auto n) {
    for (; begin < end; begin += n.value) f(begin, n);
  });
}

// Tiles of a partition and, for each, one to be fetched into cache while it is read: the hardware does not
// see the next one coming, for tiles lie apart in memory. Lines are fetched as evenly as they are read.
struct Tiles {
  const uint8_t* const* now;
  const uint8_t* const* next;
};

// Lanes of one vector at position j that lie outside [begin, end) become something else.
inline V visible(V values, int64_t j, int64_t begin, int64_t end, float otherwise = kMinusInfinity) {
  alignas(64) static constexpr float kNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const V lanes = Simd::load(kNumbers);
  const V hidden = Simd::set1(otherwise);
  const V from_begin = Simd::select_lt(lanes, Simd::set1(static_cast<float>(begin - j)), hidden, values);
  return Simd::select_lt(lanes, Simd::set1(static_cast<float>(end - j)), from_begin, hidden);
}

// Soft cap and mask of one row, in place, and the maximum. [first, last): the tiles touched by [begin, end).
inline float mask_scores(float* scores, int64_t begin, int64_t end, int64_t first, int64_t last,
                         float softcap) {
  if (softcap > 0.0f) {
    const V cap = Simd::set1(softcap), factor = Simd::set1(softcap * 1.44269504f);
    for (int64_t j = first; j < last; j += Simd::kWidth) {
      Simd::store(scores + j, Simd::mul(factor, vtanh(Simd::div(Simd::load(scores + j), cap))));
    }
  }
  const auto hide_tile = [&](int64_t tile) {
    for (int64_t j = tile; j < tile + kTilePositions; j += Simd::kWidth) {
      Simd::store(scores + j, visible(Simd::load(scores + j), j, begin, end));
    }
  };
  if (first < begin) hide_tile(first);
  if (end < last) hide_tile(last - kTilePositions);
  V top[4];
  for (int i = 0; i < 4; ++i) top[i] = Simd::set1(kMinusInfinity);
  int64_t j = first;
  for (; j + 4 * Simd::kWidth <= last; j += 4 * Simd::kWidth) {
    for (int i = 0; i < 4; ++i) top[i] = Simd::max(Simd::load(scores + j + i * Simd::kWidth), top[i]);
  }
  for (; j < last; j += Simd::kWidth) top[0] = Simd::max(Simd::load(scores + j), top[0]);
  return Simd::reduce_max(Simd::max(Simd::max(top[0], top[1]), Simd::max(top[2], top[3])));
}

// attend_rows(tiles, first, Count<n>) for blocks of neighbouring rows, all of which see something.
template <int kRows, class Attend>
void for_blocks(const KvLayout& layout, const uint8_t* const* tiles, const AttentionRows& rows, float* states,
                Attend&& attend_rows) {
  const int64_t stride = layout.value_dim + kStatePadding;
  const auto sees_nothing = [&](int64_t r) { return rows.begin[r] >= rows.end[r]; };
  const uint8_t* const* next = rows.next;
  for (int64_t r = 0; r < rows.num_rows;) {
    if (sees_nothing(r)) {
      states[r * stride + layout.value_dim] = kMinusInfinity;
      states[r * stride + layout.value_dim + 1] = 0.0f;
      ++r;
      continue;
    }
    int64_t stop = r + 1;
    while (stop < rows.num_rows && !sees_nothing(stop)) ++stop;
    for_pieces<kRows>(r, stop, [&](int64_t first, auto n) {
      attend_rows(Tiles{tiles, next}, first, n);
      next = tiles;  // what is there already costs nothing to fetch again
    });
    r = stop;
  }
}

}  // namespace

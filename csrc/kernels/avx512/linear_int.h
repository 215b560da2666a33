// AVX-512 VNNI: packed codes x quantised activations of one or two planes.
//
// Work is cut into chunks of 256 or 512 features of kGroups groups (16 rows each): scales are expanded once
// per chunk (and tables made by the first of many tiles, int_tables.h), then every tile of tokens runs over
// the chunk with its float accumulators parked in L1 between chunks. So a chunk of codes is read from memory
// once and stays in L1 for all tokens. The first tile also fetches the codes of a later chunk, so memory
// streams while tiles compute.
//
// A value is, for each block of 32 features in order: of 8-bit activations see Act8; of 15 bits t =
// float(int32 sum) * scale (per 16: a second product fused on); acc = fma(t, activation scale, acc); then acc
// = fma(minimum, activation sum, acc) (per 16: two). Nothing in it depends on the tile, so rows are equal bit
// for bit whatever else is computed. Integer sums are exact (int_sums.h).
#pragma once
#include "int_sums.h"

namespace tellin {
namespace {

// Blocks of a chunk. On Zen 5 long chunks are 5 % faster for 13 to 24 tokens, and for more where tiles read
// tables; without tables 3 % slower from 32 on. For fewer tokens, and where chunks would be of unequal
// length, they stream worse. Groups of few blocks are one chunk.
constexpr int kShortChunk = 8;
constexpr int kLongChunk = 16;
constexpr int kLargestChunk = 24;
constexpr int kMaxTile = 6;  // tokens of a tile: 2 x 6 integer and 2 x 6 float accumulators fill 32 registers
constexpr int kMaxTokens = 192;      // tokens that share a pass over the weights: 24 KiB of accumulators
constexpr int kPrefetchBlocks = 16;  // how far ahead of its use a block of codes is fetched

// More tiles than this read tables: only then they pay.
template <QuantType T>
constexpr int kTilesWithoutTables = format_of(T).per16()    ? 5
                                    : !format_of(T).has_min ? 3
                                                            : 2;
constexpr int kTableSums = 2 * kLargestChunk;  // of a chunk

// A tile of tokens of one chunk.
struct Tile {
  const uint8_t* codes;  // the chunk's first super-block of the first group
  size_t group_bytes;
  int num_supers;
  const uint8_t* x;  // the first token's records
  int64_t row_bytes;
  SumTables* tables;
  const float* start;  // [tokens][groups][16], 64-byte aligned: what the sums start with; nullptr: zero
  float* end;          // [tokens][groups][16] with rows `end_stride` apart: where they are stored
  int64_t end_stride;
  __mmask16 end_mask;  // of the last group
  // Codes of a later chunk, fetched while the tile computes: with each block `fetch_lines` lines of each
  // group, the next block's being `fetch_step` bytes further. The only tile fetches all of it, `past_caches`
  // if no copy needs to stay there.
  const uint8_t* fetch;
  int fetch_lines;
  int fetch_step;
  bool past_caches;
};

// Fetches what is due with a block of kGroups groups.
template <QuantType T, TileKind kKind, int kGroups>
TELLIN_INLINE void prefetch_codes(const Tile& tile, const uint8_t*& fetch) {
  constexpr int kBytes = format_of(T).super_bytes() / format_of(T).blocks();
  if constexpr (kKind == TileKind::kOnly) {
    if constexpr (!fetches_by_quad<T>(kGroups)) {
      const auto fetch_block = [&](bool past_caches) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 10
          for (int i = 0; i < kBytes; i += 64) fetch_line(fetch + g * tile.group_bytes + i, past_caches);
        }
      };
      if (tile.past_caches) {
        fetch_block(true);
      } else {
        fetch_block(false);
      }
    }
    fetch += kBytes;
  } else {
    // No look at where the chunk ends: a branch that goes either way within a tile costs 1 to 2 %.
    const uint8_t* line = fetch;
    // Read anew in each block: the registers are needed elsewhere.
    const Tile* same = &tile;
    asm volatile("" : "+r"(same));
    const int lines = same->fetch_lines;
    for (int i = 0; i < lines; ++i, line += 64) {
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) __builtin_prefetch(line + g * tile.group_bytes, 0, 3);
    }
    fetch += same->fetch_step;
  }
}

// acc[group][token] += integer sums x scales of 8-bit activations and weights, whose product is exact.
template <int kGroups, int kTokens>
TELLIN_INLINE void add_scaled(const ActRows<Act8, kTokens>& x, const __m512i (&sum)[kGroups][kTokens],
                              const SumTables& tables, __m512 (&acc)[kGroups][kTokens]) {
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      const __m512 product =
          _mm512_mul_ps(broadcast_float(&x.block(t)->scale), _mm512_load_ps(tables.scale[g]));
      acc[g][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[g][t]), product, acc[g][t]);
    }
  }
}

// The same by what the tile has: scales or tables.
template <TileKind kKind, int kGroups, int kTokens>
TELLIN_INLINE void add_scaled_by(const ActRows<Act8, kTokens>& x, const __m512i (&sum)[kGroups][kTokens],
                                 SumTables& tables, __m512 (&acc)[kGroups][kTokens]) {
  if constexpr (kKind == TileKind::kReader) {
    add_looked_up(x, sum, tables, acc);
  } else {
    add_scaled(x, sum, tables, acc);
  }
  if constexpr (kKind == TileKind::kMaker) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) make_scale_table(tables.scale[g], tables.scales[g]);
  }
}

// acc[group][token] += minima x sums of activations.
template <QuantType T, class Act, int kGroups, int kTokens>
TELLIN_INLINE void add_minima(const ActRows<Act, kTokens>& x, const SumTables* tables,
                              __m512 (&acc)[kGroups][kTokens]) {
  constexpr PackedFormat kFormat = format_of(T);
  if constexpr (!kFormat.has_min) return;
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
    const Act* block = x.block(t);
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 2
      for (int h = 0; h < (kFormat.per16() ? 2 : 1); ++h) {
        const float* sum = kFormat.per16() ? &block->half_sum[h] : &block->sum;
        acc[g][t] = _mm512_fmadd_ps(_mm512_load_ps(tables[h].minimum[g]), broadcast_float(sum), acc[g][t]);
      }
    }
  }
}

// One 32-feature block: acc[group][token] += scaled integer sums (and minima). `fetch`: see multiply_quad.
template <QuantType T, TileKind kKind, int kGroups, int kTokens>
TELLIN_INLINE void add_block(const uint8_t* codes, size_t group_bytes, const ActRows<Act8, kTokens>& x,
                             SumTables* tables, __m512 (&acc)[kGroups][kTokens], const QuadFetch& fetch) {
  __m512i sum[kGroups][kTokens];
  constexpr int kSums = format_of(T).per16() ? 2 : 1;
  block_sums<T, kKind, kSums == 2 ? 0 : -1>(codes, group_bytes, x, tables[0], sum, fetch);
  add_scaled_by<kKind>(x, sum, tables[0], acc);
  if constexpr (kSums == 2) {
    block_sums<T, kKind, 1>(codes, group_bytes, x, tables[1], sum, fetch);
    add_scaled_by<kKind>(x, sum, tables[1], acc);
  }
  add_minima<T>(x, tables, acc);
}

// The same with 15-bit activations, whose scale is multiplied last.
template <QuantType T, TileKind kKind, int kGroups, int kTokens>
TELLIN_INLINE void add_block(const uint8_t* codes, size_t group_bytes, const ActRows<Act16, kTokens>& x,
                             SumTables* tables, __m512 (&acc)[kGroups][kTokens], const QuadFetch& fetch) {
  constexpr PackedFormat kFormat = format_of(T);
  __m512i sum[kGroups][kTokens];
  __m512 product[kGroups][kTokens];
  block_sums<T, kKind, kFormat.per16() ? 0 : -1>(codes, group_bytes, x, tables[0], sum, fetch);
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      product[g][t] = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[g][t]), _mm512_load_ps(tables[0].scale[g]));
    }
  }
  if constexpr (kFormat.per16()) block_sums<T, kKind, 1>(codes, group_bytes, x, tables[1], sum, fetch);
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      if constexpr (kFormat.per16()) {
        product[g][t] =
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[g][t]), _mm512_load_ps(tables[1].scale[g]), product[g][t]);
      }
      acc[g][t] = _mm512_fmadd_ps(product[g][t], broadcast_float(&x.block(t)->scale), acc[g][t]);
    }
  }
  add_minima<T>(x, tables, acc);
}

template <QuantType T, class Act, TileKind kKind, int kGroups, int kTokens>
__attribute__((noinline)) void run_tile(const Tile& tile) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kSums = kFormat.per16() ? 2 : 1;
  __m512 acc[kGroups][kTokens];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      acc[g][t] = tile.start == nullptr ? _mm512_setzero_ps()
                                        : _mm512_load_ps(tile.start + (t * kGroups + g) * kRows);
    }
  }
  const size_t group_bytes = tile.group_bytes;
  ActRows<Act, kTokens> rows(tile.x, tile.row_bytes);
  SumTables* tables = tile.tables;
  const uint8_t* codes = tile.codes;
  const uint8_t* fetch = tile.fetch;
  for (int s = 0; s < tile.num_supers; ++s) {
    codes += kFormat.header_bytes();
    for (int b = 0; b < kFormat.blocks(); ++b) {
      const QuadFetch by_quad = {kKind == TileKind::kOnly ? fetch : nullptr, tile.past_caches};
      prefetch_codes<T, kKind, kGroups>(tile, fetch);
      add_block<T, kKind>(codes, group_bytes, rows, tables, acc, by_quad);
      codes += kFormat.block_bytes();
      rows.advance();
      tables += kSums;
    }
  }
  float* end = tile.end;
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t, end += tile.end_stride) {
    if constexpr (kGroups == 2) _mm512_storeu_ps(end, acc[0][t]);
    _mm512_mask_storeu_ps(end + (kGroups - 1) * kRows, tile.end_mask, acc[kGroups - 1][t]);
  }
}

using TileFunction = void (*)(const Tile&);

// The tile of 1 to kMaxTile tokens; kLeast: no fewer are asked for.
template <QuantType T, class Act, TileKind kKind, int kGroups, int kLeast>
TileFunction tile_of(int tokens) {
  if constexpr (kLeast < kMaxTile) {
    if (tokens > kLeast) return tile_of<T, Act, kKind, kGroups, kLeast + 1>(tokens);
  }
  return run_tile<T, Act, kKind, kGroups, kLeast>;
}

// The tiles of a chunk: the first, and those of the same number of tokens and of one more. A single group is
// multiplied by one tile at a time: it is the last of an odd number of groups, or streamed for few tokens.
struct Tiles {
  TileFunction first, least, greater;
};

template <QuantType T, class Act, int kGroups>
Tiles tiles_of(int num_tiles, int least, bool has_tables) {
  if (kGroups == 1 || num_tiles == 1) {
    const TileFunction only = tile_of<T, Act, TileKind::kOnly, kGroups, 1>(least);
    return {only, only, only};
  }
  if constexpr (kGroups == 2 && Act::kPlanes == 1) {
    if (has_tables) {
      constexpr int kLeast = kMaxTile * kTilesWithoutTables<T> / (kTilesWithoutTables<T> + 1);
      const auto reader = tile_of<T, Act, TileKind::kReader, kGroups, kLeast>;
      return {tile_of<T, Act, TileKind::kMaker, kGroups, kLeast>(least), reader(least), reader(least + 1)};
    }
  }
  if constexpr (kGroups == 2) {
    constexpr int kLeast = (kMaxTile + 1) / 2;
    const auto later = tile_of<T, Act, TileKind::kLater, kGroups, kLeast>;
    return {tile_of<T, Act, TileKind::kFirst, kGroups, kLeast>(least), later(least), later(least + 1)};
  }
}

struct IntProblem {
  const PackedMatrix& w;
  const QuantizedRows& x;
  float* out;
  int64_t ldo;
};

// Tokens [m0, m0 + tokens) x groups [g0, g0 + kGroups), tokens <= kMaxTokens; of one group <= kMaxTile.
// Groups at `after` are read next.
template <QuantType T, class Act, int kGroups>
void run_groups(const IntProblem& p, int64_t m0, int tokens, int64_t g0, const uint8_t* after,
                SumTables* tables) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kSums = kFormat.per16() ? 2 : 1;
  alignas(64) float acc[kMaxTokens * kGroups * kRows];
  const size_t group_bytes = p.w.group_bytes;
  const int64_t num_supers = static_cast<int64_t>(group_bytes / kFormat.super_bytes());
  const int num_tiles = (tokens + kMaxTile - 1) / kMaxTile;
  const bool has_tables = Act::kPlanes == 1 && num_tiles > kTilesWithoutTables<T>;
  // Chunks are equal but for the first, which may be shorter: so the code that is fetched with a chunk ends
  // with the group or before it.
  const bool is_whole = num_supers * kFormat.blocks() <= kLargestChunk;
  const bool is_long =
      (has_tables || num_tiles == 3 || num_tiles == 4) && num_supers % (kLongChunk / kFormat.blocks()) == 0;
  const int64_t chunk_supers =
      is_whole ? num_supers : (is_long ? kLongChunk : kShortChunk) / kFormat.blocks();
  const int64_t ahead_supers = is_whole ? num_supers : kPrefetchBlocks / kFormat.blocks();
  const uint8_t* const group = p.w.data + g0 * group_bytes;
  // Tiles are of `least` tokens or, the last `num_greater` of them, of one more.
  const int least = tokens / num_tiles, num_greater = tokens % num_tiles;
  Tiles run = tiles_of<T, Act, kGroups>(num_tiles, least, has_tables);
  const int64_t last_rows = p.w.n - (g0 + kGroups - 1) * kRows;
  const auto last_mask = static_cast<__mmask16>(last_rows >= kRows ? 0xffff : (1 << last_rows) - 1);
  float* const out = p.out + m0 * p.ldo + g0 * kRows;
  Tile tile;
  tile.codes = group;
  tile.group_bytes = group_bytes;
  tile.row_bytes = p.x.row_bytes;
  tile.tables = tables;
  tile.past_caches = streaming().past_caches;
  const uint8_t* x = p.x.data + m0 * p.x.row_bytes;
  int64_t chunk_end = (num_supers - 1) % chunk_supers + 1;
  for (int64_t s0 = 0; s0 < num_supers; s0 = chunk_end, chunk_end += chunk_supers) {
    const int chunk = static_cast<int>(chunk_end - s0);
    for (int g = 0; g < kGroups; ++g) {
      for (int s = 0; s < chunk; ++s) {
        const int first = s * kFormat.blocks() * kSums;
        expand_scales<T>(tile.codes + g * group_bytes + s * kFormat.super_bytes(),
                         sizeof(SumTables) / sizeof(float), tables[first].scale[g], tables[first].minimum[g]);
      }
    }
    if constexpr (Act::kPlanes == 1 && kFormat.has_table()) {
      if (has_tables) {
        run = tiles_of<T, Act, kGroups>(num_tiles, least,
                                        can_make_tables<T>(tables, chunk * kFormat.blocks(), kGroups));
      }
    }
    const int64_t next = s0 + ahead_supers;
    tile.fetch = next < num_supers ? group + next * kFormat.super_bytes()
                                   : after + (next - num_supers) * kFormat.super_bytes();
    constexpr int kBlockBytes = kFormat.super_bytes() / kFormat.blocks();
    tile.fetch_step = (kBlockBytes + num_tiles - 1) / num_tiles;
    tile.fetch_lines = (tile.fetch_step + 63) / 64;
    const bool is_last = chunk_end == num_supers;
    tile.num_supers = chunk;
    tile.x = x;
    float* sums = acc;
    tile.end = is_last ? out : acc;
    tile.end_stride = is_last ? p.ldo : kGroups * kRows;
    tile.end_mask = is_last ? last_mask : 0xffff;
    for (int i = 0; i < num_tiles; ++i) {
      const bool is_greater = i >= num_tiles - num_greater;
      tile.start = s0 == 0 ? nullptr : sums;
      (i == 0 ? run.first : is_greater ? run.greater : run.least)(tile);
      const int done = least + (is_greater ? 1 : 0);
      tile.x += done * p.x.row_bytes;
      sums += done * kGroups * kRows;
      tile.end += done * tile.end_stride;
      tile.fetch += static_cast<int64_t>(chunk) * kFormat.blocks() * tile.fetch_step;
    }
    tile.codes += chunk * kFormat.super_bytes();
    x += chunk * kFormat.blocks() * sizeof(Act);
  }
}

template <QuantType T, class Act>
void linear_int(const PackedMatrix& w, const QuantizedRows& x, int64_t m0, int64_t m1, int64_t g0, int64_t g1,
                float* out, int64_t ldo) {
  const IntProblem problem = {w, x, out, ldo};
  const int64_t num_passes = (m1 - m0 + kMaxTokens - 1) / kMaxTokens;
  SumTables tables[kTableSums];
  if (m1 - m0 > kMaxTile * kTilesWithoutTables<T>) {
    constexpr PackedFormat kFormat = format_of(T);
    const auto num_blocks = static_cast<int>(w.group_bytes / kFormat.super_bytes()) * kFormat.blocks();
    const int longest = num_blocks <= kLargestChunk ? num_blocks : kLongChunk;
    begin_tables(tables, longest * (kFormat.per16() ? 2 : 1));
  }
  for (int64_t i = 0; i < num_passes; ++i) {
    const int64_t begin = m0 + (m1 - m0) * i / num_passes, end = m0 + (m1 - m0) * (i + 1) / num_passes;
    const int tokens = static_cast<int>(end - begin);
    const int64_t step = tokens <= streaming().single_tokens ? 1 : 2;
    for (int64_t g = g0; g < g1; g += step) {
      const uint8_t* after = w.data + (g + step) * w.group_bytes;
      if (g + step >= g1 && w.follow != nullptr) after = w.follow;
      if (step == 2 && g + 2 <= g1) {
        run_groups<T, Act, 2>(problem, begin, tokens, g, after, tables);
      } else {
        for (int t = 0; t < tokens; t += kMaxTile) {
          const int some = tokens - t < kMaxTile ? tokens - t : kMaxTile;
          run_groups<T, Act, 1>(problem, begin + t, some, g, after, tables);
        }
      }
    }
  }
}

template <class Act>
void linear_int_any(const PackedMatrix& w, const QuantizedRows& x, int64_t m0, int64_t m1, int64_t g0,
                    int64_t g1, float* out, int64_t ldo) {
  switch (w.source) {
#define TELLIN_CASE(type) \
  case QuantType::type:   \
    return linear_int<QuantType::type, Act>(w, x, m0, m1, g0, g1, out, ldo);
    TELLIN_CASE(Q4_0)
    TELLIN_CASE(Q4_1)
    TELLIN_CASE(Q5_0)
    TELLIN_CASE(Q5_1)
    TELLIN_CASE(Q8_0)
    TELLIN_CASE(Q2_K)
    TELLIN_CASE(Q3_K)
    TELLIN_CASE(Q4_K)
    TELLIN_CASE(Q5_K)
    TELLIN_CASE(Q6_K)
    TELLIN_CASE(IQ4_NL)
    TELLIN_CASE(IQ4_XS)
    TELLIN_CASE(MXFP4)
#undef TELLIN_CASE
    default:
      return;  // float weights have no integer path (packed_group_bytes is 0)
  }
}

}  // namespace
}  // namespace tellin

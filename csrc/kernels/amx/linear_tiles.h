// AMX: packed codes x 8-bit activations of many rows, by tile products.
//
// A tile product of 16 rows of activations, 16 outputs and one block of 32 features takes 16 cycles, whatever
// it multiplies up to 64 features; what takes longer is to scale its 256 integers to floats. So codes are
// unpacked to signed bytes (code - zero point), and the rest of the product's depth adds the activations'
// zero: behind the codes stand their sums, four bytes per output, which meet the zero four times
// (act_tiles.h):
//   sum (c - z) (q + zero) = sum (c - z) q + zero * sum (c - z).
//
// Chunks of up to 16 blocks of 4 groups are unpacked to L1; then each tile of rows runs over a group's blocks
// with its float accumulators in registers. While one block's integers are scaled, the products of the next
// are on their way: the sums, scales and order of additions are those of AVX-512 (linear_int.h), so values
// are equal bit for bit.
#pragma once
#include "act_tiles.h"
#include "tiles.h"

namespace tellin {
namespace {

constexpr int kMaxGroups = 4;    // that share the loads of a tile of rows from L2
constexpr int kMaxTokens = 192;  // that share a pass over the weights
// Fewer are faster without tiles (Sapphire Rapids; of codes of 8 bits, twice as many sums are made).
template <QuantType T>
constexpr int kLeastTokens = format_of(T).code_bits() == 8 ? 48 : 32;
constexpr int kMaxRowTiles = kMaxTokens / kTileRows;
constexpr int kMaxSums = 64;   // blocks of a chunk of all groups
constexpr int kWideSums = 32;  // the same of codes of 8 bits

// Least and greatest signed code.
constexpr int least_code(PackedFormat f) {
  return f.table == CodeTable::kIq4    ? f.code(0) - f.zero_point()
         : f.table == CodeTable::kE2m1 ? f.code(15) - f.zero_point()
                                       : -f.zero_point();
}
constexpr int greatest_code(PackedFormat f) {
  return f.table == CodeTable::kIq4    ? f.code(15) - f.zero_point()
         : f.table == CodeTable::kE2m1 ? f.code(7) - f.zero_point()
                                       : (1 << f.bits) - 1 - f.zero_point();
}

// Quads whose codes are added up in a byte.
constexpr int quads_of_sum(PackedFormat f) {
  const int below = f.zero_point() == 0 ? 8 : 128 / -least_code(f), above = 127 / greatest_code(f);
  const int fits = below < above ? below : above;
  return fits >= 8 ? 8 : fits >= 4 ? 4 : 1;
}

// Quads of a block as they are multiplied: of its codes, then of their sums.
constexpr int quads_of_tile(PackedFormat f) {
  return 8 + 8 / quads_of_sum(f);
}

template <int kQuads>
struct alignas(64) TileSum {
  int8_t codes[kQuads][kVectorBytes];
  float scale[kRows];
  float minimum[kRows];
};

// One tile of rows and one group in a chunk.
template <int kQuads>
struct TileRun {
  const TileSum<kQuads>* sums;
  int num_blocks;
  const uint8_t* tiles;  // of the first row
  const uint8_t* factors;
  int64_t row_bytes;
  const float* start;  // [rows][16]: what the sums start with; nullptr: zero
  float* end;          // where they are stored, rows `end_stride` apart
  int64_t end_stride;
  __mmask16 end_mask;
  // Codes of a later chunk: with each block `fetch_lines` lines are fetched, the next block's being
  // `fetch_step` bytes further.
  const uint8_t* fetch;
  int fetch_lines;
  int fetch_step;
};

using Integers = int32_t[kTileRows][kRows];

// Tiles 0 and 1 hold integers, 2 and 3 activations, 4 and 5 codes: of even and odd sums.
template <int kOdd, int kQuads>
TELLIN_INLINE void multiply_block(const uint8_t* tiles, int64_t row_bytes, const TileSum<kQuads>* sum) {
  zero_tile<kOdd>();
  load_tile<2 + kOdd>(tiles, row_bytes);
  load_tile<4 + kOdd>(sum->codes, kVectorBytes);
  add_tile_product<kOdd, 2 + kOdd, 4 + kOdd>();
}

// acc[row] += integers x scales, then the minima x sums of activations.
template <bool kHasMin, int kQuads, int kTokens>
TELLIN_INLINE void add_integers(const Integers& integers, const TileSum<kQuads>* sum,
                                const char* const (&factors)[(kTokens + 2) / 3], int64_t stride,
                                __m512 (&acc)[kTokens]) {
  const __m512 scale = _mm512_load_ps(sum->scale);
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) {
    const auto* x = reinterpret_cast<const ActFactors*>(factors[t / 3] + t % 3 * stride);
    const __m512 product = _mm512_mul_ps(scale, broadcast_float(&x->scale));
    acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(integers[t])), product, acc[t]);
    if constexpr (kHasMin) {
      acc[t] = _mm512_fmadd_ps(_mm512_load_ps(sum->minimum), broadcast_float(&x->sum), acc[t]);
    }
  }
}

template <int kQuads>
TELLIN_INLINE void fetch_codes(const TileRun<kQuads>& run, const uint8_t*& fetch) {
  const uint8_t* line = fetch;
  for (int i = 0; i < run.fetch_lines; ++i, line += 64) __builtin_prefetch(line, 0, 2);
  fetch += run.fetch_step;
}

template <bool kHasMin, int kQuads, int kTokens>
__attribute__((noinline)) void run_row_tile(const TileRun<kQuads>& run) {
  alignas(64) Integers integers[2];
  __m512 acc[kTokens];
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) {
    acc[t] = run.start == nullptr ? _mm512_setzero_ps() : _mm512_load_ps(run.start + t * kRows);
  }
  int64_t stride = run.row_bytes;
  const char* factors[(kTokens + 2) / 3];
#pragma GCC unroll 6
  for (int i = 0; i < (kTokens + 2) / 3; ++i) {
    factors[i] = reinterpret_cast<const char*>(run.factors + 3 * i * stride);
    asm("" : "+r"(factors[i]));  // or all rows would get a pointer each
  }
  asm("" : "+r"(stride));
  const auto next_block = [&factors]() __attribute__((always_inline)) {
#pragma GCC unroll 6
    for (int i = 0; i < (kTokens + 2) / 3; ++i) factors[i] += sizeof(ActFactors);
  };
  const TileSum<kQuads>* sum = run.sums;
  const uint8_t* tiles = run.tiles;
  const uint8_t* fetch = run.fetch;
  multiply_block<0>(tiles, stride, sum);
  multiply_block<1>(tiles + kActTileBytes, stride, sum + 1);
  store_tile<0>(integers[0], kVectorBytes);
  for (int left = run.num_blocks - 2;; left -= 2) {
    tiles += 2 * kActTileBytes;
    if (left > 0) multiply_block<0>(tiles, stride, sum + 2);
    store_tile<1>(integers[1], kVectorBytes);
    add_integers<kHasMin, kQuads, kTokens>(integers[0], sum, factors, stride, acc);
    fetch_codes(run, fetch);
    next_block();
    if (left > 0) {
      multiply_block<1>(tiles + kActTileBytes, stride, sum + 3);
      store_tile<0>(integers[0], kVectorBytes);
    }
    add_integers<kHasMin, kQuads, kTokens>(integers[1], sum + 1, factors, stride, acc);
    fetch_codes(run, fetch);
    if (left == 0) break;
    next_block();
    sum += 2;
  }
  float* end = run.end;
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t, end += run.end_stride) _mm512_mask_storeu_ps(end, run.end_mask, acc[t]);
}

template <int kQuads>
using RunFunction = void (*)(const TileRun<kQuads>&);

// Rows of a tile of a pass, which has two tiles or more.
constexpr int kLeastRows = (2 * kTileRows + 3) / 3;

template <bool kHasMin, int kQuads, int kTokens = kLeastRows>
RunFunction<kQuads> run_of(int rows) {
  if constexpr (kTokens < kTileRows) {
    if (rows > kTokens) return run_of<kHasMin, kQuads, kTokens + 1>(rows);
  }
  return run_row_tile<kHasMin, kQuads, kTokens>;
}

// The signed codes of a block from quad kQuad on, and their sums.
template <QuantType T, int kQuad, int kQuads>
TELLIN_INLINE void unpack_quads(const uint8_t* block, int8_t (&codes)[kQuads][kVectorBytes], __m512i sum) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kPerSum = quads_of_sum(kFormat);
  __m512i quad = load_quad<T, kQuad>(block);
  if constexpr (kFormat.zero_point() != 0) {
    quad = _mm512_sub_epi8(quad, _mm512_set1_epi8(static_cast<char>(kFormat.zero_point())));
  }
  _mm512_store_si512(codes[kQuad], quad);
  sum = kQuad % kPerSum == 0 ? quad : _mm512_add_epi8(sum, quad);
  if constexpr ((kQuad + 1) % kPerSum == 0) _mm512_store_si512(codes[8 + kQuad / kPerSum], sum);
  if constexpr (kQuad < 7) unpack_quads<T, kQuad + 1>(block, codes, sum);
}

// `count` super-blocks of a group.
template <QuantType T, int kQuads>
void unpack_codes(const uint8_t* super_block, int count, TileSum<kQuads>* sums) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kStep = sizeof(TileSum<kQuads>) / sizeof(float);
  for (int s = 0; s < count; ++s) {
    expand_scales<T>(super_block, kStep, sums->scale, sums->minimum);
    const uint8_t* block = super_block + kFormat.header_bytes();
    for (int b = 0; b < kFormat.blocks(); ++b, block += kFormat.block_bytes()) {
      unpack_quads<T, 0>(block, sums->codes, _mm512_setzero_si512());
      ++sums;
    }
    super_block += kFormat.super_bytes();
  }
}

struct TileProblem {
  const PackedMatrix& w;
  const QuantizedRows& x;
  float* out;
  int64_t ldo;
};

// Rows of a pass as equal tiles: the last one begins earlier rather than being of fewer rows, and computes
// some values once more.
struct RowTiles {
  int count, rows, tokens;

  explicit RowTiles(int num_tokens)
      : count((num_tokens + kTileRows - 1) / kTileRows),
        rows((num_tokens + count - 1) / count),
        tokens(num_tokens) {}
  int begin(int i) const { return i * rows < tokens - rows ? i * rows : tokens - rows; }
};

template <QuantType T, int kQuads>
void run_groups(const TileProblem& p, int64_t m0, const RowTiles& row_tiles, int64_t g0, int num_groups,
                const uint8_t* after, TileSum<kQuads>* sums) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kMost = quads_of_tile(kFormat) > 10 ? kWideSums : kMaxSums;
  alignas(64) float acc[kMaxRowTiles * kMaxGroups * kTileRows * kRows];
  const auto run_tile = run_of<kFormat.has_min, kQuads>(row_tiles.rows);
  const size_t group_bytes = p.w.group_bytes;
  const int num_supers = static_cast<int>(group_bytes / kFormat.super_bytes());
  const int most_supers = kMost / num_groups / kFormat.blocks();
  const int num_chunks = (num_supers + most_supers - 1) / most_supers;
  TileRun<kQuads> run;
  run.row_bytes = p.x.row_bytes;
  for (int c = 0; c < num_chunks; ++c) {
    const int s0 = num_supers * c / num_chunks, s1 = num_supers * (c + 1) / num_chunks;
    const int chunk_sums = (s1 - s0) * kFormat.blocks();
    const uint8_t* const codes = p.w.data + g0 * group_bytes + s0 * kFormat.super_bytes();
    for (int g = 0; g < num_groups; ++g) {
      unpack_codes<T>(codes + g * group_bytes, s1 - s0, sums + g * chunk_sums);
    }
    const bool is_last = s1 == num_supers;
    const uint8_t* const next = is_last ? after : codes + (s1 - s0) * kFormat.super_bytes();
    constexpr int kBlockBytes = kFormat.super_bytes() / kFormat.blocks();
    run.fetch_step = (kBlockBytes + row_tiles.count - 1) / row_tiles.count;
    run.fetch_lines = (run.fetch_step + 63) / 64;
    run.num_blocks = (s1 - s0) * kFormat.blocks();
    for (int i = 0; i < row_tiles.count; ++i) {
      const int64_t m = m0 + row_tiles.begin(i);
      const uint8_t* const row = p.x.data + m * p.x.row_bytes;
      const int64_t first_block = int64_t{s0} * kFormat.blocks();
      run.tiles = row + tiles_offset(p.x.row_bytes) + first_block * kActTileBytes;
      run.factors =
          row + factors_offset(p.x.row_bytes) + first_block * static_cast<int64_t>(sizeof(ActFactors));
      for (int g = 0; g < num_groups; ++g) {
        float* const parked = acc + (i * kMaxGroups + g) * kTileRows * kRows;
        const int64_t rows_left = p.w.n - (g0 + g) * kRows;
        run.sums = sums + g * chunk_sums;
        run.start = c == 0 ? nullptr : parked;
        run.end = is_last ? p.out + m * p.ldo + (g0 + g) * kRows : parked;
        run.end_stride = is_last ? p.ldo : kRows;
        run.end_mask = static_cast<__mmask16>(is_last && rows_left < kRows ? (1 << rows_left) - 1 : 0xffff);
        run.fetch = next + g * group_bytes + i * run.num_blocks * run.fetch_step;
        run_tile(run);
      }
    }
  }
}

// Tokens [m0, m1), kLeastTokens<T> or more.
template <QuantType T>
void linear_tiles(const PackedMatrix& w, const QuantizedRows& x, int64_t m0, int64_t m1, int64_t g0,
                  int64_t g1, float* out, int64_t ldo) {
  constexpr int kQuads = quads_of_tile(format_of(T));
  constexpr int kMost = kQuads > 10 ? kWideSums : kMaxSums;
  TileSum<kQuads> sums[kMost];
  // Short rows are one chunk, of two groups if need be: to begin one and to end it takes as long as two
  // blocks.
  const auto num_blocks =
      static_cast<int>(w.group_bytes / format_of(T).super_bytes()) * format_of(T).blocks();
  const int most_groups = num_blocks > kMost / kMaxGroups && num_blocks <= kMost / 2 ? 2 : kMaxGroups;
  const TileProblem problem = {w, x, out, ldo};
  const int64_t num_passes = (m1 - m0 + kMaxTokens - 1) / kMaxTokens;
  for (int64_t i = 0; i < num_passes; ++i) {
    const int64_t begin = m0 + (m1 - m0) * i / num_passes, end = m0 + (m1 - m0) * (i + 1) / num_passes;
    const RowTiles row_tiles(static_cast<int>(end - begin));
    TileConfig config;
    for (int parity = 0; parity < 2; ++parity) {
      config.set(parity, row_tiles.rows, kVectorBytes);
      config.set(2 + parity, row_tiles.rows, 4 * kQuads);
      config.set(4 + parity, kQuads, kVectorBytes);
    }
    configure_tiles(config);
    for (int64_t g = g0; g < g1; g += most_groups) {
      const int num_groups = static_cast<int>(g1 - g < most_groups ? g1 - g : most_groups);
      const uint8_t* after = w.data + (g + num_groups) * w.group_bytes;
      if (g + num_groups >= g1 && w.follow != nullptr) after = w.follow;
      run_groups<T>(problem, begin, row_tiles, g, num_groups, after, sums);
    }
  }
  release_tiles();
}

}  // namespace
}  // namespace tellin

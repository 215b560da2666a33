// AMX: packed codes x activations, both as bfloat16, whatever the number of rows.
//
// A weight is round(scale * (code - zero point) + minimum), in float32 and then to bfloat16; a value is, for
// each block of 32 features in order, what TDPBF16PS adds for 16 pairs (tiles.h): nothing in it depends on
// the tile, so rows are equal bit for bit whatever else is computed. Nothing is scaled behind the products,
// so many rows cost half of what integers do; but weights are unpacked to a tile of 1 KiB per 16 outputs and
// block, which takes some 160 operations of 512 bits, also for one row.
#pragma once
#include "rows_bf16.h"
#include "tiles.h"

namespace tellin {
namespace {

constexpr int kBf16Blocks = 16;  // of a chunk
constexpr int kBf16Rows = 192;   // that share a pass over the weights
constexpr int kBf16RowTiles = kBf16Rows / kTileRows;

// 16 outputs of a block: pairs of features x outputs x 2.
struct alignas(64) WeightTile {
  uint16_t pairs[kTileRows][2 * kRows];
};

// Scales and minima of a super-block: [sums][16].
template <QuantType T>
struct alignas(64) SuperScales {
  static constexpr int kSums = format_of(T).blocks() * (format_of(T).per16() ? 2 : 1);
  float scale[kSums][kRows];
  float minimum[kSums][kRows];
};

// Two features of 16 outputs, rounded to bfloat16 (half a unit and up), side by side.
TELLIN_INLINE __m512i weight_pair(__m512 first, __m512 second) {
  const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const __m512i a = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(first), half), 16);
  return or_masked(a, _mm512_add_epi32(_mm512_castps_si512(second), half), upper);
}

template <QuantType T>
TELLIN_INLINE __m512 weight_of(__m512 code, __m512 scale, const float* minimum) {
  if constexpr (format_of(T).has_min) return _mm512_fmadd_ps(scale, code, _mm512_load_ps(minimum));
  return _mm512_mul_ps(scale, code);
}

// Floats of the 16 codes of a 4-bit format, less the zero point.
template <QuantType T>
TELLIN_INLINE __m512 code_values() {
  constexpr PackedFormat kFormat = format_of(T);
  alignas(64) float values[kRows];
  for (int i = 0; i < kRows; ++i) {
    values[i] = static_cast<float>((kFormat.has_table() ? kFormat.code(i) : i) - kFormat.zero_point());
  }
  return _mm512_load_ps(values);
}

// Feature kByte of each output's quad, as a float.
template <QuantType T, int kByte>
TELLIN_INLINE __m512 byte_value(__m512i quad) {
  __m512i code = quad;
  if constexpr (kByte < 3) code = _mm512_slli_epi32(code, 24 - 8 * kByte);
  code = _mm512_srli_epi32(code, 24);  // unsigned
  constexpr int kZero = format_of(T).zero_point();
  if constexpr (kZero != 0) code = _mm512_sub_epi32(code, _mm512_set1_epi32(kZero));
  return _mm512_cvtepi32_ps(code);
}

// Feature kNibble / 2 of quads q (even kNibble) and q + 4 (odd): a permutation reads four bits of a lane.
template <int kNibble>
TELLIN_INLINE __m512 nibble_value(__m512i nibbles, __m512 values) {
  if constexpr (kNibble == 0) return _mm512_permutexvar_ps(nibbles, values);
  return _mm512_permutexvar_ps(_mm512_srli_epi32(nibbles, 4 * kNibble), values);
}

template <QuantType T, int kQuad>
TELLIN_INLINE void unpack_quads(const uint8_t* block, const float (*scale)[kRows],
                                const float (*minimum)[kRows], __m512 values, WeightTile* tile) {
  constexpr PackedFormat kFormat = format_of(T);
  if constexpr (kFormat.bits == 4) {
    const __m512i nibbles = load_vector(block + kVectorBytes * kQuad);
    const __m512 d = _mm512_load_ps(scale[0]);
    const auto pair = [&](__m512 a, __m512 b) __attribute__((always_inline)) {
      return weight_pair(weight_of<T>(a, d, minimum[0]), weight_of<T>(b, d, minimum[0]));
    };
    _mm512_store_si512(tile->pairs[2 * kQuad],
                       pair(nibble_value<0>(nibbles, values), nibble_value<2>(nibbles, values)));
    _mm512_store_si512(tile->pairs[2 * kQuad + 1],
                       pair(nibble_value<4>(nibbles, values), nibble_value<6>(nibbles, values)));
    _mm512_store_si512(tile->pairs[2 * kQuad + 8],
                       pair(nibble_value<1>(nibbles, values), nibble_value<3>(nibbles, values)));
    _mm512_store_si512(tile->pairs[2 * kQuad + 9],
                       pair(nibble_value<5>(nibbles, values), nibble_value<7>(nibbles, values)));
    if constexpr (kQuad < 3) unpack_quads<T, kQuad + 1>(block, scale, minimum, values, tile);
  } else {
    constexpr int kHalf = kFormat.per16() ? kQuad / 4 : 0;
    const __m512i quad = load_quad<T, kQuad>(block);
    const __m512 d = _mm512_load_ps(scale[kHalf]);
    const auto pair = [&](__m512 a, __m512 b) __attribute__((always_inline)) {
      return weight_pair(weight_of<T>(a, d, minimum[kHalf]), weight_of<T>(b, d, minimum[kHalf]));
    };
    _mm512_store_si512(tile->pairs[2 * kQuad], pair(byte_value<T, 0>(quad), byte_value<T, 1>(quad)));
    _mm512_store_si512(tile->pairs[2 * kQuad + 1], pair(byte_value<T, 2>(quad), byte_value<T, 3>(quad)));
    if constexpr (kQuad < 7) unpack_quads<T, kQuad + 1>(block, scale, minimum, values, tile);
  }
}

// One super-block of a group.
template <QuantType T>
TELLIN_INLINE void unpack_super(const uint8_t* super_block, WeightTile* tiles) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kSums = kFormat.per16() ? 2 : 1;
  SuperScales<T> scales;
  expand_scales<T>(super_block, kRows, scales.scale[0], scales.minimum[0]);
  __m512 values = _mm512_setzero_ps();
  if constexpr (kFormat.bits == 4) values = code_values<T>();
  const uint8_t* block = super_block + kFormat.header_bytes();
  for (int b = 0; b < kFormat.blocks(); ++b, block += kFormat.block_bytes()) {
    unpack_quads<T, 0>(block, scales.scale + b * kSums, scales.minimum + b * kSums, values, tiles + b);
  }
}

// Float sums of a tile of rows and one group, between chunks.
using ParkedSums = float[kTileRows][kRows];

struct Bf16Problem {
  const PackedMatrix& w;
  const QuantizedRows& x;
  float* out;
  int64_t ldo;
};

// Rows of a pass as equal tiles: the last one begins earlier rather than being of fewer rows.
struct Bf16Tiles {
  int count, rows, tokens;

  explicit Bf16Tiles(int num_tokens)
      : count((num_tokens + kTileRows - 1) / kTileRows),
        rows((num_tokens + count - 1) / count),
        tokens(num_tokens) {}
  int begin(int i) const { return i * rows < tokens - rows ? i * rows : tokens - rows; }
};

constexpr int64_t kParkedStride = kRows * sizeof(float);

// Tiles 0 to 3 hold sums: of two tiles of rows (kFirst: 0 or 2) and two groups.
template <int kFirst>
TELLIN_INLINE void begin_tiles(const ParkedSums* parked) {
  if (parked == nullptr) {
    zero_tile<kFirst>();
    zero_tile<kFirst + 1>();
  } else {
    load_tile<kFirst>(parked[0], kParkedStride);
    load_tile<kFirst + 1>(parked[1], kParkedStride);
  }
}

template <int kTile>
TELLIN_INLINE void store_rows(float* out, int64_t ldo, int64_t width, int rows) {
  if (width >= kRows) return store_tile<kTile>(out, ldo * static_cast<int64_t>(sizeof(float)));
  alignas(64) ParkedSums sums;
  store_tile<kTile>(sums, kParkedStride);
  for (int m = 0; m < rows; ++m) {
    __builtin_memcpy(out + m * ldo, sums[m], static_cast<size_t>(width) * sizeof(float));
  }
}

// Tokens [m0, m0 + row_tiles.tokens) x the groups g and, if there is one more, g + 1.
template <QuantType T>
void run_pair(const Bf16Problem& p, int64_t m0, const Bf16Tiles& row_tiles, int64_t g, bool has_second,
              const uint8_t* after) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kSupers = kBf16Blocks / kFormat.blocks();
  alignas(64) WeightTile tiles[2][kBf16Blocks];
  alignas(64) ParkedSums parked[kBf16RowTiles + 1][2];
  const auto num_supers = static_cast<int>(p.w.group_bytes / kFormat.super_bytes());
  const uint8_t* const first = p.w.data + g * p.w.group_bytes;
  const uint8_t* const second = has_second ? first + p.w.group_bytes : first;
  const int64_t left = p.w.n - g * kRows;
  const int64_t ldo = p.ldo;
  for (int s0 = 0; s0 < num_supers; s0 += kSupers) {
    const int supers = num_supers - s0 < kSupers ? num_supers - s0 : kSupers;
    for (int s = 0; s < supers; ++s) {
      const int64_t at = static_cast<int64_t>(s0 + s) * kFormat.super_bytes();
      const int64_t ahead = at + int64_t{kSupers} * kFormat.super_bytes();
      const int64_t past = ahead - static_cast<int64_t>(p.w.group_bytes);
      const uint8_t* const next = past < 0 ? first + ahead : after + past;
      for (int i = 0; i < kFormat.super_bytes(); i += 64) {
        __builtin_prefetch(next + i, 0, 3);
        __builtin_prefetch(next + p.w.group_bytes + i, 0, 3);
      }
      unpack_super<T>(first + at, tiles[0] + s * kFormat.blocks());
      if (has_second) unpack_super<T>(second + at, tiles[1] + s * kFormat.blocks());
    }
    const WeightTile* const right = tiles[has_second ? 1 : 0];
    const int blocks = supers * kFormat.blocks();
    const bool is_last = s0 + supers == num_supers;
    const int64_t column = static_cast<int64_t>(s0) * kFormat.blocks() * kBf16BlockBytes;
    for (int i = 0; i < row_tiles.count; i += 2) {
      const bool has_two = i + 1 < row_tiles.count;
      const int64_t m = m0 + row_tiles.begin(i);
      const int64_t other = has_two ? m0 + row_tiles.begin(i + 1) : m;
      const uint8_t* x = p.x.data + m * p.x.row_bytes + column;
      const uint8_t* y = p.x.data + other * p.x.row_bytes + column;
      begin_tiles<0>(s0 == 0 ? nullptr : parked[i]);
      if (has_two) begin_tiles<2>(s0 == 0 ? nullptr : parked[i + 1]);
      for (int b = 0; b < blocks; ++b, x += kBf16BlockBytes, y += kBf16BlockBytes) {
        load_tile<4>(x, p.x.row_bytes);
        load_tile<6>(tiles[0] + b, kVectorBytes);
        load_tile<7>(right + b, kVectorBytes);
        add_bf16_product<0, 4, 6>();
        add_bf16_product<1, 4, 7>();
        if (!has_two) continue;
        load_tile<5>(y, p.x.row_bytes);
        add_bf16_product<2, 5, 6>();
        add_bf16_product<3, 5, 7>();
      }
      if (!is_last) {
        store_tile<0>(parked[i][0], kParkedStride);
        store_tile<1>(parked[i][1], kParkedStride);
        if (!has_two) continue;
        store_tile<2>(parked[i + 1][0], kParkedStride);
        store_tile<3>(parked[i + 1][1], kParkedStride);
        continue;
      }
      float* const out = p.out + m * ldo + g * kRows;
      store_rows<0>(out, ldo, left, row_tiles.rows);
      if (has_second) store_rows<1>(out + kRows, ldo, left - kRows, row_tiles.rows);
      if (!has_two) continue;
      float* const below = p.out + other * ldo + g * kRows;
      store_rows<2>(below, ldo, left, row_tiles.rows);
      if (has_second) store_rows<3>(below + kRows, ldo, left - kRows, row_tiles.rows);
    }
  }
}

template <QuantType T>
void linear_bf16(const PackedMatrix& w, const QuantizedRows& x, int64_t m0, int64_t m1, int64_t g0,
                 int64_t g1, float* out, int64_t ldo) {
  const Bf16Problem problem = {w, x, out, ldo};
  const int64_t num_passes = (m1 - m0 + kBf16Rows - 1) / kBf16Rows;
  for (int64_t i = 0; i < num_passes; ++i) {
    const int64_t begin = m0 + (m1 - m0) * i / num_passes, end = m0 + (m1 - m0) * (i + 1) / num_passes;
    const Bf16Tiles row_tiles(static_cast<int>(end - begin));
    TileConfig config;
    for (int t = 0; t < 6; ++t) config.set(t, row_tiles.rows, kTileRowBytes);
    for (int t = 6; t < 8; ++t) config.set(t, kTileRows, kTileRowBytes);
    configure_tiles(config);
    for (int64_t g = g0; g < g1; g += 2) {
      const uint8_t* after = w.data + (g + 2) * static_cast<int64_t>(w.group_bytes);
      if (g + 2 >= g1 && w.follow != nullptr) after = w.follow;
      run_pair<T>(problem, begin, row_tiles, g, g + 2 <= g1, after);
    }
  }
  release_tiles();
}

}  // namespace
}  // namespace tellin

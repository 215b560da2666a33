// AMX: rows of quantised activations.
//
// The records of a row of 8 bits (packed_format.h) are followed by what tiles read: for each block its q and
// 32 times its zero, which multiply codes and their sums; then for each block its scale and sums. Rows are an
// odd number of cache lines apart, so that those of a tile spread over all sets of a cache.
#pragma once
#include <cstring>

#include "../avx512/quantize.h"

namespace tellin {
namespace {

constexpr int kActTileBytes = 2 * kBlockK;

struct ActFactors {
  float scale, sum;  // as in Act8
};
static_assert(offsetof(Act8, sum) == offsetof(Act8, scale) + sizeof(float), "copied from the record");

// Of 8 blocks.
constexpr int64_t kActPartBytes = 8 * (sizeof(Act8) + kActTileBytes + sizeof(ActFactors));
static_assert(kActPartBytes % 64 == 0, "rows are whole cache lines");

constexpr int64_t blocks_of_row(int64_t row_bytes) {
  return row_bytes / kActPartBytes * 8;
}
constexpr int64_t tiles_offset(int64_t row_bytes) {
  return blocks_of_row(row_bytes) * static_cast<int64_t>(sizeof(Act8));
}
constexpr int64_t factors_offset(int64_t row_bytes) {
  return tiles_offset(row_bytes) + blocks_of_row(row_bytes) * kActTileBytes;
}

size_t tiled_row_bytes(int64_t k, ActPrecision precision) {
  if (precision == ActPrecision::kInt16) return act_row_bytes(k, true);
  return static_cast<size_t>(((k + 255) / 256 * kActPartBytes / 64 | 1) * 64);
}

// Writes what tiles read of blocks [begin, end) of a row whose records are there.
TELLIN_INLINE void write_tiles(uint8_t* row, int64_t row_bytes, int64_t begin, int64_t end) {
  const auto* records = reinterpret_cast<const Act8*>(row);
  uint8_t* tiles = row + tiles_offset(row_bytes);
  auto* factors = reinterpret_cast<ActFactors*>(row + factors_offset(row_bytes));
  for (int64_t b = begin; b < end; ++b) {
    const __m256i q = _mm256_load_si256(reinterpret_cast<const __m256i*>(records[b].q[0]));
    const __m256i zero = _mm256_set1_epi8(static_cast<char>(records[b].zero_pair[0][0]));
    const __m512i tile = _mm512_inserti64x4(_mm512_castsi256_si512(q), zero, 1);
    _mm512_store_si512(tiles + b * kActTileBytes, tile);
    std::memcpy(&factors[b], &records[b].scale, sizeof(ActFactors));
  }
}

// The line that makes their number odd: whole rows are copied.
TELLIN_INLINE void end_row(uint8_t* row, int64_t row_bytes) {
  const int64_t end = row_bytes / kActPartBytes * kActPartBytes;
  std::memset(row + end, 0, static_cast<size_t>(row_bytes - end));
}

void quantize_tiled_row(ActPrecision precision, const float* x, int64_t k, int64_t row,
                        const QuantizedRows& out) {
  quantize_row(precision, x, k, row, out);
  if (precision == ActPrecision::kInt16) return;
  uint8_t* const data = out.data + row * out.row_bytes;
  write_tiles(data, out.row_bytes, 0, blocks_of_row(out.row_bytes));
  end_row(data, out.row_bytes);
}

void quantize_tiled_part(ActPrecision precision, const float* x, int64_t ldx, int64_t m0, int64_t m1,
                         int64_t begin, int64_t end, const QuantizedRows& out) {
  quantize_part(precision, x, ldx, m0, m1, begin, end, out);
  if (precision == ActPrecision::kInt16) return;
  for (int64_t m = m0; m < m1; ++m) {
    write_tiles(out.data + m * out.row_bytes, out.row_bytes, begin / kBlockK, end / kBlockK);
  }
}

void pad_tiled_row(ActPrecision precision, int64_t k, int64_t row, const QuantizedRows& out) {
  uint8_t* const data = out.data + row * out.row_bytes;
  const int64_t begin = k / kBlockK, end = (k + 255) / 256 * 8;
  for (int64_t b = begin; b < end; ++b) {
    if (precision == ActPrecision::kInt16) {
      store_zero_record(reinterpret_cast<Act16*>(data) + b);
    } else {
      store_zero_record(reinterpret_cast<Act8*>(data) + b);
    }
  }
  if (precision == ActPrecision::kInt16) return;
  write_tiles(data, out.row_bytes, begin, end);
  end_row(data, out.row_bytes);
}

}  // namespace
}  // namespace tellin

// The packed weight layout: one description for every instruction set.
//
// A matrix is packed in groups of 16 output rows. A group is a sequence of super-blocks along k (64 input
// features for the 32-wide file formats, 256 for the K formats), each a scale header followed by its
// 32-feature blocks of codes. Code vectors are 64 bytes: byte row * 4 + i belongs to output row `row` and
// feature 4 * j + i ("quad" j of the block, j in [0, 8)). A block of codes is made of planes, in this order:
//   4-bit plane, 4 vectors: vector j has quad j in the low nibbles and quad j + 4 in the high nibbles;
//   2-bit plane, 2 vectors: vector u has quad 4u + f in bits [2f, 2f + 2);
//   1-bit plane, 1 vector:  quad j in bit j;
//   8-bit plane, 8 vectors: vector j is quad j.
// bits 2: 2-bit plane; 3: 2-bit, 1-bit (bit 2); 4: 4-bit; 5: 4-bit, 1-bit (bit 4); 6: 4-bit, 2-bit (bits 4,
// 5). A weight's value is scale * (code - zero_point), or scale * code + minimum. Signed 8-bit codes are
// stored plus 128.
//
// Everything here has internal linkage: the header is compiled into units of different instruction sets.
#pragma once
#include <cstddef>
#include <cstdint>

#include "tellin/quant_types.h"

namespace tellin {
namespace {

constexpr int kRows = 16;         // output rows of a group
constexpr int kVectorBytes = 64;  // 16 rows x 4 features
constexpr int kBlockK = 32;       // features of a code block

enum class ScaleKind {
  kNone,       // float weights
  kHalf32,     // per 32: f16 scale[2][16], then with minima f16 minimum[2][16]
  kSixBit32,   // per 32: f16 d[16], f16 dmin[16], then 6-bit scales and minima (see SixBitHeader)
  kInt8Per16,  // per 16: f32 d[16], int8 scale[16 sub-blocks][16 rows]
  kNibble16,   // per 16: f16 d[16], f16 dmin[16], byte [16 sub-blocks][16 rows]: scale low nibble, minimum
               // high
};

struct PackedFormat {
  int bits;
  int zero_point_log2;  // zero point is 1 << this; -1: none
  bool has_min;
  ScaleKind scales;

  constexpr bool is_quantized() const { return scales != ScaleKind::kNone; }
  constexpr bool per16() const { return scales == ScaleKind::kInt8Per16 || scales == ScaleKind::kNibble16; }
  constexpr int zero_point() const { return zero_point_log2 < 0 ? 0 : 1 << zero_point_log2; }
  constexpr int super_k() const { return scales == ScaleKind::kHalf32 ? 64 : 256; }
  constexpr int blocks() const { return super_k() / kBlockK; }
  constexpr int block_bytes() const { return bits * kRows * kBlockK / 8; }
  constexpr int header_bytes() const {
    return scales == ScaleKind::kHalf32 ? (has_min ? 128 : 64) : scales == ScaleKind::kSixBit32 ? 256 : 320;
  }
  constexpr int super_bytes() const { return header_bytes() + blocks() * block_bytes(); }
};

constexpr PackedFormat format_of(QuantType type) {
  switch (type) {
    case QuantType::Q4_0:
      return {4, 3, false, ScaleKind::kHalf32};
    case QuantType::Q4_1:
      return {4, -1, true, ScaleKind::kHalf32};
    case QuantType::Q5_0:
      return {5, 4, false, ScaleKind::kHalf32};
    case QuantType::Q5_1:
      return {5, -1, true, ScaleKind::kHalf32};
    case QuantType::Q8_0:
      return {8, 7, false, ScaleKind::kHalf32};
    case QuantType::Q2_K:
      return {2, -1, true, ScaleKind::kNibble16};
    case QuantType::Q3_K:
      return {3, 2, false, ScaleKind::kInt8Per16};
    case QuantType::Q4_K:
      return {4, -1, true, ScaleKind::kSixBit32};
    case QuantType::Q5_K:
      return {5, -1, true, ScaleKind::kSixBit32};
    case QuantType::Q6_K:
      return {6, 5, false, ScaleKind::kInt8Per16};
    case QuantType::F32:
      return {32, -1, false, ScaleKind::kNone};
    case QuantType::F16:
    case QuantType::BF16:
      return {16, -1, false, ScaleKind::kNone};
  }
  return {0, -1, false, ScaleKind::kNone};
}

// Header of kSixBit32: 256 bytes for 8 blocks of 16 rows.
struct SixBitHeader {
  uint16_t d[kRows];       // f16 scale of scales
  uint16_t dmin[kRows];    // f16 scale of minima (subtracted)
  uint8_t low[8][kRows];   // block b: low nibble = low 4 bits of its scale, high nibble = of its minimum
  uint8_t high[4][kRows];  // [b]: bits 0-1 scale b, 2-3 minimum b, 4-5 scale b + 4, 6-7 minimum b + 4
};
static_assert(sizeof(SixBitHeader) == 256, "header size");

struct Int8Per16Header {
  float d[kRows];
  int8_t scale[16][kRows];
};
static_assert(sizeof(Int8Per16Header) == 320, "header size");

struct Nibble16Header {
  uint16_t d[kRows];
  uint16_t dmin[kRows];
  uint8_t scale_min[16][kRows];
};
static_assert(sizeof(Nibble16Header) == 320, "header size");

// Float weights: F32 [k][16]; F16 [k][16]; BF16 [ceil(k / 2)][16][2] (odd k padded with zero).
constexpr size_t packed_group_size(QuantType type, int64_t k) {
  const PackedFormat f = format_of(type);
  if (f.is_quantized()) return static_cast<size_t>((k + f.super_k() - 1) / f.super_k()) * f.super_bytes();
  const int64_t padded = type == QuantType::BF16 ? (k + 1) / 2 * 2 : k;
  return (static_cast<size_t>(padded) * kRows * (f.bits / 8) + 63) / 64 * 64;
}

// Quantised activations of one row: one record per 32 features.
//
// 8 bits: x = scale * (q + zero). The steps of a block span its least to its greatest value, not +-its
// largest magnitude: activations of models are lopsided (an outlier has one sign), and this more than halves
// the divergence from float32 at the same width. Sums stay exact integers: for codes c of zero point z over n
// features
//   sum (c - z) (q + zero) = sum c q + zero * (sum c - n z) - z * sum q,
// and the last two terms are one product of 16-bit pairs, (zero, -sum q) x (sum c - n z, z).
struct Act8 {
  static constexpr int kPlanes = 1;

  int8_t q[1][kBlockK];
  float scale;              // 0: the block is zero; NaN: it was not finite
  float sum;                // sum of x
  float half_sum[2];        // sums of x over features [0, 16) and [16, 32)
  int16_t zero_pair[3][2];  // (zero, -sum of q) over all features, [0, 16) and [16, 32)
  int32_t reserved;         // a record is a cache line
};

// 15 bits: x = scale * v, v = 128 * q[0] + q[1] within +-127 * 128.
struct Act16 {
  static constexpr int kPlanes = 2;

  int8_t q[2][kBlockK];
  float scale;
  float sum;
  float half_sum[2];
  int32_t neg_sums[2];  // minus the sums of v over features [0, 16) and [16, 32)
};
static_assert(sizeof(Act8) == 64 && sizeof(Act16) == 88, "activation records");

constexpr int kPlaneShift = 7;        // v = (q[0] << kPlaneShift) + q[1]
constexpr float kAct8Steps = 254.0f;  // one less than there are, so that rounding both ends cannot overflow
constexpr float kAct8LargestZero = 32000.0f;  // the step of a nearly constant block is its magnitude / this
constexpr float kAct16Largest = 127 * 128;
constexpr float kTinyAct =
    0x1p-100f;  // blocks of lesser magnitude are zero: their inverse scale would overflow

// Bytes of a row of records; rows are padded to whole 256-feature super-blocks.
constexpr size_t act_row_bytes(int64_t k, bool two_planes) {
  const size_t record = two_planes ? sizeof(Act16) : sizeof(Act8);
  return static_cast<size_t>((k + 255) / 256) * 8 * record;
}

}  // namespace
}  // namespace tellin

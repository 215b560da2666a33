// The packed weight layout: one description for every instruction set.
//
// A matrix is packed in groups of 16 output rows. A group is a sequence of super-blocks along k (64 input
// features for the 32-wide file formats, 128 for MXFP4, 256 for the K formats and IQ4_XS), each a scale
// header followed by its 32-feature blocks of codes. Code vectors are 64 bytes: byte row * 4 + i belongs to
// output row `row` and feature 4 * j + i ("quad" j of the block, j in [0, 8)). A block of codes is made of
// planes, in this order:
//   4-bit plane, 4 vectors: vector j has quad j in the low nibbles and quad j + 4 in the high nibbles;
//   2-bit plane, 2 vectors: vector u has quad 4u + f in bits [2f, 2f + 2);
//   1-bit plane, 1 vector:  quad j in bit j;
//   8-bit plane, 8 vectors: vector j is quad j.
// bits 2: 2-bit plane; 3: 2-bit, 1-bit (bit 2); 4: 4-bit; 5: 4-bit, 1-bit (bit 4); 6: 4-bit, 2-bit (bits 4,
// 5). A weight's value is scale * (code - zero_point), or scale * code + minimum. Signed 8-bit codes are
// stored plus 128. Where a scale is zero (padding included), codes are the zero point (without one: 0), so
// that sums of codes minus the zero point are zero there, and kernels may take any number for the scale.
//
// Formats with a code table store 4 bits per code, which are looked up as they are unpacked: IQ4's 16 levels
// are codes of 8 bits, the doubled values of MXFP4 (E2M1) codes of 5. Their scales are what they are: no
// level of IQ4 is zero, and those of MXFP4 span 250 powers of two (see kLeastTableScale).
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
  kSignedSixBit32,  // per 32: f16 d[16], then 6-bit scales plus 32 (see SignedSixBitHeader)
  kExponent32,      // per 32: byte e[4][16]: 2^(e - 128)
};

// What the stored bits of a code stand for.
enum class CodeTable { kNone, kIq4, kE2m1 };

constexpr uint8_t kIq4Codes[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                   129, 141, 153, 166, 181, 197, 217, 241};  // levels + 128
constexpr uint8_t kE2m1Codes[16] = {16, 17, 18, 19, 20, 22, 24, 28,
                                    16, 15, 14, 13, 12, 10, 8,  4};  // twice the values, + 16

struct PackedFormat {
  int bits;             // stored
  int zero_point_log2;  // zero point is 1 << this; -1: none
  bool has_min;
  ScaleKind scales;
  CodeTable table = CodeTable::kNone;

  constexpr bool is_quantized() const { return scales != ScaleKind::kNone; }
  constexpr bool has_table() const { return table != CodeTable::kNone; }
  // Of a code as it is multiplied.
  constexpr int code_bits() const {
    return table == CodeTable::kIq4 ? 8 : table == CodeTable::kE2m1 ? 5 : bits;
  }
  constexpr uint8_t code(int stored) const {
    return table == CodeTable::kIq4 ? kIq4Codes[stored] : kE2m1Codes[stored];
  }
  constexpr bool per16() const { return scales == ScaleKind::kInt8Per16 || scales == ScaleKind::kNibble16; }
  constexpr int zero_point() const { return zero_point_log2 < 0 ? 0 : 1 << zero_point_log2; }
  constexpr int super_k() const {
    return scales == ScaleKind::kHalf32 ? 64 : scales == ScaleKind::kExponent32 ? 128 : 256;
  }
  constexpr int blocks() const { return super_k() / kBlockK; }
  constexpr int block_bytes() const { return bits * kRows * kBlockK / 8; }
  constexpr int header_bytes() const {
    switch (scales) {
      case ScaleKind::kHalf32:
        return has_min ? 128 : 64;
      case ScaleKind::kSixBit32:
        return 256;
      case ScaleKind::kSignedSixBit32:
        return 128;
      case ScaleKind::kExponent32:
        return 64;
      default:
        return 320;
    }
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
    case QuantType::IQ4_NL:
      return {4, 7, false, ScaleKind::kHalf32, CodeTable::kIq4};
    case QuantType::IQ4_XS:
      return {4, 7, false, ScaleKind::kSignedSixBit32, CodeTable::kIq4};
    case QuantType::MXFP4:
      return {4, 4, false, ScaleKind::kExponent32, CodeTable::kE2m1};
    case QuantType::F32:
      return {32, -1, false, ScaleKind::kNone};
    case QuantType::F16:
    case QuantType::BF16:
      return {16, -1, false, ScaleKind::kNone};
    case QuantType::E4M3:
      return {8, -1, false, ScaleKind::kNone};
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

// Header of kSignedSixBit32: 128 bytes for 8 blocks of 16 rows.
struct SignedSixBitHeader {
  uint16_t d[kRows];       // f16 scale of scales
  uint8_t low[4][kRows];   // [b % 4]: low 4 bits of scale b + 32; b < 4: low nibble, else high
  uint8_t high[2][kRows];  // [b % 2]: upper 2 bits of scale b + 32 in bits 2 * (b / 2) and on
};
static_assert(sizeof(SignedSixBitHeader) == 128, "header size");

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

constexpr int kE4m3K = 128;  // features of E4M3 that share a scale; k is a multiple of it
// E4M3's sign, exponent and mantissa in the places of a half's make a half of 2^-8 times the value,
// subnormals included: packed scales are multiplied by this.
constexpr float kE4m3ScaleFactor = 256.0f;
constexpr size_t e4m3_codes_offset(int64_t k) {
  return static_cast<size_t>(k / kE4m3K) * kRows * sizeof(float);
}

// Float weights: F32 [k][16]; F16 [k][16]; BF16 [ceil(k / 2)][16][2] (odd k padded with zero); E4M3 f32
// scales [k / 128][16], times kE4m3ScaleFactor, then bytes [k][16]: a weight is half * scale, rounded once.
constexpr size_t packed_group_size(QuantType type, int64_t k) {
  const PackedFormat f = format_of(type);
  if (f.is_quantized()) return static_cast<size_t>((k + f.super_k() - 1) / f.super_k()) * f.super_bytes();
  if (type == QuantType::E4M3) return e4m3_codes_offset(k) + static_cast<size_t>(k) * kRows;
  const int64_t padded = type == QuantType::BF16 ? (k + 1) / 2 * 2 : k;
  return (static_cast<size_t>(padded) * kRows * (f.bits / 8) + 63) / 64 * 64;
}

// Quantised activations of one row: one record per 32 features.
//
// 8 bits: x = scale * (q + zero). The zero follows the middle of a block's least and greatest value:
// activations of models are lopsided (an outlier has one sign), and steps that span +-the largest magnitude
// would more than double the divergence from float32 at the same width. Sums stay exact integers: for codes c
// of zero point z over n features
//   sum (c - z) (q + zero) = sum c q + zero * (sum c - n z) - z * sum q,
// and the last two terms are one product of 16-bit pairs, (zero, -sum q) x (sum c - n z, z).
//
// Zeros and scales are on a grid, so that a tile of many rows looks products up instead of multiplying:
//   zero = 32 * steps, steps in [-3, 3]: 7 multiples of a block's sum of codes, found at `zero_offset`;
//   scale = m * 2^e, m in {1, 1.25, 1.5, 1.75}: its product with a weight's scale d is exact (d has 18
//   significant bits at most), and its bits are those of the scale plus bits(m * d) - bits(m), found at
//   `scale_offset`.
// A vector of 16 rows of such a table is 64 bytes; entry 4 of the scales' table is zero: it leaves a NaN as
// it is. A value is, in all kernels,
//   acc = fma(integer sum, scale * d, acc), with a scale per 16 features for one half after the other; then
//   acc = fma(minimum, sum, acc), with two minima: half_sum.
//
// How a block of values in [low, high] is quantised: in float32 and in this order of operations, whatever the
// variant.
// - A value that is not finite, or a magnitude > kAct8LargestMagnitude: store_nan_record.
// - All magnitudes < kTinyAct8: store_zero_record.
// - steps = rint((high + low) * kAct8StepsPerMiddle / (high - low)), clamped to [-3, 3] (infinities, too).
// - need = max(high * kAct8Up[steps + 3], -low * kAct8Down[steps + 3]), it covers both ends.
// - scale = need, rounded up to three significant bits.
// - q = rint(x * (1 / scale)) - zero, always within [-128, 127]; the sums are exact.
struct Act8 {
  static constexpr int kPlanes = 1;

  int8_t q[1][kBlockK];
  float scale;              // NaN: the block was not finite
  float sum;                // sum of x
  float half_sum[2];        // sums of x over features [0, 16) and [16, 32)
  int16_t zero_pair[3][2];  // (zero, -sum of q) over all features, [0, 16) and [16, 32)
  uint16_t scale_offset;    // 64 * the place of m in {1, 1.25, 1.5, 1.75}; 64 * 4: NaN
  uint16_t zero_offset;     // 64 * (steps + 3)
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

constexpr int kPlaneShift = 7;     // v = (q[0] << kPlaneShift) + q[1]
constexpr int kZeroUnit = 32;      // zeros are multiples of this
constexpr int kMostZeroSteps = 3;  // to either side
constexpr int kZeroEntries = 2 * kMostZeroSteps + 1;
constexpr int kScaleEntries = 5;  // m = 1, 1.25, 1.5, 1.75; NaN
constexpr int kNanScaleEntry = 4;
constexpr int kEntryBytes = 4 * kRows;  // of both tables: 16 rows of 32 bits
constexpr float kAct8Scale[kScaleEntries - 1] = {1.0f, 1.25f, 1.5f, 1.75f};
constexpr float kAct8StepsPerMiddle = 127.0f / kZeroUnit;
// By steps + kMostZeroSteps: 1 / (127 + zero) and 1 / (128 - zero), where 127 + zero and zero - 128 are the
// largest and least q + zero.
constexpr float kAct8Up[kZeroEntries] = {1.0f / 31,  1.0f / 63,  1.0f / 95, 1.0f / 127,
                                         1.0f / 159, 1.0f / 191, 1.0f / 223};
constexpr float kAct8Down[kZeroEntries] = {1.0f / 224, 1.0f / 192, 1.0f / 160, 1.0f / 128,
                                           1.0f / 96,  1.0f / 64,  1.0f / 32};
constexpr uint32_t kAct8ScaleRest = 0x1fffff;  // the bits of a float behind its three most significant ones
// What stands for d where it is zero, in tables of bits(m * d): any normal number would do.
constexpr float kZeroScaleStand = 0x1p-24f;
// Magnitudes of d whose products with any scale of activations are normal numbers, as tables need them.
// Formats with a code table may have others, and zero beside codes that count: groups with such make no
// tables.
constexpr float kLeastTableScale = 0x1p-38f, kLargestTableScale = 0x1p31f;
// Blocks of greater magnitude are not finite and of lesser are zero: exponents of scale * d stay normal.
constexpr float kAct8LargestMagnitude = 0x1p100f;
constexpr float kTinyAct8 = 0x1p-80f;
constexpr float kAct16Largest = 127 * 128;
constexpr float kTinyAct =
    0x1p-100f;  // 15 bits: blocks of lesser magnitude are zero: their inverse scale would overflow

// The record of a block of zeros, or of one that is not finite; the former pads rows.
inline void store_zero_record(Act8* out) {
  *out = {};
  out->scale = 1.0f;
  out->zero_offset = kMostZeroSteps * kEntryBytes;
}

inline void store_zero_record(Act16* out) {
  *out = {};
}

inline void store_nan_record(Act8* out) {
  store_zero_record(out);
  out->scale = out->sum = out->half_sum[0] = out->half_sum[1] = __builtin_nanf("");
  out->scale_offset = kNanScaleEntry * kEntryBytes;
}

inline void store_nan_record(Act16* out) {
  *out = {};
  out->scale = out->sum = out->half_sum[0] = out->half_sum[1] = __builtin_nanf("");
}

// Bytes of a row of records; rows are padded to whole 256-feature super-blocks.
constexpr size_t act_row_bytes(int64_t k, bool two_planes) {
  const size_t record = two_planes ? sizeof(Act16) : sizeof(Act8);
  return static_cast<size_t>((k + 255) / 256) * 8 * record;
}

}  // namespace
}  // namespace tellin

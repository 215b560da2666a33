// Finds NaN and infinity in file tensors: the bits of floats and of scales tell, codes cannot be wrong.
#include "program_state.h"
#include "quant_blocks.h"

namespace tellin {
namespace {

constexpr uint16_t kHalfExponent = 0x7c00;
constexpr uint16_t kBfloatExponent = 0x7f80;

template <uint16_t kExponent, int kStep>
bool are_words_finite(const uint8_t* data, int64_t count) {
  bool bad = false;
  for (int64_t i = 0; i < count; ++i) bad |= (load_u16(data + i * kStep) & kExponent) == kExponent;
  return !bad;
}

// The two words at `offset` of each block of kBytes, or the one.
template <int kBytes>
bool are_scales_finite(const uint8_t* data, int64_t num_blocks, int offset, bool has_second) {
  return are_words_finite<kHalfExponent, kBytes>(data + offset, num_blocks) &&
         (!has_second || are_words_finite<kHalfExponent, kBytes>(data + offset + 2, num_blocks));
}

template <QuantType T>
bool are_blocks_finite(const uint8_t* data, int64_t num_values, int offset, bool has_second = false) {
  constexpr BlockShape kShape = block_shape(T);
  return are_scales_finite<kShape.bytes>(data, num_values / kShape.elements, offset, has_second);
}

// MXFP4: the scale is a power of two, and a block's greatest possible value (6 times that) a float.
bool are_exponents_finite(const uint8_t* data, int64_t num_blocks, int step) {
  constexpr uint8_t kGreatest = 252;
  bool bad = false;
  for (int64_t i = 0; i < num_blocks; ++i) bad |= data[i * step] > kGreatest;
  return !bad;
}

// E4M3: the scale is finite, and no byte NaN (there is no infinity).
bool are_e4m3_finite(const uint8_t* data, int64_t num_blocks) {
  constexpr BlockShape kShape = block_shape(QuantType::E4M3);
  bool bad = false;
  for (int64_t b = 0; b < num_blocks; ++b, data += kShape.bytes) {
    bad |= (load_u16(data + 2) & kBfloatExponent) == kBfloatExponent;
    for (int i = 4; i < kShape.bytes; ++i) bad |= (data[i] & 0x7f) == 0x7f;
  }
  return !bad;
}

}  // namespace

bool is_finite(const TensorView& tensor, int64_t begin, int64_t end) {
  const BlockShape shape = block_shape(tensor.type);
  const uint8_t* data = tensor.data + begin * (tensor.columns / shape.elements) * shape.bytes;
  const int64_t count = (end - begin) * tensor.columns;
  switch (tensor.type) {
    case QuantType::F32:  // little-endian: sign and exponent are in the upper word
      return are_words_finite<kBfloatExponent, 4>(data + 2, count);
    case QuantType::F16:
      return are_words_finite<kHalfExponent, 2>(data, count);
    case QuantType::BF16:
      return are_words_finite<kBfloatExponent, 2>(data, count);
    case QuantType::Q4_0:
      return are_blocks_finite<QuantType::Q4_0>(data, count, 0);
    case QuantType::Q4_1:
      return are_blocks_finite<QuantType::Q4_1>(data, count, 0, true);
    case QuantType::Q5_0:
      return are_blocks_finite<QuantType::Q5_0>(data, count, 0);
    case QuantType::Q5_1:
      return are_blocks_finite<QuantType::Q5_1>(data, count, 0, true);
    case QuantType::Q8_0:
      return are_blocks_finite<QuantType::Q8_0>(data, count, 0);
    case QuantType::Q2_K:
      return are_blocks_finite<QuantType::Q2_K>(data, count, 80, true);
    case QuantType::Q3_K:
      return are_blocks_finite<QuantType::Q3_K>(data, count, 108);
    case QuantType::Q4_K:
      return are_blocks_finite<QuantType::Q4_K>(data, count, 0, true);
    case QuantType::Q5_K:
      return are_blocks_finite<QuantType::Q5_K>(data, count, 0, true);
    case QuantType::Q6_K:
      return are_blocks_finite<QuantType::Q6_K>(data, count, 208);
    case QuantType::IQ4_NL:
      return are_blocks_finite<QuantType::IQ4_NL>(data, count, 0);
    case QuantType::IQ4_XS:
      return are_blocks_finite<QuantType::IQ4_XS>(data, count, 0);
    case QuantType::E4M3:
      return are_e4m3_finite(data, count / shape.elements);
    case QuantType::MXFP4:
      return are_exponents_finite(data, count / shape.elements, shape.bytes);
  }
  return false;
}

}  // namespace tellin

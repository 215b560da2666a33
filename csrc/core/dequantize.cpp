// Dequantisation of rows of file tensors (embedding lookup), exact: one rounding at most per value, in the
// order of the format's definition.
#include "linear_core.h"
#include "quant_blocks.h"
#include "tellin/packed_format.h"

namespace tellin {
namespace {

template <QuantType T>
void dequantize_blocks(const uint8_t* src, int64_t k, float* out) {
  constexpr BlockShape kShape = block_shape(T);
  constexpr int kZero = format_of(T).zero_point();
  uint8_t codes[kShape.elements];
  for (int64_t i = 0; i < k; i += kShape.elements, src += kShape.bytes) {
    decode_codes<T>(src, codes);
    for (int j = 0; j < kShape.elements / kShape.scale_step; ++j) {
      float scale, minimum;
      decode_scale<T>(src, j, &scale, &minimum);
      const uint8_t* c = codes + j * kShape.scale_step;
      float* o = out + i + j * kShape.scale_step;
      for (int e = 0; e < kShape.scale_step; ++e) {
        const float product = scale * static_cast<float>(c[e] - kZero);
        o[e] = format_of(T).has_min ? product + minimum : product;
      }
    }
  }
}

void dequantize_e4m3(const uint8_t* src, int64_t k, float* out) {
  constexpr BlockShape kShape = block_shape(QuantType::E4M3);
  for (int64_t i = 0; i < k; i += kShape.elements, src += kShape.bytes) {
    float scale;
    std::memcpy(&scale, src, sizeof scale);
    for (int e = 0; e < kShape.elements; ++e) {
      out[i + e] = half_to_float(e4m3_half(src[4 + e])) * (scale * kE4m3ScaleFactor);
    }
  }
}

}  // namespace

void dequantize_row(QuantType type, const uint8_t* src, int64_t row, int64_t k, float* out) {
  const BlockShape shape = block_shape(type);
  const uint8_t* p = src + row * (k / shape.elements) * shape.bytes;
  switch (type) {
    case QuantType::F32:
      std::memcpy(out, p, static_cast<size_t>(k) * 4);
      return;
    case QuantType::F16:
      for (int64_t i = 0; i < k; ++i) out[i] = half_to_float(load_u16(p + 2 * i));
      return;
    case QuantType::BF16:
      for (int64_t i = 0; i < k; ++i) out[i] = bfloat_to_float(load_u16(p + 2 * i));
      return;
    case QuantType::Q4_0:
      return dequantize_blocks<QuantType::Q4_0>(p, k, out);
    case QuantType::Q4_1:
      return dequantize_blocks<QuantType::Q4_1>(p, k, out);
    case QuantType::Q5_0:
      return dequantize_blocks<QuantType::Q5_0>(p, k, out);
    case QuantType::Q5_1:
      return dequantize_blocks<QuantType::Q5_1>(p, k, out);
    case QuantType::Q8_0:
      return dequantize_blocks<QuantType::Q8_0>(p, k, out);
    case QuantType::Q2_K:
      return dequantize_blocks<QuantType::Q2_K>(p, k, out);
    case QuantType::Q3_K:
      return dequantize_blocks<QuantType::Q3_K>(p, k, out);
    case QuantType::Q4_K:
      return dequantize_blocks<QuantType::Q4_K>(p, k, out);
    case QuantType::Q5_K:
      return dequantize_blocks<QuantType::Q5_K>(p, k, out);
    case QuantType::Q6_K:
      return dequantize_blocks<QuantType::Q6_K>(p, k, out);
    case QuantType::IQ4_NL:
      return dequantize_blocks<QuantType::IQ4_NL>(p, k, out);
    case QuantType::IQ4_XS:
      return dequantize_blocks<QuantType::IQ4_XS>(p, k, out);
    case QuantType::E4M3:
      return dequantize_e4m3(p, k, out);
    case QuantType::MXFP4:
      return dequantize_blocks<QuantType::MXFP4>(p, k, out);
  }
}

}  // namespace tellin

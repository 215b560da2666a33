// Quantised blocks as they lie in a GGUF file, and their decoding to integer codes, scales and minima.
// Source: GGUF's quantisation formats (ggml block definitions), checked against the `gguf` package's NumPy
// code.
//
// Included by units compiled at the ABI floor only (inline functions here must not be built for a higher
// instruction set). File bytes may be unaligned: everything is read with memcpy or as bytes.
#pragma once
#include <cstdint>
#include <cstring>

#include "tellin/packed_format.h"
#include "tellin/quant_types.h"

namespace tellin {

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint16_t load_u16(const uint8_t* p) {
  uint16_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

inline uint32_t load_u32(const uint8_t* p) {
  uint32_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// IEEE binary16 to binary32, exact (NaN payloads are kept, signalling bit included).
inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t exponent = (h >> 10) & 31;
  const uint32_t mantissa = h & 1023;
  if (exponent == 31) return bits_to_float(sign | 0x7f800000u | mantissa << 13);
  if (exponent != 0) return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

inline float bfloat_to_float(uint16_t b) {
  return bits_to_float(static_cast<uint32_t>(b) << 16);
}

struct BlockShape {
  int elements;    // per block
  int bytes;       // per block
  int scale_step;  // elements that share a scale (0: float types)
};

constexpr BlockShape block_shape(QuantType type) {
  switch (type) {
    case QuantType::F32:
      return {1, 4, 0};
    case QuantType::F16:
      return {1, 2, 0};
    case QuantType::BF16:
      return {1, 2, 0};
    case QuantType::Q4_0:
      return {32, 18, 32};
    case QuantType::Q4_1:
      return {32, 20, 32};
    case QuantType::Q5_0:
      return {32, 22, 32};
    case QuantType::Q5_1:
      return {32, 24, 32};
    case QuantType::Q8_0:
      return {32, 34, 32};
    case QuantType::Q2_K:
      return {256, 84, 16};
    case QuantType::Q3_K:
      return {256, 110, 16};
    case QuantType::Q4_K:
      return {256, 144, 32};
    case QuantType::Q5_K:
      return {256, 176, 32};
    case QuantType::Q6_K:
      return {256, 210, 16};
    case QuantType::IQ4_NL:
      return {32, 18, 32};
    case QuantType::IQ4_XS:
      return {256, 136, 32};
    case QuantType::MXFP4:
      return {32, 17, 32};
    case QuantType::E4M3:
      return {128, 132, 128};
  }
  return {0, 0, 0};
}

// 6-bit scale and minimum of sub-block j of Q4_K and Q5_K (12 bytes for 8 + 8 values).
inline void six_bit_scale_min(const uint8_t* s, int j, uint8_t* scale, uint8_t* minimum) {
  if (j < 4) {
    *scale = s[j] & 63;
    *minimum = s[j + 4] & 63;
  } else {
    *scale = static_cast<uint8_t>((s[j + 4] & 15) | (s[j - 4] >> 6) << 4);
    *minimum = static_cast<uint8_t>((s[j + 4] >> 4) | (s[j] >> 6) << 4);
  }
}

// 6-bit signed scale of sub-block j (16 elements) of Q3_K.
inline int8_t q3k_scale(const uint8_t* s, int j) {
  const int low = j < 8 ? s[j] & 15 : s[j - 8] >> 4;
  return static_cast<int8_t>((low | ((s[8 + j % 4] >> (2 * (j / 4))) & 3) << 4) - 32);
}

// 6-bit scale of sub-block b of IQ4_XS, as it is stored: plus 32.
inline uint8_t iq4_xs_scale(const uint8_t* block, int b) {
  const int low = block[4 + b / 2] >> (b % 2 * 4) & 15;
  return static_cast<uint8_t>(low | (load_u16(block + 2) >> (2 * b) & 3) << 4);
}

// 2^(e - 128), exactly.
inline float half_power_of_two(uint8_t e) {
  return bits_to_float(e < 2 ? 0x00200000u << e : static_cast<uint32_t>(e - 1) << 23);
}

// The half that is 2^-8 times an E4M3 value.
inline uint16_t e4m3_half(uint8_t code) {
  return static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7);
}

// Unsigned codes of one file block, in element order (Q8_0 and IQ4: value + 128; MXFP4: twice the value, +
// 16).
template <QuantType T>
inline void decode_codes(const uint8_t* block, uint8_t* codes) {
  if constexpr (format_of(T).has_table()) {
    constexpr int kSubBlocks = block_shape(T).elements / 32;
    const uint8_t* q = block + block_shape(T).bytes - 16 * kSubBlocks;
    for (int b = 0; b < kSubBlocks; ++b, q += 16, codes += 32) {
      for (int i = 0; i < 16; ++i) {
        codes[i] = format_of(T).code(q[i] & 15);
        codes[i + 16] = format_of(T).code(q[i] >> 4);
      }
    }
  } else if constexpr (T == QuantType::Q4_0 || T == QuantType::Q4_1 || T == QuantType::Q5_0 ||
                       T == QuantType::Q5_1) {
    constexpr bool kHasMin = T == QuantType::Q4_1 || T == QuantType::Q5_1;
    constexpr bool kFiveBits = T == QuantType::Q5_0 || T == QuantType::Q5_1;
    const uint8_t* q = block + (kHasMin ? 4 : 2);
    const uint32_t high = kFiveBits ? load_u32(q) : 0;
    if (kFiveBits) q += 4;
    for (int i = 0; i < 16; ++i) {
      codes[i] = q[i] & 15;
      codes[i + 16] = q[i] >> 4;
    }
    if (kFiveBits) {
      for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(codes[i] | ((high >> i) & 1) << 4);
    }
  } else if constexpr (T == QuantType::Q8_0) {
    for (int i = 0; i < 32; ++i) codes[i] = block[2 + i] ^ 0x80;
  } else if constexpr (T == QuantType::Q4_K || T == QuantType::Q5_K) {
    const uint8_t* high = block + 16;
    const uint8_t* q = T == QuantType::Q5_K ? block + 48 : block + 16;
    for (int c = 0; c < 4; ++c) {
      for (int i = 0; i < 32; ++i) {
        codes[64 * c + i] = q[32 * c + i] & 15;
        codes[64 * c + 32 + i] = q[32 * c + i] >> 4;
      }
      if (T == QuantType::Q5_K) {
        for (int i = 0; i < 32; ++i) {
          codes[64 * c + i] = static_cast<uint8_t>(codes[64 * c + i] | ((high[i] >> (2 * c)) & 1) << 4);
          codes[64 * c + 32 + i] =
              static_cast<uint8_t>(codes[64 * c + 32 + i] | ((high[i] >> (2 * c + 1)) & 1) << 4);
        }
      }
    }
  } else if constexpr (T == QuantType::Q6_K) {
    for (int half = 0; half < 2; ++half) {
      const uint8_t* low = block + 64 * half;
      const uint8_t* high = block + 128 + 32 * half;
      uint8_t* out = codes + 128 * half;
      for (int i = 0; i < 32; ++i) {
        out[i] = static_cast<uint8_t>((low[i] & 15) | (high[i] & 3) << 4);
        out[i + 32] = static_cast<uint8_t>((low[i + 32] & 15) | ((high[i] >> 2) & 3) << 4);
        out[i + 64] = static_cast<uint8_t>((low[i] >> 4) | ((high[i] >> 4) & 3) << 4);
        out[i + 96] = static_cast<uint8_t>((low[i + 32] >> 4) | (high[i] >> 6) << 4);
      }
    }
  } else {
    static_assert(T == QuantType::Q2_K || T == QuantType::Q3_K, "not a block format");
    const uint8_t* q = T == QuantType::Q2_K ? block + 16 : block + 32;
    for (int half = 0; half < 2; ++half) {
      for (int f = 0; f < 4; ++f) {
        uint8_t* out = codes + 128 * half + 32 * f;
        for (int i = 0; i < 32; ++i) {
          out[i] = (q[32 * half + i] >> (2 * f)) & 3;
          if (T == QuantType::Q3_K)
            out[i] = static_cast<uint8_t>(out[i] | ((block[i] >> (4 * half + f)) & 1) << 2);
        }
      }
    }
  }
}

// Float scale and minimum of sub-block j of a file block (value = scale * (code - zero point) + minimum).
template <QuantType T>
inline void decode_scale(const uint8_t* block, int j, float* scale, float* minimum) {
  *minimum = 0.0f;
  if constexpr (T == QuantType::Q4_1 || T == QuantType::Q5_1) {
    *scale = half_to_float(load_u16(block));
    *minimum = half_to_float(load_u16(block + 2));
  } else if constexpr (T == QuantType::Q4_0 || T == QuantType::Q5_0 || T == QuantType::Q8_0 ||
                       T == QuantType::IQ4_NL) {
    *scale = half_to_float(load_u16(block));
  } else if constexpr (T == QuantType::IQ4_XS) {
    *scale = half_to_float(load_u16(block)) * static_cast<float>(iq4_xs_scale(block, j) - 32);
  } else if constexpr (T == QuantType::MXFP4) {
    *scale = half_power_of_two(block[0]);
  } else if constexpr (T == QuantType::Q4_K || T == QuantType::Q5_K) {
    uint8_t s, m;
    six_bit_scale_min(block + 4, j, &s, &m);
    *scale = half_to_float(load_u16(block)) * s;
    *minimum = -(half_to_float(load_u16(block + 2)) * m);
  } else if constexpr (T == QuantType::Q6_K) {
    *scale = half_to_float(load_u16(block + 208)) * static_cast<int8_t>(block[192 + j]);
  } else if constexpr (T == QuantType::Q3_K) {
    *scale = half_to_float(load_u16(block + 108)) * q3k_scale(block + 96, j);
  } else {
    static_assert(T == QuantType::Q2_K, "not a block format");
    *scale = half_to_float(load_u16(block + 80)) * (block[j] & 15);
    *minimum = -(half_to_float(load_u16(block + 82)) * (block[j] >> 4));
  }
}

}  // namespace tellin

// Storage types of weights and the packed layouts made from them at load. PODs and enums only: this header
// is included by every instruction-set unit (no inline functions with external linkage here).
#pragma once
#include <cstdint>

namespace tellin {

// GGUF's tensor type numbers; from 1000 on types that GGUF does not have.
enum class QuantType : int32_t {
  F32 = 0,
  F16 = 1,
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q2_K = 10,
  Q3_K = 11,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  IQ4_NL = 20,
  IQ4_XS = 23,
  BF16 = 30,
  E4M3 = 1000,  // per 128: f32 scale, then bytes: sign, 4 bits of exponent (bias 7), 3 of mantissa
  MXFP4 = 39,
};

}  // namespace tellin

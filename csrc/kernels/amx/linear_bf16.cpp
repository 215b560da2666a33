// AMX table "amx-bf16": what others multiply with 8-bit activations, as bfloat16 tiles; AVX-512 for the rest.
#include "linear_bf16.h"

namespace tellin {

const LinearKernels* avx512_linear_table();
const LinearKernels* amx_bf16_linear_table();

namespace {

void linear_any(const PackedMatrix& w, const QuantizedRows& x, int64_t m0, int64_t m1, int64_t g0, int64_t g1,
                float* out, int64_t ldo) {
  if (m0 >= m1 || g0 >= g1) return;
  switch (w.source) {
#define TELLIN_CASE(type) \
  case QuantType::type:   \
    return linear_bf16<QuantType::type>(w, x, m0, m1, g0, g1, out, ldo);
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

const LinearKernels* amx_bf16_linear_table() {
  static const LinearKernels table = [] {
    LinearKernels t = *avx512_linear_table();
    t.isa = "amx-bf16";
    t.quantized_row_bytes = bf16_row_bytes;
    t.quantize_row = quantize_bf16_row;
    t.quantize_part = quantize_bf16_part;
    t.pad_row = pad_bf16_row;
    t.linear_int8 = linear_any;
    return t;
  }();
  return &table;
}

}  // namespace tellin

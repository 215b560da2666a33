// AMX table of the linear kernels: tiles for many rows of 8-bit activations, AVX-512 for the rest.
#include "linear_tiles.h"

namespace tellin {

const LinearKernels* avx512_linear_table();
const LinearKernels* amx_linear_table();

namespace {

void linear_int8(const PackedMatrix& w, const QuantizedRows& x, int64_t m0, int64_t m1, int64_t g0,
                 int64_t g1, float* out, int64_t ldo) {
  if (m1 - m0 < kLeastTokens) return avx512_linear_table()->linear_int8(w, x, m0, m1, g0, g1, out, ldo);
  switch (w.source) {
#define TELLIN_CASE(type) \
  case QuantType::type:   \
    return linear_tiles<QuantType::type>(w, x, m0, m1, g0, g1, out, ldo);
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

const LinearKernels* amx_linear_table() {
  static const LinearKernels table = [] {
    LinearKernels t = *avx512_linear_table();
    t.isa = "amx";
    t.quantized_row_bytes = tiled_row_bytes;
    t.quantize_row = quantize_tiled_row;
    t.quantize_part = quantize_tiled_part;
    t.pad_row = pad_tiled_row;
    t.linear_int8 = linear_int8;
    return t;
  }();
  return &table;
}

}  // namespace tellin

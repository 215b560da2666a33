// AMX table of the linear kernels: tiles for many rows of 8-bit activations and scales per 32 features,
// AVX-512 for the rest.
#include "linear_tiles.h"

namespace tellin {

const LinearKernels* avx512_linear_table();
const LinearKernels* amx_linear_table();

namespace {

template <QuantType T>
void linear_of(const PackedMatrix& w, const QuantizedRows& x, int64_t m0, int64_t m1, int64_t g0, int64_t g1,
               float* out, int64_t ldo) {
  if (m1 - m0 < kLeastTokens<T>) return avx512_linear_table()->linear_int8(w, x, m0, m1, g0, g1, out, ldo);
  linear_tiles<T>(w, x, m0, m1, g0, g1, out, ldo);
}

void linear_int8(const PackedMatrix& w, const QuantizedRows& x, int64_t m0, int64_t m1, int64_t g0,
                 int64_t g1, float* out, int64_t ldo) {
  switch (w.source) {
#define TELLIN_CASE(type) \
  case QuantType::type:   \
    return linear_of<QuantType::type>(w, x, m0, m1, g0, g1, out, ldo);
    TELLIN_CASE(Q4_0)
    TELLIN_CASE(Q4_1)
    TELLIN_CASE(Q5_0)
    TELLIN_CASE(Q5_1)
    TELLIN_CASE(Q8_0)
    TELLIN_CASE(Q4_K)
    TELLIN_CASE(Q5_K)
    TELLIN_CASE(IQ4_NL)
    TELLIN_CASE(IQ4_XS)
    TELLIN_CASE(MXFP4)
#undef TELLIN_CASE
    default:
      // Scales per 16 features would leave half of each product's depth unused: with tiles no faster.
      return avx512_linear_table()->linear_int8(w, x, m0, m1, g0, g1, out, ldo);
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

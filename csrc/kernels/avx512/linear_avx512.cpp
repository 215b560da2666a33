// AVX-512 VNNI table of the linear kernels.
#include "quantize.h"
#include "tables.h"

namespace tellin {

const LinearKernels* avx512_linear_table();

namespace {

constexpr LinearKernels kTable = {"avx512",
                                  nullptr,
                                  nullptr,
                                  nullptr,
                                  nullptr,
                                  quantize_row,
                                  avx512_linear_int8,
                                  avx512_linear_int16,
                                  avx512_linear_f32,
                                  nullptr,
                                  quantize_part,
                                  nullptr};

}  // namespace

const LinearKernels* avx512_linear_table() {
  return &kTable;
}

}  // namespace tellin

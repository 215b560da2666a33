#if defined(__GNUC__) && !defined(__clang__)
// GCC's own AVX-512 header starts from deliberately undefined registers (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include "vector/simd_avx512.h"
// The vector type must be known before what is written against it.
#include "vector/recurrent_ops.h"

namespace tellin {

const RecurrentKernels* recurrent_table_avx512() {
  static const RecurrentKernels table{"avx512", short_conv, gated_delta, selective_scan};
  return &table;
}

}  // namespace tellin

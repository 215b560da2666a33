#if defined(__GNUC__) && !defined(__clang__)
// GCC's own AVX-512 header starts from deliberately undefined registers (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include "vector/simd_avx512.h"
// The vector type must be known before what is written against it.
#include "vector/row_ops.h"

namespace tellin {

const VectorKernels* vector_table_avx512() {
  static const VectorKernels table{"avx512", rms_norm,   layer_norm, add,  scale,
                                   softcap,  activation, act_mul,    rope, add_scaled};
  return &table;
}

}  // namespace tellin

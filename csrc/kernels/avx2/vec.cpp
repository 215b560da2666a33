#include "vector/simd_avx2.h"
// The vector type must be known before what is written against it.
#include "vector/row_ops.h"

namespace tellin {

const VectorKernels* vector_table_avx2() {
  static const VectorKernels table{"avx2",  rms_norm,   layer_norm, add,  scale,
                                   softcap, activation, act_mul,    rope, add_scaled};
  return &table;
}

}  // namespace tellin

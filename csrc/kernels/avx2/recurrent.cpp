#include "vector/simd_avx2.h"
// The vector type must be known before what is written against it.
#include "vector/recurrent_ops.h"

namespace tellin {

const RecurrentKernels* recurrent_table_avx2() {
  static const RecurrentKernels table{"avx2", short_conv, gated_delta, selective_scan};
  return &table;
}

}  // namespace tellin

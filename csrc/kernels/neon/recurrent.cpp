#include "vector/simd_neon.h"
// The vector type must be known before what is written against it.
#include "vector/recurrent_ops.h"

namespace tellin {

const RecurrentKernels* recurrent_table_neon() {
  static const RecurrentKernels table{"neon", short_conv, gated_delta, selective_scan};
  return &table;
}

}  // namespace tellin

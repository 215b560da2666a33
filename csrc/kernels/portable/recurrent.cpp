#include "vector/simd_portable.h"
// The vector type must be known before what is written against it.
#include "vector/recurrent_ops.h"

namespace tellin {

const RecurrentKernels* recurrent_table_portable() {
  static const RecurrentKernels table{"portable", short_conv, gated_delta, selective_scan};
  return &table;
}

}  // namespace tellin

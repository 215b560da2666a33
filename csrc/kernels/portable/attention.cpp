#include "vector/simd_portable.h"
// The vector type must be known before what is written against it.
#include "vector/attention_ops.h"

namespace tellin {

const AttentionKernels* attention_table_portable() {
  static const AttentionKernels table{"portable", kv_store, encode_queries, kv_expand, attend, fold, finish};
  return &table;
}

}  // namespace tellin

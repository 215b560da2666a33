#include "vector/simd_avx2.h"
// The vector type must be known before what is written against it.
#include "vector/attention_ops.h"

namespace tellin {

const AttentionKernels* attention_table_avx2() {
  static const AttentionKernels table{"avx2", kv_store, encode_queries, kv_expand, attend, fold, finish};
  return &table;
}

}  // namespace tellin

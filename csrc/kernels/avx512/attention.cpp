#if defined(__GNUC__) && !defined(__clang__)
// GCC's own AVX-512 header starts from deliberately undefined registers (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include "vector/simd_avx512.h"
// The vector type must be known before what is written against it.
#include "vector/attention_ops.h"

namespace tellin {

const AttentionKernels* attention_table_avx512() {
  static const AttentionKernels table{"avx512", kv_store, encode_queries, kv_expand, attend, fold, finish};
  return &table;
}

}  // namespace tellin

// Names of row and attention kernel variants to their tables. Whether this machine can run one is decided by
// linear_kernels().
#include <cstring>

#include "tellin/vector_kernels.h"

namespace tellin {

#define TELLIN_DECLARE(isa)                        \
  const VectorKernels* vector_table_##isa();       \
  const AttentionKernels* attention_table_##isa(); \
  const RecurrentKernels* recurrent_table_##isa();
TELLIN_DECLARE(portable)
TELLIN_DECLARE(avx2)
TELLIN_DECLARE(avx512)
TELLIN_DECLARE(neon)
#undef TELLIN_DECLARE
const AttentionKernels* attention_table_avxvnni();  // rows and recurrences are AVX2's

namespace {

struct Variant {
  const char* isa;
  const VectorKernels* (*vector)();
  const AttentionKernels* (*attention)();
  const RecurrentKernels* (*recurrent)();
};

constexpr Variant kVariants[] = {
    {"portable", vector_table_portable, attention_table_portable, recurrent_table_portable},
#ifdef TELLIN_HAVE_AVX2
    {"avx2", vector_table_avx2, attention_table_avx2, recurrent_table_avx2},
#endif
#ifdef TELLIN_HAVE_AVXVNNI
    {"avxvnni", vector_table_avx2, attention_table_avxvnni, recurrent_table_avx2},
#endif
#ifdef TELLIN_HAVE_AVX512
    {"avx512", vector_table_avx512, attention_table_avx512, recurrent_table_avx512},
#endif
#ifdef TELLIN_HAVE_AMX  // differs in the linear kernels only
    {"amx", vector_table_avx512, attention_table_avx512, recurrent_table_avx512},
    {"amx-bf16", vector_table_avx512, attention_table_avx512, recurrent_table_avx512},
#endif
#ifdef TELLIN_HAVE_NEON
    {"neon", vector_table_neon, attention_table_neon, recurrent_table_neon},
#endif
};

const Variant* find(const char* isa) {
  for (const Variant& variant : kVariants) {
    if (std::strcmp(variant.isa, isa) == 0) return &variant;
  }
  return nullptr;
}

}  // namespace

const VectorKernels* vector_kernels(const char* isa) {
  const Variant* variant = find(isa);
  return variant == nullptr ? nullptr : variant->vector();
}

const AttentionKernels* attention_kernels(const char* isa) {
  const Variant* variant = find(isa);
  return variant == nullptr ? nullptr : variant->attention();
}

const RecurrentKernels* recurrent_kernels(const char* isa) {
  const Variant* variant = find(isa);
  return variant == nullptr ? nullptr : variant->recurrent();
}

}  // namespace tellin

// Names of row and attention kernel variants to their tables. Whether this machine can run one is decided by
// linear_kernels().
#include <cstring>

#include "tellin/vector_kernels.h"

namespace tellin {

const VectorKernels* vector_table_portable();
const AttentionKernels* attention_table_portable();
#ifdef TELLIN_HAVE_AVX2
const VectorKernels* vector_table_avx2() __attribute__((weak));
const AttentionKernels* attention_table_avx2() __attribute__((weak));
#endif
#ifdef TELLIN_HAVE_AVX512
const VectorKernels* vector_table_avx512();
const AttentionKernels* attention_table_avx512();
#endif

namespace {

// 64-bit ARM's baseline has NEON: the portable row kernels are compiled for it.
bool is_portable(const char* isa) {
  return std::strcmp(isa, "portable") == 0 || std::strcmp(isa, "neon") == 0;
}

// The AVX-VNNI variant differs from AVX2 in the linear kernels only.
[[maybe_unused]] bool is_avx2(const char* isa) {
  return std::strcmp(isa, "avx2") == 0 || std::strcmp(isa, "avxvnni") == 0;
}

}  // namespace

const VectorKernels* vector_kernels(const char* isa) {
  if (is_portable(isa)) return vector_table_portable();
#ifdef TELLIN_HAVE_AVX2
  if (is_avx2(isa)) return vector_table_avx2 ? vector_table_avx2() : nullptr;
#endif
#ifdef TELLIN_HAVE_AVX512
  if (std::strcmp(isa, "avx512") == 0) return vector_table_avx512();
#endif
  return nullptr;
}

const AttentionKernels* attention_kernels(const char* isa) {
  if (is_portable(isa)) return attention_table_portable();
#ifdef TELLIN_HAVE_AVX2
  if (is_avx2(isa)) return attention_table_avx2 ? attention_table_avx2() : nullptr;
#endif
#ifdef TELLIN_HAVE_AVX512
  if (std::strcmp(isa, "avx512") == 0) return attention_table_avx512();
#endif
  return nullptr;
}

}  // namespace tellin

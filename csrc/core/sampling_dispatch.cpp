// Choice of the sampler's vector loops by what the processor and the operating system offer.
#include <cstring>

#include "linear_core.h"
#include "tellin/sampling_kernels.h"

namespace tellin {

extern const SamplingKernels kSamplingPortable;
#ifdef TELLIN_HAVE_AVX2
extern const SamplingKernels kSamplingAvx2;
#endif
#ifdef TELLIN_HAVE_AVX512
extern const SamplingKernels kSamplingAvx512;
#endif
#ifdef TELLIN_HAVE_NEON
extern const SamplingKernels kSamplingNeon;
#endif

namespace {

bool can_run(const SamplingKernels& table) {
  [[maybe_unused]] const CpuFeatures features = cpu_features();
  if (std::strcmp(table.isa, "avx512") == 0) return features.avx512;
  if (std::strcmp(table.isa, "avx2") == 0) return features.avx2;
  if (std::strcmp(table.isa, "neon") == 0) return features.neon;
  return true;
}

}  // namespace

const SamplingKernels* sampling_kernels(const char* isa) {
  // AVX-VNNI differs from AVX2, and AMX from AVX-512, in the linear kernels only.
  if (isa != nullptr && std::strcmp(isa, "avxvnni") == 0) isa = "avx2";
  if (isa != nullptr && std::strncmp(isa, "amx", 3) == 0) isa = "avx512";
  // Best first.
  static const SamplingKernels* const kTables[] = {
#ifdef TELLIN_HAVE_AVX512
      &kSamplingAvx512,
#endif
#ifdef TELLIN_HAVE_AVX2
      &kSamplingAvx2,
#endif
#ifdef TELLIN_HAVE_NEON
      &kSamplingNeon,
#endif
      &kSamplingPortable,
  };
  for (const SamplingKernels* table : kTables) {
    if ((isa == nullptr || std::strcmp(isa, table->isa) == 0) && can_run(*table)) return table;
  }
  return nullptr;
}

}  // namespace tellin

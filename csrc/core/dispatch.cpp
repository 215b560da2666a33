// Choice of the linear kernels' variant: the best one this machine runs, or the one asked for by name.
#include <cstring>

#include "linear_core.h"

namespace tellin {
namespace {

struct Variants {
  LinearKernels tables[7];  // best first, then those that are used only if they are asked for
  int count = 0;            // of the former
  int total = 0;

  void add(const LinearKernels* isa_table) {
    LinearKernels table = *isa_table;
    table.packed_group_bytes = packed_group_bytes;
    table.pack_groups = pack_groups;
    table.layout_id = layout_id;
    if (table.quantized_row_bytes == nullptr) table.quantized_row_bytes = quantized_row_bytes;
    table.dequantize_row = dequantize_row;
    if (table.pad_row == nullptr) table.pad_row = pad_row;
    tables[total++] = table;
  }

  Variants() {
    [[maybe_unused]] const CpuFeatures features = cpu_features();
#ifdef TELLIN_HAVE_AMX
    if (features.amx) add(amx_linear_table());
#endif
#ifdef TELLIN_HAVE_AVX512
    if (features.avx512) add(avx512_linear_table());
#endif
#ifdef TELLIN_HAVE_AVXVNNI
    if (features.avxvnni) add(avxvnni_linear_table());
#endif
#ifdef TELLIN_HAVE_AVX2
    if (features.avx2) add(avx2_linear_table());
#endif
#ifdef TELLIN_HAVE_NEON
    if (features.neon) add(neon_linear_table());
#endif
    add(portable_linear_table());
    count = total;
#ifdef TELLIN_HAVE_AMX
    if (features.amx_bf16) add(amx_bf16_linear_table());
#endif
  }
};

const Variants& variants() {
  static const Variants all;
  return all;
}

}  // namespace

const LinearKernels* linear_kernels(const char* isa) {
  const Variants& all = variants();
  for (int i = 0; i < (isa == nullptr ? all.count : all.total); ++i) {
    const LinearKernels& table = all.tables[i];
    if (isa != nullptr && std::strcmp(table.isa, isa) != 0) continue;
    if (std::strncmp(table.isa, "amx", 3) != 0 || may_use_tiles()) return &table;
  }
  return nullptr;
}

int num_linear_variants() {
  return variants().count;
}

const LinearKernels* linear_variant(int index) {
  return &variants().tables[index];
}

}  // namespace tellin

// What the instruction-set tables share: packing and row dequantisation, compiled at the ABI floor.
#pragma once
#include "tellin/linear.h"

namespace tellin {

size_t packed_group_bytes(QuantType type, int64_t k, ActPrecision precision);
void pack_groups(QuantType type, ActPrecision precision, const uint8_t* src, int64_t n, int64_t k, int64_t g0,
                 int64_t g1, uint8_t* dst);
int32_t layout_id(QuantType type, ActPrecision precision);
size_t quantized_row_bytes(int64_t k, ActPrecision precision);
void pad_row(ActPrecision precision, int64_t k, int64_t row, const QuantizedRows& out);
void dequantize_row(QuantType type, const uint8_t* src, int64_t row, int64_t k, float* out);

// Tables of the instruction sets compiled in: only the fields that depend on one are set (see dispatch.cpp).
const LinearKernels* portable_linear_table();
const LinearKernels* avx2_linear_table();
const LinearKernels* avxvnni_linear_table();
const LinearKernels* avx512_linear_table();
const LinearKernels* amx_linear_table();
const LinearKernels* amx_bf16_linear_table();
const LinearKernels* neon_linear_table();

// What this processor has and its operating system saves.
struct CpuFeatures {
  bool avx2;      // AVX2, FMA, F16C, BMI2
  bool avxvnni;   // avx2 and AVX-VNNI
  bool avx512;    // F, BW, VL, DQ, VNNI
  bool amx;       // avx512 and tiles of 8-bit integers
  bool amx_bf16;  // amx and tiles of bfloat16
  bool neon;      // Advanced SIMD with dot products
};
const CpuFeatures& cpu_features();

// Asks Linux for the use of tiles by all threads of this process, once, when they are to be used: it cannot
// be taken back, and makes threads' stacks for signals larger. Refused, for one, where such a stack has no
// room.
bool may_use_tiles();

}  // namespace tellin

// AVX-512: what the table of linear kernels is made of. Each is a file of its own, for they take a compiler
// long.
#pragma once
#include "tellin/linear.h"

namespace tellin {

void avx512_linear_int8(const PackedMatrix& w, const QuantizedRows& x, int64_t m0, int64_t m1, int64_t g0,
                        int64_t g1, float* out, int64_t ldo);
void avx512_linear_int16(const PackedMatrix& w, const QuantizedRows& x, int64_t m0, int64_t m1, int64_t g0,
                         int64_t g1, float* out, int64_t ldo);
void avx512_linear_f32(const PackedMatrix& w, const float* x, int64_t ldx, int64_t m0, int64_t m1, int64_t g0,
                       int64_t g1, float* out, int64_t ldo);

}  // namespace tellin

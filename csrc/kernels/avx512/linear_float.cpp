// AVX-512: packed matrices x float activations, of every format.
#include "linear_f32.h"
#include "tables.h"

namespace tellin {

void avx512_linear_f32(const PackedMatrix& w, const float* x, int64_t ldx, int64_t m0, int64_t m1, int64_t g0,
                       int64_t g1, float* out, int64_t ldo) {
  switch (w.source) {
#define TELLIN_CASE(type) \
  case QuantType::type:   \
    return linear_f32<QuantType::type>(w, x, ldx, m0, m1, g0, g1, out, ldo);
    TELLIN_CASE(F32)
    TELLIN_CASE(F16)
    TELLIN_CASE(BF16)
    TELLIN_CASE(E4M3)
    TELLIN_CASE(Q4_0)
    TELLIN_CASE(Q4_1)
    TELLIN_CASE(Q5_0)
    TELLIN_CASE(Q5_1)
    TELLIN_CASE(Q8_0)
    TELLIN_CASE(Q2_K)
    TELLIN_CASE(Q3_K)
    TELLIN_CASE(Q4_K)
    TELLIN_CASE(Q5_K)
    TELLIN_CASE(Q6_K)
    TELLIN_CASE(IQ4_NL)
    TELLIN_CASE(IQ4_XS)
    TELLIN_CASE(MXFP4)
#undef TELLIN_CASE
  }
}

}  // namespace tellin

// AVX-512 VNNI: packed codes x 15-bit activations, of every format.
#include "linear_int.h"
#include "tables.h"

namespace tellin {

void avx512_linear_int16(const PackedMatrix& w, const QuantizedRows& x, int64_t m0, int64_t m1, int64_t g0,
                         int64_t g1, float* out, int64_t ldo) {
  linear_int_any<Act16>(w, x, m0, m1, g0, g1, out, ldo);
}

}  // namespace tellin

// AMX: rows of activations as bfloat16, the upper halves of float32 rounded to nearest even, one after the
// other; rows are an odd number of cache lines apart, so that those of a tile spread over all sets of a
// cache.
#pragma once
#include "../avx512/quantize.h"

namespace tellin {
namespace {

constexpr int kBf16BlockBytes = 2 * kBlockK;

size_t bf16_row_bytes(int64_t k, ActPrecision precision) {
  if (precision == ActPrecision::kInt16) return act_row_bytes(k, true);
  return static_cast<size_t>(((k + 255) / 256 * 8 * kBf16BlockBytes / 64 | 1) * 64);
}

// Upper halves of 16 floats, rounded: 32-bit lanes whose lower halves are the result.
TELLIN_INLINE __m512i rounded_halves(__m512i bits) {
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
}

// Block `block` of a row. As in all kernels (LinearKernels::quantize_row), a value that is not finite, or
// above 2^100, makes all outputs of the row NaN: so does a block of NaN.
TELLIN_INLINE void write_bf16_block(const float* x, uint8_t* row, int64_t block) {
  const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
  const __m512 most = _mm512_set1_ps(kAct8LargestMagnitude);
  const __mmask16 wrong = _mm512_cmp_ps_mask(_mm512_abs_ps(a), most, _CMP_NLE_UQ) |
                          _mm512_cmp_ps_mask(_mm512_abs_ps(b), most, _CMP_NLE_UQ);
  auto* const out = reinterpret_cast<__m256i*>(row + block * kBf16BlockBytes);
  __m256i low = _mm512_cvtepi32_epi16(rounded_halves(_mm512_castps_si512(a)));
  __m256i high = _mm512_cvtepi32_epi16(rounded_halves(_mm512_castps_si512(b)));
  if (__builtin_expect(wrong != 0, 0)) low = high = _mm256_set1_epi16(0x7fc0);
  _mm256_store_si256(out, low);
  _mm256_store_si256(out + 1, high);
}

void quantize_bf16_part(ActPrecision precision, const float* x, int64_t ldx, int64_t m0, int64_t m1,
                        int64_t begin, int64_t end, const QuantizedRows& out) {
  if (precision == ActPrecision::kInt16) return quantize_part(precision, x, ldx, m0, m1, begin, end, out);
  for (int64_t m = m0; m < m1; ++m) {
    uint8_t* const row = out.data + m * out.row_bytes;
    for (int64_t k = begin; k < end; k += kBlockK) write_bf16_block(x + m * ldx + k, row, k / kBlockK);
  }
}

void pad_bf16_row(ActPrecision precision, int64_t k, int64_t row, const QuantizedRows& out) {
  uint8_t* const data = out.data + row * out.row_bytes;
  if (precision == ActPrecision::kInt16) {
    for (int64_t b = k / kBlockK; b < (k + 255) / 256 * 8; ++b) {
      store_zero_record(reinterpret_cast<Act16*>(data) + b);
    }
    return;
  }
  const int64_t end = k / kBlockK * kBf16BlockBytes;
  __builtin_memset(data + end, 0, static_cast<size_t>(out.row_bytes - end));
}

void quantize_bf16_row(ActPrecision precision, const float* x, int64_t k, int64_t row,
                       const QuantizedRows& out) {
  if (precision == ActPrecision::kInt16) return quantize_row(precision, x, k, row, out);
  const int64_t full = k / kBlockK;
  pad_bf16_row(precision, full * kBlockK, row, out);
  uint8_t* const data = out.data + row * out.row_bytes;
  for (int64_t b = 0; b < full; ++b) write_bf16_block(x + b * kBlockK, data, b);
  if (full * kBlockK == k) return;
  float last[kBlockK] = {};
  __builtin_memcpy(last, x + full * kBlockK, static_cast<size_t>(k % kBlockK) * sizeof(float));
  write_bf16_block(last, data, full);
}

}  // namespace
}  // namespace tellin

// AVX-512: quads of codes out of the packed planes, and block scales out of the headers.
#pragma once
// GCC 12 takes the intrinsics' deliberately undefined pass-through operands for uninitialised variables.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "tellin/packed_format.h"

#define TELLIN_INLINE inline __attribute__((always_inline))

namespace tellin {
namespace {

TELLIN_INLINE __m512i load_vector(const uint8_t* p) {
  return _mm512_loadu_si512(p);
}

TELLIN_INLINE __m256i load_half(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

// Moves bit `from` of every byte to bit `to` (neighbouring bits spill over: mask afterwards).
template <int from, int to>
TELLIN_INLINE __m512i move_bits(__m512i v) {
  if constexpr (from < to) {
    return _mm512_slli_epi16(v, to - from);
  } else if constexpr (from > to) {
    return _mm512_srli_epi16(v, from - to);
  } else {
    return v;
  }
}

// base | (v & mask)
TELLIN_INLINE __m512i or_masked(__m512i base, __m512i v, __m512i mask) {
  return _mm512_ternarylogic_epi32(base, v, mask, 0xf8);
}

// A format's 16 codes, in each 128-bit lane.
template <QuantType T>
TELLIN_INLINE __m512i code_table() {
  const auto word = [](int i) {
    return static_cast<int>(format_of(T).code(i) | format_of(T).code(i + 1) << 8 |
                            format_of(T).code(i + 2) << 16 |
                            static_cast<uint32_t>(format_of(T).code(i + 3)) << 24);
  };
  return _mm512_set4_epi32(word(12), word(8), word(4), word(0));
}

// Unsigned codes of quad kQuad (rows x 4 features) of a packed block.
template <QuantType T, int kQuad>
TELLIN_INLINE __m512i load_quad(const uint8_t* block) {
  constexpr int kBits = format_of(T).bits;
  if constexpr (kBits == 8) {
    return load_vector(block + kVectorBytes * kQuad);
  } else if constexpr (kBits <= 3) {
    const __m512i pairs = load_vector(block + kVectorBytes * (kQuad / 4));
    const __m512i low = _mm512_and_si512(move_bits<2 * (kQuad % 4), 0>(pairs), _mm512_set1_epi8(3));
    if constexpr (kBits == 2) return low;
    const __m512i high = move_bits<kQuad, 2>(load_vector(block + kVectorBytes * 2));
    return or_masked(low, high, _mm512_set1_epi8(4));
  } else {
    const __m512i nibbles = load_vector(block + kVectorBytes * (kQuad % 4));
    const __m512i low = _mm512_and_si512(move_bits<kQuad / 4 * 4, 0>(nibbles), _mm512_set1_epi8(15));
    if constexpr (format_of(T).has_table()) return _mm512_shuffle_epi8(code_table<T>(), low);
    if constexpr (kBits == 4) return low;
    if constexpr (kBits == 5) {
      const __m512i high = move_bits<kQuad, 4>(load_vector(block + kVectorBytes * 4));
      return or_masked(low, high, _mm512_set1_epi8(16));
    }
    const __m512i high = move_bits<2 * (kQuad % 4), 4>(load_vector(block + kVectorBytes * (4 + kQuad / 4)));
    return or_masked(low, high, _mm512_set1_epi8(48));
  }
}

// Whether codes have a 4-bit plane, and are not looked up.
template <QuantType T>
constexpr bool has_nibbles = (format_of(T).bits == 4 || format_of(T).bits == 5) && !format_of(T).has_table();

// Quads kQuad and kQuad + 4 (kQuad < 4) of a packed block of such codes, of one load per plane.
template <QuantType T, int kQuad>
TELLIN_INLINE void load_quad_pair(const uint8_t* block, __m512i& low, __m512i& high) {
  const __m512i m15 = _mm512_set1_epi8(15);
  __m512i nibbles = load_vector(block + kVectorBytes * kQuad);
  asm("" : "+v"(nibbles));  // or it would be loaded where it is used, twice
  low = _mm512_and_si512(nibbles, m15);
  high = _mm512_and_si512(_mm512_srli_epi16(nibbles, 4), m15);
  if constexpr (format_of(T).bits == 5) {
    const __m512i m16 = _mm512_set1_epi8(16);
    __m512i bits = load_vector(block + kVectorBytes * 4);
    asm("" : "+v"(bits));
    low = or_masked(low, move_bits<kQuad, 4>(bits), m16);
    high = or_masked(high, move_bits<kQuad + 4, 4>(bits), m16);
  }
}

TELLIN_INLINE __m512 half_to_float16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

TELLIN_INLINE __m512 broadcast_float(const float* p) {
  return _mm512_set1_ps(*p);
}

TELLIN_INLINE __m512 bytes_to_float(__m128i bytes) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
}

// Scales and minima of the 16 rows for every sum of a super-block: [blocks][1 or 2 (per 16)][16], `step`
// floats apart.
template <QuantType T>
TELLIN_INLINE void expand_scales(const uint8_t* super_block, int step, float* scale, float* minimum) {
  constexpr PackedFormat kFormat = format_of(T);
  if constexpr (kFormat.scales == ScaleKind::kHalf32) {
    const auto* h = reinterpret_cast<const uint16_t*>(super_block);
    for (int b = 0; b < 2; ++b) {
      _mm512_store_ps(scale + b * step, half_to_float16(h + kRows * b));
      if (kFormat.has_min) _mm512_store_ps(minimum + b * step, half_to_float16(h + kRows * (2 + b)));
    }
  } else if constexpr (kFormat.scales == ScaleKind::kSixBit32) {
    const auto* h = reinterpret_cast<const SixBitHeader*>(super_block);
    const __m512 d = half_to_float16(h->d);
    const __m512 dmin = _mm512_sub_ps(_mm512_setzero_ps(), half_to_float16(h->dmin));
    const __m512i high = load_vector(h->high[0]), m15 = _mm512_set1_epi8(15), m48 = _mm512_set1_epi8(48);
    alignas(64) uint8_t s[8][kRows], m[8][kRows];
    const __m512i low0 = load_vector(h->low[0]), low1 = load_vector(h->low[4]);
    const auto scales_of = [&](__m512i low, __m512i bits) {
      return or_masked(_mm512_and_si512(low, m15), bits, m48);
    };
    _mm512_store_si512(s[0], scales_of(low0, _mm512_slli_epi16(high, 4)));
    _mm512_store_si512(m[0], scales_of(_mm512_srli_epi16(low0, 4), _mm512_slli_epi16(high, 2)));
    _mm512_store_si512(s[4], scales_of(low1, high));
    _mm512_store_si512(m[4], scales_of(_mm512_srli_epi16(low1, 4), _mm512_srli_epi16(high, 2)));
    for (int b = 0; b < 8; ++b) {
      const __m128i sb = _mm_load_si128(reinterpret_cast<const __m128i*>(s[b]));
      const __m128i mb = _mm_load_si128(reinterpret_cast<const __m128i*>(m[b]));
      _mm512_store_ps(scale + b * step, _mm512_mul_ps(d, bytes_to_float(sb)));
      _mm512_store_ps(minimum + b * step, _mm512_mul_ps(dmin, bytes_to_float(mb)));
    }
  } else if constexpr (kFormat.scales == ScaleKind::kSignedSixBit32) {
    const auto* h = reinterpret_cast<const SignedSixBitHeader*>(super_block);
    const __m512 d = half_to_float16(h->d);
    const __m512i low = load_vector(h->low[0]);
    const __m512i high = _mm512_broadcast_i64x4(load_half(h->high[0]));
    const __m512i m15 = _mm512_set1_epi8(15), m48 = _mm512_set1_epi8(48), offset = _mm512_set1_epi8(32);
    alignas(64) int8_t s[8][kRows];
    // Upper bits of blocks 0 and 1 (then 4 and 5) beside those of 2 and 3 (6 and 7).
    const auto high_bits = [&](__m512i first, __m512i second) {
      return _mm512_mask_mov_epi64(first, 0xf0, second);
    };
    const auto scales_of = [&](__m512i nibbles, __m512i bits) {
      return _mm512_sub_epi8(or_masked(_mm512_and_si512(nibbles, m15), bits, m48), offset);
    };
    _mm512_store_si512(s[0],
                       scales_of(low, high_bits(_mm512_slli_epi16(high, 4), _mm512_slli_epi16(high, 2))));
    _mm512_store_si512(s[4],
                       scales_of(_mm512_srli_epi16(low, 4), high_bits(high, _mm512_srli_epi16(high, 2))));
    for (int b = 0; b < 8; ++b) {
      const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(s[b]));
      _mm512_store_ps(scale + b * step, _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))));
    }
  } else if constexpr (kFormat.scales == ScaleKind::kExponent32) {
    for (int b = 0; b < 4; ++b) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(super_block + kRows * b));
      const __m512i e = _mm512_cvtepu8_epi32(bytes);
      // 2^(e - 128): from e = 2 on a normal number, of which e - 1 is the exponent's field.
      const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
      const __m512i subnormal = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
      const __mmask16 is_subnormal = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
      _mm512_store_si512(scale + b * step, _mm512_mask_mov_epi32(normal, is_subnormal, subnormal));
    }
  } else if constexpr (kFormat.scales == ScaleKind::kInt8Per16) {
    const auto* h = reinterpret_cast<const Int8Per16Header*>(super_block);
    const __m512 d = _mm512_loadu_ps(h->d);
    for (int j = 0; j < 16; ++j) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(h->scale[j]));
      _mm512_store_ps(scale + j * step, _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))));
    }
  } else {
    const auto* h = reinterpret_cast<const Nibble16Header*>(super_block);
    const __m512 d = half_to_float16(h->d);
    const __m512 dmin = _mm512_sub_ps(_mm512_setzero_ps(), half_to_float16(h->dmin));
    const __m128i m15 = _mm_set1_epi8(15);
    for (int j = 0; j < 16; ++j) {
      const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(h->scale_min[j]));
      const __m128i m = _mm_and_si128(_mm_srli_epi16(both, 4), m15);
      _mm512_store_ps(scale + j * step, _mm512_mul_ps(d, bytes_to_float(_mm_and_si128(both, m15))));
      _mm512_store_ps(minimum + j * step, _mm512_mul_ps(dmin, bytes_to_float(m)));
    }
  }
}

}  // namespace
}  // namespace tellin

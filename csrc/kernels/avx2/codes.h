// AVX2: quads of codes out of the packed planes, and block scales out of the headers.
//
// A 64-byte packed vector is two registers: half 0 is rows [0, 8), half 1 rows [8, 16).
#pragma once
#include <immintrin.h>

#include "tellin/packed_format.h"

#define TELLIN_INLINE inline __attribute__((always_inline))

namespace tellin {
namespace {

constexpr int kHalfBytes = 32;
constexpr int kHalfRows = 8;

TELLIN_INLINE __m256i load_half(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

// A load: compilers would make a constant anew from a general register, which takes two operations.
TELLIN_INLINE __m256i broadcast_word(const void* p) {
  __m256i v;
  asm("vpbroadcastd %1, %0" : "=x"(v) : "m"(*static_cast<const int32_t*>(p)));
  return v;
}

// Moves bit `from` of every byte to bit `to` (neighbouring bits spill over: mask afterwards).
template <int from, int to>
TELLIN_INLINE __m256i move_bits(__m256i v) {
  if constexpr (from < to) {
    return _mm256_slli_epi16(v, to - from);
  } else if constexpr (from > to) {
    return _mm256_srli_epi16(v, from - to);
  } else {
    return v;
  }
}

TELLIN_INLINE __m256i or_masked(__m256i base, __m256i v, int mask) {
  return _mm256_or_si256(base, _mm256_and_si256(v, _mm256_set1_epi8(static_cast<char>(mask))));
}

// Which bits of a format's codes are looked up.
enum class CodePart { kWhole, kLowNibble, kHighNibble };

// A format's 16 codes, in each 128-bit lane.
template <QuantType T, CodePart kPart>
TELLIN_INLINE __m256i code_table() {
  const auto code = [](int i) {
    const int whole = format_of(T).code(i);
    return static_cast<char>(kPart == CodePart::kWhole       ? whole
                             : kPart == CodePart::kLowNibble ? whole & 15
                                                             : whole >> 4);
  };
  return _mm256_broadcastsi128_si256(_mm_setr_epi8(code(0), code(1), code(2), code(3), code(4), code(5),
                                                   code(6), code(7), code(8), code(9), code(10), code(11),
                                                   code(12), code(13), code(14), code(15)));
}

// Unsigned codes of quad kQuad (8 rows x 4 features) of a packed block; `block` points to the half's first
// byte. kPart: of formats with a code table.
template <QuantType T, int kQuad, CodePart kPart = CodePart::kWhole>
TELLIN_INLINE __m256i load_quad(const uint8_t* block) {
  constexpr int kBits = format_of(T).bits;
  if constexpr (kBits == 8) {
    return load_half(block + kVectorBytes * kQuad);
  } else if constexpr (kBits <= 3) {
    const __m256i pairs = load_half(block + kVectorBytes * (kQuad / 4));
    const __m256i low = _mm256_and_si256(move_bits<2 * (kQuad % 4), 0>(pairs), _mm256_set1_epi8(3));
    if constexpr (kBits == 2) return low;
    return or_masked(low, move_bits<kQuad, 2>(load_half(block + kVectorBytes * 2)), 4);
  } else {
    const __m256i nibbles = load_half(block + kVectorBytes * (kQuad % 4));
    const __m256i low = _mm256_and_si256(move_bits<kQuad / 4 * 4, 0>(nibbles), _mm256_set1_epi8(15));
    if constexpr (format_of(T).has_table()) return _mm256_shuffle_epi8(code_table<T, kPart>(), low);
    if constexpr (kBits == 4) return low;
    if constexpr (kBits == 5)
      return or_masked(low, move_bits<kQuad, 4>(load_half(block + kVectorBytes * 4)), 16);
    return or_masked(low, move_bits<2 * (kQuad % 4), 4>(load_half(block + kVectorBytes * (4 + kQuad / 4))),
                     48);
  }
}

TELLIN_INLINE __m256 half_to_float8(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

TELLIN_INLINE __m256 bytes_to_float8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

TELLIN_INLINE __m256 signed_bytes_to_float8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// Writes the first `rows` (at most 16) of a group's results.
TELLIN_INLINE void store_rows(const float* acc, int64_t rows, float* out) {
  if (rows >= kRows) {
    _mm256_storeu_ps(out, _mm256_load_ps(acc));
    _mm256_storeu_ps(out + kHalfRows, _mm256_load_ps(acc + kHalfRows));
  } else {
    for (int64_t r = 0; r < rows; ++r) out[r] = acc[r];
  }
}

// Scales and minima of the eight blocks of a super-block as bytes.
TELLIN_INLINE void unpack_six_bits(const SixBitHeader& h, uint8_t (&scale)[8][kRows],
                                   uint8_t (&minimum)[8][kRows]) {
  const auto store = [](uint8_t* to, __m256i x) { _mm256_store_si256(reinterpret_cast<__m256i*>(to), x); };
  const auto nibble = [](__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); };
  for (int v = 0; v < 2; ++v) {  // two blocks of 16 rows in a register
    const __m256i high = load_half(h.high[2 * v]);
    const __m256i low0 = load_half(h.low[2 * v]), low1 = load_half(h.low[4 + 2 * v]);
    store(scale[2 * v], or_masked(nibble(low0), _mm256_slli_epi16(high, 4), 48));
    store(minimum[2 * v], or_masked(nibble(_mm256_srli_epi16(low0, 4)), _mm256_slli_epi16(high, 2), 48));
    store(scale[4 + 2 * v], or_masked(nibble(low1), high, 48));
    store(minimum[4 + 2 * v], or_masked(nibble(_mm256_srli_epi16(low1, 4)), _mm256_srli_epi16(high, 2), 48));
  }
}

// Scales of the eight blocks of a super-block as bytes.
TELLIN_INLINE void unpack_signed_six_bits(const SignedSixBitHeader& h, int8_t (&scale)[8][kRows]) {
  const __m256i high = load_half(h.high[0]);
  const auto store = [&](int pair, __m256i low, __m256i high_bits) {  // two blocks of 16 rows in a register
    const __m256i six = or_masked(_mm256_and_si256(low, _mm256_set1_epi8(15)), high_bits, 48);
    const __m256i whole = _mm256_sub_epi8(six, _mm256_set1_epi8(32));
    _mm256_store_si256(reinterpret_cast<__m256i*>(scale[2 * pair]), whole);
  };
  const __m256i low0 = load_half(h.low[0]), low1 = load_half(h.low[2]);
  store(0, low0, _mm256_slli_epi16(high, 4));
  store(1, low1, _mm256_slli_epi16(high, 2));
  store(2, _mm256_srli_epi16(low0, 4), high);
  store(3, _mm256_srli_epi16(low1, 4), _mm256_srli_epi16(high, 2));
}

// 2^(e - 128) of 8 bytes e: from e = 2 on a normal number, of which e - 1 is the exponent's field.
TELLIN_INLINE __m256 powers_of_two(const uint8_t* p) {
  const __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
  const __m256i subnormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
  const __m256i is_normal = _mm256_cmpgt_epi32(e, _mm256_set1_epi32(1));
  return _mm256_castsi256_ps(_mm256_blendv_epi8(subnormal, normal, is_normal));
}

// Scales and minima of a super-block, as 8 floats: of half h of the rows, for sum j (a block, or 16 features
// of it).
template <QuantType T>
class SuperScales {
 public:
  TELLIN_INLINE explicit SuperScales(const uint8_t* super_block) : header_(super_block) {
    if constexpr (kKind == ScaleKind::kSixBit32) {
      const auto* header = reinterpret_cast<const SixBitHeader*>(super_block);
      unpack_six_bits(*header, scale_, minimum_);
      asm("" : "+m"(scale_), "+m"(minimum_));  // or they would be taken apart in registers, which is slower
    } else if constexpr (kKind == ScaleKind::kSignedSixBit32) {
      const auto* header = reinterpret_cast<const SignedSixBitHeader*>(super_block);
      unpack_signed_six_bits(*header, signed_scale_);
      asm("" : "+m"(signed_scale_));
      for (int h = 0; h < 2; ++h) d_[h] = half_to_float8(header->d + h * kHalfRows);
    }
    if constexpr (kFormat.has_table()) return;
    for (int h = 0; h < 2; ++h) {
      if constexpr (kKind == ScaleKind::kInt8Per16) {
        d_[h] = _mm256_loadu_ps(reinterpret_cast<const float*>(super_block) + h * kHalfRows);
      } else if constexpr (kKind != ScaleKind::kHalf32) {  // both headers begin with d and dmin
        const auto* d = reinterpret_cast<const uint16_t*>(super_block);
        d_[h] = half_to_float8(d + h * kHalfRows);
        dmin_[h] = _mm256_sub_ps(_mm256_setzero_ps(), half_to_float8(d + kRows + h * kHalfRows));
      }
    }
  }

  TELLIN_INLINE __m256 scale(int j, int h) const {
    if constexpr (kKind == ScaleKind::kHalf32) {
      return half_to_float8(reinterpret_cast<const uint16_t*>(header_) + kRows * j + kHalfRows * h);
    } else if constexpr (kKind == ScaleKind::kSixBit32) {
      return _mm256_mul_ps(d_[h], bytes_to_float8(scale_[j] + kHalfRows * h));
    } else if constexpr (kKind == ScaleKind::kSignedSixBit32) {
      return _mm256_mul_ps(d_[h], signed_bytes_to_float8(signed_scale_[j] + kHalfRows * h));
    } else if constexpr (kKind == ScaleKind::kExponent32) {
      return powers_of_two(header_ + kRows * j + kHalfRows * h);
    } else if constexpr (kKind == ScaleKind::kInt8Per16) {
      const auto* header = reinterpret_cast<const Int8Per16Header*>(header_);
      return _mm256_mul_ps(d_[h], signed_bytes_to_float8(header->scale[j] + kHalfRows * h));
    } else {
      return _mm256_mul_ps(d_[h], _mm256_cvtepi32_ps(_mm256_and_si256(nibbles(j, h), _mm256_set1_epi32(15))));
    }
  }

  TELLIN_INLINE __m256 minimum(int j, int h) const {
    if constexpr (kKind == ScaleKind::kHalf32) {
      return half_to_float8(reinterpret_cast<const uint16_t*>(header_) + kRows * (2 + j) + kHalfRows * h);
    } else if constexpr (kKind == ScaleKind::kSixBit32) {
      return _mm256_mul_ps(dmin_[h], bytes_to_float8(minimum_[j] + kHalfRows * h));
    } else {
      return _mm256_mul_ps(dmin_[h], _mm256_cvtepi32_ps(_mm256_srli_epi32(nibbles(j, h), 4)));
    }
  }

 private:
  static constexpr PackedFormat kFormat = format_of(T);
  static constexpr ScaleKind kKind = kFormat.scales;

  TELLIN_INLINE __m256i nibbles(int j, int h) const {
    const auto* header = reinterpret_cast<const Nibble16Header*>(header_);
    return _mm256_cvtepu8_epi32(
        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(header->scale_min[j] + kHalfRows * h)));
  }

  const uint8_t* header_;
  __m256 d_[2], dmin_[2];
  alignas(32) uint8_t scale_[8][kRows];
  alignas(32) uint8_t minimum_[8][kRows];
  alignas(32) int8_t signed_scale_[8][kRows];
};

// Scales and minima of the 16 rows for every sum of a super-block: [blocks][1 or 2 (per 16)][16].
template <QuantType T>
TELLIN_INLINE void expand_scales(const uint8_t* super_block, float (*scale)[kRows], float (*minimum)[kRows]) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kSums = kFormat.blocks() * (kFormat.per16() ? 2 : 1);
  const SuperScales<T> scales(super_block);
  for (int h = 0; h < 2; ++h) {
    for (int j = 0; j < kSums; ++j) {
      _mm256_store_ps(scale[j] + h * kHalfRows, scales.scale(j, h));
      if constexpr (kFormat.has_min) _mm256_store_ps(minimum[j] + h * kHalfRows, scales.minimum(j, h));
    }
  }
}

}  // namespace
}  // namespace tellin

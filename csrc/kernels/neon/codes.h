// NEON: quads of codes out of the packed planes, and block scales out of the headers.
//
// A 64-byte packed vector is four registers: quarter i is rows [4i, 4i + 4).
#pragma once
#include <arm_neon.h>

#include "tellin/packed_format.h"

#define TELLIN_INLINE inline __attribute__((always_inline))

namespace tellin {
namespace {

constexpr int kQuarters = 4;
constexpr int kQuarterBytes = 16;
constexpr int kQuarterRows = 4;

// Moves bit `from` of every byte to bit `to`; bits that leave the byte are lost.
template <int from, int to>
TELLIN_INLINE uint8x16_t move_bits(uint8x16_t v) {
  if constexpr (from < to) {
    return vshlq_n_u8(v, to - from);
  } else if constexpr (from > to) {
    return vshrq_n_u8(v, from - to);
  } else {
    return v;
  }
}

TELLIN_INLINE uint8x16_t or_masked(uint8x16_t base, uint8x16_t v, uint8_t mask) {
  return vorrq_u8(base, vandq_u8(v, vdupq_n_u8(mask)));
}

// Codes less the zero point of a format with a code table.
template <QuantType T>
TELLIN_INLINE int8x16_t code_table() {
  constexpr PackedFormat kFormat = format_of(T);
  const uint8_t* const codes = kFormat.table == CodeTable::kIq4 ? kIq4Codes : kE2m1Codes;
  return vreinterpretq_s8_u8(vsubq_u8(vld1q_u8(codes), vdupq_n_u8(kFormat.zero_point())));
}

// Codes of quad kQuad (4 rows x 4 features) of a packed block; `block` points to the quarter's first byte.
// 8-bit codes and those of a table come as signed values (minus their zero point), the others as they are:
// all fit a signed byte.
template <QuantType T, int kQuad>
TELLIN_INLINE int8x16_t load_quad(const uint8_t* block) {
  constexpr int kBits = format_of(T).bits;
  if constexpr (kBits == 8) {
    return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(block + kVectorBytes * kQuad), vdupq_n_u8(0x80)));
  } else if constexpr (kBits <= 3) {
    const uint8x16_t pairs = vld1q_u8(block + kVectorBytes * (kQuad / 4));
    const uint8x16_t low = vandq_u8(move_bits<2 * (kQuad % 4), 0>(pairs), vdupq_n_u8(3));
    if constexpr (kBits == 2) return vreinterpretq_s8_u8(low);
    return vreinterpretq_s8_u8(or_masked(low, move_bits<kQuad, 2>(vld1q_u8(block + kVectorBytes * 2)), 4));
  } else {
    const uint8x16_t nibbles = vld1q_u8(block + kVectorBytes * (kQuad % 4));
    const uint8x16_t low = vandq_u8(move_bits<kQuad / 4 * 4, 0>(nibbles), vdupq_n_u8(15));
    if constexpr (format_of(T).has_table()) return vqtbl1q_s8(code_table<T>(), low);
    if constexpr (kBits == 4) return vreinterpretq_s8_u8(low);
    if constexpr (kBits == 5) {
      return vreinterpretq_s8_u8(or_masked(low, move_bits<kQuad, 4>(vld1q_u8(block + kVectorBytes * 4)), 16));
    }
    const uint8x16_t high = vld1q_u8(block + kVectorBytes * (4 + kQuad / 4));
    return vreinterpretq_s8_u8(or_masked(low, move_bits<2 * (kQuad % 4), 4>(high), 48));
  }
}

// What is left of the zero point in the codes of load_quad.
template <QuantType T>
constexpr int quad_zero_point() {
  return format_of(T).bits == 8 || format_of(T).has_table() ? 0 : format_of(T).zero_point();
}

TELLIN_INLINE float half_to_float(uint16_t h) {
  __fp16 value;
  __builtin_memcpy(&value, &h, sizeof value);
  return static_cast<float>(value);
}

// Scales and minima of the 16 rows for every sum of a super-block: [blocks][1 or 2 (per 16)][16].
template <QuantType T>
TELLIN_INLINE void expand_scales(const uint8_t* super_block, float (*scale)[kRows], float (*minimum)[kRows]) {
  constexpr PackedFormat kFormat = format_of(T);
  if constexpr (kFormat.scales == ScaleKind::kHalf32) {
    const auto* h = reinterpret_cast<const uint16_t*>(super_block);
    for (int b = 0; b < 2; ++b) {
      for (int r = 0; r < kRows; ++r) scale[b][r] = half_to_float(h[kRows * b + r]);
      if (!kFormat.has_min) continue;
      for (int r = 0; r < kRows; ++r) minimum[b][r] = half_to_float(h[kRows * (2 + b) + r]);
    }
  } else if constexpr (kFormat.scales == ScaleKind::kSixBit32) {
    const auto* h = reinterpret_cast<const SixBitHeader*>(super_block);
    for (int b = 0; b < 8; ++b) {
      for (int r = 0; r < kRows; ++r) {
        const int low = h->low[b][r], high = h->high[b % 4][r] >> (b / 4 * 4);
        scale[b][r] = half_to_float(h->d[r]) * static_cast<float>((low & 15) | (high & 3) << 4);
        minimum[b][r] = -half_to_float(h->dmin[r]) * static_cast<float>(low >> 4 | (high >> 2 & 3) << 4);
      }
    }
  } else if constexpr (kFormat.scales == ScaleKind::kSignedSixBit32) {
    const auto* h = reinterpret_cast<const SignedSixBitHeader*>(super_block);
    for (int b = 0; b < 8; ++b) {
      for (int r = 0; r < kRows; ++r) {
        const int low = h->low[b % 4][r] >> (b / 4 * 4) & 15, high = h->high[b % 2][r] >> (b / 2 * 2) & 3;
        scale[b][r] = half_to_float(h->d[r]) * static_cast<float>((low | high << 4) - 32);
      }
    }
  } else if constexpr (kFormat.scales == ScaleKind::kExponent32) {
    for (int b = 0; b < 4; ++b) {
      for (int r = 0; r < kRows; ++r) {
        const uint32_t e = super_block[kRows * b + r], bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
        __builtin_memcpy(&scale[b][r], &bits, sizeof bits);
      }
    }
  } else if constexpr (kFormat.scales == ScaleKind::kInt8Per16) {
    const auto* h = reinterpret_cast<const Int8Per16Header*>(super_block);
    for (int j = 0; j < 16; ++j) {
      for (int r = 0; r < kRows; ++r) scale[j][r] = h->d[r] * static_cast<float>(h->scale[j][r]);
    }
  } else {
    const auto* h = reinterpret_cast<const Nibble16Header*>(super_block);
    for (int j = 0; j < 16; ++j) {
      for (int r = 0; r < kRows; ++r) {
        const int both = h->scale_min[j][r];
        scale[j][r] = half_to_float(h->d[r]) * static_cast<float>(both & 15);
        minimum[j][r] = -half_to_float(h->dmin[r]) * static_cast<float>(both >> 4);
      }
    }
  }
}

// Writes the first `rows` (at most 16) of a group's results.
TELLIN_INLINE void store_rows(const float* acc, int64_t rows, float* out) {
  for (int64_t r = 0; r < (rows < kRows ? rows : kRows); ++r) out[r] = acc[r];
}

}  // namespace
}  // namespace tellin

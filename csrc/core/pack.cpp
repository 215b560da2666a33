// Packing of file tensors into the kernels' layout (tellin/packed_format.h), losslessly in value. Codes under
// a scale of zero do not count, and become neutral.
//
// Planes are built a file block at a time as 32-bit words (4 neighbouring codes) with plain integer
// arithmetic and stored with the stride that interleaves 16 rows. No state: groups may be packed by different
// threads.
#include "linear_core.h"
#include "quant_blocks.h"
#include "tellin/packed_format.h"

namespace tellin {
namespace {

void load_words(const uint8_t* p, uint32_t (&words)[8]) {
  std::memcpy(words, p, sizeof words);
}

// Low nibbles of (words >> shift), quads j and j + 4 in one word.
void nibble_plane(const uint32_t (&words)[8], int shift, uint32_t* plane) {
  for (int j = 0; j < 4; ++j) {
    plane[j] = ((words[j] >> shift) & 0x0f0f0f0fu) | ((words[j + 4] >> shift) & 0x0f0f0f0fu) << 4;
  }
}

void two_bit_plane(const uint32_t (&words)[8], int shift, uint32_t* plane) {
  for (int u = 0; u < 2; ++u) {
    plane[u] = 0;
    for (int f = 0; f < 4; ++f) plane[u] |= ((words[4 * u + f] >> shift) & 0x03030303u) << (2 * f);
  }
}

void one_bit_plane(const uint32_t (&words)[8], int shift, uint32_t* plane) {
  plane[0] = 0;
  for (int j = 0; j < 8; ++j) plane[0] |= ((words[j] >> shift) & 0x01010101u) << j;
}

// The 1-bit plane of 32 consecutive bits: bit 4 * j + i goes to bit j of byte i.
uint32_t one_bit_plane_of_bits(uint32_t bits) {
  uint32_t plane = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t x = (bits >> i) & 0x11111111u;  // bits 0, 4, 8, ... to 0, 1, 2, ...
    x = (x | x >> 3) & 0x03030303u;
    x = (x | x >> 6) & 0x000f000fu;
    x = (x | x >> 12) & 0xffu;
    plane |= x << (8 * i);
  }
  return plane;
}

// Planes of 32-wide block b of a file block: one word for each 64-byte vector of the packed block.
template <QuantType T>
void block_planes(const uint8_t* p, int b, uint32_t* plane) {
  uint32_t words[8];
  if constexpr (T == QuantType::Q4_0 || T == QuantType::IQ4_NL) {
    std::memcpy(plane, p + 2, 16);
  } else if constexpr (T == QuantType::IQ4_XS) {
    std::memcpy(plane, p + 8 + 16 * b, 16);
  } else if constexpr (T == QuantType::MXFP4) {
    std::memcpy(plane, p + 1, 16);
  } else if constexpr (T == QuantType::Q4_1) {
    std::memcpy(plane, p + 4, 16);
  } else if constexpr (T == QuantType::Q5_0) {
    std::memcpy(plane, p + 6, 16);
    plane[4] = one_bit_plane_of_bits(load_u32(p + 2));
  } else if constexpr (T == QuantType::Q5_1) {
    std::memcpy(plane, p + 8, 16);
    plane[4] = one_bit_plane_of_bits(load_u32(p + 4));
  } else if constexpr (T == QuantType::Q8_0) {
    load_words(p + 2, words);
    for (int j = 0; j < 8; ++j) plane[j] = words[j] ^ 0x80808080u;
  } else if constexpr (T == QuantType::Q4_K) {
    load_words(p + 16 + 32 * (b / 2), words);
    nibble_plane(words, 4 * (b % 2), plane);
  } else if constexpr (T == QuantType::Q5_K) {
    load_words(p + 48 + 32 * (b / 2), words);
    nibble_plane(words, 4 * (b % 2), plane);
    load_words(p + 16, words);
    one_bit_plane(words, b, plane + 4);
  } else if constexpr (T == QuantType::Q6_K) {
    load_words(p + 64 * (b / 4) + 32 * (b % 2), words);
    nibble_plane(words, b % 4 / 2 * 4, plane);
    load_words(p + 128 + 32 * (b / 4), words);
    two_bit_plane(words, 2 * (b % 4), plane + 4);
  } else {
    static_assert(T == QuantType::Q2_K || T == QuantType::Q3_K, "not a block format");
    load_words(p + (T == QuantType::Q2_K ? 16 : 32) + 32 * (b / 4), words);
    two_bit_plane(words, 2 * (b % 4), plane);
    if (T == QuantType::Q3_K) {
      load_words(p, words);
      one_bit_plane(words, b, plane + 2);
    }
  }
}

// Whether all codes of a block of MXFP4 are zero, of either sign: its scale does not count, and writers leave
// the least one there.
bool is_zero_block(const uint8_t* codes) {
  uint64_t words[2];
  std::memcpy(words, codes, sizeof words);
  return ((words[0] | words[1]) & 0x7777777777777777u) == 0;
}

// The exponent byte of a scale of one.
constexpr uint8_t kUnitExponent = 128;

// Scale header of one super-block of row r from its file block(s); num_blocks file blocks exist (kHalf32: 1
// or 2, kExponent32: 1 to 4).
template <QuantType T>
void pack_header(const uint8_t* p, int r, int num_blocks, uint8_t* header) {
  constexpr PackedFormat kFormat = format_of(T);
  if constexpr (kFormat.scales == ScaleKind::kHalf32) {
    for (int b = 0; b < num_blocks; ++b, p += block_shape(T).bytes) {
      std::memcpy(header + 32 * b + 2 * r, p, 2);
      if (kFormat.has_min) std::memcpy(header + 64 + 32 * b + 2 * r, p + 2, 2);
    }
  } else if constexpr (kFormat.scales == ScaleKind::kSixBit32) {
    auto* h = reinterpret_cast<SixBitHeader*>(header);
    h->d[r] = load_u16(p);
    h->dmin[r] = load_u16(p + 2);
    for (int b = 0; b < 8; ++b) {
      uint8_t scale, minimum;
      six_bit_scale_min(p + 4, b, &scale, &minimum);
      h->low[b][r] = static_cast<uint8_t>((scale & 15) | (minimum & 15) << 4);
      const int high = (scale >> 4 | minimum >> 4 << 2) << (b / 4 * 4);
      h->high[b % 4][r] = static_cast<uint8_t>(h->high[b % 4][r] | high);
    }
  } else if constexpr (kFormat.scales == ScaleKind::kSignedSixBit32) {
    auto* h = reinterpret_cast<SignedSixBitHeader*>(header);
    h->d[r] = load_u16(p);
    for (int b = 0; b < 8; ++b) {
      const int scale = iq4_xs_scale(p, b);
      h->low[b % 4][r] = static_cast<uint8_t>(h->low[b % 4][r] | (scale & 15) << (b / 4 * 4));
      h->high[b % 2][r] = static_cast<uint8_t>(h->high[b % 2][r] | scale >> 4 << (b / 2 * 2));
    }
  } else if constexpr (kFormat.scales == ScaleKind::kExponent32) {
    for (int b = 0; b < num_blocks; ++b, p += block_shape(T).bytes) {
      header[kRows * b + r] = is_zero_block(p + 1) ? kUnitExponent : p[0];
    }
  } else if constexpr (kFormat.scales == ScaleKind::kInt8Per16) {
    auto* h = reinterpret_cast<Int8Per16Header*>(header);
    constexpr bool kSixK = T == QuantType::Q6_K;
    h->d[r] = half_to_float(load_u16(p + (kSixK ? 208 : 108)));
    for (int j = 0; j < 16; ++j)
      h->scale[j][r] = kSixK ? static_cast<int8_t>(p[192 + j]) : q3k_scale(p + 96, j);
  } else {
    auto* h = reinterpret_cast<Nibble16Header*>(header);
    h->d[r] = load_u16(p + 80);
    h->dmin[r] = load_u16(p + 82);
    for (int j = 0; j < 16; ++j) h->scale_min[j][r] = p[j];
  }
}

// Which features of a block half 0 has in the word of vector v of its planes; half 1 has the others.
constexpr uint32_t first_half_mask(int bits, int v) {
  if (bits == 8) return v < 4 ? ~0u : 0u;
  if (bits >= 4 && v < 4) return 0x0f0f0f0fu;                          // 4-bit plane
  if (bits == 6 || (bits < 4 && v < 2)) return v % 2 == 0 ? ~0u : 0u;  // 2-bit plane
  return 0x0f0f0f0fu;                                                  // 1-bit plane
}

// The word of vector v of a block whose codes are all the format's zero point.
constexpr uint32_t neutral_word(const PackedFormat& format, int v) {
  if (format.has_table()) return 0;
  const auto zero = static_cast<uint32_t>(format.zero_point());
  if (format.bits == 8) return zero * 0x01010101u;
  if (format.bits >= 4 && v < 4) return (zero & 15) * 0x11111111u;
  if (format.bits < 4 && v < 2) return (zero & 3) * 0x55555555u;
  if (format.bits == 6) return (zero >> 4) * 0x55555555u;
  return zero >> (format.bits - 1) != 0 ? ~0u : 0u;
}

// Whether the scale of a 32-wide block b, or of one of its halves, is zero in a file block.
template <QuantType T>
bool is_scale_zero(const uint8_t* p, int b, int half) {
  constexpr PackedFormat kFormat = format_of(T);
  const auto is_zero = [p](int offset) { return (load_u16(p + offset) & 0x7fff) == 0; };
  if constexpr (kFormat.scales == ScaleKind::kHalf32) {
    return is_zero(0);
  } else if constexpr (kFormat.scales == ScaleKind::kSixBit32) {
    uint8_t scale, minimum;
    six_bit_scale_min(p + 4, b, &scale, &minimum);
    return scale == 0 || is_zero(0);
  } else if constexpr (T == QuantType::Q6_K) {
    return p[192 + 2 * b + half] == 0 || is_zero(208);
  } else if constexpr (T == QuantType::Q3_K) {
    return q3k_scale(p + 96, 2 * b + half) == 0 || is_zero(108);
  } else {
    return (p[2 * b + half] & 15) == 0 || is_zero(80);
  }
}

// Codes of 32-wide block b that no scale makes count become the zero point, if there is a code for it.
template <QuantType T>
void neutralize(const uint8_t* p, int b, uint32_t* plane) {
  constexpr PackedFormat kFormat = format_of(T);
  if constexpr (!kFormat.has_table()) {
    const bool first = is_scale_zero<T>(p, b, 0);
    const bool second = kFormat.per16() ? is_scale_zero<T>(p, b, 1) : first;
    if (!first && !second) return;
    for (int v = 0; v < kFormat.bits; ++v) {
      const uint32_t half = first_half_mask(kFormat.bits, v);
      const uint32_t mask = (first ? half : 0) | (second ? ~half : 0);
      plane[v] = (plane[v] & ~mask) | (neutral_word(kFormat, v) & mask);
    }
  }
}

// A super-block of neutral codes and zero scales. Formats with a code table, of which some have no neutral
// code: of any code and ordinary scales, for activations beside padding are zero and outputs of it are not
// written.
template <QuantType T>
void clear_super_block(uint8_t* dst) {
  constexpr PackedFormat kFormat = format_of(T);
  std::memset(dst, kFormat.scales == ScaleKind::kExponent32 ? kUnitExponent : 0, kFormat.header_bytes());
  if constexpr (kFormat.table == CodeTable::kIq4) {
    constexpr uint16_t kOne = 0x3c00;
    constexpr int kHalves = kFormat.scales == ScaleKind::kHalf32 ? 2 * kRows : kRows;
    for (int i = 0; i < kHalves; ++i) std::memcpy(dst + 2 * i, &kOne, sizeof kOne);
  }
  uint8_t* codes = dst + kFormat.header_bytes();
  for (int i = 0; i < kFormat.blocks() * kFormat.bits; ++i, codes += kVectorBytes) {
    const uint32_t word = neutral_word(kFormat, i % kFormat.bits);
    for (int r = 0; r < kRows; ++r) std::memcpy(codes + 4 * r, &word, sizeof word);
  }
}

template <QuantType T>
void pack_quantized_group(const uint8_t* src, int64_t rows, int64_t k, uint8_t* dst) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr BlockShape kShape = block_shape(T);
  constexpr int kBlocksPerFileBlock = kShape.elements / kBlockK;
  const int64_t row_bytes = k / kShape.elements * kShape.bytes;
  for (int64_t k0 = 0; k0 < k; k0 += kFormat.super_k(), dst += kFormat.super_bytes()) {
    const int blocks = k - k0 < kFormat.super_k() ? static_cast<int>((k - k0) / kBlockK) : kFormat.blocks();
    if (rows < kRows || blocks < kFormat.blocks()) {
      clear_super_block<T>(dst);
    } else {
      std::memset(dst, 0, kFormat.header_bytes());
    }
    const uint8_t* p = src + k0 / kShape.elements * kShape.bytes;
    for (int r = 0; r < rows; ++r, p += row_bytes) {
      pack_header<T>(p, r, blocks, dst);
      uint8_t* codes = dst + kFormat.header_bytes() + 4 * r;
      for (int b = 0; b < blocks; ++b, codes += kFormat.block_bytes()) {
        uint32_t plane[8];
        const uint8_t* file_block = p + b / kBlocksPerFileBlock * kShape.bytes;
        block_planes<T>(file_block, b % kBlocksPerFileBlock, plane);
        neutralize<T>(file_block, b % kBlocksPerFileBlock, plane);
        for (int v = 0; v < kFormat.bits; ++v) std::memcpy(codes + kVectorBytes * v, &plane[v], 4);
      }
    }
  }
}

// [rows, k] elements of E to [k][16] (pairs = 1) or [ceil(k / 2)][16][2] (pairs = 2).
template <class E, int kPairs>
void pack_float_group(const uint8_t* src, int64_t rows, int64_t k, uint8_t* dst) {
  std::memset(dst, 0, static_cast<size_t>((k + kPairs - 1) / kPairs * kPairs * kRows) * sizeof(E));
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* p = src + static_cast<size_t>(r * k) * sizeof(E);
    for (int64_t i = 0; i < k; ++i) {
      const int64_t at = (i / kPairs * kRows + r) * kPairs + i % kPairs;
      std::memcpy(dst + static_cast<size_t>(at) * sizeof(E), p + static_cast<size_t>(i) * sizeof(E),
                  sizeof(E));
    }
  }
}

void pack_e4m3_group(const uint8_t* src, int64_t rows, int64_t k, uint8_t* dst) {
  constexpr BlockShape kShape = block_shape(QuantType::E4M3);
  std::memset(dst, 0, packed_group_size(QuantType::E4M3, k));
  uint8_t* const codes = dst + e4m3_codes_offset(k);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t b = 0; b < k / kE4m3K; ++b, src += kShape.bytes) {
      float scale;
      std::memcpy(&scale, src, sizeof scale);
      scale *= kE4m3ScaleFactor;
      std::memcpy(dst + (b * kRows + r) * static_cast<int64_t>(sizeof scale), &scale, sizeof scale);
      for (int i = 0; i < kE4m3K; ++i) codes[(b * kE4m3K + i) * kRows + r] = src[4 + i];
    }
  }
}

void pack_group(QuantType type, const uint8_t* src, int64_t rows, int64_t k, uint8_t* dst) {
  switch (type) {
    case QuantType::F32:
      return pack_float_group<uint32_t, 1>(src, rows, k, dst);
    case QuantType::F16:
      return pack_float_group<uint16_t, 1>(src, rows, k, dst);
    case QuantType::BF16:
      return pack_float_group<uint16_t, 2>(src, rows, k, dst);
    case QuantType::Q4_0:
      return pack_quantized_group<QuantType::Q4_0>(src, rows, k, dst);
    case QuantType::Q4_1:
      return pack_quantized_group<QuantType::Q4_1>(src, rows, k, dst);
    case QuantType::Q5_0:
      return pack_quantized_group<QuantType::Q5_0>(src, rows, k, dst);
    case QuantType::Q5_1:
      return pack_quantized_group<QuantType::Q5_1>(src, rows, k, dst);
    case QuantType::Q8_0:
      return pack_quantized_group<QuantType::Q8_0>(src, rows, k, dst);
    case QuantType::Q2_K:
      return pack_quantized_group<QuantType::Q2_K>(src, rows, k, dst);
    case QuantType::Q3_K:
      return pack_quantized_group<QuantType::Q3_K>(src, rows, k, dst);
    case QuantType::Q4_K:
      return pack_quantized_group<QuantType::Q4_K>(src, rows, k, dst);
    case QuantType::Q5_K:
      return pack_quantized_group<QuantType::Q5_K>(src, rows, k, dst);
    case QuantType::Q6_K:
      return pack_quantized_group<QuantType::Q6_K>(src, rows, k, dst);
    case QuantType::IQ4_NL:
      return pack_quantized_group<QuantType::IQ4_NL>(src, rows, k, dst);
    case QuantType::IQ4_XS:
      return pack_quantized_group<QuantType::IQ4_XS>(src, rows, k, dst);
    case QuantType::E4M3:
      return pack_e4m3_group(src, rows, k, dst);
    case QuantType::MXFP4:
      return pack_quantized_group<QuantType::MXFP4>(src, rows, k, dst);
  }
}

}  // namespace

size_t packed_group_bytes(QuantType type, int64_t k, ActPrecision precision) {
  const BlockShape shape = block_shape(type);
  if (shape.elements == 0 || k <= 0 || k % shape.elements != 0) return 0;
  if (precision != ActPrecision::kFloat32 && !format_of(type).is_quantized()) return 0;
  return packed_group_size(type, k);
}

size_t quantized_row_bytes(int64_t k, ActPrecision precision) {
  return act_row_bytes(k, precision == ActPrecision::kInt16);
}

void pad_row(ActPrecision precision, int64_t k, int64_t row, const QuantizedRows& out) {
  uint8_t* target = out.data + row * out.row_bytes;
  const int64_t num_blocks = (k + 255) / 256 * 8;
  for (int64_t b = k / kBlockK; b < num_blocks; ++b) {
    if (precision == ActPrecision::kInt8) {
      store_zero_record(reinterpret_cast<Act8*>(target) + b);
    } else {
      store_zero_record(reinterpret_cast<Act16*>(target) + b);
    }
  }
}

int32_t layout_id(QuantType type, ActPrecision) {
  return static_cast<int32_t>(type);
}

void pack_groups(QuantType type, ActPrecision, const uint8_t* src, int64_t n, int64_t k, int64_t g0,
                 int64_t g1, uint8_t* dst) {
  const BlockShape shape = block_shape(type);
  const size_t row_bytes = static_cast<size_t>(k / shape.elements) * shape.bytes;
  const size_t group_bytes = packed_group_size(type, k);
  for (int64_t g = g0; g < g1; ++g) {
    const int64_t rows = n - g * kRows < kRows ? n - g * kRows : kRows;
    pack_group(type, src + static_cast<size_t>(g * kRows) * row_bytes, rows, k, dst + g * group_bytes);
  }
}

}  // namespace tellin

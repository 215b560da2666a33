// AVX2: packed codes x 8-bit activations of many tokens, whose zeros and scales are looked up.
//
// A chunk is unpacked as in linear_int.h, with a table beside each sum of codes: what every zero makes of it
// (and with vpdpbusd what every mantissa of a scale makes of the weights' scale, see Act8). A tile then adds
// what it had to multiply: 22 multiplications per 32 features of 16 rows of Q4_0 instead of 24, and 40
// operations instead of 42, which count as much on a core that executes four a cycle. vpdpbusd begins its
// sums with the zeros.
//
// Codes of formats with a zero point are made signed (c - z), and activations unsigned (see act_rows.h):
//   sum (c - z) (q + zero) = sum (c - z) (q + 128) + (zero - 128) * sum (c - z),
// which needs no sum of q. The roundings are those of linear_int.h.
#pragma once
#include <algorithm>

#include "act_rows.h"
#include "int_terms.h"

namespace tellin {
namespace {

// A table of scales is 8 more stores per sum, at one a cycle, and saves a multiplication: worth it where
// nothing but multiplications counts.
#if defined(__AVXVNNI__)
constexpr bool kHasScaleTable = true;
#else
constexpr bool kHasScaleTable = false;
#endif

// Whether tables may be made of the scales of a group (see kLeastTableScale).
template <QuantType T>
bool can_make_tables([[maybe_unused]] const PackedMatrix& w, [[maybe_unused]] int64_t g) {
  constexpr PackedFormat kFormat = format_of(T);
  if constexpr (kHasScaleTable && kFormat.has_table()) {
    const uint8_t* super_block = w.data + g * w.group_bytes;
    for (const uint8_t* const end = super_block + w.group_bytes; super_block < end;
         super_block += kFormat.super_bytes()) {
      const SuperScales<T> scales(super_block);
      __m256 fits = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
      for (int i = 0; i < 2 * kFormat.blocks(); ++i) {
        const __m256 d = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), scales.scale(i / 2, i % 2));
        fits = _mm256_and_ps(fits, _mm256_cmp_ps(d, _mm256_set1_ps(kLeastTableScale), _CMP_GE_OQ));
        fits = _mm256_and_ps(fits, _mm256_cmp_ps(d, _mm256_set1_ps(kLargestTableScale), _CMP_LE_OQ));
      }
      if (_mm256_movemask_ps(fits) != 0xff) return false;
    }
  }
  return true;
}

// How the sums of a format run.
struct TableFormat {
  PackedFormat format;

  constexpr int sums() const { return format.per16() ? 2 : 1; }  // of a block
  constexpr int quads() const { return 8 / sums(); }             // of a sum
  constexpr bool is_signed() const { return format.zero_point_log2 >= 0; }

#if defined(__AVXVNNI__)
  constexpr bool starts_low() const { return false; }
  constexpr int step() const { return quads(); }
#else
  // Whether int16 takes only what is left of a sum once 128 * sum (c - z) is off it. Sums run modulo 2^16, so
  // they may begin with that; and as 2 * quads * -(z * -128) is one too many, with 256 less.
  constexpr bool starts_low() const { return is_signed() && 2 * quads() * format.zero_point() * 255 > 32767; }
  // Quads that fit into int16.
  constexpr int step() const {
    return is_signed() ? quads() : std::min(quads(), int16_quads(format.code_bits()));
  }
#endif
  // What the zero table allows for.
  constexpr int zero_shift() const { return !is_signed() || starts_low() ? 0 : -128; }
  constexpr int constant() const { return starts_low() ? 2 * 256 : 0; }
};

// A block as a tile reads it. A chunk of them fits with its activations into half of a small L1 cache.
template <QuantType T>
struct TableBlock {
  static constexpr TableFormat kTable = {format_of(T)};
  static constexpr int kSums = kTable.sums();

  alignas(64) uint8_t codes[8][kVectorBytes];
  alignas(64) int32_t zero[kSums][kZeroEntries][kRows];
  alignas(64) float scale[kSums][kHasScaleTable ? kScaleEntries : 1][kRows];
  alignas(64) int16_t start[kTable.starts_low() ? kSums : 0][2 * kRows];
  alignas(64) float minimum[kTable.format.has_min ? kSums : 0][kRows];
};

// ---- unpacking ----

// Unpacks quads [kQuad, kEnd) of half a block, and adds up the codes from quad kBegin on: in bytes, of 8 bits
// in int32.
template <QuantType T, int kBegin, int kQuad, int kEnd>
TELLIN_INLINE void unpack_table_quads(const uint8_t* block, uint8_t (*codes)[kVectorBytes],
                                      __m256i& code_sum) {
  constexpr PackedFormat kFormat = format_of(T);
  if constexpr (kQuad < kEnd) {
    __m256i quad = load_quad<T, kQuad>(block);
    if constexpr (kFormat.code_bits() < 8) {
      add_codes(quad, kQuad == kBegin, code_sum);
    } else {
      const __m256i sum =
          _mm256_madd_epi16(_mm256_maddubs_epi16(quad, _mm256_set1_epi8(1)), _mm256_set1_epi16(1));
      code_sum = kQuad == kBegin ? sum : _mm256_add_epi32(code_sum, sum);
    }
    quad = _mm256_sub_epi8(quad, _mm256_set1_epi8(static_cast<char>(kFormat.zero_point())));
    _mm256_store_si256(reinterpret_cast<__m256i*>(codes[kQuad]), quad);
    unpack_table_quads<T, kBegin, kQuad + 1, kEnd>(block, codes, code_sum);
  }
}

TELLIN_INLINE void store_words(void* to, __m256i v) {
  _mm256_store_si256(static_cast<__m256i*>(to), v);
}

// Tables of a sum of codes (see unpack_table_quads), at their rows.
template <QuantType T>
TELLIN_INLINE void store_zeros(__m256i code_sum, int32_t (*zero)[kRows], int16_t* start) {
  constexpr TableFormat kTable = {format_of(T)};
  constexpr int kFeatures = 4 * kTable.quads(), kZero = kTable.format.zero_point();
  if constexpr (kTable.format.code_bits() < 8) {
    code_sum = _mm256_maddubs_epi16(code_sum, _mm256_set1_epi8(1));
    if constexpr (kTable.starts_low()) {
      const auto even = static_cast<int16_t>(128 * (kFeatures / 2) * kZero - 256);
      store_words(start, _mm256_sub_epi16(_mm256_set1_epi16(even), _mm256_slli_epi16(code_sum, 7)));
    }
    code_sum = _mm256_madd_epi16(code_sum, _mm256_set1_epi16(1));
  }
  code_sum = _mm256_sub_epi32(code_sum, _mm256_set1_epi32(kFeatures * kZero));
  const __m256i unit = _mm256_slli_epi32(code_sum, 5);
  static_assert(kZeroUnit == 1 << 5);
  // Of the least zero, and so on.
  constexpr int kLeast = kTable.zero_shift() / kZeroUnit - kMostZeroSteps;
  static_assert(kLeast == -3 || kLeast == -7);
  const __m256i times4 = _mm256_slli_epi32(unit, 2);
  __m256i entry =
      kLeast == -3 ? _mm256_sub_epi32(unit, times4) : _mm256_sub_epi32(unit, _mm256_slli_epi32(unit, 3));
  if constexpr (kTable.constant() != 0) entry = _mm256_add_epi32(entry, _mm256_set1_epi32(kTable.constant()));
#pragma GCC unroll 7
  for (int i = 0; i < kZeroEntries; ++i) {
    store_words(zero[i], entry);
    if (i + 1 < kZeroEntries) entry = _mm256_add_epi32(entry, unit);
  }
}

// The weights' scale d, or its table: bits(m * d) - bits(m). Where d is zero so are the sums: any d does.
TELLIN_INLINE void store_scales(__m256 d, float (*scale)[kRows]) {
  if constexpr (kHasScaleTable) {
    const __m256 is_zero = _mm256_cmp_ps(d, _mm256_setzero_ps(), _CMP_EQ_OQ);
    d = _mm256_blendv_ps(d, _mm256_set1_ps(kZeroScaleStand), is_zero);
#pragma GCC unroll 4
    for (int i = 0; i < kNanScaleEntry; ++i) {
      const __m256 m = _mm256_set1_ps(kAct8Scale[i]);
      const __m256i bits = _mm256_castps_si256(i == 0 ? d : _mm256_mul_ps(d, m));
      store_words(scale[i], _mm256_sub_epi32(bits, _mm256_castps_si256(m)));
    }
    store_words(scale[kNanScaleEntry], _mm256_setzero_si256());
  } else {
    _mm256_store_ps(scale[0], d);
  }
}

// Half h of the rows of sum kSum of block b of a super-block.
template <QuantType T, int kSum>
TELLIN_INLINE void unpack_table_sum(const uint8_t* packed, const SuperScales<T>& scales, int b, int h,
                                    TableBlock<T>* to) {
  constexpr TableFormat kTable = {format_of(T)};
  constexpr int kBegin = kSum * kTable.quads();
  const int row = kHalfRows * h, scale = kTable.sums() * b + kSum;
  __m256i code_sum;
  unpack_table_quads<T, kBegin, kBegin, kBegin + kTable.quads()>(
      packed + kHalfBytes * h, reinterpret_cast<uint8_t (*)[kVectorBytes]>(to->codes[0] + kHalfBytes * h),
      code_sum);
  int16_t* const start = kTable.starts_low() ? to->start[kSum] + 2 * row : nullptr;
  store_zeros<T>(code_sum, reinterpret_cast<int32_t (*)[kRows]>(to->zero[kSum][0] + row), start);
  store_scales(scales.scale(scale, h), reinterpret_cast<float (*)[kRows]>(to->scale[kSum][0] + row));
  if constexpr (kTable.format.has_min) {
    _mm256_store_ps(to->minimum[kSum] + row, scales.minimum(scale, h));
  }
}

template <QuantType T>
void unpack_table_chunk(const uint8_t* w, int num_supers, TableBlock<T>* to) {
  constexpr TableFormat kTable = {format_of(T)};
  constexpr PackedFormat kFormat = kTable.format;
  for (int s = 0; s < num_supers; ++s, w += kFormat.super_bytes()) {
    const SuperScales<T> scales(w);
    for (int b = 0; b < kFormat.blocks(); ++b, ++to) {
      const uint8_t* const packed = w + kFormat.header_bytes() + b * kFormat.block_bytes();
      for (int h = 0; h < 2; ++h) {
        unpack_table_sum<T, 0>(packed, scales, b, h, to);
        if constexpr (kTable.sums() == 2) unpack_table_sum<T, 1>(packed, scales, b, h, to);
      }
    }
  }
}

// ---- tiles ----

TELLIN_INLINE __m256i load_words(const void* p) {
  return _mm256_load_si256(static_cast<const __m256i*>(p));
}

// What a tile reads of its rows from a block on: records, and q or q + 128 of them. Two offsets that move and
// rows that stay take fewer registers than as many pointers.
template <int kTokens>
struct TileRows {
  const uint8_t* row[kTokens];
  int64_t records, q;

  TELLIN_INLINE const Act8* record(int t) const { return reinterpret_cast<const Act8*>(row[t] + records); }
};

// Adds quads [kQuad, kEnd): sum[half][token]. The first quad's products begin the sums if `is_first`.
template <QuantType T, int kQuad, int kEnd, int kTokens>
TELLIN_INLINE void add_table_quads(const uint8_t (*codes)[kVectorBytes], const TileRows<kTokens>& x,
                                   bool is_first, __m256i (&sum)[2][kTokens]) {
  constexpr TableFormat kTable = {format_of(T)};
  if constexpr (kQuad < kEnd) {
    const __m256i w0 = load_half(codes[kQuad]), w1 = load_half(codes[kQuad] + kHalfBytes);
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) {
      const __m256i y = broadcast_word(x.row[t] + x.q + 4 * kQuad);
      add_product(kTable.is_signed() ? y : w0, kTable.is_signed() ? w0 : y, is_first, sum[0][t]);
      add_product(kTable.is_signed() ? y : w1, kTable.is_signed() ? w1 : y, is_first, sum[1][t]);
    }
    asm volatile("" ::: "memory");  // keeps the loads of later quads from being hoisted
    add_table_quads<T, kQuad + 1, kEnd>(codes, x, false, sum);
  }
}

// Exact int32 sums of (codes - zero point) x whole activations over quads [kQuad, kEnd), less what the table
// of zeros has.
template <QuantType T, int kQuad, int kEnd, int kTokens>
TELLIN_INLINE void table_sums(const uint8_t (*codes)[kVectorBytes], const int16_t* start,
                              const TileRows<kTokens>& x, __m256i (&sum)[2][kTokens]) {
  constexpr TableFormat kTable = {format_of(T)};
  constexpr int kStop = kQuad + kTable.step() < kEnd ? kQuad + kTable.step() : kEnd;
  const __m256i one = _mm256_set1_epi16(1);
  if constexpr (kTable.starts_low()) {
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) {
      sum[0][t] = load_words(start);
      sum[1][t] = load_words(start + 2 * kHalfRows);
    }
  }
  add_table_quads<T, kQuad, kStop>(codes, x, !kTable.starts_low(), sum);
#pragma GCC unroll 6
  for (int t = 0; t < kTokens; ++t) {
    sum[0][t] = _mm256_madd_epi16(sum[0][t], one);
    sum[1][t] = _mm256_madd_epi16(sum[1][t], one);
  }
  if constexpr (kStop < kEnd) {
    __m256i rest[2][kTokens];
    table_sums<T, kStop, kEnd>(codes, start, x, rest);
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) {
      add_int32(sum[0][t], rest[0][t]);
      add_int32(sum[1][t], rest[1][t]);
    }
  }
}

// Activations' scale, broadcast, * weights' scale, exactly.
TELLIN_INLINE __m256 whole_scale(__m256i x_scale, int offset, const float* scale) {
  if constexpr (kHasScaleTable) {
    const auto* const entry = reinterpret_cast<const uint8_t*>(scale) + offset;
    return _mm256_castsi256_ps(_mm256_add_epi32(x_scale, load_words(entry)));
  } else {
    return _mm256_mul_ps(_mm256_castsi256_ps(x_scale), _mm256_load_ps(scale));
  }
}

// Sum kSum of a block added to acc [kTokens][16].
template <QuantType T, int kSum, int kTokens>
TELLIN_INLINE void add_table_sum(const TableBlock<T>& block, TileRows<kTokens>& x, float* acc) {
  constexpr TableFormat kTable = {format_of(T)};
  constexpr int kSums = kTable.sums(), kBegin = kSum * kTable.quads(), kEnd = kBegin + kTable.quads();
  constexpr bool kHasMin = kTable.format.has_min && kSum == kSums - 1;
  const auto* const zeros = reinterpret_cast<const uint8_t*>(block.zero[kSum]);
  __m256i sum[2][kTokens];
#if defined(__AVXVNNI__)
#pragma GCC unroll 6
  for (int t = 0; t < kTokens; ++t) {
    const uint8_t* const zero = zeros + x.record(t)->zero_offset;
    sum[0][t] = load_words(zero);
    sum[1][t] = load_words(zero + kHalfBytes);
    asm volatile("" : "+x"(sum[0][t]), "+x"(sum[1][t])::"memory");  // one address at a time
  }
  asm volatile("" : "+r"(x.records));  // addresses are not kept until they are needed again
  add_table_quads<T, kBegin, kEnd>(block.codes, x, false, sum);
#else
  table_sums<T, kBegin, kEnd>(block.codes, kTable.starts_low() ? block.start[kSum] : nullptr, x, sum);
#endif
#pragma GCC unroll 6
  for (int t = 0; t < kTokens; ++t) {
    const Act8* const record = x.record(t);
    const __m256i x_scale = broadcast_word(&record->scale);
    const int offset = record->scale_offset;
    [[maybe_unused]] const uint8_t* const zero = zeros + record->zero_offset;
    __m256 x_sum[kSums];
    if constexpr (kHasMin) {
      for (int i = 0; i < kSums; ++i)
        x_sum[i] = broadcast_float(kSums == 2 ? &record->half_sum[i] : &record->sum);
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
#if !defined(__AVXVNNI__)
      sum[h][t] = _mm256_add_epi32(sum[h][t], load_words(zero + h * kHalfBytes));
#endif
      float* const a = acc + t * kRows + h * kHalfRows;
      const __m256 scale = whole_scale(x_scale, offset, block.scale[kSum][0] + h * kHalfRows);
      __m256 result = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[h][t]), scale, _mm256_load_ps(a));
      if constexpr (kHasMin) {
        for (int i = 0; i < kSums; ++i)
          result = _mm256_fmadd_ps(_mm256_load_ps(block.minimum[i] + h * kHalfRows), x_sum[i], result);
      }
      _mm256_store_ps(a, result);
    }
  }
  asm volatile("" ::: "memory");
}

// Runs a tile over blocks, from block `first` of rows x on. acc: [kTokens][16], 32-byte aligned.
template <QuantType T, int kTokens>
__attribute__((noinline)) void run_table_tile(const TableBlock<T>* block, CodeStream* ahead, int num_blocks,
                                              const uint8_t* x, int64_t row_bytes, int64_t first,
                                              float* acc) {
  constexpr TableFormat kTable = {format_of(T)};
  constexpr int kStep = kTable.format.super_bytes() / kTable.format.blocks();
  constexpr int64_t kRecord = sizeof(Act8), kQStep = kTable.is_signed() ? kBlockK : kRecord;
  TileRows<kTokens> rows;
#pragma GCC unroll 6
  for (int t = 0; t < kTokens; ++t) {
    rows.row[t] = x + t * row_bytes;
    asm volatile("" : "+r"(rows.row[t]));
  }
  rows.records = first * kRecord;
  rows.q = kTable.is_signed() ? shifted_offset(row_bytes) + first * kBlockK : rows.records;
  for (int b = 0; b < num_blocks; ++b, ++block) {
    if (ahead != nullptr) ahead->fetch<kStep>();
    add_table_sum<T, 0, kTokens>(*block, rows, acc);
    if constexpr (kTable.sums() == 2) add_table_sum<T, 1, kTokens>(*block, rows, acc);
    rows.records += kRecord;
    rows.q += kQStep;
    asm volatile("" : "+r"(rows.records), "+r"(rows.q));
  }
}

}  // namespace
}  // namespace tellin

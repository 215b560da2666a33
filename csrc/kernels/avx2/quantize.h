// AVX2: quantisation of float32 activations to records of one or two planes.
#pragma once
#include "act_rows.h"
#include "block_walk.h"
#include "codes.h"
#include "tellin/linear.h"

namespace tellin {
namespace {

TELLIN_INLINE float horizontal_max(__m256 v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

TELLIN_INLINE int32_t horizontal_sum(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

TELLIN_INLINE void store_plane(const __m256i (&v)[4], int8_t* q) {
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
  const __m256i ordered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), ordered);
}

// Rewrites the record of a block whose values are not all finite and of some size, but not too large.
template <class Act>
void repair_block(const float* x, float least, float largest, Act* out) {
  bool is_finite = true, is_tiny = true;
  for (int i = 0; i < kBlockK; ++i) {
    const float magnitude = __builtin_fabsf(x[i]);
    is_finite = is_finite && magnitude <= largest;
    is_tiny = is_tiny && magnitude < least;
  }
  if (!is_finite) return store_nan_record(out);
  if (is_tiny) store_zero_record(out);
}

// ---- 15 bits ----

TELLIN_INLINE void quantize_block(const float* x, Act16* out) {
  __m256 magnitudes = _mm256_setzero_ps(), finite = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256 a = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_loadu_ps(x + 8 * i));
    finite = _mm256_and_ps(finite, _mm256_cmp_ps(a, _mm256_set1_ps(__FLT_MAX__), _CMP_LE_OQ));
    magnitudes = _mm256_max_ps(magnitudes, a);
  }
  const float magnitude = horizontal_max(magnitudes);
  if (__builtin_expect(_mm256_movemask_ps(finite) != 0xff || !(magnitude >= kTinyAct), 0)) {
    return repair_block(x, kTinyAct, __FLT_MAX__, out);
  }
  const __m256 factor = _mm256_set1_ps(kAct16Largest / magnitude);
  const __m256i half = _mm256_set1_epi32(1 << (kPlaneShift - 1));
  __m256i v[4], high[4], low[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), factor));
    high[i] = _mm256_srai_epi32(_mm256_add_epi32(v[i], half), kPlaneShift);  // leaves a rest within [-64, 63]
    low[i] = _mm256_sub_epi32(v[i], _mm256_slli_epi32(high[i], kPlaneShift));
  }
  store_plane(high, out->q[0]);
  store_plane(low, out->q[1]);
  const int32_t sum0 = horizontal_sum(_mm256_add_epi32(v[0], v[1]));
  const int32_t sum1 = horizontal_sum(_mm256_add_epi32(v[2], v[3]));
  out->scale = magnitude / kAct16Largest;
  out->sum = out->scale * static_cast<float>(sum0 + sum1);
  out->half_sum[0] = out->scale * static_cast<float>(sum0);
  out->half_sum[1] = out->scale * static_cast<float>(sum1);
  out->neg_sums[0] = -sum0;
  out->neg_sums[1] = -sum1;
}

// ---- 8 bits: two blocks, A and B, side by side ----

template <int kLanes>
TELLIN_INLINE __m256 lanes_of(__m256 a, __m256 b) {
  return _mm256_permute2f128_ps(a, b, kLanes);
}

TELLIN_INLINE void load_block(const float* x, __m256 (&v)[4]) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) v[i] = _mm256_loadu_ps(x + 8 * i);
}

// The greatest value of a block (kMost) or the least, in eight parts.
template <bool kMost>
TELLIN_INLINE __m256 extreme(__m256 a, __m256 b) {
  return kMost ? _mm256_max_ps(a, b) : _mm256_min_ps(a, b);
}
template <bool kMost>
TELLIN_INLINE __m256 extreme_of(const __m256 (&v)[4]) {
  return extreme<kMost>(extreme<kMost>(v[0], v[1]), extreme<kMost>(v[2], v[3]));
}

// That of block A in the low lane, of block B in the high one.
template <bool kMost>
TELLIN_INLINE __m256 extremes_of(const __m256 (&va)[4], const __m256 (&vb)[4]) {
  const __m256 a = extreme_of<kMost>(va), b = extreme_of<kMost>(vb);
  __m256 v = extreme<kMost>(lanes_of<0x20>(a, b), lanes_of<0x31>(a, b));
  v = extreme<kMost>(v, _mm256_permute_ps(v, 0x4e));
  return extreme<kMost>(v, _mm256_permute_ps(v, 0xb1));
}

// Values of a block, in units of the inverse of `factor`: [0, 16) and [16, 32), each in the order of packs.
TELLIN_INLINE void whole_words(const __m256 (&v)[4], __m256 factor, __m256i (&words)[2]) {
  const auto whole = [&](__m256 x) { return _mm256_cvtps_epi32(_mm256_mul_ps(x, factor)); };
  words[0] = _mm256_packs_epi32(whole(v[0]), whole(v[1]));
  words[1] = _mm256_packs_epi32(whole(v[2]), whole(v[3]));
}

// Still in the order of packs.
TELLIN_INLINE __m256i bytes_less(const __m256i (&words)[2], __m256i zero) {
  return _mm256_packs_epi16(_mm256_sub_epi16(words[0], zero), _mm256_sub_epi16(words[1], zero));
}

// Every 32-bit lane the same, from memory.
template <uint32_t kValue>
TELLIN_INLINE __m256i lanes32() {
  static constexpr uint32_t kInMemory = kValue;
  return broadcast_word(&kInMemory);
}

// Sums of q + 128 over parts of both halves of a block, in each lane.
TELLIN_INLINE __m256i octet_sums(__m256i q) {
  return _mm256_sad_epu8(_mm256_xor_si256(q, lanes32<0x80808080>()), _mm256_setzero_si256());
}

// `ends`: what follows q in a record. `shifted`: see act_rows.h.
TELLIN_INLINE void store_record(__m256i q, __m256 ends, Act8* out, uint8_t* shifted) {
  q = _mm256_permutevar8x32_epi32(q, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out->q[0]), q);
  _mm256_storeu_ps(&out->scale, ends);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(shifted), _mm256_xor_si256(q, lanes32<0x80808080>()));
}

// How two blocks are quantised: block A in the low lane, B in the high one.
struct PairGrid {
  __m256 magnitude, scale, inverse;
  __m256i zero;
};

TELLIN_INLINE PairGrid pair_grid(__m256 high, __m256 low) {
  const __m256 middle = _mm256_mul_ps(_mm256_add_ps(high, low), _mm256_set1_ps(kAct8StepsPerMiddle));
  const __m256 place = _mm256_div_ps(middle, _mm256_sub_ps(high, low));
  const __m256 minus_low = _mm256_xor_ps(low, _mm256_set1_ps(-0.0f));
  const __m256 most = _mm256_set1_ps(kMostZeroSteps), fewest = _mm256_set1_ps(-kMostZeroSteps);
  const __m256i steps = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(place, fewest), most));
  // By steps modulo 8.
  const __m256 up =
      _mm256_setr_ps(kAct8Up[3], kAct8Up[4], kAct8Up[5], kAct8Up[6], 0, kAct8Up[0], kAct8Up[1], kAct8Up[2]);
  const __m256 down = _mm256_setr_ps(kAct8Down[3], kAct8Down[4], kAct8Down[5], kAct8Down[6], 0, kAct8Down[0],
                                     kAct8Down[1], kAct8Down[2]);
  const __m256 need = _mm256_max_ps(_mm256_mul_ps(high, _mm256_permutevar8x32_ps(up, steps)),
                                    _mm256_mul_ps(minus_low, _mm256_permutevar8x32_ps(down, steps)));
  const __m256i rest = lanes32<kAct8ScaleRest>();
  const __m256i scale = _mm256_andnot_si256(rest, _mm256_add_epi32(_mm256_castps_si256(need), rest));
  // 1 / (m * 2^e) is 1 / m, rounded, less e in the exponent; permute_ps looks at the two bits of m alone.
  const __m256i inverse_m = _mm256_castps_si256(_mm256_permutevar_ps(
      _mm256_setr_ps(1 / kAct8Scale[0], 1 / kAct8Scale[1], 1 / kAct8Scale[2], 1 / kAct8Scale[3],
                     1 / kAct8Scale[0], 1 / kAct8Scale[1], 1 / kAct8Scale[2], 1 / kAct8Scale[3]),
      _mm256_srli_epi32(scale, 21)));
  const __m256i exponent = _mm256_and_si256(scale, lanes32<0x7f800000>());
  const __m256i inverse = _mm256_add_epi32(inverse_m, _mm256_sub_epi32(lanes32<127 << 23>(), exponent));
  return {_mm256_max_ps(high, minus_low), _mm256_castsi256_ps(scale), _mm256_castsi256_ps(inverse),
          _mm256_slli_epi32(steps, 5)};
}

// What follows q in the records of blocks A (low lane) and B (high lane).
TELLIN_INLINE void record_ends(__m256i qa, __m256i qb, const PairGrid& grid, __m256& floats, __m256& words) {
  const __m256 octets_a = _mm256_castsi256_ps(octet_sums(qa)), octets_b = _mm256_castsi256_ps(octet_sums(qb));
  // Of q + 128: sums of the halves, then 0, sum, sums of the halves.
  const __m256i halves = _mm256_add_epi64(_mm256_castps_si256(lanes_of<0x20>(octets_a, octets_b)),
                                          _mm256_castps_si256(lanes_of<0x31>(octets_a, octets_b)));
  const __m256i sums = _mm256_add_epi32(_mm256_shuffle_epi32(halves, _MM_SHUFFLE(2, 0, 0, 1)),
                                        _mm256_shuffle_epi32(halves, _MM_SHUFFLE(1, 1, 2, 1)));
  constexpr int kShift = 128 * kBlockK;
  const __m256i shifts =
      _mm256_setr_epi32(-1, kShift, kShift / 2, kShift / 2, -1, kShift, kShift / 2, kShift / 2);
  const __m256i negative = _mm256_sub_epi32(shifts, sums);  // -1, -sum, -sums of the halves
  const __m256i zeros = grid.zero, scales = _mm256_castps_si256(grid.scale);
  const __m256i log2_counts = _mm256_setr_epi32(32, 5, 4, 4, 32, 5, 4, 4);
  const __m256i whole = _mm256_sub_epi32(_mm256_sllv_epi32(zeros, log2_counts), negative);
  floats = _mm256_mul_ps(_mm256_cvtepi32_ps(whole), _mm256_castsi256_ps(scales));
  // Both offsets: 64 * (the two bits of m), 64 * (zero / 32 + 3) in the high half.
  const __m256i m_offsets = _mm256_and_si256(_mm256_srli_epi32(scales, 15), lanes32<0xc0>());
  const __m256i first = lanes32<kMostZeroSteps * kEntryBytes << 16>();
  const __m256i offsets = _mm256_add_epi32(m_offsets, _mm256_add_epi32(_mm256_slli_epi32(zeros, 17), first));
  const __m256i pairs =
      _mm256_bsrli_epi128(_mm256_blend_epi16(_mm256_slli_epi32(negative, 16), zeros, 0x55), 4);
  words = _mm256_castsi256_ps(_mm256_blend_epi32(pairs, offsets, 0x88));
}

void repair_record(const float* x, Act8* out, uint8_t* shifted) {
  repair_block(x, kTinyAct8, kAct8LargestMagnitude, out);
  for (int f = 0; f < kBlockK; ++f) shifted[f] = static_cast<uint8_t>(out->q[0][f] + 128);
}

constexpr uint32_t kTinyAct8Bits = (127 - 80) << 23, kLargestAct8Bits = (127 + 100) << 23;
static_assert(kTinyAct8 == 0x1p-80f && kAct8LargestMagnitude == 0x1p100f);

// Two blocks, and where they are written (see act_rows.h).
struct Pair {
  const float *a, *b;
  Act8 *out_a, *out_b;
  uint8_t *shifted_a, *shifted_b;
};

// The next two blocks of the walk. The last one of an odd number is both.
TELLIN_INLINE Pair next_pair(BlockWalk& walk) {
  const auto record = [&walk] { return reinterpret_cast<Act8*>(walk.records()) + walk.block(); };
  const auto shifted = [&walk] {
    return walk.records() + shifted_offset(walk.row_bytes()) + walk.block() * kBlockK;
  };
  walk.fetch_ahead<Act8>();
  Pair pair;
  pair.a = pair.b = walk.values();
  pair.out_a = pair.out_b = record();
  pair.shifted_a = pair.shifted_b = shifted();
  walk.advance();
  if (walk.left() == 0) return pair;
  walk.fetch_ahead<Act8>();
  pair.b = walk.values();
  pair.out_b = record();
  pair.shifted_b = shifted();
  walk.advance();
  return pair;
}

TELLIN_INLINE PairGrid grid_of(const Pair& pair) {
  __m256 a[4], b[4];
  load_block(pair.a, a);
  load_block(pair.b, b);
  return pair_grid(extremes_of<true>(a, b), extremes_of<false>(a, b));
}

TELLIN_INLINE void store_pair(const Pair& pair, const PairGrid& grid) {
  __m256 a[4], b[4];
  load_block(pair.a, a);
  load_block(pair.b, b);
  __m256i words_a[2], words_b[2];
  whole_words(a, lanes_of<0x00>(grid.inverse, grid.inverse), words_a);
  whole_words(b, lanes_of<0x11>(grid.inverse, grid.inverse), words_b);
  const __m256i zero = _mm256_packs_epi32(grid.zero, grid.zero);
  const __m256i qa = bytes_less(words_a, _mm256_permute2x128_si256(zero, zero, 0x00));
  const __m256i qb = bytes_less(words_b, _mm256_permute2x128_si256(zero, zero, 0x11));
  __m256 floats, words;
  record_ends(qa, qb, grid, floats, words);
  store_record(qa, lanes_of<0x20>(floats, words), pair.out_a, pair.shifted_a);
  store_record(qb, lanes_of<0x31>(floats, words), pair.out_b, pair.shifted_b);

  // Whole values are within +-224, but for those of NaN, which are -2^31.
  const __m256i least =
      _mm256_min_epi16(_mm256_min_epi16(words_a[0], words_a[1]), _mm256_min_epi16(words_b[0], words_b[1]));
  const __m256i special = _mm256_cmpeq_epi16(least, lanes32<0x80008000>());
  // Magnitudes from kTinyAct8 to kAct8LargestMagnitude become the least integers.
  const __m256i size =
      _mm256_add_epi32(_mm256_castps_si256(grid.magnitude), lanes32<0x80000000 - kTinyAct8Bits>());
  const __m256i misfit = _mm256_cmpgt_epi32(size, lanes32<0x80000000 + kLargestAct8Bits - kTinyAct8Bits>());
  const __m256i any = _mm256_or_si256(special, misfit);
  if (__builtin_expect(_mm256_movemask_epi8(any) != 0, 0)) {
    repair_record(pair.a, pair.out_a, pair.shifted_a);
    repair_record(pair.b, pair.out_b, pair.shifted_b);
  }
}

// ---- rows ----

template <class Act>
TELLIN_INLINE void quantize_blocks(BlockWalk walk) {
  if (walk.left() == 0) return;
  if constexpr (Act::kPlanes == 1) {
    // A pair is a long chain of operations: the grid of the next one is found beside what a pair stores.
    Pair next = next_pair(walk);
    PairGrid next_grid = grid_of(next);
    while (walk.left() > 0) {
      const Pair pair = next;
      const PairGrid grid = next_grid;
      next = next_pair(walk);
      next_grid = grid_of(next);
      store_pair(pair, grid);
    }
    store_pair(next, next_grid);
  } else {
    for (; walk.left() > 0; walk.advance()) {
      quantize_block(walk.values(), reinterpret_cast<Act*>(walk.records()) + walk.block());
    }
  }
}

// Blocks of zeros from block `first` to a row's end.
template <class Act>
void pad_blocks(int64_t k, int64_t first, int64_t row, const QuantizedRows& out) {
  uint8_t* const target = out.data + row * out.row_bytes;
  const int64_t num_blocks = (k + 255) / 256 * 8;
  for (int64_t b = first; b < num_blocks; ++b) store_zero_record(reinterpret_cast<Act*>(target) + b);
  if constexpr (Act::kPlanes == 1) {
    __builtin_memset(target + shifted_offset(out.row_bytes) + first * kBlockK, 128,
                     static_cast<size_t>((num_blocks - first) * kBlockK));
  }
}

template <class Act>
void quantize_whole_row(const float* x, int64_t k, int64_t row, const QuantizedRows& out) {
  int64_t full = k / kBlockK;
  quantize_blocks<Act>({x, 0, row, row + 1, 0, full, out});
  if (k % kBlockK != 0) {
    float last[kBlockK] = {};
    __builtin_memcpy(last, x + full * kBlockK, static_cast<size_t>(k % kBlockK) * sizeof(float));
    quantize_blocks<Act>({last - full * kBlockK, 0, row, row + 1, full, full + 1, out});
    ++full;
  }
  pad_blocks<Act>(k, full, row, out);
}

void quantize_row(ActPrecision precision, const float* x, int64_t k, int64_t row, const QuantizedRows& out) {
  if (precision == ActPrecision::kInt8) {
    quantize_whole_row<Act8>(x, k, row, out);
  } else {
    quantize_whole_row<Act16>(x, k, row, out);
  }
}

void quantize_part(ActPrecision precision, const float* x, int64_t ldx, int64_t m0, int64_t m1, int64_t begin,
                   int64_t end, const QuantizedRows& out) {
  const BlockWalk walk(x, ldx, m0, m1, begin / kBlockK, end / kBlockK, out);
  if (precision == ActPrecision::kInt8) {
    quantize_blocks<Act8>(walk);
  } else {
    quantize_blocks<Act16>(walk);
  }
}

void pad_row(ActPrecision precision, int64_t k, int64_t row, const QuantizedRows& out) {
  if (precision == ActPrecision::kInt8) {
    pad_blocks<Act8>(k, k / kBlockK, row, out);
  } else {
    pad_blocks<Act16>(k, k / kBlockK, row, out);
  }
}

}  // namespace
}  // namespace tellin

// Body of an instruction-set unit's sampling.cpp. The including file defines TELLIN_SAMPLING_ISA (the name of
// the variant), TELLIN_SAMPLING_TABLE (the symbol to export) and TELLIN_SAMPLING_WIDTH (float lanes of a
// register). Everything but the table has internal linkage: no copy of these functions can leak into another
// unit.
#include <cstring>
#include <limits>

#if defined(__AVX2__)
// GCC 12 takes the intrinsics' deliberately undefined pass-through operands for uninitialised variables.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#include "tellin/sampling_kernels.h"

namespace tellin {
namespace {

constexpr int64_t kLanes = TELLIN_SAMPLING_WIDTH;
constexpr int64_t kHalfLanes = kLanes / 2;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr float kPosInf = std::numeric_limits<float>::infinity();

typedef float FloatVec __attribute__((vector_size(4 * TELLIN_SAMPLING_WIDTH)));
typedef int32_t IntVec __attribute__((vector_size(4 * TELLIN_SAMPLING_WIDTH)));
typedef float HalfVec __attribute__((vector_size(2 * TELLIN_SAMPLING_WIDTH)));
typedef double DoubleVec __attribute__((vector_size(4 * TELLIN_SAMPLING_WIDTH)));
typedef uint64_t LongVec __attribute__((vector_size(4 * TELLIN_SAMPLING_WIDTH)));

#define TELLIN_INLINE static inline __attribute__((always_inline))

// Vectors are passed by reference: by value they would depend on the ABI of the unit's flags.
TELLIN_INLINE void load(const float* p, FloatVec& v) {
  std::memcpy(&v, p, sizeof v);
}
TELLIN_INLINE void store(float* p, const FloatVec& v) {
  std::memcpy(p, &v, sizeof v);
}

// w = 2^kWeightBits * exp(z) for z <= 0 with a relative error below 2e-7; z is clamped to [-64, 0].
// Cody-Waite reduction to |r| <= ln(2)/2 and the Taylor polynomial of degree 7 in Horner form, separate
// multiplies and adds. Four vectors step by step, because one is a chain of dependent operations.
constexpr int64_t kWide = 4;

TELLIN_INLINE void exp_weights(FloatVec (&z)[kWide], FloatVec (&w)[kWide]) {
  constexpr float kCoefficients[] = {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f,
                                     0.5f,          1.0f,          1.0f};
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the low mantissa bits
  FloatVec shifted[kWide];
#pragma GCC unroll 4
  for (int64_t j = 0; j < kWide; ++j) {
    z[j] = z[j] < -64.0f ? FloatVec{} - 64.0f : z[j];
    shifted[j] = z[j] * 1.44269504f + kRound;
  }
#pragma GCC unroll 4
  for (int64_t j = 0; j < kWide; ++j) {
    const FloatVec k = shifted[j] - kRound;
    z[j] = (z[j] - k * 0.693359375f) - k * -2.12194440e-4f;
    w[j] = z[j] * (1.0f / 5040.0f);
  }
#pragma GCC unroll 7
  for (int64_t i = 0; i < 7; ++i) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < kWide; ++j) {
      w[j] = w[j] + kCoefficients[i];
      if (i < 6) w[j] = w[j] * z[j];
    }
  }
#pragma GCC unroll 4
  for (int64_t j = 0; j < kWide; ++j) {
    IntVec exponent;
    std::memcpy(&exponent, &shifted[j], sizeof exponent);
    exponent = (exponent - 0x4B400000 + 127 + kWeightBits) << 23;
    FloatVec scale;
    std::memcpy(&scale, &exponent, sizeof scale);
    w[j] *= scale;
  }
}

// Weights to the nearest integers, each kIntegerBase too large.
#if TELLIN_SAMPLING_WIDTH == 16 && defined(__AVX512DQ__)
constexpr uint64_t kIntegerBase = 0;

TELLIN_INLINE void round_weights(const FloatVec& w, LongVec& low, LongVec& high) {
  const __m512 v = reinterpret_cast<const __m512&>(w);
  low = reinterpret_cast<LongVec>(_mm512_cvtps_epi64(_mm512_castps512_ps256(v)));
  high = reinterpret_cast<LongVec>(_mm512_cvtps_epi64(_mm512_extractf32x8_ps(v, 1)));
}
#else
constexpr uint64_t kIntegerBase = 0x4330000000000000ULL;  // bits of the double 2^52

// Adding 2^52 rounds to an integer, which is then in the mantissa.
TELLIN_INLINE void round_weights(const FloatVec& w, LongVec& low, LongVec& high) {
  HalfVec half[2];
  std::memcpy(&half[0], &w, sizeof half[0]);
  std::memcpy(&half[1], reinterpret_cast<const char*>(&w) + sizeof half[0], sizeof half[1]);
  const DoubleVec d0 = __builtin_convertvector(half[0], DoubleVec) + 4503599627370496.0;
  const DoubleVec d1 = __builtin_convertvector(half[1], DoubleVec) + 4503599627370496.0;
  std::memcpy(&low, &d0, sizeof low);
  std::memcpy(&high, &d1, sizeof high);
}
#endif

// Sum of the lanes of a + b.
TELLIN_INLINE uint64_t sum_of_lanes(const LongVec& a, const LongVec& b) {
  typedef uint64_t HalfLongVec __attribute__((vector_size(2 * TELLIN_SAMPLING_WIDTH)));
  const LongVec sum = a + b;
  HalfLongVec low, high;
  std::memcpy(&low, &sum, sizeof low);
  std::memcpy(&high, reinterpret_cast<const char*>(&sum) + sizeof low, sizeof high);
  low += high;
  uint64_t total = 0;
  for (int64_t i = 0; i < kHalfLanes / 2; ++i) total += low[i];
  return total;
}

// Weights of one full block.
TELLIN_INLINE void block_weights(const float* x, float max, float inv_t, uint64_t* out) {
  for (int64_t i = 0; i < kSampleBlock; i += kWide * kLanes) {
    FloatVec z[kWide], w[kWide];
    for (int64_t j = 0; j < kWide; ++j) {
      load(x + i + j * kLanes, z[j]);
      z[j] = (z[j] - max) * inv_t;
    }
    exp_weights(z, w);
    for (int64_t j = 0; j < kWide; ++j, out += kLanes) {
      LongVec low, high;
      round_weights(w[j], low, high);
      low -= kIntegerBase;
      high -= kIntegerBase;
      std::memcpy(out, &low, sizeof low);
      std::memcpy(out + kHalfLanes, &high, sizeof high);
    }
  }
}

// Sum of the weights of one full block, of entries >= lowest if kHasLowest.
template <bool kHasLowest>
TELLIN_INLINE uint64_t mass_of_block(const float* x, float max, float inv_t, float lowest) {
  LongVec sum[2] = {};
#pragma GCC unroll 4
  for (int64_t i = 0; i < kSampleBlock; i += kWide * kLanes) {
    FloatVec z[kWide], w[kWide];
#pragma GCC unroll 4
    for (int64_t j = 0; j < kWide; ++j) {
      FloatVec v;
      load(x + i + j * kLanes, v);
      z[j] = (v - max) * inv_t;
      if (kHasLowest) z[j] = v >= lowest ? z[j] : FloatVec{} - 64.0f;
    }
    exp_weights(z, w);
#pragma GCC unroll 4
    for (int64_t j = 0; j < kWide; ++j) {
      LongVec low, high;
      round_weights(w[j], low, high);
      sum[0] += low;
      sum[1] += high;
    }
  }
  return sum_of_lanes(sum[0], sum[1]) - kSampleBlock * kIntegerBase;  // modulo 2^64
}

// The last, short block of a row, padded with -infinity.
TELLIN_INLINE void pad_block(const float* x, int64_t n, float* block) {
  for (int64_t i = 0; i < kSampleBlock; ++i) block[i] = i < n ? x[i] : kNegInf;
}

// Largest entry of one full block.
TELLIN_INLINE float max_of_block(const float* x) {
  float best = kNegInf;
  for (int64_t i = 0; i < kSampleBlock; ++i) {
    if (!(x[i] < kPosInf)) return kPosInf;
    best = x[i] > best ? x[i] : best;
  }
  return best;
}

// Entries of a and b, which is counted on from a, in the order of the indices.
#if defined(__clang__)
#define TELLIN_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else  // GCC has the former from version 12 on
#define TELLIN_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntVec{__VA_ARGS__})
#endif

// a's first half, b's first half, ... in turns, the larger of them and their second halves.
TELLIN_INLINE void max_of_halves(const FloatVec& a, const FloatVec& b, FloatVec& out) {
#if TELLIN_SAMPLING_WIDTH == 16
  const FloatVec first = TELLIN_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const FloatVec second = TELLIN_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif TELLIN_SAMPLING_WIDTH == 8
  const FloatVec first = TELLIN_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  const FloatVec second = TELLIN_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  const FloatVec first = TELLIN_SHUFFLE(a, b, 0, 4, 1, 5);
  const FloatVec second = TELLIN_SHUFFLE(a, b, 2, 6, 3, 7);
#endif
  out = first > second ? first : second;
}

// Largest entries of kLanes full blocks, `stride` entries apart; of `count` of them if those are fewer.
// Fetches what lies `ahead` entries behind.
TELLIN_INLINE void max_of_blocks(const float* x, int64_t stride, int64_t count, int64_t ahead,
                                 FloatVec& maxima) {
  constexpr int64_t kVecs = kSampleBlock / kLanes;
  FloatVec best[kLanes], sums[4] = {};
#pragma GCC unroll 16
  for (int64_t i = 0; i < kLanes; ++i) {
    const float* block = x + (i < count ? i : 0) * stride;
    if (ahead > 0) {
#pragma GCC unroll 4
      for (int64_t j = 0; j < kSampleBlock; j += 16) __builtin_prefetch(block + ahead + j);
    }
    FloatVec v[kVecs];
#pragma GCC unroll 16
    for (int64_t j = 0; j < kVecs; ++j) {
      load(block + j * kLanes, v[j]);
      sums[j % 4] += v[j];
    }
#pragma GCC unroll 4
    for (int64_t half = kVecs / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
      for (int64_t j = 0; j < half; ++j) v[j] = v[j] > v[j + half] ? v[j] : v[j + half];
    }
    best[i] = v[0];
  }
#pragma GCC unroll 4
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < half; ++i) max_of_halves(best[i], best[i + half], best[i]);
  }
  maxima = best[0];
  // NaN and +infinity survive addition, unless finite entries overflow or -infinity makes it NaN: then the
  // blocks are looked at one by one.
  const IntVec good = (sums[0] + sums[1]) + (sums[2] + sums[3]) < kPosInf;
  int32_t all = -1;
  for (int64_t i = 0; i < kLanes; ++i) all &= good[i];
  if (__builtin_expect(all == 0, 0)) {
    for (int64_t i = 0; i < kLanes; ++i) maxima[i] = max_of_block(x + (i < count ? i : 0) * stride);
  }
}

constexpr int64_t kAhead = 1024;  // entries; the loads of a few blocks come in bursts

bool block_max(const float* x, int64_t n, float* maxima) {
  const int64_t full = n / kSampleBlock;
  FloatVec largest = FloatVec{} + kNegInf, found;
  int64_t b = 0;
  for (; b + kLanes <= full; b += kLanes) {
    max_of_blocks(x + b * kSampleBlock, kSampleBlock, kLanes, kAhead, found);
    store(maxima + b, found);
    largest = found > largest ? found : largest;
  }
  float rest[kLanes];
  if (b < full) {
    max_of_blocks(x + b * kSampleBlock, kSampleBlock, full - b, 0, found);
    largest = found > largest ? found : largest;
    store(rest, found);
    for (int64_t i = 0; b + i < full; ++i) maxima[b + i] = rest[i];
  }
  bool good = true;
  if (n % kSampleBlock != 0) {
    float block[kSampleBlock];
    pad_block(x + full * kSampleBlock, n % kSampleBlock, block);
    maxima[full] = max_of_block(block);
    good = maxima[full] < kPosInf;
  }
  for (int64_t i = 0; i < kLanes; ++i) good &= largest[i] < kPosInf;
  return good;
}

void tile_max(const float* x, int64_t stride, int64_t rows, int64_t n, float* maxima, int64_t maxima_stride) {
  float found[kLanes];
  for (int64_t m = 0; m < rows; m += kLanes) {
    const int64_t count = rows - m < kLanes ? rows - m : kLanes;
    const float* tile = x + m * stride;
    float* out = maxima + m * maxima_stride;
    for (int64_t begin = 0; begin < n; begin += kSampleBlock, ++out) {
      if (n - begin >= kSampleBlock) {
        FloatVec v;
        max_of_blocks(tile + begin, stride, count, 0, v);
        store(found, v);
      } else {
        float block[kSampleBlock];
        for (int64_t i = 0; i < count; ++i) {
          pad_block(tile + i * stride + begin, n - begin, block);
          found[i] = max_of_block(block);
        }
      }
      for (int64_t i = 0; i < count; ++i) out[i * maxima_stride] = found[i];
    }
  }
}

uint64_t block_mass(const float* x, int64_t n, const float* maxima, float max, float inv_t, float lowest,
                    float least_max, uint64_t* masses) {
  least_max = lowest > least_max ? lowest : least_max;
  uint64_t total = 0;
  float padded[kSampleBlock];
  for (int64_t b = 0; b * kSampleBlock < n; ++b) {
    uint64_t mass = 0;
    if (maxima[b] >= least_max && (maxima[b] - max) * inv_t >= -kWeightCutoff) {
      const float* block = x + b * kSampleBlock;
      if (n - b * kSampleBlock < kSampleBlock) {
        pad_block(block, n - b * kSampleBlock, padded);
        block = padded;
      }
      mass = lowest > kNegInf ? mass_of_block<true>(block, max, inv_t, lowest)
                              : mass_of_block<false>(block, max, inv_t, lowest);
    }
    masses[b] = mass;
    total += mass;
  }
  return total;
}

void weights(const float* x, int64_t n, float max, float inv_t, uint64_t* out) {
  if (n == kSampleBlock) {
    block_weights(x, max, inv_t, out);
    return;
  }
  float block[kSampleBlock];
  uint64_t w[kSampleBlock];
  pad_block(x, n, block);
  block_weights(block, max, inv_t, w);
  std::memcpy(out, w, static_cast<size_t>(n) * sizeof(uint64_t));
}

// Bit i: whether lowest <= x[i] <= highest, for a full block.
TELLIN_INLINE uint64_t hits_of_block(const float* x, float lowest, float highest) {
  uint64_t bits = 0;
#if TELLIN_SAMPLING_WIDTH == 16 && defined(__AVX512F__)
  const __m512 least = _mm512_set1_ps(lowest), most = _mm512_set1_ps(highest);
  for (int64_t i = 0; i < kSampleBlock; i += kLanes) {
    const __m512 v = _mm512_loadu_ps(x + i);
    const __mmask16 hit =
        _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(v, least, _CMP_GE_OQ), v, most, _CMP_LE_OQ);
    bits |= static_cast<uint64_t>(hit) << i;
  }
#elif TELLIN_SAMPLING_WIDTH == 8 && defined(__AVX2__)
  const __m256 least = _mm256_set1_ps(lowest), most = _mm256_set1_ps(highest);
  for (int64_t i = 0; i < kSampleBlock; i += kLanes) {
    const __m256 v = _mm256_loadu_ps(x + i);
    const __m256 hit = _mm256_and_ps(_mm256_cmp_ps(v, least, _CMP_GE_OQ), _mm256_cmp_ps(v, most, _CMP_LE_OQ));
    bits |= static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_ps(hit))) << i;
  }
#else
  alignas(8) uint8_t hit[kSampleBlock];
  for (int64_t i = 0; i < kSampleBlock; ++i) hit[i] = (x[i] >= lowest) & (x[i] <= highest);
  for (int64_t i = 0; i < kSampleBlock; i += 8) {
    uint64_t eight;  // bytes 0 or 1, gathered in the top byte of the product
    std::memcpy(&eight, hit + i, sizeof eight);
    bits |= (eight * 0x0102040810204080ULL >> 56) << i;
  }
#endif
  return bits;
}

int64_t list_entries(const float* x, int64_t n, const float* maxima, float lowest, float highest,
                     int64_t* block, Candidate* out, int64_t capacity) {
  const int64_t num_blocks = (n + kSampleBlock - 1) / kSampleBlock;
  int64_t count = 0;
  float padded[kSampleBlock];
  int64_t b = *block;
  for (; b < num_blocks && count + kSampleBlock <= capacity; ++b) {
    if (maxima[b] < lowest) continue;
    const int64_t begin = b * kSampleBlock, left = n - begin;
    const float* entries = x + begin;
    if (left < kSampleBlock) {
      pad_block(entries, left, padded);
      entries = padded;
    }
    uint64_t bits = hits_of_block(entries, lowest, highest);
    if (left < kSampleBlock) bits &= (uint64_t{1} << left) - 1;
    for (; bits != 0; bits &= bits - 1) {
      const int64_t i = __builtin_ctzll(bits);
      out[count++] = {entries[i], static_cast<int32_t>(begin + i), 0};
    }
  }
  *block = b;
  return count;
}

int64_t count_at_least(const float* x, int64_t n, const float* maxima, float value) {
  int64_t count = 0;
  float padded[kSampleBlock];
  for (int64_t begin = 0; begin < n; begin += kSampleBlock) {
    if (maxima[begin / kSampleBlock] < value) continue;
    const float* block = x + begin;
    int64_t padding = 0;
    if (n - begin < kSampleBlock) {
      pad_block(block, n - begin, padded);
      block = padded;
      padding = value == kNegInf ? kSampleBlock - (n - begin) : 0;
    }
    IntVec lanes = {};
    for (int64_t i = 0; i < kSampleBlock; i += kLanes) {
      FloatVec v;
      load(block + i, v);
      lanes -= v >= value;
    }
    for (int64_t i = 0; i < kLanes; ++i) count += lanes[i];
    count -= padding;
  }
  return count;
}

void apply_bitmask(float* x, int64_t n, const int32_t* mask) {
  for (int64_t begin = 0; begin < n; begin += 32) {
    const uint32_t bits = static_cast<uint32_t>(mask[begin / 32]);
    if (bits == 0xFFFFFFFFu) continue;
    const int64_t count = n - begin < 32 ? n - begin : 32;
    for (int64_t i = 0; i < count; ++i) x[begin + i] = (bits >> i & 1u) != 0 ? x[begin + i] : kNegInf;
  }
}

void divide(float* x, int64_t n, float divisor) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    FloatVec v;
    load(x + i, v);
    store(x + i, v / divisor);
  }
  for (; i < n; ++i) x[i] /= divisor;
}

}  // namespace

extern const SamplingKernels TELLIN_SAMPLING_TABLE;
const SamplingKernels TELLIN_SAMPLING_TABLE = {
    TELLIN_SAMPLING_ISA, block_max,      tile_max,      block_mass, weights,
    list_entries,        count_at_least, apply_bitmask, divide,
};

}  // namespace tellin

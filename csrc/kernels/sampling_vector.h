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

TELLIN_INLINE float max_of_block(const float* x, IntVec& good) {
  FloatVec best;
  load(x, best);
  good &= best < kPosInf;  // false for NaN and for +infinity
  for (int64_t i = kLanes; i < kSampleBlock; i += kLanes) {
    FloatVec v;
    load(x + i, v);
    good &= v < kPosInf;
    best = v > best ? v : best;
  }
  float out = best[0];
  for (int64_t i = 1; i < kLanes; ++i) out = best[i] > out ? best[i] : out;
  return out;
}

bool block_max(const float* x, int64_t n, float* maxima) {
  IntVec good = IntVec{} - 1;
  const int64_t full = n / kSampleBlock;
  for (int64_t b = 0; b < full; ++b) maxima[b] = max_of_block(x + b * kSampleBlock, good);
  if (n % kSampleBlock != 0) {
    float block[kSampleBlock];
    pad_block(x + full * kSampleBlock, n % kSampleBlock, block);
    maxima[full] = max_of_block(block, good);
  }
  int32_t all = -1;
  for (int64_t i = 0; i < kLanes; ++i) all &= good[i];
  return all != 0;
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
    TELLIN_SAMPLING_ISA, block_max, block_mass, weights, list_entries, count_at_least, apply_bitmask, divide,
};

}  // namespace tellin

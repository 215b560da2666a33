// Body of an instruction-set unit's sampling.cpp. The including file defines TELLIN_SAMPLING_ISA (the name of
// the variant), TELLIN_SAMPLING_TABLE (the symbol to export) and TELLIN_SAMPLING_WIDTH (float lanes of a
// register). Everything but the table has internal linkage: no copy of these functions can leak into another
// unit.
#include <cstring>
#include <limits>

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

// e = exp(z) for z <= 0 with a relative error below 2e-7; z is clamped to [-64, 0]. Cody-Waite reduction to
// |r| <= ln(2)/2 and the Taylor polynomial of degree 7 in Horner form, separate multiplies and adds.
TELLIN_INLINE void exp_nonpositive(const FloatVec& z, FloatVec& e) {
  const float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  const FloatVec clamped = z < -64.0f ? FloatVec{} - 64.0f : z;
  const FloatVec shifted = clamped * 1.44269504f + kRound;
  IntVec exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  const FloatVec k = shifted - kRound;
  const FloatVec r = (clamped - k * 0.693359375f) - k * -2.12194440e-4f;
  FloatVec p = r * (1.0f / 5040.0f) + (1.0f / 720.0f);
  p = p * r + (1.0f / 120.0f);
  p = p * r + (1.0f / 24.0f);
  p = p * r + (1.0f / 6.0f);
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const IntVec bits = (exponent - 0x4B400000 + 127) << 23;
  FloatVec scale;
  std::memcpy(&scale, &bits, sizeof scale);
  e = p * scale;
}

// Weights of one full block.
TELLIN_INLINE void block_weights(const float* x, float max, float inv_t, float lowest, uint64_t* w) {
  float e[kSampleBlock];
  for (int64_t i = 0; i < kSampleBlock; i += kLanes) {
    FloatVec v, out;
    load(x + i, v);
    FloatVec z = (v - max) * inv_t;
    z = v >= lowest ? z : FloatVec{} - 64.0f;
    exp_nonpositive(z, out);
    store(e + i, out);
  }
  const double kScale = static_cast<double>(1ULL << kWeightBits);
  const double kRound = 4503599627370496.0;  // 2^52: adding it rounds to an integer in the mantissa
  for (int64_t i = 0; i < kSampleBlock; i += kHalfLanes) {
    HalfVec half;
    std::memcpy(&half, e + i, sizeof half);
    const DoubleVec d = __builtin_convertvector(half, DoubleVec) * kScale + kRound;
    LongVec bits;
    std::memcpy(&bits, &d, sizeof bits);
    bits -= 0x4330000000000000ULL;
    std::memcpy(w + i, &bits, sizeof bits);
  }
}

TELLIN_INLINE uint64_t sum_block(const uint64_t* w) {
  LongVec sum = {};
  for (int64_t i = 0; i < kSampleBlock; i += kHalfLanes) {
    LongVec v;
    std::memcpy(&v, w + i, sizeof v);
    sum += v;
  }
  uint64_t total = 0;
  for (int64_t i = 0; i < kHalfLanes; ++i) total += sum[i];
  return total;
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
  uint64_t w[kSampleBlock];
  float padded[kSampleBlock];
  for (int64_t begin = 0; begin < n; begin += kSampleBlock) {
    const int64_t b = begin / kSampleBlock;
    uint64_t mass = 0;
    if (maxima[b] >= least_max && (maxima[b] - max) * inv_t >= -kWeightCutoff) {
      const float* block = x + begin;
      if (n - begin < kSampleBlock) {
        pad_block(block, n - begin, padded);
        block = padded;
      }
      block_weights(block, max, inv_t, lowest, w);
      mass = sum_block(w);
    }
    masses[b] = mass;
    total += mass;
  }
  return total;
}

void weights(const float* x, int64_t n, float max, float inv_t, uint64_t* out) {
  if (n == kSampleBlock) {
    block_weights(x, max, inv_t, kNegInf, out);
    return;
  }
  float block[kSampleBlock];
  uint64_t w[kSampleBlock];
  pad_block(x, n, block);
  block_weights(block, max, inv_t, kNegInf, w);
  std::memcpy(out, w, static_cast<size_t>(n) * sizeof(uint64_t));
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
    TELLIN_SAMPLING_ISA, block_max, block_mass, weights, count_at_least, apply_bitmask, divide,
};

}  // namespace tellin

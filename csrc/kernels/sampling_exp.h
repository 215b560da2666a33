// Vectors of sampling_vector.h, which includes this file: its registers and its two exponentials, one of
// equal bits everywhere, one for estimates.
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
#define TELLIN_MEMBER inline __attribute__((always_inline))

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

// out = a * b + c, rounded once where the instruction set can.
TELLIN_INLINE void multiply_add(const FloatVec& a, const FloatVec& b, float c, FloatVec& out) {
#if TELLIN_SAMPLING_WIDTH == 16 && defined(__AVX512F__)
  out = reinterpret_cast<FloatVec>(_mm512_fmadd_ps(reinterpret_cast<const __m512&>(a),
                                                   reinterpret_cast<const __m512&>(b), _mm512_set1_ps(c)));
#elif TELLIN_SAMPLING_WIDTH == 8 && defined(__FMA__)
  out = reinterpret_cast<FloatVec>(_mm256_fmadd_ps(reinterpret_cast<const __m256&>(a),
                                                   reinterpret_cast<const __m256&>(b), _mm256_set1_ps(c)));
#else
  out = a * b + c;
#endif
}

// Sum of 2^t for t <= 0 (at least -64) in every lane: a polynomial of degree 4, within 3e-6 of 2^f for |f| <=
// 0.5. Not the same bits in every variant.
TELLIN_INLINE void add_exp2(FloatVec (&t)[kWide], FloatVec& sum) {
  constexpr float kRound = 12582912.0f;  // as above
  constexpr float kCoefficients[] = {0.05591785907745361f, 0.240247443318367f, 0.6931217908859253f,
                                     0.9999992847442627f};
  FloatVec shifted[kWide], p[kWide];
#pragma GCC unroll 4
  for (int64_t j = 0; j < kWide; ++j) {
    t[j] = t[j] > -64.0f ? t[j] : FloatVec{} - 64.0f;
    shifted[j] = t[j] + kRound;
    t[j] -= shifted[j] - kRound;
    p[j] = FloatVec{} + 0.009570102207362652f;
  }
#pragma GCC unroll 4
  for (int64_t i = 0; i < 4; ++i) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < kWide; ++j) multiply_add(p[j], t[j], kCoefficients[i], p[j]);
  }
#pragma GCC unroll 4
  for (int64_t j = 0; j < kWide; ++j) {
    IntVec bits, exponent;
    std::memcpy(&bits, &p[j], sizeof bits);
    std::memcpy(&exponent, &shifted[j], sizeof exponent);
    bits += exponent << 23;
    std::memcpy(&p[j], &bits, sizeof bits);
  }
#pragma GCC unroll 2
  for (int64_t j = 0; j < kWide; j += 2) sum += p[j] + p[j + 1];
}

constexpr float kLog2E = 1.44269504f;

// Sum over the lanes of float sums of a few blocks.
class EstimateSum {
 public:
  TELLIN_MEMBER void add(const FloatVec& sum) {
    HalfVec half[2];
    std::memcpy(half, &sum, sizeof half);
    low_ += __builtin_convertvector(half[0], DoubleVec);
    high_ += __builtin_convertvector(half[1], DoubleVec);
  }
  TELLIN_MEMBER double total() const {
    const DoubleVec sum = low_ + high_;
    double total = 0.0;
    for (int64_t i = 0; i < kHalfLanes; ++i) total += sum[i];
    return total;
  }

 private:
  DoubleVec low_ = {}, high_ = {};
};

}  // namespace
}  // namespace tellin

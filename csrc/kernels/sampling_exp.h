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

// out = a > b ? a : b, for which GCC does not always see the instruction.
TELLIN_INLINE void larger(const FloatVec& a, const FloatVec& b, FloatVec& out) {
#if TELLIN_SAMPLING_WIDTH == 16 && defined(__AVX512F__)
  out = reinterpret_cast<FloatVec>(
      _mm512_max_ps(reinterpret_cast<const __m512&>(a), reinterpret_cast<const __m512&>(b)));
#elif TELLIN_SAMPLING_WIDTH == 8 && defined(__AVX2__)
  out = reinterpret_cast<FloatVec>(
      _mm256_max_ps(reinterpret_cast<const __m256&>(a), reinterpret_cast<const __m256&>(b)));
#else
  out = a > b ? a : b;
#endif
}

// w = 2^kWeightBits * exp(z) for z <= 0 with a relative error below 2e-7; z is clamped to [-64, 0].
// Cody-Waite reduction to |r| <= ln(2)/2 and the Taylor polynomial of degree 7 in Horner form, separate
// multiplies and adds (but where the product is exact). Four vectors step by step, because one is a chain of
// dependent operations.
constexpr int64_t kWide = 4;

// out = c - a * b with an exact product.
TELLIN_INLINE void subtract_exact_product(const FloatVec& c, const FloatVec& a, float b, FloatVec& out) {
#if TELLIN_SAMPLING_WIDTH == 16 && defined(__AVX512F__)
  out = reinterpret_cast<FloatVec>(_mm512_fnmadd_ps(reinterpret_cast<const __m512&>(a), _mm512_set1_ps(b),
                                                    reinterpret_cast<const __m512&>(c)));
#elif TELLIN_SAMPLING_WIDTH == 8 && defined(__FMA__)
  out = reinterpret_cast<FloatVec>(_mm256_fnmadd_ps(reinterpret_cast<const __m256&>(a), _mm256_set1_ps(b),
                                                    reinterpret_cast<const __m256&>(c)));
#else
  out = c - a * b;
#endif
}

// x * 2^i for normal x and products, where `shifted` holds i in its low mantissa bits.
TELLIN_INLINE void add_to_exponent(FloatVec& x, const FloatVec& shifted) {
  IntVec bits, exponent;
  std::memcpy(&bits, &x, sizeof bits);
  std::memcpy(&exponent, &shifted, sizeof exponent);
  bits += exponent << 23;
  std::memcpy(&x, &bits, sizeof x);
}

TELLIN_INLINE void exp_weights(FloatVec (&z)[kWide], FloatVec (&w)[kWide]) {
  constexpr float kCoefficients[] = {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f,
                                     0.5f,          1.0f,          1.0f};
  // 1.5 * 2^23 rounds to an integer in the low mantissa bits.
  constexpr float kRound = 12582912.0f + static_cast<float>(kWeightBits);
  const FloatVec lowest = FloatVec{} - 64.0f;
  FloatVec shifted[kWide];
#pragma GCC unroll 4
  for (int64_t j = 0; j < kWide; ++j) {
    larger(z[j], lowest, z[j]);
    shifted[j] = z[j] * 1.44269504f + kRound;
  }
#pragma GCC unroll 4
  for (int64_t j = 0; j < kWide; ++j) {
    const FloatVec k = shifted[j] - kRound;
    subtract_exact_product(z[j], k, 0.693359375f, z[j]);  // 9 bits times at most 7
    z[j] -= k * -2.12194440e-4f;
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
    add_to_exponent(w[j], shifted[j]);
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

// Sum of the lanes.
TELLIN_INLINE uint64_t sum_of_lanes(const LongVec& sum) {
#if TELLIN_SAMPLING_WIDTH == 16 && defined(__AVX512F__)
  return static_cast<uint64_t>(_mm512_reduce_add_epi64(reinterpret_cast<const __m512i&>(sum)));
#else
  uint64_t total = 0;
  for (int64_t i = 0; i < kHalfLanes; ++i) total += sum[i];
  return total;
#endif
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

// t = 2^t for t <= 0 (at least -64): a polynomial of degree 5, within 2e-7 of 2^f for |f| <= 0.5 and exact
// for 0. With fused multiply-adds it has not the same bits in every variant.
template <bool kFused>
TELLIN_INLINE void exp2_of(FloatVec* t) {
  constexpr float kRound = 12582912.0f;  // as above
  const FloatVec lowest = FloatVec{} - 64.0f;
  constexpr float kCoefficients[] = {0.009671512991189957f, 0.05550733581185341f, 0.24022242426872253f,
                                     0.6931470036506653f, 1.0f};
  FloatVec shifted[kWide], p[kWide];
#pragma GCC unroll 4
  for (int64_t j = 0; j < kWide; ++j) {
    larger(t[j], lowest, t[j]);
    shifted[j] = t[j] + kRound;
    t[j] -= shifted[j] - kRound;
    p[j] = FloatVec{} + 0.001326472731307149f;
  }
#pragma GCC unroll 5
  for (int64_t i = 0; i < 5; ++i) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < kWide; ++j) {
      if (kFused) {
        multiply_add(p[j], t[j], kCoefficients[i], p[j]);
      } else {
        p[j] = p[j] * t[j] + kCoefficients[i];
      }
    }
  }
#pragma GCC unroll 4
  for (int64_t j = 0; j < kWide; ++j) {
    add_to_exponent(p[j], shifted[j]);
    t[j] = p[j];
  }
}

#if TELLIN_SAMPLING_WIDTH == 16 && defined(__AVX512F__)
// The fast one with instructions for the integer part: 2^f for 0 <= f < 1 by another polynomial, within 2e-7.
// -infinity becomes 0: its f is NaN, but scaling by 2^-infinity makes 0 of that.
template <>
TELLIN_MEMBER void exp2_of<true>(FloatVec* t) {
  constexpr float kCoefficients[] = {0.00898934062570333f, 0.05582631751894951f, 0.24015361070632935f,
                                     0.69315308332443237f, 0.99999994039535522f};
  __m512 fraction[kWide], whole[kWide], p[kWide];
#pragma GCC unroll 4
  for (int64_t j = 0; j < kWide; ++j) {
    const __m512 v = reinterpret_cast<const __m512&>(t[j]);
    whole[j] = _mm512_roundscale_ps(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    fraction[j] = _mm512_sub_ps(v, whole[j]);
    p[j] = _mm512_set1_ps(0.0018775766948238015f);
  }
#pragma GCC unroll 5
  for (int64_t i = 0; i < 5; ++i) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < kWide; ++j)
      p[j] = _mm512_fmadd_ps(p[j], fraction[j], _mm512_set1_ps(kCoefficients[i]));
  }
#pragma GCC unroll 4
  for (int64_t j = 0; j < kWide; ++j) {
    t[j] = reinterpret_cast<FloatVec>(_mm512_scalef_ps(p[j], whole[j]));
  }
}
#endif

constexpr float kLog2E = 1.44269504f;
constexpr int64_t kBlockVecs = kSampleBlock / kLanes;

// Adds lanes of floats to lanes of doubles.
TELLIN_INLINE void add_floats(const FloatVec& v, DoubleVec& low, DoubleVec& high) {
#if TELLIN_SAMPLING_WIDTH == 16 && defined(__AVX512DQ__)
  const __m512 floats = reinterpret_cast<const __m512&>(v);
  low += reinterpret_cast<DoubleVec>(_mm512_cvtps_pd(_mm512_castps512_ps256(floats)));
  high += reinterpret_cast<DoubleVec>(_mm512_cvtps_pd(_mm512_extractf32x8_ps(floats, 1)));
#else
  HalfVec half[2];
  std::memcpy(half, &v, sizeof half);
  low += __builtin_convertvector(half[0], DoubleVec);
  high += __builtin_convertvector(half[1], DoubleVec);
#endif
}

// Sum of 2^t over blocks: in float over few of them, so that roundings stay small, then in double. The fast
// sum takes what the instruction set offers. The other one has the same bits in every variant: entries i, i +
// 16, i + 32 ... are added up one after the other, and the 16 sums in the end.
template <bool kFast>
class BlockSum {
 public:
  TELLIN_MEMBER void add(FloatVec (&t)[kBlockVecs]) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < kBlockVecs; i += kWide) exp2_of<kFast>(t + i);
#pragma GCC unroll 16
    for (int64_t j = 0; j < kBlockVecs; ++j) sum_[j % kParts] += t[j];
    if (++count_ % kBlocksInFloat == 0) flush();
  }
  TELLIN_MEMBER double total() {
    flush();
    double lanes[kParts * kLanes], total = 0.0;
    for (int64_t i = 0; i < kParts; ++i) {
      std::memcpy(lanes + i * kLanes, &low_[i], sizeof low_[i]);
      std::memcpy(lanes + i * kLanes + kHalfLanes, &high_[i], sizeof high_[i]);
    }
    for (const double lane : lanes) total += lane;
    return total;
  }

 private:
  static constexpr int64_t kParts = kFast ? 1 : 16 / kLanes;
  static constexpr int64_t kBlocksInFloat = kFast ? kLanes / 4 : 2;

  TELLIN_MEMBER void flush() {
#pragma GCC unroll 4
    for (int64_t i = 0; i < kParts; ++i) {
      add_floats(sum_[i], low_[i], high_[i]);
      sum_[i] = FloatVec{};
    }
  }

  FloatVec sum_[kParts] = {};
  DoubleVec low_[kParts] = {}, high_[kParts] = {};
  int64_t count_ = 0;
};

}  // namespace
}  // namespace tellin

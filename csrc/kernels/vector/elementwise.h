// What kernels of rows are built from: walks over values, sums of fixed order, activations. Include a
// simd_*.h first.
#pragma once

#include "tellin/vector_kernels.h"
#include "vector/math.h"

namespace {

using tellin::Activation;

constexpr int kWidth = Simd::kWidth;

// Calls full(i) for each whole vector and partial(i, count) for the rest of [0, n).
template <class Full, class Partial>
inline void for_vectors(int64_t n, Full full, Partial partial) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) full(i);
  if (i < n) partial(i, static_cast<int>(n - i));
}

// out[i] = f(x[i])
template <class F>
inline void map1(const float* x, int64_t n, float* out, F f) {
  for_vectors(
      n, [&](int64_t i) { Simd::store(out + i, f(Simd::load(x + i))); },
      [&](int64_t i, int count) {
        Simd::store_partial(out + i, f(Simd::load_partial(x + i, count)), count);
      });
}

// out[i] = f(x[i], y[i])
template <class F>
inline void map2(const float* x, const float* y, int64_t n, float* out, F f) {
  for_vectors(
      n, [&](int64_t i) { Simd::store(out + i, f(Simd::load(x + i), Simd::load(y + i))); },
      [&](int64_t i, int count) {
        Simd::store_partial(out + i, f(Simd::load_partial(x + i, count), Simd::load_partial(y + i, count)),
                            count);
      });
}

// Sum over i of term(x[i]) in four running vectors of kLanes lanes (one FMA latency hidden), folded pairwise:
// of equal bits whatever the width of a register. term(0) must be 0.
template <class Term>
inline float sum(const float* x, int64_t n, Term accumulate) {
  constexpr int kParts = kLanes / kWidth;
  V acc[4][kParts];
  for (auto& vector : acc) {
    for (V& part : vector) part = Simd::zero();
  }
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      for (int p = 0; p < kParts; ++p) {
        acc[j][p] = accumulate(Simd::load(x + i + j * kLanes + p * kWidth), acc[j][p]);
      }
    }
  }
  for (; i + kLanes <= n; i += kLanes) {
    for (int p = 0; p < kParts; ++p) acc[0][p] = accumulate(Simd::load(x + i + p * kWidth), acc[0][p]);
  }
  for (int p = 0; i < n; ++p, i += kWidth) {
    const V v = i + kWidth <= n ? Simd::load(x + i) : Simd::load_partial(x + i, static_cast<int>(n - i));
    acc[1][p] = accumulate(v, acc[1][p]);
  }
  V total[kParts];
  for (int p = 0; p < kParts; ++p) {
    total[p] = Simd::add(Simd::add(acc[0][p], acc[1][p]), Simd::add(acc[2][p], acc[3][p]));
  }
  return add_lanes(total);
}

inline V silu(V x) {
  return Simd::mul(x, vsigmoid(x));
}

inline V gelu(V x) {
  const V half = Simd::mul(Simd::set1(0.5f), x);
  return Simd::fma(half, verf(Simd::mul(x, Simd::set1(0.70710678118654752f))), half);
}

// x/2 (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3). Source: Hendrycks & Gimpel 2016.
inline V gelu_tanh(V x) {
  const V cubic = Simd::fma(Simd::mul(Simd::set1(0.044715f), Simd::mul(x, x)), x, x);
  return Simd::mul(x, vsigmoid(Simd::mul(Simd::set1(1.5957691216057308f), cubic)));
}

// x sigmoid(1.702 x). Source: Hendrycks & Gimpel 2016.
inline V quick_gelu(V x) {
  return Simd::mul(x, vsigmoid(Simd::mul(Simd::set1(1.702f), x)));
}

inline V relu(V x) {
  return Simd::max(Simd::zero(), x);
}

// See Activation. NaN stays NaN: min and max give their second operand then.
inline V swiglu_oai(V gate, V up) {
  const V limit = Simd::set1(7.0f);
  const V g = Simd::min(limit, gate);
  const V u = Simd::min(limit, Simd::max(Simd::set1(-7.0f), up));
  const V swish = Simd::mul(g, vsigmoid(Simd::mul(Simd::set1(1.702f), g)));
  return Simd::fma(swish, u, swish);
}

inline void activation(Activation act, const float* x, int64_t n, float* out) {
  switch (act) {
    case Activation::kSilu:
      return map1(x, n, out, silu);
    case Activation::kGelu:
      return map1(x, n, out, gelu);
    case Activation::kGeluTanh:
      return map1(x, n, out, gelu_tanh);
    case Activation::kRelu:
      return map1(x, n, out, relu);
    case Activation::kQuickGelu:
      return map1(x, n, out, quick_gelu);
    case Activation::kSigmoid:
      return map1(x, n, out, vsigmoid);
    case Activation::kIdentity:
      return map1(x, n, out, [](V v) { return v; });
    case Activation::kSwigluOai:
      return;  // has two operands: Program refuses it here
  }
}

}  // namespace

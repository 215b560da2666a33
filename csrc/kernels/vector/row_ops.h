// Kernels of one row each, written once against Simd. The vector order of a row is fixed by its length alone.
// Include a simd_*.h first.
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

void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  const float squares = sum(x, n, [](V v, V acc) { return Simd::fma(v, v, acc); });
  const V inverse = Simd::set1(1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps));
  map2(x, weight, n, out, [&](V v, V w) { return Simd::mul(Simd::mul(v, inverse), w); });
}

void layer_norm(const float* x, const float* weight, const float* bias, int64_t n, float eps, float* out) {
  const float mean = sum(x, n, [](V v, V acc) { return Simd::add(v, acc); }) / static_cast<float>(n);
  const V shift = Simd::set1(mean);
  map1(x, n, out, [&](V v) { return Simd::sub(v, shift); });
  const float squares = sum(out, n, [](V v, V acc) { return Simd::fma(v, v, acc); });
  const V inverse = Simd::set1(1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps));
  map2(out, weight, n, out, [&](V v, V w) { return Simd::mul(Simd::mul(v, inverse), w); });
  if (bias != nullptr) map2(out, bias, n, out, [](V v, V b) { return Simd::add(v, b); });
}

void add(const float* x, const float* y, int64_t n, float* out) {
  map2(x, y, n, out, [](V a, V b) { return Simd::add(a, b); });
}

void scale(const float* x, float factor, int64_t n, float* out) {
  const V f = Simd::set1(factor);
  map1(x, n, out, [&](V v) { return Simd::mul(v, f); });
}

void add_scaled(const float* x, float factor, int64_t n, float* out) {
  const V f = Simd::set1(factor);
  map2(x, out, n, out, [&](V v, V sum) { return Simd::fma(v, f, sum); });
}

void softcap(const float* x, float cap, int64_t n, float* out) {
  const V c = Simd::set1(cap);
  map1(x, n, out, [&](V v) { return Simd::mul(c, vtanh(Simd::div(v, c))); });
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

void activation(Activation act, const float* x, int64_t n, float* out) {
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
    case Activation::kSwigluOai:
      return;  // has two operands: Program refuses it here
  }
}

void act_mul(Activation act, const float* gate, const float* up, int64_t n, float* out) {
  switch (act) {
    case Activation::kSilu:
      return map2(gate, up, n, out, [](V g, V u) { return Simd::mul(silu(g), u); });
    case Activation::kGelu:
      return map2(gate, up, n, out, [](V g, V u) { return Simd::mul(gelu(g), u); });
    case Activation::kGeluTanh:
      return map2(gate, up, n, out, [](V g, V u) { return Simd::mul(gelu_tanh(g), u); });
    case Activation::kRelu:
      return map2(gate, up, n, out, [](V g, V u) { return Simd::mul(relu(g), u); });
    case Activation::kQuickGelu:
      return map2(gate, up, n, out, [](V g, V u) { return Simd::mul(quick_gelu(g), u); });
    case Activation::kSwigluOai:
      return map2(gate, up, n, out, swiglu_oai);
  }
}

// Interleaved pairs are handled one by one: the lanes of a vector would have to change places twice.
void rope(float* head, const float* cos, const float* sin, int64_t half, bool interleaved) {
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = head[2 * i], b = head[2 * i + 1];
      head[2 * i] = a * cos[i] - b * sin[i];
      head[2 * i + 1] = a * sin[i] + b * cos[i];
    }
    return;
  }
  float* second = head + half;
  for_vectors(
      half,
      [&](int64_t i) {
        const V a = Simd::load(head + i), b = Simd::load(second + i);
        const V c = Simd::load(cos + i), s = Simd::load(sin + i);
        Simd::store(head + i, Simd::fnma(b, s, Simd::mul(a, c)));
        Simd::store(second + i, Simd::fma(a, s, Simd::mul(b, c)));
      },
      [&](int64_t i, int count) {
        const V a = Simd::load_partial(head + i, count), b = Simd::load_partial(second + i, count);
        const V c = Simd::load_partial(cos + i, count), s = Simd::load_partial(sin + i, count);
        Simd::store_partial(head + i, Simd::fnma(b, s, Simd::mul(a, c)), count);
        Simd::store_partial(second + i, Simd::fma(a, s, Simd::mul(b, c)), count);
      });
}

}  // namespace

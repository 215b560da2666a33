// Kernels of one row each, written once against Simd. The vector order of a row is fixed by its length alone.
// Include a simd_*.h first.
#pragma once

#include "vector/elementwise.h"

namespace {

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
    case Activation::kSigmoid:
      return map2(gate, up, n, out, [](V g, V u) { return Simd::mul(vsigmoid(g), u); });
    case Activation::kIdentity:
      return map2(gate, up, n, out, [](V g, V u) { return Simd::mul(g, u); });
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

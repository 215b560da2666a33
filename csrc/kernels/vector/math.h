// Elementary functions on vectors, for finite arguments within 2 units in the last place unless said. NaN
// stays NaN. Coefficients are our own fits (weighted least squares, reweighted towards the minimax error).
// Include a simd_*.h first.
#pragma once

namespace {

using V = Simd::V;

constexpr int kLanes = 16;  // of a running sum, whatever the width of a register: variants add alike

// Sum of the lanes of N vectors: halves, quarters, and so on.
template <int N>
inline float add_lanes(V (&parts)[N]) {
  for (int n = N / 2; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) parts[i] = Simd::add(parts[i], parts[i + n]);
  }
  return Simd::reduce_add(parts[0]);
}

constexpr float kExpLeast = -87.33654f;  // exp of it is just above the smallest normal number

// exp(x) for x within [kExpLeast, 88.37]; exp of the nearer end without. Cody-Waite reduction to
// |r| <= ln(2) / 2, then 1 + r + r^2 E(r).
inline V vexp_clamped(V x) {
  const V clamped = Simd::min(Simd::set1(88.37626f), Simd::max(Simd::set1(kExpLeast), x));
  const V n = Simd::round(Simd::mul(clamped, Simd::set1(1.44269504088896341f)));
  V r = Simd::fnma(n, Simd::set1(0.693359375f), clamped);  // ln 2 in two parts, the first exact in 10 bits
  r = Simd::fnma(n, Simd::set1(-2.12194440e-4f), r);
  V e = Simd::set1(1.395047909703611e-3f);
  e = Simd::fma(e, r, Simd::set1(8.36888375173441e-3f));
  e = Simd::fma(e, r, Simd::set1(4.166620597982943e-2f));
  e = Simd::fma(e, r, Simd::set1(1.6666518885714118e-1f));
  e = Simd::fma(e, r, Simd::set1(5.000000095132497e-1f));
  const V p = Simd::add(Simd::set1(1.0f), Simd::fma(Simd::mul(r, r), e, r));
  return Simd::scale_pow2(p, n);
}

// Results below the smallest normal number are 0; arguments above 88.37 give exp(88.37).
inline V vexp(V x) {
  return Simd::select_lt(x, Simd::set1(kExpLeast), Simd::zero(), vexp_clamped(x));
}

// 2^x for x <= 0: 2^-126 below that. 2^r = 1 + r P(r) with |r| <= 1/2.
inline V vexp2_down(V x) {
  const V clamped = Simd::max(Simd::set1(-126.0f), x);
  const V n = Simd::round(clamped);
  const V r = Simd::sub(clamped, n);
  V p = Simd::set1(1.326472731307149e-3f);
  p = Simd::fma(p, r, Simd::set1(9.671512991189957e-3f));
  p = Simd::fma(p, r, Simd::set1(5.550733581185341e-2f));
  p = Simd::fma(p, r, Simd::set1(2.4022242426872253e-1f));
  p = Simd::fma(p, r, Simd::set1(6.931470036506653e-1f));
  return Simd::add_exponent(Simd::fma(p, r, Simd::set1(1.0f)), n);
}

inline V vsigmoid(V x) {
  const V one = Simd::set1(1.0f);
  return Simd::div(one, Simd::add(one, vexp_clamped(Simd::sub(Simd::zero(), x))));
}

// log(1 + exp(x)) = max(x, 0) + log(1 + t) with t = exp(-|x|): log(1 + t) = 2 artanh(s) with s = t / (2 + t),
// at most 1/3, as a power series in s^2.
inline V vsoftplus(V x) {
  const V t = vexp_clamped(Simd::sub(Simd::zero(), Simd::abs(x)));
  const V s = Simd::div(t, Simd::add(Simd::set1(2.0f), t));
  const V z = Simd::mul(s, s);
  V p = Simd::set1(1.0f / 15);
  p = Simd::fma(p, z, Simd::set1(1.0f / 13));
  p = Simd::fma(p, z, Simd::set1(1.0f / 11));
  p = Simd::fma(p, z, Simd::set1(1.0f / 9));
  p = Simd::fma(p, z, Simd::set1(1.0f / 7));
  p = Simd::fma(p, z, Simd::set1(1.0f / 5));
  p = Simd::fma(p, z, Simd::set1(1.0f / 3));
  const V twice = Simd::add(s, s);
  const V log = Simd::fma(Simd::mul(twice, z), p, twice);
  return Simd::add(Simd::max(Simd::zero(), x), log);
}

// a + a t T(t) with t = a^2 below 0.625, else 1 - 2 / (exp(2a) + 1).
inline V vtanh(V x) {
  const V a = Simd::abs(x);
  const V t = Simd::mul(a, a);
  V p = Simd::set1(-5.717036547526588e-3f);
  p = Simd::fma(p, t, Simd::set1(2.0650578990245416e-2f));
  p = Simd::fma(p, t, Simd::set1(-5.374349525680298e-2f));
  p = Simd::fma(p, t, Simd::set1(1.3331491248452398e-1f));
  p = Simd::fma(p, t, Simd::set1(-3.3333283923588003e-1f));
  const V small = Simd::fma(Simd::mul(a, t), p, a);
  const V one = Simd::set1(1.0f);
  const V large = Simd::sub(one, Simd::div(Simd::set1(2.0f), Simd::add(vexp_clamped(Simd::add(a, a)), one)));
  return Simd::copysign(Simd::select_lt(a, Simd::set1(0.625f), small, large), x);
}

// a S(a^2) below 1, else 1 - exp(-Q(a)) with Q fitted to -log(erfc) on [1, 4]; erf(4) rounds to 1.
// Absolute error below 2e-7.
inline V verf(V x) {
  const V a = Simd::min(Simd::set1(4.0f), Simd::abs(x));
  const V t = Simd::mul(a, a);
  V s = Simd::set1(7.889119523970688e-5f);
  s = Simd::fma(s, t, Simd::set1(-8.02084127759551e-4f));
  s = Simd::fma(s, t, Simd::set1(5.189535339113707e-3f));
  s = Simd::fma(s, t, Simd::set1(-2.685444459179471e-2f));
  s = Simd::fma(s, t, Simd::set1(1.1283600176254445e-1f));
  s = Simd::fma(s, t, Simd::set1(-3.7612627135965426e-1f));
  s = Simd::fma(s, t, Simd::set1(1.1283791659137514f));
  const V small = Simd::mul(a, s);
  V q = Simd::set1(-2.5132685061155146e-7f);
  q = Simd::fma(q, a, Simd::set1(2.5314811824456982e-5f));
  q = Simd::fma(q, a, Simd::set1(-4.637880399559327e-4f));
  q = Simd::fma(q, a, Simd::set1(4.282382696045761e-3f));
  q = Simd::fma(q, a, Simd::set1(-2.537355589608013e-2f));
  q = Simd::fma(q, a, Simd::set1(1.086389979522523e-1f));
  q = Simd::fma(q, a, Simd::set1(6.330396124522224e-1f));
  q = Simd::fma(q, a, Simd::set1(1.1296611570813329f));
  q = Simd::fma(q, a, Simd::set1(-2.0435989961057325e-4f));
  const V large = Simd::sub(Simd::set1(1.0f), vexp_clamped(Simd::sub(Simd::zero(), q)));
  return Simd::copysign(Simd::select_lt(a, Simd::set1(1.0f), small, large), x);
}

}  // namespace

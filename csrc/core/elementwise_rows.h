// Row operations of models/plan/elementwise.py: each value for itself.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace tellin {

// 1 + beta * ln(1 + position / length), of whole lengths, rounded once.
inline float position_factor(int64_t position, float beta, int64_t length) {
  const auto periods = static_cast<double>(position / length);
  return static_cast<float>(1.0 + static_cast<double>(beta) * std::log(1.0 + periods));
}

struct XieluNumbers {
  float positive, negative, beta, eps;

  static XieluNumbers of(float alpha_p, float alpha_n, float beta, float eps) {
    const auto softplus = [](float x) {
      const auto value = static_cast<double>(x);
      return std::max(value, 0.0) + std::log1p(std::exp(-std::fabs(value)));
    };
    return {static_cast<float>(softplus(alpha_p)),
            static_cast<float>(static_cast<double>(beta) + softplus(alpha_n)), beta, eps};
  }
};

// out may be x. What is no number stays none.
inline void xielu(const float* x, const XieluNumbers& numbers, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    const float value = x[i];
    const float curved = value > 0.0f ? numbers.positive * value * value
                                      : numbers.negative * (std::expm1(std::min(value, numbers.eps)) - value);
    out[i] = curved + numbers.beta * value;
  }
}

}  // namespace tellin

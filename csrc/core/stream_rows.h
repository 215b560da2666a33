// Row operations of models with several residual streams (models/plan/streams.py). Sums run from the first
// value to the last, in double precision.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace tellin {

inline void scale_columns(float* x, const float* weight, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] *= weight[i];
}

// out may be x.
inline void add_scaled(const float* x, const float* y, float coef, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] + coef * y[i];
}

inline double mean_square(const float* x, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return sum / static_cast<double>(n);
}

inline void match_magnitude(float* x, const float* target, int64_t n) {
  constexpr double kLeast = 1e-5;
  const auto factor =
      static_cast<float>(std::sqrt(mean_square(target, n) / std::max(mean_square(x, n), kLeast)));
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

inline void keep_largest(float* x, float deviations, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]);
  const double mean = sum / static_cast<double>(n);
  double squares = 0.0;
  for (int64_t i = 0; i < n; ++i) {
    const double centred = static_cast<double>(x[i]) - mean;
    squares += centred * centred;
  }
  const double deviation = std::sqrt(squares / static_cast<double>(n));
  const auto cut = static_cast<float>(mean + deviation * static_cast<double>(deviations));
  for (int64_t i = 0; i < n; ++i) x[i] = std::max(x[i] - cut, 0.0f);
}

}  // namespace tellin

// Argument checks at the border: a false condition is the caller's mistake.
#pragma once
#include <stdexcept>
#include <string>

namespace tellin {

inline void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}
inline void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

}  // namespace tellin

// AVX2: rows of quantised activations.
//
// The records of a row of 8 bits are followed by their q once more, plus 128: [features] bytes. Products of
// bytes take an unsigned and a signed factor, and which of codes and activations is which depends on the
// format of the weights (see linear_tables.h).
#pragma once
#include "tellin/linear.h"
#include "tellin/packed_format.h"

namespace tellin {
namespace {

static_assert(sizeof(Act8) == 2 * kBlockK, "a third of a row is q + 128");

// Where q + 128 of a row's features begins.
constexpr int64_t shifted_offset(int64_t row_bytes) {
  return row_bytes / 3 * 2;
}

[[maybe_unused]] size_t extended_row_bytes(int64_t k, ActPrecision precision) {
  return precision == ActPrecision::kInt16 ? act_row_bytes(k, true) : act_row_bytes(k, false) / 2 * 3;
}

}  // namespace
}  // namespace tellin

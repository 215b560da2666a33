// Kernels of recurrences, written once against Simd. A column of a matrix depends on no other column, so the
// columns are the lanes and every sum runs over the depth, in one order whatever the width of a register.
// Include a simd_*.h first.
#pragma once

#include "vector/elementwise.h"

namespace {

using tellin::ConvRows;
using tellin::DeltaRows;
using tellin::kStateColumns;
using tellin::ScanRows;

constexpr int64_t kGateRows = 64;  // whose decays and the like are computed together
// ---- short convolutions

constexpr int64_t kRowsAhead = 6;  // that are fetched: a column of a buffer is no stream that caches know

// Fetches n values, to be read or to be written over.
template <bool kWrite>
inline void fetch(const float* p, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(p + i, kWrite);
}

// Reads a fixed kernel, or any with kKernel = 0.
template <int kKernel>
inline void conv_row(const ConvRows& r, const float* const* rows, float* out) {
  const int64_t kernel = kKernel != 0 ? kKernel : r.kernel;
  const auto value = [&](auto load) {
    V sum = r.bias != nullptr ? load(r.bias) : Simd::zero();
    for (int64_t j = 0; j < kernel; ++j) {
      sum = Simd::fma(load(r.weight + j * r.weight_stride), load(rows[j]), sum);
    }
    return sum;
  };
  for_vectors(
      r.columns,
      [&](int64_t i) { Simd::store(out + i, value([i](const float* p) { return Simd::load(p + i); })); },
      [&](int64_t i, int count) {
        Simd::store_partial(out + i, value([=](const float* p) { return Simd::load_partial(p + i, count); }),
                            count);
      });
}

void short_conv(const ConvRows& r) {
  const int64_t before = r.kernel - 1;
  // Row i of those before and of this call, counted from the first one kept.
  const auto row = [&](int64_t i) {
    return i < before ? r.state + i * r.columns : r.x + (i - before) * r.x_stride;
  };
  for (int64_t t = 0; t < r.num_rows; ++t) {
    const float* rows[tellin::kMaxConvKernel];
    for (int64_t j = 0; j < r.kernel; ++j) rows[j] = row(t + j);
    float* out = r.out + t * r.out_stride;
    if (t + kRowsAhead < r.num_rows) {
      fetch<false>(r.x + (t + kRowsAhead) * r.x_stride, r.columns);
      fetch<true>(out + kRowsAhead * r.out_stride, r.columns);
    }
    if (r.kernel == 4) {
      conv_row<4>(r, rows, out);
    } else if (r.kernel == 3) {
      conv_row<3>(r, rows, out);
    } else {
      conv_row<0>(r, rows, out);
    }
    if (r.has_act) activation(r.act, out, r.columns, out);
  }
  // A row that is kept came later than the one whose place it takes.
  for (int64_t i = 0; i < before; ++i) {
    map1(row(r.num_rows + i), r.columns, r.state + i * r.columns, [](V v) { return v; });
  }
}

// ---- matrices

// N vectors of columns, of which the last may have `count` values only.
template <int N, bool kPartial>
struct Columns {
  int count;

  V load(const float* p, int i) const {
    return kPartial && i == N - 1 ? Simd::load_partial(p + i * kWidth, count) : Simd::load(p + i * kWidth);
  }
  void store(float* p, int i, V v) const {
    if (kPartial && i == N - 1) {
      Simd::store_partial(p + i * kWidth, v, count);
    } else {
      Simd::store(p + i * kWidth, v);
    }
  }
};

// What one row adds to a matrix and reads from it: S = keep S + add change^T, out = S^T read.
template <int N>
struct Update {
  V keep;
  const float* add;
  V change[N];
  const float* read;
  V out[N];
};

// Goes once through rows of a matrix: the update, if there is one, then known = S^T dot, if there is one.
// Sums of even and of odd rows are added at last.
template <bool kUpdate, bool kDot, int N, bool kPartial>
inline void sweep(const Columns<N, kPartial>& columns, float* state, int64_t stride, int64_t depth,
                  Update<N>* update, const float* dot, V* known) {
  V out[2][N], sum[2][N];
  for (int i = 0; i < N; ++i) out[0][i] = out[1][i] = sum[0][i] = sum[1][i] = Simd::zero();
  const auto one = [&](int64_t d, int parity) {
    for (int i = 0; i < N; ++i) {
      V s = columns.load(state + d * stride, i);
      if (kUpdate) {
        s = Simd::fma(Simd::set1(update->add[d]), update->change[i], Simd::mul(update->keep, s));
        columns.store(state + d * stride, i, s);
        out[parity][i] = Simd::fma(Simd::set1(update->read[d]), s, out[parity][i]);
      }
      if (kDot) sum[parity][i] = Simd::fma(Simd::set1(dot[d]), s, sum[parity][i]);
    }
  };
  int64_t d = 0;
  for (; d + 2 <= depth; d += 2) {
    one(d, 0);
    one(d + 1, 1);
  }
  if (d < depth) one(d, 0);
  for (int i = 0; i < N; ++i) {
    if (kUpdate) update->out[i] = Simd::add(out[0][i], out[1][i]);
    if (kDot) known[i] = Simd::add(sum[0][i], sum[1][i]);
  }
}

// Calls run(columns, first, state) for groups of columns, whose part of the matrix has rows of `stride`
// values.
template <class Run>
inline void for_columns(int64_t num_columns, int64_t depth, float* state, Run run) {
  constexpr int N = Simd::kStateVectors;
  for (int64_t block = 0; block < num_columns; block += kStateColumns) {
    const int64_t left = num_columns - block;
    const int64_t width = left < kStateColumns ? left : kStateColumns;
    float* part = state + block * depth;
    int64_t c = 0;
    for (; c + N * kWidth <= width; c += N * kWidth) run(Columns<N, false>{0}, block + c, part + c, width);
    for (; c + kWidth <= width; c += kWidth) run(Columns<1, false>{0}, block + c, part + c, width);
    if (c < width) run(Columns<1, true>{static_cast<int>(width - c)}, block + c, part + c, width);
  }
}

// ---- the gated delta rule

// Per row of up to kGateRows. Rows of q and k are used as they are: what divides them by their length
// multiplies what is made of them.
struct DeltaGates {
  float keep[kGateRows], beta[kGateRows], q_scale[kGateRows], k_scale[kGateRows];

  void fill(const DeltaRows& r, int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      keep[i] = r.a[(first + i) * r.a_stride];
      beta[i] = r.b[(first + i) * r.b_stride];
    }
    const V decay = Simd::set1(r.decay), bias = Simd::set1(r.dt_bias);
    map1(keep, count, keep, [&](V a) { return vexp(Simd::mul(decay, vsoftplus(Simd::add(a, bias)))); });
    map1(beta, count, beta, vsigmoid);
    const float root = 1.0f / __builtin_sqrtf(static_cast<float>(r.depth));
    for (int64_t i = 0; i < count; ++i) {
      q_scale[i] = root * one_over_length(r.q + (first + i) * r.q_stride, r.depth);
      k_scale[i] = one_over_length(r.k + (first + i) * r.k_stride, r.depth);
    }
  }

  static float one_over_length(const float* x, int64_t n) {
    const float squares = sum(x, n, [](V v, V acc) { return Simd::fma(v, v, acc); });
    return 1.0f / __builtin_sqrtf(squares + 1e-6f);
  }
};

// Rows [first, first + count) of some columns.
template <int N, bool kPartial>
inline void delta_columns(const DeltaRows& r, const DeltaGates& gates, int64_t first, int64_t count,
                          const Columns<N, kPartial>& columns, int64_t column, float* state, int64_t stride) {
  V known[N];
  Update<N> update;
  const float* k = r.k + first * r.k_stride;
  sweep<false, true>(columns, state, stride, r.depth, &update, k, known);
  for (int64_t i = 0; i < count; ++i) {
    const float* v = r.v + (first + i) * r.v_stride + column;
    const V scale = Simd::set1(gates.keep[i] * gates.k_scale[i]);
    const V step = Simd::set1(gates.beta[i] * gates.k_scale[i]);
    for (int j = 0; j < N; ++j) {
      update.change[j] = Simd::mul(step, Simd::fnma(scale, known[j], columns.load(v, j)));
    }
    update.keep = Simd::set1(gates.keep[i]);
    update.add = k + i * r.k_stride;
    update.read = r.q + (first + i) * r.q_stride;
    if (i + 1 < count) {
      sweep<true, true>(columns, state, stride, r.depth, &update, k + (i + 1) * r.k_stride, known);
    } else {
      sweep<true, false>(columns, state, stride, r.depth, &update, nullptr, known);
    }
    float* out = r.out + (first + i) * r.out_stride + column;
    const V q_scale = Simd::set1(gates.q_scale[i]);
    for (int j = 0; j < N; ++j) columns.store(out, j, Simd::mul(update.out[j], q_scale));
  }
}

void gated_delta(const DeltaRows& r) {
  DeltaGates gates;
  for (int64_t first = 0; first < r.num_rows; first += kGateRows) {
    const int64_t left = r.num_rows - first;
    const int64_t count = left < kGateRows ? left : kGateRows;
    gates.fill(r, first, count);
    for_columns(r.columns, r.depth, r.state,
                [&](const auto& columns, int64_t column, float* state, int64_t stride) {
                  delta_columns(r, gates, first, count, columns, column, state, stride);
                });
  }
}

// ---- selective scans

template <int N, bool kPartial>
inline void scan_columns(const ScanRows& r, const float* steps, const float* keeps, int64_t first,
                         int64_t count, const Columns<N, kPartial>& columns, int64_t column, float* state,
                         int64_t stride) {
  const V skip = Simd::set1(r.skip);
  for (int64_t i = 0; i < count; ++i) {
    const float* x = r.x + (first + i) * r.x_stride + column;
    const V step = Simd::set1(steps[i]);
    Update<N> update;
    update.keep = Simd::set1(keeps[i]);
    update.add = r.b + (first + i) * r.b_stride;
    update.read = r.c + (first + i) * r.c_stride;
    for (int j = 0; j < N; ++j) update.change[j] = Simd::mul(step, columns.load(x, j));
    sweep<true, false>(columns, state, stride, r.depth, &update, nullptr, nullptr);
    float* out = r.out + (first + i) * r.out_stride + column;
    for (int j = 0; j < N; ++j) columns.store(out, j, Simd::fma(skip, columns.load(x, j), update.out[j]));
  }
}

void selective_scan(const ScanRows& r) {
  float steps[kGateRows], keeps[kGateRows];
  const V decay = Simd::set1(r.decay), bias = Simd::set1(r.dt_bias);
  const V least = Simd::set1(r.dt_min), most = Simd::set1(r.dt_max);
  for (int64_t first = 0; first < r.num_rows; first += kGateRows) {
    const int64_t left = r.num_rows - first;
    const int64_t count = left < kGateRows ? left : kGateRows;
    for (int64_t i = 0; i < count; ++i) steps[i] = r.dt[(first + i) * r.dt_stride];
    map1(steps, count, steps,
         [&](V dt) { return Simd::min(most, Simd::max(least, vsoftplus(Simd::add(dt, bias)))); });
    map1(steps, count, keeps, [&](V step) { return vexp(Simd::mul(decay, step)); });
    for_columns(r.columns, r.depth, r.state,
                [&](const auto& columns, int64_t column, float* state, int64_t stride) {
                  scan_columns(r, steps, keeps, first, count, columns, column, state, stride);
                });
  }
}

}  // namespace

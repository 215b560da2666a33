// Checks the row, attention and recurrence kernels of the variant named on the command line against double
// precision, and that blocking does not change a bit. Needs nothing but the kernels, so it also runs under an
// emulator:
//   aarch64-linux-gnu-g++ -static ... && qemu-aarch64 ./vector_check neon
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "tellin/kv_pool.h"
#include "tellin/vector_kernels.h"

namespace {

using namespace tellin;

int failures = 0;

void expect(bool ok, const char* what, double value) {
  if (ok) return;
  std::printf("FAILED %s (%g)\n", what, value);
  ++failures;
}

uint32_t random_state = 1;
float random_float(float scale) {
  random_state = random_state * 1664525u + 1013904223u;
  return scale * static_cast<float>(static_cast<int32_t>(random_state)) / 2147483648.0f;
}

std::vector<float> random_row(int64_t n, float scale) {
  std::vector<float> row(static_cast<size_t>(n));
  for (float& x : row) x = random_float(scale);
  return row;
}

double worst(const std::vector<float>& a, const std::vector<double>& b) {
  double error = 0;
  for (size_t i = 0; i < a.size(); ++i)
    error = std::fmax(error, std::fabs(a[i] - b[i]) / (1.0 + std::fabs(b[i])));
  return error;
}

void check_rows(const VectorKernels& k) {
  for (int64_t n : {1, 3, 8, 16, 17, 64, 100, 576}) {
    const std::vector<float> x = random_row(n, 4.0f), y = random_row(n, 2.0f), w = random_row(n, 1.5f);
    const std::vector<float> big = random_row(n, 12.0f), wide = random_row(n, 12.0f);  // beyond the limits
    std::vector<float> out(static_cast<size_t>(n));
    std::vector<double> expected(static_cast<size_t>(n));
    double squares = 0, mean = 0, variance = 0;
    for (float v : x) {
      squares += static_cast<double>(v) * v / static_cast<double>(n);
      mean += v / static_cast<double>(n);
    }
    for (float v : x) variance += (v - mean) * (v - mean) / static_cast<double>(n);
    const auto check = [&](const char* what, auto&& formula) {
      for (size_t i = 0; i < x.size(); ++i)
        expected[i] = formula(static_cast<double>(x[i]), static_cast<double>(y[i]), i);
      const double error = worst(out, expected);
      expect(error < 1e-6, what, error);
    };
    k.rms_norm(x.data(), w.data(), n, 1e-5f, out.data());
    check("rms_norm", [&](double v, double, size_t i) { return v / std::sqrt(squares + 1e-5) * w[i]; });
    k.layer_norm(x.data(), w.data(), y.data(), n, 1e-5f, out.data());
    check("layer_norm",
          [&](double v, double b, size_t i) { return (v - mean) / std::sqrt(variance + 1e-5) * w[i] + b; });
    k.add(x.data(), y.data(), n, out.data());
    check("add", [](double a, double b, size_t) { return a + b; });
    k.scale(x.data(), 0.37f, n, out.data());
    check("scale", [](double a, double, size_t) { return a * static_cast<double>(0.37f); });
    k.softcap(x.data(), 2.5f, n, out.data());
    check("softcap", [](double a, double, size_t) { return 2.5 * std::tanh(a / 2.5); });
    k.act_mul(Activation::kSilu, x.data(), y.data(), n, out.data());
    check("silu", [](double a, double b, size_t) { return a / (1 + std::exp(-a)) * b; });
    k.act_mul(Activation::kGelu, x.data(), y.data(), n, out.data());
    check("gelu",
          [](double a, double b, size_t) { return 0.5 * a * (1 + std::erf(a / std::sqrt(2.0))) * b; });
    k.act_mul(Activation::kGeluTanh, x.data(), y.data(), n, out.data());
    check("gelu_tanh", [](double a, double b, size_t) {
      return 0.5 * a * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (a + 0.044715 * a * a * a))) * b;
    });
    k.act_mul(Activation::kSwigluOai, big.data(), wide.data(), n, out.data());
    check("swiglu_oai", [&](double, double, size_t i) {
      const double g = std::fmin(7.0, static_cast<double>(big[i]));
      const double u = std::fmax(-7.0, std::fmin(7.0, static_cast<double>(wide[i])));
      return g / (1 + std::exp(-1.702 * g)) * (u + 1);
    });
    k.act_mul(Activation::kQuickGelu, x.data(), y.data(), n, out.data());
    check("quick_gelu", [](double a, double b, size_t) { return a / (1 + std::exp(-1.702 * a)) * b; });
    k.activation(Activation::kRelu, x.data(), n, out.data());
    check("relu", [](double a, double, size_t) { return a > 0 ? a : 0; });
    if (n % 2 != 0) continue;
    for (bool interleaved : {false, true}) {
      const auto half = static_cast<size_t>(n / 2);
      std::vector<float> head = x;
      k.rope(head.data(), y.data(), w.data(), n / 2, interleaved);
      for (size_t i = 0; i < half; ++i) {
        const size_t a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + half;
        expected[a] = static_cast<double>(x[a]) * y[i] - static_cast<double>(x[b]) * w[i];
        expected[b] = static_cast<double>(x[a]) * w[i] + static_cast<double>(x[b]) * y[i];
      }
      const double error = worst(head, expected);
      expect(error < 1e-6, interleaved ? "rope interleaved" : "rope", error);
    }
  }
}

struct Cached {
  MappedMemory memory;
  const uint8_t* tiles[kPartitionTiles];
};

Cached make_cache(const AttentionKernels& k, const KvLayout& layout, const std::vector<float>& keys,
                  const std::vector<float>& values) {
  Cached cache{MappedMemory(static_cast<size_t>(layout.tile_bytes * kPartitionTiles), false), {}};
  std::memset(cache.memory.data(), 0xff, cache.memory.size());  // what is not written is NaN
  const int64_t positions = static_cast<int64_t>(keys.size()) / layout.head_dim;
  for (int64_t p = 0; p < positions; ++p) {
    uint8_t* tile = cache.memory.data() + p / kTilePositions * layout.tile_bytes;
    k.kv_store(layout, &keys[static_cast<size_t>(p * layout.head_dim)],
               &values[static_cast<size_t>(p * layout.head_dim)], p % kTilePositions, tile);
  }
  for (int64_t t = 0; t < kPartitionTiles; ++t) cache.tiles[t] = cache.memory.data() + t * layout.tile_bytes;
  return cache;
}

void check_attention(const AttentionKernels& k, KvDtype dtype, int64_t head_dim, int64_t rows) {
  const int64_t positions = 101;
  const std::vector<float> q = random_row(rows * head_dim, 0.5f);
  const std::vector<float> keys = random_row(positions * head_dim, 1.0f),
                           values = random_row(positions * head_dim, 1.0f);
  const KvLayout layout = kv_layout(dtype, head_dim);
  const Cached cache = make_cache(k, layout, keys, values);
  std::vector<int32_t> begin, end;
  for (int64_t r = 0; r < rows; ++r) {
    begin.push_back(static_cast<int32_t>(r < 2 ? 0 : r));
    end.push_back(static_cast<int32_t>(positions - rows + r + 1));
  }
  const int64_t stride = head_dim + kStatePadding;
  std::vector<float> scores(kScratchRows * kPartition), states(static_cast<size_t>(rows * stride)),
      one(static_cast<size_t>(stride));
  std::vector<float> scaled = q;
  for (float& x : scaled) x *= 1.44269504f;
  std::vector<int16_t> codes(static_cast<size_t>(rows * kQueryStride));
  std::vector<float> scales(static_cast<size_t>(rows));
  k.encode_queries(q.data(), 1.44269504f, rows, head_dim, codes.data(), scales.data());
  const auto query = [&](int64_t first, int64_t count) {
    const auto at = static_cast<size_t>(first);
    return AttentionRows{&scaled[at * static_cast<size_t>(head_dim)],
                         count,
                         &begin[at],
                         &end[at],
                         0.0f,
                         cache.tiles,
                         &codes[static_cast<size_t>(first * kQueryStride)],
                         &scales[at]};
  };
  k.attend(layout, cache.tiles, query(0, rows), scores.data(), states.data());
  const double tolerance = dtype == KvDtype::kFloat32 ? 2e-6 : (dtype == KvDtype::kInt8 ? 3e-2 : 2e-3);
  for (int64_t r = 0; r < rows; ++r) {
    const float* row_q = &q[static_cast<size_t>(r * head_dim)];
    std::vector<double> weights(static_cast<size_t>(positions)), expected(static_cast<size_t>(head_dim));
    double total = 0;
    for (int64_t p = begin[static_cast<size_t>(r)]; p < end[static_cast<size_t>(r)]; ++p) {
      double score = 0;
      for (int64_t d = 0; d < head_dim; ++d)
        score += static_cast<double>(row_q[d]) * keys[static_cast<size_t>(p * head_dim + d)];
      weights[static_cast<size_t>(p)] = std::exp(score);
      total += weights[static_cast<size_t>(p)];
    }
    for (int64_t p = 0; p < positions; ++p) {
      for (int64_t d = 0; d < head_dim; ++d) {
        expected[static_cast<size_t>(d)] +=
            weights[static_cast<size_t>(p)] / total * values[static_cast<size_t>(p * head_dim + d)];
      }
    }
    std::vector<float> out(static_cast<size_t>(head_dim));
    k.finish(head_dim, &states[static_cast<size_t>(r * stride)], out.data());
    const double error = worst(out, expected);
    expect(error < tolerance, "attend", error);
    // The same row alone, and from an expanded tile: not a bit may differ.
    k.attend(layout, cache.tiles, query(r, 1), scores.data(), one.data());
    expect(std::memcmp(one.data(), &states[static_cast<size_t>(r * stride)],
                       static_cast<size_t>(head_dim + 2) * 4) == 0,
           "attend: alone or in a block", static_cast<double>(r));
  }
  if (dtype == KvDtype::kInt16) return;  // read as it is
  const KvLayout wide = expanded_layout(layout);
  MappedMemory panel(static_cast<size_t>(wide.tile_bytes * kPartitionTiles), false);
  const uint8_t* panels[kPartitionTiles];
  for (int64_t t = 0; t < kPartitionTiles; ++t) {
    uint8_t* tile = panel.data() + t * wide.tile_bytes;
    k.kv_expand(layout, cache.tiles[t], wide, tile);
    panels[t] = tile;
  }
  std::vector<float> again(states.size());
  k.attend(wide, panels, query(0, rows), scores.data(), again.data());
  for (int64_t r = 0; r < rows; ++r) {
    const auto at = static_cast<size_t>(r * stride);
    expect(std::memcmp(&again[at], &states[at], static_cast<size_t>(head_dim + 2) * 4) == 0,
           "attend: expanded tiles", static_cast<double>(r));
  }
}

double softplus(double x) {
  return std::log1p(std::exp(x));
}

double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

// Runs rows [begin, end) of a recurrence, and again in two calls: equal bits, and near `expected`.
template <class Call>
void expect_rows(const char* what, int64_t num_rows, int64_t num_state, const std::vector<double>& expected,
                 Call call) {
  std::vector<float> out(expected.size()), parts(expected.size());
  std::vector<float> state(static_cast<size_t>(num_state)), parts_state(static_cast<size_t>(num_state));
  call(0, num_rows, state.data(), out.data());
  call(0, num_rows / 3, parts_state.data(), parts.data());
  call(num_rows / 3, num_rows, parts_state.data(), parts.data());
  const double error = worst(out, expected);
  expect(error < 1e-5, what, error);
  expect(std::memcmp(out.data(), parts.data(), out.size() * sizeof(float)) == 0, what, -1);
  expect(std::memcmp(state.data(), parts_state.data(), state.size() * sizeof(float)) == 0, what, -2);
}

void check_conv(const RecurrentKernels& k, int64_t num_rows, int64_t columns, int64_t kernel) {
  const std::vector<float> x = random_row(num_rows * columns, 1.0f), bias = random_row(columns, 0.5f),
                           weight = random_row(kernel * columns, 1.0f);
  std::vector<double> expected(x.size());
  for (int64_t t = 0; t < num_rows; ++t) {
    for (int64_t c = 0; c < columns; ++c) {
      double value = static_cast<double>(bias[static_cast<size_t>(c)]);
      for (int64_t j = std::max<int64_t>(0, kernel - 1 - t); j < kernel; ++j) {
        value += static_cast<double>(weight[static_cast<size_t>(j * columns + c)]) *
                 static_cast<double>(x[static_cast<size_t>((t - kernel + 1 + j) * columns + c)]);
      }
      expected[static_cast<size_t>(t * columns + c)] = value * sigmoid(value);
    }
  }
  expect_rows(
      "short_conv", num_rows, (kernel - 1) * columns, expected,
      [&](int64_t begin, int64_t end, float* state, float* out) {
        k.short_conv({x.data() + begin * columns, columns, out + begin * columns, columns, end - begin,
                      columns, weight.data(), columns, kernel, bias.data(), true, Activation::kSilu, state});
      });
}

void check_delta(const RecurrentKernels& k, int64_t num_rows, int64_t depth, int64_t columns) {
  const std::vector<float> q = random_row(num_rows * depth, 1.0f), keys = random_row(num_rows * depth, 1.0f),
                           v = random_row(num_rows * columns, 1.0f), a = random_row(num_rows, 2.0f),
                           b = random_row(num_rows, 2.0f);
  const float decay = -0.7f, bias = 0.3f;
  std::vector<double> expected(v.size()), matrix(static_cast<size_t>(depth * columns));
  for (int64_t t = 0; t < num_rows; ++t) {
    double q_length = 1e-6, k_length = 1e-6;
    const float *q_row = &q[static_cast<size_t>(t * depth)], *k_row = &keys[static_cast<size_t>(t * depth)];
    for (int64_t d = 0; d < depth; ++d) {
      q_length += static_cast<double>(q_row[d]) * q_row[d];
      k_length += static_cast<double>(k_row[d]) * k_row[d];
    }
    const double keep = std::exp(static_cast<double>(decay) *
                                 softplus(static_cast<double>(a[static_cast<size_t>(t)] + bias)));
    for (int64_t c = 0; c < columns; ++c) {
      double known = 0, out = 0;
      const auto at = [&](int64_t d) { return static_cast<size_t>(d * columns + c); };
      for (int64_t d = 0; d < depth; ++d) known += (matrix[at(d)] *= keep) * k_row[d] / std::sqrt(k_length);
      const auto value = static_cast<size_t>(t * columns + c);
      const double change =
          sigmoid(static_cast<double>(b[static_cast<size_t>(t)])) * (static_cast<double>(v[value]) - known);
      for (int64_t d = 0; d < depth; ++d) {
        matrix[at(d)] += change * k_row[d] / std::sqrt(k_length);
        out += matrix[at(d)] * q_row[d] / std::sqrt(q_length * static_cast<double>(depth));
      }
      expected[value] = out;
    }
  }
  expect_rows(
      "gated_delta", num_rows, depth * columns, expected,
      [&](int64_t begin, int64_t end, float* state, float* out) {
        k.gated_delta({q.data() + begin * depth, keys.data() + begin * depth, v.data() + begin * columns,
                       a.data() + begin, b.data() + begin, depth, depth, columns, 1, 1, out + begin * columns,
                       columns, end - begin, depth, columns, decay, bias, state});
      });
}

void check_scan(const RecurrentKernels& k, int64_t num_rows, int64_t depth, int64_t columns) {
  const std::vector<float> x = random_row(num_rows * columns, 1.0f), b = random_row(num_rows * depth, 1.0f),
                           c = random_row(num_rows * depth, 1.0f), dt = random_row(num_rows, 2.0f);
  const float decay = -0.9f, skip = 0.6f, bias = -0.2f, least = 0.05f, most = 1.5f;
  std::vector<double> expected(x.size()), matrix(static_cast<size_t>(depth * columns));
  for (int64_t t = 0; t < num_rows; ++t) {
    const double step =
        std::fmin(static_cast<double>(most),
                  std::fmax(static_cast<double>(least),
                            softplus(static_cast<double>(dt[static_cast<size_t>(t)] + bias))));
    const double keep = std::exp(static_cast<double>(decay) * step);
    for (int64_t i = 0; i < columns; ++i) {
      const auto value = static_cast<size_t>(t * columns + i);
      double out = static_cast<double>(skip) * x[value];
      for (int64_t d = 0; d < depth; ++d) {
        double& held = matrix[static_cast<size_t>(d * columns + i)];
        held = keep * held + step * x[value] * b[static_cast<size_t>(t * depth + d)];
        out += held * c[static_cast<size_t>(t * depth + d)];
      }
      expected[value] = out;
    }
  }
  expect_rows(
      "selective_scan", num_rows, depth * columns, expected,
      [&](int64_t begin, int64_t end, float* state, float* out) {
        k.selective_scan({x.data() + begin * columns, b.data() + begin * depth, c.data() + begin * depth,
                          dt.data() + begin, columns, depth, depth, 1, out + begin * columns, columns,
                          end - begin, depth, columns, decay, skip, bias, least, most, state});
      });
}

}  // namespace

int main(int argc, char** argv) {
  const char* isa = argc > 1 ? argv[1] : "portable";
  const VectorKernels* rows = vector_kernels(isa);
  const AttentionKernels* attention = attention_kernels(isa);
  const RecurrentKernels* recurrent = recurrent_kernels(isa);
  if (rows == nullptr || attention == nullptr || recurrent == nullptr) {
    std::fprintf(stderr, "no kernels for isa %s in this build\n", isa);
    return 2;
  }
  check_rows(*rows);
  for (KvDtype dtype : {KvDtype::kFloat32, KvDtype::kFloat16, KvDtype::kInt16, KvDtype::kInt8}) {
    for (int64_t head_dim : {8, 24, 64, 128, 200}) {
      for (int64_t num_rows : {1, 3, 7, 20}) check_attention(*attention, dtype, head_dim, num_rows);
    }
  }
  for (int64_t num_rows : {1, 5, 70}) {
    for (int64_t columns : {3, 16, 64, 100}) {
      for (int64_t kernel : {2, 3, 4, 7}) check_conv(*recurrent, num_rows, columns, kernel);
      for (int64_t depth : {5, 16, 128}) {
        check_delta(*recurrent, num_rows, depth, columns);
        check_scan(*recurrent, num_rows, depth, columns);
      }
    }
  }
  if (failures == 0) std::printf("ok %s\n", isa);
  return failures == 0 ? 0 : 1;
}

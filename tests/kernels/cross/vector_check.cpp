// Checks the row and attention kernels of the variant named on the command line against double precision, and
// that blocking does not change a bit. Needs nothing but the kernels, so it also runs under an emulator:
//   aarch64-linux-gnu-g++ -static ... && qemu-aarch64 ./vector_check neon
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

uint32_t state = 1;
float random_float(float scale) {
  state = state * 1664525u + 1013904223u;
  return scale * static_cast<float>(static_cast<int32_t>(state)) / 2147483648.0f;
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

}  // namespace

int main(int argc, char** argv) {
  const char* isa = argc > 1 ? argv[1] : "portable";
  const VectorKernels* rows = vector_kernels(isa);
  const AttentionKernels* attention = attention_kernels(isa);
  if (rows == nullptr || attention == nullptr) {
    std::fprintf(stderr, "no kernels for isa %s in this build\n", isa);
    return 2;
  }
  check_rows(*rows);
  for (KvDtype dtype : {KvDtype::kFloat32, KvDtype::kFloat16, KvDtype::kInt16, KvDtype::kInt8}) {
    for (int64_t head_dim : {8, 24, 64, 128, 200}) {
      for (int64_t num_rows : {1, 3, 7, 20}) check_attention(*attention, dtype, head_dim, num_rows);
    }
  }
  if (failures == 0) std::printf("ok %s\n", isa);
  return failures == 0 ? 0 : 1;
}

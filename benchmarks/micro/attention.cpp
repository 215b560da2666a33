// Attention over one full partition (256 positions) for some query rows of one kv head, and the cache's
// writes.
#include "micro.h"
#include "tellin/kv_pool.h"
#include "tellin/vector_kernels.h"

namespace tellin::micro {
namespace {

// A partition's tiles, filled through the kernels.
class Tiles {
 public:
  Tiles(const AttentionKernels& kernels, KvDtype dtype, int64_t head_dim)
      : kernels_(kernels),
        layout_(kv_layout(dtype, head_dim)),
        panel_layout_(expanded_layout(layout_)),
        cache_(static_cast<size_t>(layout_.tile_bytes * kPartitionTiles), false),
        panel_(static_cast<size_t>(panel_layout_.tile_bytes * kPartitionTiles), false),
        row_(values(static_cast<size_t>(head_dim))) {
    for (int64_t t = 0; t < kPartitionTiles; ++t) {
      tiles_[t] = cache_.data() + t * layout_.tile_bytes;
      panels_[t] = panel_.data() + t * panel_layout_.tile_bytes;
    }
    store();
    expand();
  }

  void store() {
    for (int64_t j = 0; j < kPartition; ++j) {
      kernels_.kv_store(layout_, row_.data(), row_.data(), j % kTilePositions, tiles_[j / kTilePositions]);
    }
  }
  void expand() {
    for (int64_t t = 0; t < kPartitionTiles; ++t) {
      kernels_.kv_expand(layout_, tiles_[t], panel_layout_, panels_[t]);
    }
  }
  const KvLayout& layout(bool is_expanded) const { return is_expanded ? panel_layout_ : layout_; }
  const uint8_t* const* tiles(bool is_expanded) const { return is_expanded ? panels_ : tiles_; }

 private:
  const AttentionKernels& kernels_;
  const KvLayout layout_, panel_layout_;
  const MappedMemory cache_, panel_;
  const std::vector<float> row_;
  uint8_t* tiles_[kPartitionTiles];
  uint8_t* panels_[kPartitionTiles];
};

void attend(benchmark::State& state, const AttentionKernels* kernels, KvDtype dtype, bool is_expanded) {
  const int64_t head_dim = state.range(0), rows = state.range(1);
  const Tiles tiles(*kernels, dtype, head_dim);
  const std::vector<float> q = values(static_cast<size_t>(rows * head_dim));
  const std::vector<int32_t> begin(static_cast<size_t>(rows), 0);
  const std::vector<int32_t> end(static_cast<size_t>(rows), static_cast<int32_t>(kPartition));
  std::vector<float> scores(kScratchRows * kPartition);
  std::vector<float> states(static_cast<size_t>(rows * (head_dim + kStatePadding)));
  std::vector<int16_t> codes(static_cast<size_t>(rows * kQueryStride));
  std::vector<float> scales(static_cast<size_t>(rows));
  kernels->encode_queries(q.data(), 1.0f, rows, head_dim, codes.data(), scales.data());
  const AttentionRows query{
      q.data(), rows, begin.data(), end.data(), 0.0f, tiles.tiles(is_expanded), codes.data(), scales.data()};
  for (auto _ : state) {
    kernels->attend(tiles.layout(is_expanded), tiles.tiles(is_expanded), query, scores.data(), states.data());
    benchmark::ClobberMemory();
  }
  state.counters["MAC"] = rate(static_cast<double>(2 * rows * head_dim * kPartition));
}

// A partition's states merged into the running ones, and the result.
void fold(benchmark::State& state, const AttentionKernels* kernels) {
  const int64_t head_dim = state.range(0);
  const auto floats = static_cast<size_t>(head_dim + kStatePadding);
  std::vector<float> part = values(floats), running = values(floats), out(static_cast<size_t>(head_dim));
  part[static_cast<size_t>(head_dim) + 1] = running[static_cast<size_t>(head_dim) + 1] = 1.0f;
  for (auto _ : state) {
    kernels->fold(1, head_dim, part.data(), running.data());
    kernels->finish(head_dim, running.data(), out.data());
    running[static_cast<size_t>(head_dim) + 1] = 1.0f;
    benchmark::ClobberMemory();
  }
}

// Tiles::store or Tiles::expand.
void write_tiles(benchmark::State& state, const AttentionKernels* kernels, KvDtype dtype,
                 void (Tiles::*write)()) {
  Tiles tiles(*kernels, dtype, state.range(0));
  for (auto _ : state) {
    (tiles.*write)();
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * kPartition);
}

}  // namespace

void add_attention(const std::string& isa) {
  const AttentionKernels* const k = attention_kernels(isa.c_str());
  const std::string prefix = "attention/" + isa + "/";
  const std::pair<const char*, KvDtype> dtypes[] = {{"f32", KvDtype::kFloat32},
                                                    {"f16", KvDtype::kFloat16},
                                                    {"int16", KvDtype::kInt16},
                                                    {"int8", KvDtype::kInt8}};
  for (const auto& [name, dtype] : dtypes) {
    const std::string what = prefix + name;
    benchmark::RegisterBenchmark((what + "/attend").c_str(), attend, k, dtype, false)
        ->ArgNames({"head_dim", "rows"})
        ->ArgsProduct({{64, 128}, {1, 3, 4, 8, 96}});
    benchmark::RegisterBenchmark((what + "/attend_expanded").c_str(), attend, k, dtype, true)
        ->ArgNames({"head_dim", "rows"})
        ->ArgsProduct({{64, 128}, {96}});
    benchmark::RegisterBenchmark((what + "/kv_store").c_str(), write_tiles, k, dtype, &Tiles::store)
        ->Arg(64)
        ->Arg(128);
    benchmark::RegisterBenchmark((what + "/kv_expand").c_str(), write_tiles, k, dtype, &Tiles::expand)
        ->Arg(64)
        ->Arg(128);
  }
  benchmark::RegisterBenchmark((prefix + "fold").c_str(), fold, k)->Arg(64)->Arg(128);
}

}  // namespace tellin::micro

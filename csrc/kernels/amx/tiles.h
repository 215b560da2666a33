// AMX: the tile instructions. A tile has up to 16 rows of 64 bytes; a product of signed bytes adds
// sum over k of a[m][k] * b[k / 4][4 * n + k % 4] to c[m][n]. One of bfloat16 adds the sum of two float32
// sums to it, each begun with zero: of a[m][2 * k] * b[k][2 * n], and of a[m][2 * k + 1] * b[k][2 * n + 1], k
// ascending, every step rounded once (Intel SDM volume 2, TDPBF16PS; seen to be so on a Xeon).
//
// Inline assembly, not the compiler's intrinsics: those of GCC 12 do not say that loads read memory.
// With TELLIN_EMULATE_TILES (sanitizer builds) plain code does what the instructions do, on any processor,
// and every byte that a tile reads or writes is seen.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#define TELLIN_TILE_INLINE inline __attribute__((always_inline))

namespace tellin {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;

// Rows and bytes per row of the eight tiles (Intel SDM volume 1, section 18.3: palette 1).
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileConfig) == 64, "layout of LDTILECFG");

#ifdef TELLIN_EMULATE_TILES

struct EmulatedTiles {
  TileConfig config;
  int32_t values[8][kTileRows][kTileRowBytes / 4];
};

inline EmulatedTiles& emulated_tiles() {
  static thread_local EmulatedTiles tiles;
  return tiles;
}

inline void configure_tiles(const TileConfig& config) {
  emulated_tiles().config = config;
}

inline void release_tiles() {
  emulated_tiles().config = {};
}

template <int kTile>
inline void load_tile(const void* rows, int64_t stride) {
  EmulatedTiles& t = emulated_tiles();
  std::memset(t.values[kTile], 0, sizeof t.values[kTile]);
  for (int m = 0; m < t.config.rows[kTile]; ++m) {
    std::memcpy(t.values[kTile][m], static_cast<const char*>(rows) + m * stride, t.config.row_bytes[kTile]);
  }
}

template <int kTile>
inline void store_tile(void* rows, int64_t stride) {
  const EmulatedTiles& t = emulated_tiles();
  for (int m = 0; m < t.config.rows[kTile]; ++m) {
    std::memcpy(static_cast<char*>(rows) + m * stride, t.values[kTile][m], t.config.row_bytes[kTile]);
  }
}

template <int kTile>
inline void zero_tile() {
  std::memset(emulated_tiles().values[kTile], 0, sizeof emulated_tiles().values[kTile]);
}

template <int kC, int kA, int kB>
inline void add_tile_product() {
  EmulatedTiles& t = emulated_tiles();
  for (int m = 0; m < t.config.rows[kC]; ++m) {
    const auto* a = reinterpret_cast<const int8_t*>(t.values[kA][m]);
    for (int n = 0; n < t.config.row_bytes[kC] / 4; ++n) {
      for (int k = 0; k < t.config.row_bytes[kA]; ++k) {
        const auto* b = reinterpret_cast<const int8_t*>(t.values[kB][k / 4]);
        t.values[kC][m][n] += a[k] * b[4 * n + k % 4];
      }
    }
  }
}

inline float bf16_value(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

template <int kC, int kA, int kB>
inline void add_bf16_product() {
  EmulatedTiles& t = emulated_tiles();
  for (int m = 0; m < t.config.rows[kC]; ++m) {
    const auto* a = reinterpret_cast<const uint16_t*>(t.values[kA][m]);
    for (int n = 0; n < t.config.row_bytes[kC] / 4; ++n) {
      float sums[2] = {};
      for (int k = 0; k < t.config.row_bytes[kA] / 2; ++k) {
        const auto* b = reinterpret_cast<const uint16_t*>(t.values[kB][k / 2]);
        // The product of two bfloat16 is a float32, exactly.
        sums[k % 2] += bf16_value(a[k]) * bf16_value(b[2 * n + k % 2]);
      }
      float c;
      std::memcpy(&c, &t.values[kC][m][n], sizeof c);
      c += sums[0] + sums[1];
      std::memcpy(&t.values[kC][m][n], &c, sizeof c);
    }
  }
}

#else

TELLIN_TILE_INLINE void configure_tiles(const TileConfig& config) {
  asm volatile("ldtilecfg %0" : : "m"(config));
}

// A thread that has tiles makes every switch to another thread save them.
TELLIN_TILE_INLINE void release_tiles() {
  asm volatile("tilerelease" : : : "memory");
}

template <int kTile>
TELLIN_TILE_INLINE void load_tile(const void* rows, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(rows), "r"(stride) : "memory");
}

template <int kTile>
TELLIN_TILE_INLINE void store_tile(void* rows, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kTile), "r"(rows), "r"(stride) : "memory");
}

template <int kTile>
TELLIN_TILE_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

template <int kC, int kA, int kB>
TELLIN_TILE_INLINE void add_tile_product() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

template <int kC, int kA, int kB>
TELLIN_TILE_INLINE void add_bf16_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

#endif

}  // namespace
}  // namespace tellin

// Body of an instruction-set unit's sampling.cpp. The including file defines TELLIN_SAMPLING_ISA (the name of
// the variant), TELLIN_SAMPLING_TABLE (the symbol to export) and TELLIN_SAMPLING_WIDTH (float lanes of a
// register). Everything but the table has internal linkage: no copy of these functions can leak into another
// unit.
#include "sampling_lists.h"

namespace tellin {
namespace {

// Weights of one full block, and their sum in lanes.
TELLIN_INLINE void block_weights(const float* x, float max, float inv_t, uint64_t* out, LongVec& sum) {
  sum = LongVec{};
  for (int64_t i = 0; i < kSampleBlock; i += kWide * kLanes) {
    FloatVec z[kWide], w[kWide];
    for (int64_t j = 0; j < kWide; ++j) {
      load(x + i + j * kLanes, z[j]);
      z[j] = (z[j] - max) * inv_t;
    }
    exp_weights(z, w);
    for (int64_t j = 0; j < kWide; ++j, out += kLanes) {
      LongVec low, high;
      round_weights(w[j], low, high);
      low -= kIntegerBase;
      high -= kIntegerBase;
      sum += low + high;
      std::memcpy(out, &low, sizeof low);
      std::memcpy(out + kHalfLanes, &high, sizeof high);
    }
  }
}

// Sum of the weights of one full block: in lanes, kBlockBase too large.
constexpr uint64_t kBlockBase = kSampleBlock * kIntegerBase;  // modulo 2^64, as the sums

TELLIN_INLINE void mass_of_block(const float* x, float max, float inv_t, LongVec& mass) {
  LongVec sum[2] = {};
#pragma GCC unroll 4
  for (int64_t i = 0; i < kSampleBlock; i += kWide * kLanes) {
    FloatVec z[kWide], w[kWide];
#pragma GCC unroll 4
    for (int64_t j = 0; j < kWide; ++j) {
      load(x + i + j * kLanes, z[j]);
      z[j] = (z[j] - max) * inv_t;
    }
    exp_weights(z, w);
#pragma GCC unroll 4
    for (int64_t j = 0; j < kWide; ++j) {
      LongVec low, high;
      round_weights(w[j], low, high);
      sum[0] += low;
      sum[1] += high;
    }
  }
  mass = sum[0] + sum[1];
}

// Largest entry of one full block.
TELLIN_INLINE float max_of_block(const float* x) {
  float best = kNegInf;
  for (int64_t i = 0; i < kSampleBlock; ++i) {
    if (!(x[i] < kPosInf)) return kPosInf;
    best = x[i] > best ? x[i] : best;
  }
  return best;
}

// Entries of a and b, which is counted on from a, in the order of the indices.
#if defined(__clang__)
#define TELLIN_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else  // GCC has the former from version 12 on
#define TELLIN_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntVec{__VA_ARGS__})
#endif

// a's first half, b's first half, ... in turns, the larger of them and their second halves.
TELLIN_INLINE void max_of_halves(const FloatVec& a, const FloatVec& b, FloatVec& out) {
#if TELLIN_SAMPLING_WIDTH == 16
  const FloatVec first = TELLIN_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const FloatVec second = TELLIN_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif TELLIN_SAMPLING_WIDTH == 8
  const FloatVec first = TELLIN_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  const FloatVec second = TELLIN_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  const FloatVec first = TELLIN_SHUFFLE(a, b, 0, 4, 1, 5);
  const FloatVec second = TELLIN_SHUFFLE(a, b, 2, 6, 3, 7);
#endif
  out = first > second ? first : second;
}

// Largest entries of kLanes full blocks, `stride` entries apart; of `count` of them if those are fewer.
// Fetches what lies `ahead` entries behind.
TELLIN_INLINE void max_of_blocks(const float* x, int64_t stride, int64_t count, int64_t ahead,
                                 FloatVec& maxima) {
  constexpr int64_t kVecs = kSampleBlock / kLanes;
  FloatVec best[kLanes], sums[4] = {};
#pragma GCC unroll 16
  for (int64_t i = 0; i < kLanes; ++i) {
    const float* block = x + (i < count ? i : 0) * stride;
    if (ahead > 0) {
#pragma GCC unroll 4
      for (int64_t j = 0; j < kSampleBlock; j += 16) __builtin_prefetch(block + ahead + j);
    }
    FloatVec v[kVecs];
#pragma GCC unroll 16
    for (int64_t j = 0; j < kVecs; ++j) {
      load(block + j * kLanes, v[j]);
      sums[j % 4] += v[j];
    }
#pragma GCC unroll 4
    for (int64_t half = kVecs / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
      for (int64_t j = 0; j < half; ++j) v[j] = v[j] > v[j + half] ? v[j] : v[j + half];
    }
    best[i] = v[0];
  }
#pragma GCC unroll 4
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < half; ++i) max_of_halves(best[i], best[i + half], best[i]);
  }
  maxima = best[0];
  // NaN and +infinity survive addition, unless finite entries overflow or -infinity makes it NaN: then the
  // blocks are looked at one by one.
  const IntVec good = (sums[0] + sums[1]) + (sums[2] + sums[3]) < kPosInf;
  int32_t all = -1;
  for (int64_t i = 0; i < kLanes; ++i) all &= good[i];
  if (__builtin_expect(all == 0, 0)) {
    for (int64_t i = 0; i < kLanes; ++i) maxima[i] = max_of_block(x + (i < count ? i : 0) * stride);
  }
}

constexpr int64_t kAhead = 1024;  // entries; the loads of a few blocks come in bursts

bool block_max(const float* x, int64_t n, float* maxima) {
  const int64_t full = n / kSampleBlock;
  FloatVec largest = FloatVec{} + kNegInf, found;
  int64_t b = 0;
  for (; b + kLanes <= full; b += kLanes) {
    max_of_blocks(x + b * kSampleBlock, kSampleBlock, kLanes, kAhead, found);
    store(maxima + b, found);
    largest = found > largest ? found : largest;
  }
  float rest[kLanes];
  if (b < full) {
    max_of_blocks(x + b * kSampleBlock, kSampleBlock, full - b, 0, found);
    largest = found > largest ? found : largest;
    store(rest, found);
    for (int64_t i = 0; b + i < full; ++i) maxima[b + i] = rest[i];
  }
  bool good = true;
  if (n % kSampleBlock != 0) {
    float block[kSampleBlock];
    pad_block(x + full * kSampleBlock, n % kSampleBlock, block);
    maxima[full] = max_of_block(block);
    good = maxima[full] < kPosInf;
  }
  for (int64_t i = 0; i < kLanes; ++i) good &= largest[i] < kPosInf;
  return good;
}

void tile_max(const float* x, int64_t stride, int64_t rows, int64_t n, float* maxima, int64_t maxima_stride) {
  float found[kLanes];
  for (int64_t m = 0; m < rows; m += kLanes) {
    const int64_t count = rows - m < kLanes ? rows - m : kLanes;
    const float* tile = x + m * stride;
    float* out = maxima + m * maxima_stride;
    for (int64_t begin = 0; begin < n; begin += kSampleBlock, ++out) {
      if (n - begin >= kSampleBlock) {
        FloatVec v;
        max_of_blocks(tile + begin, stride, count, 0, v);
        store(found, v);
      } else {
        float block[kSampleBlock];
        for (int64_t i = 0; i < count; ++i) {
          pad_block(tile + i * stride + begin, n - begin, block);
          found[i] = max_of_block(block);
        }
      }
      for (int64_t i = 0; i < count; ++i) out[i * maxima_stride] = found[i];
    }
  }
}

uint64_t block_mass(const float* x, int64_t n, const float* maxima, float max, float inv_t, float least_max,
                    uint64_t* masses) {
  const int64_t num_blocks = num_blocks_of(n);
  if (masses != nullptr) std::memset(masses, 0, static_cast<size_t>(num_blocks) * sizeof(uint64_t));
  LongVec total = {};
  uint64_t count = 0;
  float padded[kSampleBlock];
  for_blocks(x, maxima, num_blocks, least_max, kPosInf, [&](int64_t b) {
    if ((maxima[b] - max) * inv_t < -kWeightCutoff) return;
    const float* block = block_entries(x, n, b, padded);
    LongVec mass;
    mass_of_block(block, max, inv_t, mass);
    total += mass;
    ++count;
    if (masses != nullptr) masses[b] = sum_of_lanes(mass) - kBlockBase;
  });
  return sum_of_lanes(total) - count * kBlockBase;
}

template <bool kFast>
TELLIN_INLINE double sum_of_blocks(const float* x, int64_t n, const float* maxima, float lowest,
                                   float highest, float max, float inv_t) {
  const float scale = inv_t * kLog2E;
  BlockSum<kFast> sum;
  float padded[kSampleBlock];
  for_blocks(x, maxima, num_blocks_of(n), lowest, highest, [&](int64_t b) {
    const float* block = block_entries(x, n, b, padded);
    FloatVec t[kBlockVecs];
#pragma GCC unroll 16
    for (int64_t j = 0; j < kBlockVecs; ++j) {
      load(block + j * kLanes, t[j]);
      t[j] = (t[j] - max) * scale;
    }
    sum.add(t);
  });
  return sum.total();
}

double sum_exp(const float* x, int64_t n, const float* maxima, float max, float inv_t) {
  return sum_of_blocks<false>(x, n, maxima, max - kWeightCutoff / inv_t, max, max, inv_t);
}

double estimate_blocks(const float* x, int64_t n, const float* maxima, float lowest, float highest, float max,
                       float inv_t) {
  return sum_of_blocks<true>(x, n, maxima, lowest, highest, max, inv_t);
}

double estimate_entries(const float* x, int64_t n, float highest, float max, float inv_t) {
  const float scale = inv_t * kLog2E;
  BlockSum<true> sum;
  float padded[kSampleBlock];
  for (int64_t b = 0; b < num_blocks_of(n); ++b) {
    const float* block = block_entries(x, n, b, padded);
    FloatVec t[kBlockVecs];
#pragma GCC unroll 16
    for (int64_t j = 0; j < kSampleBlock / kLanes; ++j) {
      FloatVec v;
      load(block + j * kLanes, v);
      t[j] = v <= highest ? (v - max) * scale : FloatVec{} - 64.0f;
    }
    sum.add(t);
  }
  return sum.total();
}

uint64_t weights(const float* x, int64_t n, float max, float inv_t, uint64_t* out) {
  LongVec total = {}, sum;
  int64_t i = 0;
  for (; i + kSampleBlock <= n; i += kSampleBlock) {
    block_weights(x + i, max, inv_t, out + i, sum);
    total += sum;
  }
  if (i < n) {
    float block[kSampleBlock];
    uint64_t w[kSampleBlock];
    pad_block(x + i, n - i, block);
    block_weights(block, max, inv_t, w, sum);  // those of the padding are 0
    total += sum;
    std::memcpy(out + i, w, static_cast<size_t>(n - i) * sizeof(uint64_t));
  }
  return sum_of_lanes(total);
}

int64_t count_at_least(const float* x, int64_t n, const float* maxima, float value) {
  int64_t count = 0;
  float padded[kSampleBlock];
  for (int64_t begin = 0; begin < n; begin += kSampleBlock) {
    if (maxima[begin / kSampleBlock] < value) continue;
    const float* block = x + begin;
    int64_t padding = 0;
    if (n - begin < kSampleBlock) {
      pad_block(block, n - begin, padded);
      block = padded;
      padding = value == kNegInf ? kSampleBlock - (n - begin) : 0;
    }
    IntVec lanes = {};
    for (int64_t i = 0; i < kSampleBlock; i += kLanes) {
      FloatVec v;
      load(block + i, v);
      lanes -= v >= value;
    }
    for (int64_t i = 0; i < kLanes; ++i) count += lanes[i];
    count -= padding;
  }
  return count;
}

void apply_bitmask(float* x, int64_t n, const int32_t* mask) {
  for (int64_t begin = 0; begin < n; begin += 32) {
    const uint32_t bits = static_cast<uint32_t>(mask[begin / 32]);
    if (bits == 0xFFFFFFFFu) continue;
    const int64_t count = n - begin < 32 ? n - begin : 32;
    for (int64_t i = 0; i < count; ++i) x[begin + i] = (bits >> i & 1u) != 0 ? x[begin + i] : kNegInf;
  }
}

void divide(float* x, int64_t n, float divisor) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    FloatVec v;
    load(x + i, v);
    store(x + i, v / divisor);
  }
  for (; i < n; ++i) x[i] /= divisor;
}

}  // namespace

extern const SamplingKernels TELLIN_SAMPLING_TABLE;
const SamplingKernels TELLIN_SAMPLING_TABLE = {
    TELLIN_SAMPLING_ISA, block_max,        tile_max,      block_mass,   sum_exp,
    estimate_blocks,     estimate_entries, weights,       list_entries, entries_above,
    copy_entries,        count_at_least,   apply_bitmask, divide,
};

}  // namespace tellin

// Vector loops of the sampler: the border between sampler.cpp and the instruction-set units.
//
// A row of logits is seen as blocks of kSampleBlock entries, the last one possibly shorter. Probabilities are
// integers: weight(x) = round(2^44 * exp((x - max) / T)), so that sums are exact and do not depend on the
// order of summation, on the vector width or on which entries were skipped because their weight is zero. exp
// is one fixed sequence of float32 operations; every variant gives the same bits.
//
// PODs only (see quant_types.h): included by every instruction-set unit. Kernels do not allocate and do not
// throw.
#pragma once
#include <cstdint>

namespace tellin {

constexpr int64_t kSampleBlock = 64;  // entries per block: 4 vectors of 512 bits, 4096 blocks for 262k ids
constexpr int kWeightBits = 44;       // weight of the maximum; 2^19 ids sum to less than 2^63
// Per nat below the maximum 2.4e-7 from rounding; 2^19 entries cannot have most of their mass below 13 nats.
// 3e-7 from the polynomials, 1.2e-6 from adding up.
constexpr double kEstimateError = 6e-6;
constexpr float kWeightCutoff = 31.2f;  // exp(-31.2) * 2^44 < 0.5: entries further down weigh nothing

// Entries of a row in id order. The kSampleBlock values that follow the last one are NaN, which no comparison
// holds for; so arrays have room for kSampleBlock entries more than they are for.
struct EntryArrays {
  float* values;
  int32_t* ids;
  uint64_t* weights;
};

// What lies above a value: sum of the weights and number; and how many entries equal the value.
struct EntriesAbove {
  uint64_t mass;
  int64_t count;
  int64_t num_equal;
};

enum class Side { kAtLeast, kAbove, kBelow };  // of a value

struct SamplingKernels {
  const char* isa;

  // maxima[b] = largest entry of block b, or +infinity if it holds NaN or +infinity. Returns whether none
  // does.
  bool (*block_max)(const float* x, int64_t n, float* maxima);
  // The same of a tile of `rows` rows, `stride` entries apart: maxima[m * maxima_stride + b] is row m's.
  void (*tile_max)(const float* x, int64_t stride, int64_t rows, int64_t n, float* maxima,
                   int64_t maxima_stride);
  // masses[b] = sum of the weights of the entries of block b, or 0 if the block's maximum is below least_max,
  // unless `masses` is null; returns the sum over all blocks. inv_t = 1 / temperature.
  uint64_t (*block_mass)(const float* x, int64_t n, const float* maxima, float max, float inv_t,
                         float least_max, uint64_t* masses);
  // Sum of exp((x - max) * inv_t), within 1e-6 of it; float32, so the same bits in every variant. For
  // log-probabilities: half the work of block_mass.
  double (*sum_exp)(const float* x, int64_t n, const float* maxima, float max, float inv_t);
  // About the sum of exp((x - max) * inv_t) over all entries of the blocks whose maximum lies in [lowest,
  // highest]; over all entries <= highest. Times 2^kWeightBits it differs from the sum of the weights by at
  // most kEstimateError of it and one per entry. Much cheaper than block_mass, but not the same bits in every
  // variant: for bounds only.
  double (*estimate_blocks)(const float* x, int64_t n, const float* maxima, float lowest, float highest,
                            float max, float inv_t);
  double (*estimate_entries)(const float* x, int64_t n, float highest, float max, float inv_t);
  // weights[i] for n entries; returns their sum.
  uint64_t (*weights)(const float* x, int64_t n, float max, float inv_t, uint64_t* weights);
  // Lists the entries >= lowest, without weights; returns their number. *rest, unless `rest` is null, is such
  // an estimate for the entries < lowest of the blocks whose maximum is >= lowest.
  int64_t (*list_entries)(const float* x, int64_t n, const float* maxima, float lowest, float max,
                          float inv_t, const EntryArrays& out, double* rest);
  // Of the first n entries of a list.
  EntriesAbove (*entries_above)(const EntryArrays& list, int64_t n, float value);
  // Copies the entries on one side of a value, in order; returns their number. `to` may be `from`.
  int64_t (*copy_entries)(const EntryArrays& from, int64_t n, float value, Side side, const EntryArrays& to);
  // Number of entries >= value.
  int64_t (*count_at_least)(const float* x, int64_t n, const float* maxima, float value);
  // x[i] = -infinity where bit i of the mask is 0 (least significant bit first, ceil(n / 32) words).
  void (*apply_bitmask)(float* x, int64_t n, const int32_t* mask);
  // x[i] /= divisor
  void (*divide)(float* x, int64_t n, float divisor);
};

// Table of the best variant this machine runs, or of the one named (nullptr if it is unknown or cannot run).
const SamplingKernels* sampling_kernels(const char* isa);

}  // namespace tellin

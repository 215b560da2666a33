// Selection among the entries of a row: the best k, the nucleus, the draw. Used by sampler.cpp only.
#pragma once
#include <cstdint>

#include "tellin/sampler.h"

namespace tellin {

// A row of logits with its block maxima. Weights are relative to `max` at temperature 1 / inv_t.
struct LogitsRow {
  const SamplingKernels* kernels;
  float* x;
  int64_t n;
  const float* maxima;
  float max;
  float inv_t;
};

inline int64_t num_sample_blocks(int64_t n) {
  return (n + kSampleBlock - 1) / kSampleBlock;
}

inline bool better(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// Largest entry of the maxima.
float max_of_maxima(const SamplingKernels& kernels, const float* maxima, int64_t n);

// Lowest id among the largest entries.
int32_t argmax(const LogitsRow& row);

// The k best entries in scratch.best, in unspecified order (k >= 1; all entries if k >= n).
void gather_top_k(const LogitsRow& row, int64_t k, SamplerScratch& scratch);

// Lowest value that min_p keeps: (x - max) * inv_t >= log(min_p).
float min_p_lowest(const LogitsRow& row, float min_p);

// 128 random bits for a row.
struct RowRandom {
  uint64_t first, second;
};

struct Draw {
  int32_t id;
  uint64_t mass;  // of all that the filters leave; 0 if there are none
};

// Draws an id from what min-p, top-k and top-p leave. With `forget_dropped` all other entries are overwritten
// with -infinity.
//
// Without filters the draw has two steps, so that it rarely needs the whole row: blocks whose maximum lies
// within 8 nats of the row's are the head; `first` chooses head or tail, `second` the entry there. With
// filters `first` chooses among all that is left. Entries lie in id order.
Draw filter_and_draw(const LogitsRow& row, int64_t top_k, double top_p, float min_p, const RowRandom& random,
                     bool forget_dropped, SamplerScratch& scratch);

}  // namespace tellin

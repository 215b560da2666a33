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

inline int64_t num_sample_blocks(int64_t n) { return (n + kSampleBlock - 1) / kSampleBlock; }

inline bool better(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// Largest entry of the maxima.
float max_of_maxima(const float* maxima, int64_t n);

// Lowest id among the largest entries.
int32_t argmax(const LogitsRow& row);

// Appends all entries >= lowest in id order, with their weights when asked.
void gather(const LogitsRow& row, float lowest, bool with_weights, std::vector<Candidate>& out);

// The k best entries in unspecified order, without weights (k >= 1; all entries if k >= n).
void gather_top_k(const LogitsRow& row, int64_t k, float lowest, std::vector<float>& buffer,
                  std::vector<Candidate>& out);

// Overwrites entries whose probability is below min_p times the largest with -infinity.
void apply_min_p(const LogitsRow& row, float min_p);

// Draws an id for 64 random bits from what the filters leave. With `forget_dropped` the entries that were
// filtered out are overwritten with -infinity; returns the mass of what is left.
struct Draw {
  int32_t id;
  uint64_t mass;
};
Draw filter_and_draw(const LogitsRow& row, int64_t top_k, double top_p, float min_p, uint64_t random,
                     bool forget_dropped, SamplerScratch& scratch);

}  // namespace tellin

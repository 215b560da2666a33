#include "sampler_select.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace tellin {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr size_t kSortedNucleus = 8192;  // candidates up to which a nucleus is found by gathering, then by histogram
constexpr int64_t kBins = 2048;          // histogram bins of 1/64 nat: 24 KiB, and all weights that are not zero
constexpr float kBinsPerNat = 64.0f;

// floor(random * total / 2^64): uniform on [0, total) up to 2^-64 * total.
uint64_t scale_random(uint64_t random, uint64_t total) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(random) * total >> 64);
}

// Smallest mass that is at least the fraction top_p of the total.
uint64_t nucleus_mass(double top_p, uint64_t total) {
  const double wanted = std::ceil(top_p * static_cast<double>(total));
  return wanted >= static_cast<double>(total) ? total : static_cast<uint64_t>(wanted);
}

// An entry whose probability is min_p of the maximum's has this weight.
uint64_t min_p_weight(float min_p) {
  return static_cast<uint64_t>(std::ceil(static_cast<double>(min_p) * static_cast<double>(1ULL << kWeightBits)));
}

// A value below all entries that can reach min_p, with room for the rounding of exp.
float min_p_bound(const LogitsRow& row, float min_p) {
  return row.max + (std::log(min_p) - 1e-3f) / row.inv_t * (1.0f + 1e-5f);
}

uint64_t mass_of(const std::vector<Candidate>& candidates) {
  uint64_t total = 0;
  for (const Candidate& c : candidates) total += c.weight;
  return total;
}

// Keeps the smallest number of best candidates whose mass reaches `wanted` (at least one). Average linear time.
void keep_nucleus(std::vector<Candidate>& candidates, uint64_t wanted) {
  size_t begin = 0, end = candidates.size();
  uint64_t before = 0;  // mass of [0, begin), which is kept
  while (end - begin > 32) {
    const size_t middle = begin + (end - begin) / 2;
    std::nth_element(candidates.begin() + static_cast<std::ptrdiff_t>(begin),
                     candidates.begin() + static_cast<std::ptrdiff_t>(middle),
                     candidates.begin() + static_cast<std::ptrdiff_t>(end), better);
    uint64_t mass = 0;
    for (size_t i = begin; i < middle; ++i) mass += candidates[i].weight;
    if (before + mass >= wanted) {
      end = middle;
    } else {
      before += mass;
      begin = middle;
    }
  }
  std::sort(candidates.begin() + static_cast<std::ptrdiff_t>(begin),
            candidates.begin() + static_cast<std::ptrdiff_t>(end), better);
  while (begin < end && (begin == 0 || before < wanted)) before += candidates[begin++].weight;
  candidates.resize(begin);
}

// What survives the filters when it is too much to list: entries > lowest, and entries equal to it up to an id.
struct Cut {
  float lowest;
  int32_t last_id;

  bool keeps(float value, int64_t id) const { return value > lowest || (value == lowest && id <= last_id); }
};

constexpr Cut kKeepAll = {kNegInf, std::numeric_limits<int32_t>::max()};

// Nucleus of a flat row: adds up masses per 1/64 nat below the maximum, then orders only the bin in which the wanted
// mass is reached. Leaves in `dropped` the entries of that bin which are equal to the cut but worse.
Cut nucleus_by_histogram(const LogitsRow& row, uint64_t wanted, std::vector<Candidate>& dropped) {
  std::vector<uint64_t> bins(kBins, 0);
  uint64_t w[kSampleBlock];
  const float scale = row.inv_t * kBinsPerNat;
  const auto bin_of = [&](float x) { return static_cast<int64_t>(std::min((row.max - x) * scale, kBins - 1.0f)); };
  for (int64_t begin = 0; begin < row.n; begin += kSampleBlock) {
    if ((row.maxima[begin / kSampleBlock] - row.max) * row.inv_t < -kWeightCutoff) continue;
    const int64_t count = std::min(kSampleBlock, row.n - begin);
    row.kernels->weights(row.x + begin, count, row.max, row.inv_t, w);
    for (int64_t i = 0; i < count; ++i) bins[static_cast<size_t>(bin_of(row.x[begin + i]))] += w[i];
  }
  int64_t bin = 0;
  uint64_t before = 0;
  while (before + bins[static_cast<size_t>(bin)] < wanted) before += bins[static_cast<size_t>(bin++)];
  std::vector<Candidate> boundary;
  for (int64_t begin = 0; begin < row.n; begin += kSampleBlock) {
    if (bin_of(row.maxima[begin / kSampleBlock]) > bin) continue;
    const int64_t count = std::min(kSampleBlock, row.n - begin);
    row.kernels->weights(row.x + begin, count, row.max, row.inv_t, w);
    for (int64_t i = 0; i < count; ++i) {
      const float x = row.x[begin + i];
      if (bin_of(x) == bin) boundary.push_back({x, static_cast<int32_t>(begin + i), w[i]});
    }
  }
  dropped = boundary;
  keep_nucleus(boundary, wanted - before);
  const Candidate last = *std::max_element(boundary.begin(), boundary.end(), better);
  dropped.erase(std::remove_if(dropped.begin(), dropped.end(),
                               [&last](const Candidate& c) { return c.value != last.value || c.id <= last.id; }),
                dropped.end());
  return {last.value, last.id};
}

// Entry in which the r-th unit of mass lies; `masses` are those of the blocks.
int32_t find_in_blocks(const LogitsRow& row, const uint64_t* masses, const Cut& cut, uint64_t r) {
  int64_t b = 0;
  while (r >= masses[b]) r -= masses[b++];
  uint64_t w[kSampleBlock];
  const int64_t begin = b * kSampleBlock;
  const int64_t count = std::min(kSampleBlock, row.n - begin);
  row.kernels->weights(row.x + begin, count, row.max, row.inv_t, w);
  int64_t i = 0;
  for (;; ++i) {
    if (!cut.keeps(row.x[begin + i], begin + i)) continue;
    if (r < w[i]) break;
    r -= w[i];
  }
  return static_cast<int32_t>(begin + i);
}

// Draws among the entries that the cut keeps; `dropped` are those equal to it that it does not keep.
Draw draw_from_row(const LogitsRow& row, const Cut& cut, const std::vector<Candidate>& dropped, uint64_t random,
                   bool forget_dropped, std::vector<uint64_t>& masses) {
  masses.resize(static_cast<size_t>(num_sample_blocks(row.n)));
  uint64_t total =
      row.kernels->block_mass(row.x, row.n, row.maxima, row.max, row.inv_t, cut.lowest, masses.data());
  for (const Candidate& c : dropped) {
    masses[static_cast<size_t>(c.id / kSampleBlock)] -= c.weight;
    total -= c.weight;
  }
  const int32_t id = find_in_blocks(row, masses.data(), cut, scale_random(random, total));
  if (forget_dropped) {
    for (int64_t i = 0; i < row.n; ++i) row.x[i] = cut.keeps(row.x[i], i) ? row.x[i] : kNegInf;
  }
  return {id, total};
}

Draw draw_from_candidates(const LogitsRow& row, uint64_t random, bool forget_dropped,
                          std::vector<Candidate>& candidates) {
  std::sort(candidates.begin(), candidates.end(),
            [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  const uint64_t total = mass_of(candidates);
  uint64_t r = scale_random(random, total);
  size_t chosen = 0;
  while (r >= candidates[chosen].weight) r -= candidates[chosen++].weight;
  if (forget_dropped) {
    std::fill(row.x, row.x + row.n, kNegInf);
    for (const Candidate& c : candidates) row.x[c.id] = c.value;
  }
  return {candidates[chosen].id, total};
}

void add_weights(const LogitsRow& row, std::vector<Candidate>& candidates) {
  float x[kSampleBlock];
  uint64_t w[kSampleBlock];
  for (size_t begin = 0; begin < candidates.size(); begin += kSampleBlock) {
    const size_t count = std::min(static_cast<size_t>(kSampleBlock), candidates.size() - begin);
    for (size_t i = 0; i < count; ++i) x[i] = candidates[begin + i].value;
    row.kernels->weights(x, static_cast<int64_t>(count), row.max, row.inv_t, w);
    for (size_t i = 0; i < count; ++i) candidates[begin + i].weight = w[i];
  }
}

void drop_light(std::vector<Candidate>& candidates, uint64_t least_weight) {
  candidates.erase(std::remove_if(candidates.begin(), candidates.end(),
                                  [least_weight](const Candidate& c) { return c.weight < least_weight; }),
                   candidates.end());
}

}  // namespace

float max_of_maxima(const float* maxima, int64_t n) { return *std::max_element(maxima, maxima + num_sample_blocks(n)); }

int32_t argmax(const LogitsRow& row) {
  int64_t i = 0;
  while (row.maxima[i / kSampleBlock] != row.max) i += kSampleBlock;
  while (row.x[i] != row.max) ++i;
  return static_cast<int32_t>(i);
}

void gather(const LogitsRow& row, float lowest, bool with_weights, std::vector<Candidate>& out) {
  uint64_t w[kSampleBlock] = {};
  for (int64_t begin = 0; begin < row.n; begin += kSampleBlock) {
    if (row.maxima[begin / kSampleBlock] < lowest) continue;
    const int64_t count = std::min(kSampleBlock, row.n - begin);
    if (with_weights) row.kernels->weights(row.x + begin, count, row.max, row.inv_t, w);
    for (int64_t i = 0; i < count; ++i) {
      const float x = row.x[begin + i];
      if (x >= lowest) out.push_back({x, static_cast<int32_t>(begin + i), w[i]});
    }
  }
}

void gather_top_k(const LogitsRow& row, int64_t k, float lowest, std::vector<float>& buffer,
                  std::vector<Candidate>& out) {
  const int64_t blocks = num_sample_blocks(row.n);
  if (k <= blocks) {  // the k-th largest block maximum cannot be better than the k-th best entry
    buffer.assign(row.maxima, row.maxima + blocks);
    std::nth_element(buffer.begin(), buffer.begin() + (k - 1), buffer.end(), std::greater<float>());
    lowest = std::max(lowest, buffer[static_cast<size_t>(k - 1)]);
  }
  out.clear();
  gather(row, lowest, false, out);
  if (static_cast<int64_t>(out.size()) > k) {
    std::nth_element(out.begin(), out.begin() + (k - 1), out.end(), better);
    out.resize(static_cast<size_t>(k));
  }
}

Draw filter_and_draw(const LogitsRow& row, int64_t top_k, double top_p, float min_p, uint64_t random,
                     bool forget_dropped, SamplerScratch& scratch) {
  std::vector<Candidate>& candidates = scratch.candidates;
  const bool has_min_p = min_p > 0.0f, has_top_k = top_k > 0 && top_k < row.n, has_top_p = top_p < 1.0;
  const float lowest = has_min_p ? min_p_bound(row, min_p) : kNegInf;
  const uint64_t least_weight = has_min_p ? min_p_weight(min_p) : 0;
  if (!has_min_p && !has_top_k && !has_top_p) {
    return draw_from_row(row, kKeepAll, {}, random, forget_dropped, scratch.masses);
  }
  if (has_top_k || has_min_p) {
    candidates.clear();
    if (has_top_k && !has_min_p) {
      gather_top_k(row, top_k, lowest, scratch.sorted_maxima, candidates);
      add_weights(row, candidates);
    } else {
      gather(row, lowest, true, candidates);
      drop_light(candidates, least_weight);
      if (has_top_k && static_cast<int64_t>(candidates.size()) > top_k) {
        std::nth_element(candidates.begin(), candidates.begin() + (top_k - 1), candidates.end(), better);
        candidates.resize(static_cast<size_t>(top_k));
      }
    }
    if (has_top_p) keep_nucleus(candidates, nucleus_mass(top_p, mass_of(candidates)));
    return draw_from_candidates(row, random, forget_dropped, candidates);
  }

  scratch.masses.resize(static_cast<size_t>(num_sample_blocks(row.n)));
  const uint64_t total =
      row.kernels->block_mass(row.x, row.n, row.maxima, row.max, row.inv_t, kNegInf, scratch.masses.data());
  const uint64_t wanted = nucleus_mass(top_p, total);
  for (float nats = 4.0f; nats < kWeightCutoff; nats *= 2.0f) {
    candidates.clear();
    gather(row, row.max - nats / row.inv_t, true, candidates);
    if (mass_of(candidates) >= wanted) {
      keep_nucleus(candidates, wanted);
      return draw_from_candidates(row, random, forget_dropped, candidates);
    }
    if (candidates.size() > kSortedNucleus) break;
  }
  const Cut cut = nucleus_by_histogram(row, wanted, candidates);
  return draw_from_row(row, cut, candidates, random, forget_dropped, scratch.masses);
}

void apply_min_p(const LogitsRow& row, float min_p) {
  const uint64_t least_weight = min_p_weight(min_p);
  uint64_t w[kSampleBlock];
  for (int64_t begin = 0; begin < row.n; begin += kSampleBlock) {
    const int64_t count = std::min(kSampleBlock, row.n - begin);
    row.kernels->weights(row.x + begin, count, row.max, row.inv_t, w);
    for (int64_t i = 0; i < count; ++i) {
      if (w[i] < least_weight) row.x[begin + i] = kNegInf;
    }
  }
}

}  // namespace tellin

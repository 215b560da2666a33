#include "sampler_select.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "sampler_entries.h"

namespace tellin {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr float kHeadNats = 8.0f;  // blocks with a maximum this close to the row's are the head
// How far below the row's maximum a block's may lie for the block to be estimated, in steps: the others weigh
// less and less.
constexpr std::array<float, 5> kEstimatedNats = {kHeadNats, 12.0f, 16.0f, 20.0f, 26.0f};
constexpr int64_t kFewEntries = 64;  // selected from in less time than bounds are tightened

// Smallest mass that is at least the fraction top_p of the total.
uint64_t nucleus_mass(double top_p, uint64_t total) {
  const double wanted = std::ceil(top_p * static_cast<double>(total));
  if (!(wanted > 0.0)) return 0;
  return wanted >= static_cast<double>(total) ? total : static_cast<uint64_t>(wanted);
}

// Integers in the order of the floats they stand for.
int32_t ordered(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits >= 0 ? bits : std::numeric_limits<int32_t>::min() - bits;
}

float from_ordered(int32_t order) {
  const int32_t bits = order >= 0 ? order : std::numeric_limits<int32_t>::min() - order;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

uint64_t total_mass(const LogitsRow& row, uint64_t* masses) {
  return row.kernels->block_mass(row.x, row.n, row.maxima, row.max, row.inv_t, kNegInf, masses);
}

// Bounds on the total mass of a row: what its listed entries weigh, if there are, an estimate of the others
// in blocks whose maximum is close to the row's, and their maxima for all entries of the blocks that are
// left.
class MassBounds {
 public:
  explicit MassBounds(const LogitsRow& row) : row_(row) {}

  // Lists the entries down to `nats` below the row's maximum. To be called first, if at all.
  void list(float nats, EntryList& list) {
    list_entries(row_, row_.max - nats / row_.inv_t, list, &sum_);
    listed_ = list.mass;
    left_ = list.cut.lowest;
  }

  // Estimates the blocks whose maximum lies down to `nats` below the row's.
  void estimate(float nats) {
    const SamplingKernels& kernels = *row_.kernels;
    const float lowest = row_.max - nats / row_.inv_t;
    if (lowest < left_) {
      sum_ += kernels.estimate_blocks(row_.x, row_.n, row_.maxima, lowest, std::nextafter(left_, kNegInf),
                                      row_.max, row_.inv_t);
      left_ = lowest;
    }
    rest_ = static_cast<double>(kSampleBlock) *
            kernels.estimate_entries(row_.maxima, num_sample_blocks(row_.n), std::nextafter(left_, kNegInf),
                                     row_.max, row_.inv_t);
  }

  uint64_t least() const {
    const double mass = std::ldexp(sum_ * (1.0 - kEstimateError), kWeightBits) - static_cast<double>(row_.n);
    return listed_ + static_cast<uint64_t>(std::max(mass, listed_ > 0 ? 0.0 : 1.0));
  }
  uint64_t most() const {
    const double mass = std::ldexp((sum_ + rest_) * (1.0 + kEstimateError), kWeightBits);
    return listed_ + static_cast<uint64_t>(mass) + 2 * static_cast<uint64_t>(row_.n);
  }

 private:
  const LogitsRow& row_;
  uint64_t listed_ = 0;
  float left_ = std::numeric_limits<float>::infinity();  // above the maxima of the blocks that are left
  double sum_ = 0.0;
  double rest_ = 0.0;
};

// Entry in which the r-th unit of mass lies; `masses` are those of the blocks.
int32_t find_in_blocks(const LogitsRow& row, const uint64_t* masses, uint64_t r) {
  int64_t b = 0;
  while (r >= masses[b]) r -= masses[b++];
  uint64_t w[kSampleBlock];
  const int64_t begin = b * kSampleBlock;
  row.kernels->weights(row.x + begin, std::min(kSampleBlock, row.n - begin), row.max, row.inv_t, w);
  int64_t i = 0;
  while (r >= w[i]) r -= w[i++];
  return static_cast<int32_t>(begin + i);
}

// Chooses head or tail, then an entry there (see filter_and_draw); what the tail weighs only if it matters.
Draw draw_in_row(const LogitsRow& row, const RowRandom& random, SamplerScratch& scratch) {
  scratch.masses.resize(static_cast<size_t>(num_sample_blocks(row.n)));
  const float least_max = row.max - kHeadNats / row.inv_t;
  const uint64_t head =
      row.kernels->block_mass(row.x, row.n, row.maxima, row.max, row.inv_t, least_max, scratch.masses.data());
  MassBounds bounds(row);
  for (const float nats : kEstimatedNats) {
    bounds.estimate(nats);
    if (scale_random(random.first, bounds.most()) < head) {
      return {find_in_blocks(row, scratch.masses.data(), scale_random(random.second, head)), 0};
    }
  }
  scratch.tail_masses.resize(scratch.masses.size());
  const uint64_t total = total_mass(row, scratch.tail_masses.data());
  if (scale_random(random.first, total) < head) {
    return {find_in_blocks(row, scratch.masses.data(), scale_random(random.second, head)), 0};
  }
  for (int64_t b = 0; b < num_sample_blocks(row.n); ++b) {
    if (row.maxima[b] >= least_max) scratch.tail_masses[static_cast<size_t>(b)] = 0;
  }
  return {find_in_blocks(row, scratch.tail_masses.data(), scale_random(random.second, total - head)), 0};
}

void forget_outside(const LogitsRow& row, const Cut& cut) {
  for (int64_t i = 0; i < row.n; ++i) row.x[i] = cut.keeps(row.x[i], i) ? row.x[i] : kNegInf;
}

// How far below the maximum a row's nucleus is likely to reach; most do not reach quite so far. By
// experience: it grows with what the nucleus leaves out, and is less where one entry outweighs the best of
// all other blocks.
float likely_depth(const LogitsRow& row, double top_p) {
  const int64_t blocks = num_sample_blocks(row.n);
  const double maxima = row.kernels->estimate_entries(row.maxima, blocks, row.max, row.max, row.inv_t);
  const double nats = 2.1 - 2.1 * std::log(1.0 - top_p);
  return static_cast<float>(nats * (maxima < 1.05 ? 0.5 : (maxima < 1.2 ? 0.8 : 1.0)));
}

// Lists the nucleus of the whole row. The total mass is found only as far as it matters.
void list_nucleus(const LogitsRow& row, double top_p, SamplerScratch& scratch) {
  EntryList& list = scratch.listed;
  float nats = likely_depth(row, top_p);
  MassBounds bounds(row);
  bounds.list(nats, list);
  size_t level = 0;
  uint64_t least = 0, most = 0;
  const auto tighten = [&] {
    if (level == kEstimatedNats.size()) {
      least = most = nucleus_mass(top_p, total_mass(row, nullptr));
    } else {
      bounds.estimate(kEstimatedNats[level++]);
      least = nucleus_mass(top_p, bounds.least());
      most = nucleus_mass(top_p, bounds.most());
    }
  };
  tighten();
  for (;;) {
    if (list.mass < least) {
      nats += 1.5f;
      list_entries(row, row.max - nats / row.inv_t, list);
      continue;
    }
    // Of many entries the limit is hardly found by bounds further apart than the lightest one's weight.
    const double lightest = std::ldexp(std::exp(-static_cast<double>(nats)), kWeightBits);
    if (list.size > kFewEntries && level < kEstimatedNats.size() &&
        static_cast<double>(most - least) > lightest) {
      tighten();
      continue;
    }
    const Selection nucleus = select_best(*row.kernels, list, 1, least, scratch.rest);
    // Without its limit the nucleus was less than an earlier bound: that is all a later one has to leave so.
    while (nucleus.mass >= least && nucleus.mass < most) tighten();
    if (nucleus.mass >= least) return keep_selection(*row.kernels, nucleus, list);
  }
}

}  // namespace

MassRange mass_range(const SamplingKernels& kernels, const float* x, int64_t n, float inv_t, float nats,
                     float listed_nats) {
  std::vector<float> maxima(static_cast<size_t>(num_sample_blocks(n)));
  kernels.block_max(x, n, maxima.data());
  // The row is only read: LogitsRow is shared with code that writes.
  const LogitsRow row = {
      &kernels, const_cast<float*>(x), n, maxima.data(), max_of_maxima(kernels, maxima.data(), n), inv_t};
  EntryList list;
  MassBounds bounds(row);
  bounds.list(listed_nats, list);
  bounds.estimate(nats / 2);
  bounds.estimate(nats);
  return {bounds.least(), total_mass(row, nullptr), bounds.most()};
}

float max_of_maxima(const SamplingKernels& kernels, const float* maxima, int64_t n) {
  // Blocks of blocks, as long as there are many.
  float upper[kSampleBlock];
  const int64_t blocks = num_sample_blocks(n);
  float max = kNegInf;
  for (int64_t begin = 0; begin < blocks; begin += kSampleBlock * kSampleBlock) {
    const int64_t count = std::min(kSampleBlock * kSampleBlock, blocks - begin);
    kernels.block_max(maxima + begin, count, upper);
    max = std::max(max, *std::max_element(upper, upper + num_sample_blocks(count)));
  }
  return max;
}

int32_t argmax(const LogitsRow& row) {
  int64_t i = 0;
  while (row.maxima[i / kSampleBlock] != row.max) i += kSampleBlock;
  while (i < row.n - 1 && row.x[i] != row.max) ++i;
  return static_cast<int32_t>(i);
}

float min_p_lowest(const LogitsRow& row, float min_p) {
  const float least = static_cast<float>(std::log(static_cast<double>(min_p)));
  // The condition is monotone in x: bisect between -infinity and the maximum over floats in order.
  int32_t below = ordered(kNegInf), kept = ordered(row.max);
  while (kept - static_cast<int64_t>(below) > 1) {
    const int32_t middle = static_cast<int32_t>((static_cast<int64_t>(below) + kept) / 2);
    ((from_ordered(middle) - row.max) * row.inv_t >= least ? kept : below) = middle;
  }
  return from_ordered(kept);
}

void gather_top_k(const LogitsRow& row, int64_t k, SamplerScratch& scratch) {
  list_top_k(row, k, kNegInf, scratch.sorted_maxima, scratch.listed);
  const EntryArrays listed = scratch.listed.arrays();
  scratch.best.resize(static_cast<size_t>(scratch.listed.size));
  for (size_t i = 0; i < scratch.best.size(); ++i) scratch.best[i] = {listed.values[i], listed.ids[i]};
  if (scratch.listed.size <= k) return;
  const auto end = scratch.best.begin() + static_cast<std::ptrdiff_t>(k);
  std::nth_element(scratch.best.begin(), end - 1, scratch.best.end(), better);
  scratch.best.erase(end, scratch.best.end());
}

Draw filter_and_draw(const LogitsRow& row, int64_t top_k, double top_p, float min_p, const RowRandom& random,
                     bool forget_dropped, SamplerScratch& scratch) {
  const SamplingKernels& kernels = *row.kernels;
  const bool has_min_p = min_p > 0.0f, has_top_k = top_k > 0 && top_k < row.n, has_top_p = top_p < 1.0;
  if (!has_min_p && !has_top_k && !has_top_p) return draw_in_row(row, random, scratch);

  EntryList& list = scratch.listed;
  if (has_min_p || has_top_k) {
    const float lowest = has_min_p ? min_p_lowest(row, min_p) : kNegInf;
    if (has_top_k) {
      list_top_k(row, top_k, lowest, scratch.sorted_maxima, list);
      keep_selection(kernels, select_best(kernels, list, top_k, 0, scratch.rest), list);
    } else {
      list_entries(row, lowest, list);
    }
    if (has_top_p) {
      const uint64_t mass = nucleus_mass(top_p, list.mass);
      keep_selection(kernels, select_best(kernels, list, 1, mass, scratch.rest), list);
    }
  } else {
    list_nucleus(row, top_p, scratch);
  }
  const Draw draw = draw_from_list(kernels, list, random.first);
  if (forget_dropped) forget_outside(row, list.cut);
  return draw;
}

}  // namespace tellin

#include "sampler_select.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>

namespace tellin {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr float kHeadNats = 8.0f;  // blocks with a maximum this close to the row's are the head
// How far below the row's maximum a block's may lie for the block to be estimated, in steps: the others weigh
// less and less.
constexpr std::array<float, 5> kEstimatedNats = {kHeadNats, 12.0f, 16.0f, 20.0f, 26.0f};
constexpr int64_t kMinCandidates = 1024;  // entries that are always listed; more are counted in bins first
constexpr int64_t kListed = 512;          // entries listed at a time
constexpr size_t kSorted = 256;           // candidates up to which ordering them is cheaper than bins
constexpr int32_t kLastBin = 2048;        // bins of 1/64 nat each; the last: 32 nats and more, no weight
constexpr int64_t kBins = kLastBin + 1;
constexpr float kBinsPerNat = 64.0f;

// What the filters leave: entries > lowest, and entries equal to it up to an id.
struct Cut {
  float lowest;
  int32_t last_id;

  bool keeps(float value, int64_t id) const {
    return (value > lowest) | ((value == lowest) & (id <= last_id));
  }
};

constexpr int32_t kAnyId = std::numeric_limits<int32_t>::max();
constexpr Cut kWholeRow = {kNegInf, kAnyId};

// floor(random * total / 2^64): uniform on [0, total) up to 2^-64 * total.
uint64_t scale_random(uint64_t random, uint64_t total) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(random) * total >> 64);
}

// Smallest mass that is at least the fraction top_p of the total.
uint64_t nucleus_mass(double top_p, uint64_t total) {
  const double wanted = std::ceil(top_p * static_cast<double>(total));
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

int32_t bin_of(const LogitsRow& row, float x) {
  const float bin = (row.max - x) * row.inv_t * kBinsPerNat;
  return static_cast<int32_t>(bin < kLastBin ? bin : kLastBin);
}

uint64_t mass_of(const std::vector<Candidate>& candidates) {
  uint64_t total = 0;
  for (const Candidate& c : candidates) total += c.weight;
  return total;
}

Candidate worst_of(const std::vector<Candidate>& candidates) {
  return *std::max_element(candidates.begin(), candidates.end(), better);
}

std::vector<Candidate>::iterator at(std::vector<Candidate>& candidates, size_t i) {
  return candidates.begin() + static_cast<std::ptrdiff_t>(i);
}

void keep_best(std::vector<Candidate>& candidates, size_t count) {
  if (candidates.size() <= count) return;
  std::nth_element(candidates.begin(), at(candidates, count - 1), candidates.end(), better);
  candidates.resize(count);
}

// Keeps the smallest number of best candidates whose mass reaches `wanted`, at least one. Average linear
// time. Returns the mass kept.
uint64_t keep_nucleus(std::vector<Candidate>& candidates, uint64_t wanted) {
  size_t begin = 0, end = candidates.size();
  uint64_t before = 0;  // mass of [0, begin), which is kept
  while (end - begin > 32) {
    const size_t middle = begin + (end - begin) / 2;
    std::nth_element(at(candidates, begin), at(candidates, middle), at(candidates, end), better);
    uint64_t mass = 0;
    for (size_t i = begin; i < middle; ++i) mass += candidates[i].weight;
    if (before + mass >= wanted) {
      end = middle;
    } else {
      before += mass;
      begin = middle;
    }
  }
  std::sort(at(candidates, begin), at(candidates, end), better);
  while (begin < end && (begin == 0 || before < wanted)) before += candidates[begin++].weight;
  candidates.resize(begin);
  return before;
}

// Leaves in scratch.candidates what keep_nucleus keeps of many candidates of a row, in id order before and
// after: they are weighed in bins of 1/64 nat below the maximum, and only the bin in which the limit falls is
// put in order.
uint64_t take_nucleus(const LogitsRow& row, const std::vector<Candidate>& listed, uint64_t wanted,
                      SamplerScratch& scratch) {
  std::vector<Candidate>& kept = scratch.candidates;
  if (listed.size() <= kSorted) {
    kept = listed;
    return keep_nucleus(kept, wanted);
  }
  std::array<uint64_t, kBins> mass{};
  scratch.bins.resize(listed.size());
  for (size_t i = 0; i < listed.size(); ++i) {
    const auto bin = static_cast<size_t>(bin_of(row, listed[i].value));
    scratch.bins[i] = static_cast<uint16_t>(bin);
    mass[bin] += listed[i].weight;
  }
  uint64_t before = 0;
  size_t limit = 0;
  while (limit < kLastBin && before + mass[limit] < wanted) before += mass[limit++];
  std::vector<Candidate> last;
  for (size_t i = 0; i < listed.size(); ++i) {
    if (scratch.bins[i] == limit) last.push_back(listed[i]);
  }
  if (last.empty()) {
    kept = listed;
    return before;
  }
  before += keep_nucleus(last, wanted - before);
  const Candidate worst = worst_of(last);
  const Cut cut = {worst.value, worst.id};
  // Without branches, which would be mispredicted.
  kept.resize(listed.size());
  size_t count = 0;
  for (const Candidate& c : listed) {
    kept[count] = c;
    count += static_cast<size_t>(cut.keeps(c.value, c.id));
  }
  kept.resize(count);
  return before;
}

// Adds the weights of all candidates.
void weigh(const LogitsRow& row, std::vector<Candidate>& candidates) {
  float x[kSampleBlock];
  uint64_t w[kSampleBlock];
  for (size_t begin = 0; begin < candidates.size(); begin += kSampleBlock) {
    const size_t count = std::min(static_cast<size_t>(kSampleBlock), candidates.size() - begin);
    for (size_t i = 0; i < count; ++i) x[i] = candidates[begin + i].value;
    row.kernels->weights(x, static_cast<int64_t>(count), row.max, row.inv_t, w);
    for (size_t i = 0; i < count; ++i) candidates[begin + i].weight = w[i];
  }
}

// Lists the entries in [lowest, highest] in id order, without weights, until there are more than `most`.
void list_entries(const LogitsRow& row, float lowest, float highest, size_t most,
                  std::vector<Candidate>& out) {
  Candidate listed[kListed];
  out.clear();
  for (int64_t block = 0; block < num_sample_blocks(row.n) && out.size() <= most;) {
    const int64_t count =
        row.kernels->list_entries(row.x, row.n, row.maxima, lowest, highest, &block, listed, kListed);
    out.insert(out.end(), listed, listed + count);
  }
}

// Lists and weighs the entries >= lowest. Returns false, with an incomplete list, if they are too many.
bool list_best(const LogitsRow& row, float lowest, std::vector<Candidate>& out) {
  // Beyond a part of the row it is cheaper to count entries in bins than to list and order them.
  const size_t most = static_cast<size_t>(std::max(row.n / 4, kMinCandidates));
  list_entries(row, lowest, row.max, most, out);
  if (out.size() > most) return false;
  weigh(row, out);
  return true;
}

float kth_largest(std::vector<float>& values, int64_t k) {
  std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
  return values[static_cast<size_t>(k - 1)];
}

// Keeps the nucleus of scratch.candidates.
void keep_nucleus(const LogitsRow& row, double top_p, SamplerScratch& scratch) {
  scratch.listed.swap(scratch.candidates);
  take_nucleus(row, scratch.listed, nucleus_mass(top_p, mass_of(scratch.listed)), scratch);
}

// A value that the k-th best entry reaches: the k-th largest block maximum.
float top_k_bound(const LogitsRow& row, int64_t k, std::vector<float>& buffer) {
  const int64_t blocks = num_sample_blocks(row.n), upper_blocks = num_sample_blocks(blocks);
  if (k > blocks) return kNegInf;
  if (k > upper_blocks) {
    buffer.assign(row.maxima, row.maxima + blocks);
    return kth_largest(buffer, k);
  }
  // Of many maxima only those above such a bound of their own blocks are put in order.
  buffer.resize(static_cast<size_t>(upper_blocks));
  row.kernels->block_max(row.maxima, blocks, buffer.data());
  std::vector<float> upper = buffer;
  const float bound = kth_largest(upper, k);
  std::vector<float> large;
  for (int64_t i = 0; i < upper_blocks; ++i) {
    if (buffer[static_cast<size_t>(i)] < bound) continue;
    const int64_t end = std::min(blocks, (i + 1) * kSampleBlock);
    std::copy_if(row.maxima + i * kSampleBlock, row.maxima + end, std::back_inserter(large),
                 [bound](float x) { return x >= bound; });
  }
  return kth_largest(large, k);
}

// top-k and top-p over more entries than are worth listing: entries are counted and weighed in bins of 1/64
// nat below the maximum, and only the bin in which a limit falls is put in order.
class BinnedSelection {
 public:
  BinnedSelection(const LogitsRow& row, float lowest) : row_(row), cut_{lowest, kAnyId} {
    uint64_t w[kSampleBlock];
    int32_t bin[kSampleBlock];
    for (int64_t begin = 0; begin < row.n; begin += kSampleBlock) {
      if (row.maxima[begin / kSampleBlock] < lowest) continue;
      const int64_t count = std::min(kSampleBlock, row.n - begin);
      const float* x = row.x + begin;
      row.kernels->weights(x, count, row.max, row.inv_t, w);
      for (int64_t i = 0; i < count; ++i) bin[i] = bin_of(x[i]);
      if (lowest > kNegInf) {
        for (int64_t i = 0; i < count; ++i) bin[i] = x[i] >= lowest ? bin[i] : kNoBin;
      }
      for (int64_t i = 0; i < count; ++i) {
        bins_[static_cast<size_t>(bin[i])].mass += w[i];
        ++bins_[static_cast<size_t>(bin[i])].count;
      }
    }
    for (size_t i = 0; i < kNoBin; ++i) total_ += bins_[i].mass;
  }

  void keep_top_k(int64_t k) {
    int64_t before = 0;
    uint64_t mass = 0;
    int32_t i = 0;
    for (; i < kNoBin && before + bins_[static_cast<size_t>(i)].count < k; ++i) {
      before += bins_[static_cast<size_t>(i)].count;
      mass += bins_[static_cast<size_t>(i)].mass;
    }
    if (i == kNoBin) return;  // fewer than k entries
    std::vector<Candidate> entries = entries_of(i);
    keep_best(entries, static_cast<size_t>(k - before));
    set_cut(entries);
    total_ = mass + mass_of(entries);
  }

  void keep_top_p(double top_p) {
    const uint64_t wanted = nucleus_mass(top_p, total_);
    uint64_t before = 0;
    int32_t i = 0;
    for (; before + bins_[static_cast<size_t>(i)].mass < wanted; ++i)
      before += bins_[static_cast<size_t>(i)].mass;
    std::vector<Candidate> entries = entries_of(i);
    keep_nucleus(entries, wanted - before);
    set_cut(entries);
  }

  const Cut& cut() const { return cut_; }

 private:
  struct Bin {
    uint64_t mass = 0;
    int64_t count = 0;
  };

  int32_t bin_of(float x) const { return tellin::bin_of(row_, x); }

  void set_cut(const std::vector<Candidate>& kept) {
    const Candidate worst = worst_of(kept);
    cut_ = {worst.value, worst.id};
  }

  // Entries of a bin that were not cut off before.
  std::vector<Candidate> entries_of(int32_t bin) const {
    // The values of the bin and a little more, against rounding; bin_of decides.
    const float nats = static_cast<float>(bin) / kBinsPerNat, width = 1.0f / kBinsPerNat;
    const float slack = 1e-5f * (std::fabs(row_.max) + (nats + 1.0f) / row_.inv_t);
    const float highest = row_.max - nats / row_.inv_t + slack;
    const float lowest = bin == kLastBin ? kNegInf : row_.max - (nats + width) / row_.inv_t - slack;
    std::vector<Candidate> entries;
    list_entries(row_, std::max(lowest, cut_.lowest), highest, std::numeric_limits<size_t>::max(), entries);
    entries.erase(std::remove_if(entries.begin(), entries.end(),
                                 [&](const Candidate& c) {
                                   return bin_of(c.value) != bin || !cut_.keeps(c.value, c.id);
                                 }),
                  entries.end());
    weigh(row_, entries);
    return entries;
  }

  static constexpr int32_t kNoBin = kLastBin + 1;

  const LogitsRow& row_;
  Cut cut_;
  std::vector<Bin> bins_ = std::vector<Bin>(kNoBin + 1);
  uint64_t total_ = 0;
};

// Entry in which the r-th unit of mass lies; `masses` are those of what the cut leaves of the blocks.
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

void forget_outside(const LogitsRow& row, const Cut& cut) {
  for (int64_t i = 0; i < row.n; ++i) row.x[i] = cut.keeps(row.x[i], i) ? row.x[i] : kNegInf;
}

Draw draw_in_cut(const LogitsRow& row, const Cut& cut, uint64_t random, std::vector<uint64_t>& masses) {
  uint64_t total = row.kernels->block_mass(row.x, row.n, row.maxima, row.max, row.inv_t, cut.lowest, kNegInf,
                                           masses.data());
  if (cut.last_id != kAnyId) {  // entries equal to the lowest, but with too high an id
    for (int64_t b = cut.last_id / kSampleBlock; b < num_sample_blocks(row.n); ++b) {
      if (row.maxima[b] < cut.lowest) continue;
      uint64_t w[kSampleBlock];
      const int64_t begin = b * kSampleBlock;
      const int64_t count = std::min(kSampleBlock, row.n - begin);
      row.kernels->weights(row.x + begin, count, row.max, row.inv_t, w);
      for (int64_t i = 0; i < count; ++i) {
        if (row.x[begin + i] != cut.lowest || begin + i <= cut.last_id) continue;
        masses[static_cast<size_t>(b)] -= w[i];
        total -= w[i];
      }
    }
  }
  return {find_in_blocks(row, masses.data(), cut, scale_random(random, total)), total};
}

Draw draw_in_candidates(std::vector<Candidate>& candidates, uint64_t random) {
  const auto before = [](const Candidate& a, const Candidate& b) { return a.id < b.id; };
  if (!std::is_sorted(candidates.begin(), candidates.end(), before)) {
    std::sort(candidates.begin(), candidates.end(), before);
  }
  const uint64_t total = mass_of(candidates);
  uint64_t r = scale_random(random, total);
  size_t chosen = 0;
  while (r >= candidates[chosen].weight) r -= candidates[chosen++].weight;
  return {candidates[chosen].id, total};
}

uint64_t total_mass(const LogitsRow& row, uint64_t* masses) {
  return row.kernels->block_mass(row.x, row.n, row.maxima, row.max, row.inv_t, kNegInf, kNegInf, masses);
}

// Bounds on the total mass of a row: an estimate for blocks whose maximum is close to the row's, and their
// maxima for all entries of the others.
class MassBounds {
 public:
  explicit MassBounds(const LogitsRow& row) : row_(row) {}

  // Estimates the blocks whose maximum lies down to `nats` below the row's.
  void estimate(float nats) {
    const SamplingKernels& kernels = *row_.kernels;
    const float lowest = row_.max - nats / row_.inv_t;
    sum_ += kernels.estimate_blocks(row_.x, row_.n, row_.maxima, lowest, highest_, row_.max, row_.inv_t);
    highest_ = std::nextafter(lowest, kNegInf);
    rest_ = static_cast<double>(kSampleBlock) *
            kernels.estimate_entries(row_.maxima, num_sample_blocks(row_.n), highest_, row_.max, row_.inv_t);
  }

  uint64_t least() const {
    const double mass = std::ldexp(sum_ * (1.0 - kEstimateError), kWeightBits) - static_cast<double>(row_.n);
    return static_cast<uint64_t>(std::max(mass, 1.0));
  }
  uint64_t most() const {
    const double mass = std::ldexp((sum_ + rest_) * (1.0 + kEstimateError), kWeightBits);
    return static_cast<uint64_t>(mass) + 2 * static_cast<uint64_t>(row_.n);
  }

 private:
  const LogitsRow& row_;
  float highest_ = std::numeric_limits<float>::infinity();  // of the blocks that are left
  double sum_ = 0.0;
  double rest_ = 0.0;
};

// Chooses head or tail, then an entry there (see filter_and_draw); what the tail weighs only if it matters.
Draw draw_in_row(const LogitsRow& row, const RowRandom& random, SamplerScratch& scratch) {
  const float least_max = row.max - kHeadNats / row.inv_t;
  const uint64_t head = row.kernels->block_mass(row.x, row.n, row.maxima, row.max, row.inv_t, kNegInf,
                                                least_max, scratch.masses.data());
  MassBounds bounds(row);
  for (const float nats : kEstimatedNats) {
    bounds.estimate(nats);
    if (scale_random(random.first, bounds.most()) < head) {
      return {find_in_blocks(row, scratch.masses.data(), kWholeRow, scale_random(random.second, head)), 0};
    }
  }
  scratch.tail_masses.resize(scratch.masses.size());
  const uint64_t total = total_mass(row, scratch.tail_masses.data());
  if (scale_random(random.first, total) < head) {
    return {find_in_blocks(row, scratch.masses.data(), kWholeRow, scale_random(random.second, head)), 0};
  }
  for (int64_t b = 0; b < num_sample_blocks(row.n); ++b) {
    if (row.maxima[b] >= least_max) scratch.tail_masses[static_cast<size_t>(b)] = 0;
  }
  return {
      find_in_blocks(row, scratch.tail_masses.data(), kWholeRow, scale_random(random.second, total - head)),
      0};
}

// Lists the nucleus of the whole row; false if it is too large. The total mass is found only as far as it
// matters.
bool list_nucleus(const LogitsRow& row, double top_p, SamplerScratch& scratch) {
  std::vector<Candidate>& listed = scratch.listed;
  MassBounds bounds(row);
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
  // The flatter a row, the further down its nucleus reaches.
  const double flatness = std::ldexp(static_cast<double>(least), -kWeightBits);
  float nats = flatness < 1.2 ? 4.0f : (flatness < 3.0 ? 5.5f : 7.0f);
  for (bool is_listed = false;;) {
    if (!is_listed) {
      if (nats >= 2.0f * kWeightCutoff || !list_best(row, row.max - nats / row.inv_t, listed)) return false;
      is_listed = true;
    }
    if (mass_of(listed) < least) {
      nats += 1.5f;
      is_listed = false;
      continue;
    }
    // Of many entries the limit is hardly found by bounds further apart than the lightest one's weight.
    const double lightest = std::ldexp(std::exp(-static_cast<double>(nats)), kWeightBits);
    if (listed.size() > kSorted / 4 && level < kEstimatedNats.size() &&
        static_cast<double>(most - least) > lightest) {
      tighten();
      continue;
    }
    if (take_nucleus(row, listed, least, scratch) >= most) return true;
    const uint64_t limit = worst_of(scratch.candidates).weight;
    do {
      tighten();
    } while (most - least > limit);
  }
}

}  // namespace

MassRange mass_range(const SamplingKernels& kernels, const float* x, int64_t n, float inv_t, float nats) {
  std::vector<float> maxima(static_cast<size_t>(num_sample_blocks(n)));
  kernels.block_max(x, n, maxima.data());
  // The row is only read: LogitsRow is shared with code that writes.
  const LogitsRow row = {
      &kernels, const_cast<float*>(x), n, maxima.data(), max_of_maxima(kernels, maxima.data(), n), inv_t};
  MassBounds bounds(row);
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

void gather_top_k(const LogitsRow& row, int64_t k, std::vector<float>& buffer, std::vector<Candidate>& out) {
  list_entries(row, top_k_bound(row, k, buffer), row.max, std::numeric_limits<size_t>::max(), out);
  keep_best(out, static_cast<size_t>(k));
}

Draw filter_and_draw(const LogitsRow& row, int64_t top_k, double top_p, float min_p, const RowRandom& random,
                     bool forget_dropped, SamplerScratch& scratch) {
  std::vector<Candidate>& candidates = scratch.candidates;
  scratch.masses.resize(static_cast<size_t>(num_sample_blocks(row.n)));
  const bool has_min_p = min_p > 0.0f, has_top_k = top_k > 0 && top_k < row.n, has_top_p = top_p < 1.0;
  if (!has_min_p && !has_top_k && !has_top_p) return draw_in_row(row, random, scratch);

  float lowest = has_min_p ? min_p_lowest(row, min_p) : kNegInf;
  Cut cut{lowest, kAnyId};
  if (has_top_k || has_top_p) {
    bool listed = false;
    if (has_top_k) {
      lowest = std::max(lowest, top_k_bound(row, top_k, scratch.sorted_maxima));
      listed = lowest > kNegInf && list_best(row, lowest, candidates);
      if (listed) keep_best(candidates, static_cast<size_t>(top_k));
      if (listed && has_top_p) keep_nucleus(row, top_p, scratch);
    } else if (has_min_p) {
      listed = list_best(row, lowest, candidates);
      if (listed) keep_nucleus(row, top_p, scratch);
    } else {
      listed = list_nucleus(row, top_p, scratch);
    }
    if (listed) {
      const Candidate worst = worst_of(candidates);
      const Draw draw = draw_in_candidates(candidates, random.first);
      if (forget_dropped) forget_outside(row, {worst.value, worst.id});
      return draw;
    }
    BinnedSelection selection(row, lowest);
    if (has_top_k) selection.keep_top_k(top_k);
    if (has_top_p) selection.keep_top_p(top_p);
    cut = selection.cut();
  }
  const Draw draw = draw_in_cut(row, cut, random.first, scratch.masses);
  if (forget_dropped) forget_outside(row, cut);
  return draw;
}

}  // namespace tellin

#include "sampler_entries.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>

namespace tellin {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr int64_t kFewEntries = 64;  // of so many, three entries tell the middle well enough
constexpr int64_t kTopKSample = 1024;
constexpr int64_t kDrawChunk = 256;  // entries that are passed over at once

float kth_largest(std::vector<float>& values, int64_t k) {
  std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
  return values[static_cast<size_t>(k - 1)];
}

// A value that the k-th best entry reaches: the k-th largest block maximum (k <= blocks).
float top_k_bound(const LogitsRow& row, int64_t k, std::vector<float>& buffer) {
  const int64_t blocks = num_sample_blocks(row.n), upper_blocks = num_sample_blocks(blocks);
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

// A value that the k-th best entry most likely reaches, by what does so of one entry in many.
float likely_top_k_bound(const LogitsRow& row, int64_t k, std::vector<float>& buffer) {
  const int64_t count = std::min(kTopKSample, row.n);
  buffer.resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) buffer[static_cast<size_t>(i)] = row.x[i * row.n / count];
  const double expected = static_cast<double>(k) * static_cast<double>(count) / static_cast<double>(row.n);
  const int64_t rank = static_cast<int64_t>(expected + 4.0 * std::sqrt(expected)) + 1;
  return rank < count ? kth_largest(buffer, rank) : kNegInf;
}

// An entry near the middle of the first n: the middle one of a few.
int64_t find_middle(const EntryArrays& list, int64_t n) {
  std::array<int64_t, 9> sample;
  const int64_t count = n < kFewEntries ? 3 : static_cast<int64_t>(sample.size());
  for (int64_t i = 0; i < count; ++i) sample[static_cast<size_t>(i)] = (2 * i + 1) * n / (2 * count);
  const auto middle = sample.begin() + count / 2;
  std::nth_element(sample.begin(), middle, sample.begin() + count,
                   [&](int64_t a, int64_t b) { return list.values[a] < list.values[b]; });
  return *middle;
}

// Id of the count-th of the first n entries that equals the value.
int32_t id_of_equal(const EntryArrays& list, int64_t n, float value, int64_t count) {
  int64_t i = -1;
  while (count > 0 && ++i < n) count -= list.values[i] == value;
  return list.ids[i];
}

}  // namespace

void EntryList::make_room(int64_t n) {
  size = 0;
  if (n <= room_) return;
  room_ = 0;
  const size_t room = static_cast<size_t>(n + kSampleBlock);
  values_.reset(new float[room]);
  ids_.reset(new int32_t[room]);
  weights_.reset(new uint64_t[room]);
  room_ = n;
}

void list_entries(const LogitsRow& row, float lowest, EntryList& list, double* rest) {
  list.make_room(row.n);
  const EntryArrays arrays = list.arrays();
  list.size = row.kernels->list_entries(row.x, row.n, row.maxima, lowest, row.max, row.inv_t, arrays, rest);
  list.mass = row.kernels->weights(arrays.values, list.size, row.max, row.inv_t, arrays.weights);
  list.cut = {lowest, Cut::kAnyId};
}

void list_top_k(const LogitsRow& row, int64_t k, float lowest, std::vector<float>& buffer, EntryList& list) {
  const bool is_sure = k <= num_sample_blocks(row.n);
  const float bound = is_sure ? top_k_bound(row, k, buffer) : likely_top_k_bound(row, k, buffer);
  list_entries(row, std::max(bound, lowest), list);
  if (!is_sure && list.size < k && bound > lowest) list_entries(row, lowest, list);
}

Selection select_best(const SamplingKernels& kernels, const EntryList& list, int64_t count, uint64_t mass,
                      EntryList& buffer) {
  buffer.make_room(list.size);
  EntryArrays part = list.arrays();  // of the list: the limit is in it
  int64_t n = list.size, count_before = 0;
  uint64_t mass_before = 0;  // of the better entries, which are not enough
  const auto is_enough = [&](int64_t more, uint64_t more_mass) {
    return count_before + more >= count && mass_before + more_mass >= mass;
  };
  while (n > 0) {
    const int64_t middle = find_middle(part, n);
    const float value = part.values[middle];
    const uint64_t weight = part.weights[middle];
    const EntriesAbove above = kernels.entries_above(part, n, value);
    if (is_enough(above.count, above.mass)) {
      n = kernels.copy_entries(part, n, value, Side::kAbove, buffer.arrays());
      part = buffer.arrays();
      continue;
    }
    count_before += above.count;
    mass_before += above.mass;
    int64_t taken = 1;  // of the entries that equal the value
    while (taken < above.num_equal && !is_enough(taken, static_cast<uint64_t>(taken) * weight)) ++taken;
    const uint64_t taken_mass = static_cast<uint64_t>(taken) * weight;
    if (is_enough(taken, taken_mass)) {
      const bool all = taken == above.num_equal;
      return {
          {value, all ? Cut::kAnyId : id_of_equal(part, n, value, taken)}, mass_before + taken_mass, weight};
    }
    count_before += taken;
    mass_before += taken_mass;
    n = kernels.copy_entries(part, n, value, Side::kBelow, buffer.arrays());
    part = buffer.arrays();
  }
  return {list.cut, list.mass, 0};
}

void keep_selection(const SamplingKernels& kernels, const Selection& selection, EntryList& list) {
  const EntryArrays all = list.arrays();
  list.size = kernels.copy_entries(all, list.size, selection.cut.lowest, Side::kAtLeast, all);
  if (selection.cut.last_id != Cut::kAnyId) {
    int64_t count = 0;
    for (int64_t i = 0; i < list.size; ++i) {
      all.values[count] = all.values[i];
      all.ids[count] = all.ids[i];
      all.weights[count] = all.weights[i];
      count += selection.cut.keeps(all.values[i], all.ids[i]);
    }
    std::fill(all.values + count, all.values + list.size, std::numeric_limits<float>::quiet_NaN());
    list.size = count;
  }
  // Of entries that equal the lowest some may be gone that the selection has not seen.
  const bool same_lowest = selection.cut.lowest == list.cut.lowest;
  list.cut = {selection.cut.lowest,
              same_lowest ? std::min(selection.cut.last_id, list.cut.last_id) : selection.cut.last_id};
  list.mass = selection.mass;
}

Draw draw_from_list(const SamplingKernels& kernels, const EntryList& list, uint64_t random) {
  EntryArrays rest = list.arrays();
  uint64_t r = scale_random(random, list.mass);
  for (int64_t n = list.size; n > kDrawChunk; n -= kDrawChunk) {
    // All entries weigh; what weighs nothing may be -infinity.
    const uint64_t mass = kernels.entries_above(rest, kDrawChunk, kNegInf).mass;
    if (r < mass) break;
    r -= mass;
    rest = {rest.values + kDrawChunk, rest.ids + kDrawChunk, rest.weights + kDrawChunk};
  }
  int64_t i = 0;
  while (r >= rest.weights[i]) r -= rest.weights[i++];
  return {rest.ids[i], list.mass};
}

}  // namespace tellin

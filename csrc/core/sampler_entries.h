// Lists of a row's entries: what filters choose from, and the draw. Used by sampler_select.cpp only.
#pragma once
#include <cstdint>

#include "sampler_select.h"

namespace tellin {

// Lists and weighs the entries >= lowest. *rest, unless `rest` is null: see SamplingKernels::list_entries.
void list_entries(const LogitsRow& row, float lowest, EntryList& list, double* rest = nullptr);

// Lists and weighs entries >= lowest, the k best of them at least.
void list_top_k(const LogitsRow& row, int64_t k, float lowest, std::vector<float>& buffer, EntryList& list);

// The best entries of a list up to a limit, which is the last of them.
struct Selection {
  Cut cut;
  uint64_t mass;          // of all of them
  uint64_t limit_weight;  // of the limit
};

// Selects the smallest number of best entries, at least `count` >= 1, whose mass reaches `mass`; the whole
// list if it has not so many. Average linear time. Overwrites `buffer`.
Selection select_best(const SamplingKernels& kernels, const EntryList& list, int64_t count, uint64_t mass,
                      EntryList& buffer);

// Drops what the selection does not hold.
void keep_selection(const SamplingKernels& kernels, const Selection& selection, EntryList& list);

// Draws an entry by its weight: the one in which that unit of mass lies which `random` chooses.
Draw draw_from_list(const SamplingKernels& kernels, const EntryList& list, uint64_t random);

// floor(random * total / 2^64): uniform on [0, total) up to 2^-64 * total.
inline uint64_t scale_random(uint64_t random, uint64_t total) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(random) * total >> 64);
}

}  // namespace tellin

#include "tellin/drafting.h"

#include <algorithm>

namespace tellin {
namespace {

constexpr int32_t kEnd = -1;  // follows each cached output; no id
constexpr int64_t kMaxNaiveMatch =
    32;  // longer matches are found by the Z function, which is slower for short ones
constexpr size_t kMaxPlaces =
    256;  // places looked at per walk, most recent first: bounds the time of a draft

uint64_t pair_key(int32_t first, int32_t second) {
  return static_cast<uint64_t>(static_cast<uint32_t>(first)) << 32 | static_cast<uint32_t>(second);
}

// Length of the common suffix of a[0, a_len) and b[0, b_len), at most max.
int64_t common_suffix(const int32_t* a, int64_t a_len, const int32_t* b, int64_t b_len, int64_t max) {
  const int64_t bound = std::min({a_len, b_len, max});
  int64_t n = 0;
  while (n < bound && a[a_len - 1 - n] == b[b_len - 1 - n]) ++n;
  return n;
}

// For every end in [1, len): length of the common suffix of ids[0, end) and ids[0, len). The Z function of
// the reversed ids (Gusfield 1997, section 1.4), linear for any ids.
std::vector<int32_t> suffix_matches(const int32_t* ids, int64_t len) {
  std::vector<int32_t> lengths(static_cast<size_t>(len), 0);
  int64_t left = 0, right = 0;  // the match that reaches furthest, in the reversed ids
  for (int64_t i = 1; i < len; ++i) {
    int64_t n = i < right ? std::min<int64_t>(right - i, lengths[static_cast<size_t>(len - (i - left))]) : 0;
    while (i + n < len && ids[len - 1 - n] == ids[len - 1 - (i + n)]) ++n;
    if (i + n > right) {
      left = i;
      right = i + n;
    }
    lengths[static_cast<size_t>(len - i)] = static_cast<int32_t>(n);
  }
  return lengths;
}

// Longest match of the suffix of ids[0, len) at places that end before len; appends the ends of those places,
// in order. Returns its length.
int64_t longest_match(const int32_t* ids, int64_t len, int64_t max, std::vector<int64_t>& ends) {
  int64_t best = 0;
  const int32_t last = ids[len - 1];
  for (int64_t end = 1; end < len; ++end) {
    if (ids[end - 1] != last) continue;
    const int64_t n = common_suffix(ids, end, ids, len, max);
    if (n > best) {
      best = n;
      ends.clear();
    }
    if (n == best) ends.push_back(end);
  }
  return best;
}

}  // namespace

int64_t propose_ngram(const int32_t* ids, int64_t len, const NgramParams& params, int64_t limit,
                      int32_t* out) {
  if (len < 2 || limit <= 0) return 0;
  std::vector<int32_t> lengths;
  if (params.max_n > kMaxNaiveMatch) lengths = suffix_matches(ids, len);
  int64_t best = 0, best_end = 0;
  const int32_t last = ids[len - 1];
  for (int64_t i = 1; i < len; ++i) {
    const int64_t end = params.most_recent ? len - i : i;  // the first of the longest matches is taken
    if (ids[end - 1] != last) continue;
    const int64_t n = lengths.empty() ? common_suffix(ids, end, ids, len, params.max_n)
                                      : std::min<int64_t>(lengths[static_cast<size_t>(end)], params.max_n);
    if (n > best) {
      best = n;
      best_end = end;
    }
    if (best == params.max_n) break;
  }
  if (best < params.min_n) return 0;
  const int64_t count = std::min(limit, len - best_end);
  std::copy(ids + best_end, ids + best_end + count, out);
  return count;
}

int64_t SuffixDrafter::propose(const int32_t* ids, int64_t len, int64_t limit, int32_t* out) const {
  if (len < 2 || limit <= 0) return 0;
  std::vector<int64_t> places;
  const int64_t own_match = match_own(ids, len, places);
  const Path own = walk(ids, len, places, own_match, limit);
  places.clear();
  const int64_t cached_match = match_cached(ids, len, places);
  const Path cached = walk(store_.data(), static_cast<int64_t>(store_.size()), places, cached_match, limit);
  const Path& best = cached.score > own.score ? cached : own;
  std::copy(best.ids.begin(), best.ids.end(), out);
  return static_cast<int64_t>(best.ids.size());
}

// Goes on from all places (ends of matches in ids) at once: at every step the most frequent next id is taken,
// and the places where another one follows drop out.
SuffixDrafter::Path SuffixDrafter::walk(const int32_t* ids, int64_t len, std::vector<int64_t>& places,
                                        int64_t match, int64_t limit) const {
  Path path;
  const int64_t longest =
      std::min(limit, static_cast<int64_t>(params_.max_spec_factor * static_cast<double>(match)));
  const double all = static_cast<double>(places.size());
  std::vector<std::pair<int32_t, int64_t>> next;  // id that follows, place
  while (static_cast<int64_t>(path.ids.size()) < longest) {
    next.clear();
    for (const int64_t place : places) {
      if (place < len && ids[place] != kEnd) next.emplace_back(ids[place], place);
    }
    std::sort(next.begin(), next.end());
    size_t best_begin = 0, best_count = 0;
    int64_t best_place = -1;  // among equally frequent ids the one seen last
    for (size_t begin = 0; begin < next.size();) {
      size_t end = begin;
      while (end < next.size() && next[end].first == next[begin].first) ++end;
      const int64_t place = next[end - 1].second;
      if (end - begin > best_count || (end - begin == best_count && place > best_place)) {
        best_begin = begin;
        best_count = end - begin;
        best_place = place;
      }
      begin = end;
    }
    const double probability = all > 0.0 ? static_cast<double>(best_count) / all : 0.0;
    if (best_count == 0 || probability < params_.min_token_prob) break;
    path.ids.push_back(next[best_begin].first);
    path.score += probability;
    places.clear();
    for (size_t i = best_begin; i < best_begin + best_count; ++i) places.push_back(next[i].second + 1);
  }
  return path;
}

int64_t SuffixDrafter::match_own(const int32_t* ids, int64_t len, std::vector<int64_t>& places) const {
  const int64_t match = longest_match(ids, len, params_.max_depth, places);
  if (places.size() > kMaxPlaces)
    places.erase(places.begin(), places.end() - static_cast<int64_t>(kMaxPlaces));
  return match;
}

int64_t SuffixDrafter::match_cached(const int32_t* ids, int64_t len, std::vector<int64_t>& places) const {
  const auto found = last_.find(pair_key(ids[len - 2], ids[len - 1]));
  if (found == last_.end()) return 0;
  int64_t best = 0;
  size_t seen = 0;
  for (int64_t p = found->second; p >= base_ && seen < kMaxPlaces; ++seen) {
    const int64_t end = p - base_ + 1;
    const int64_t n = common_suffix(store_.data(), end, ids, len, params_.max_depth);
    if (n > best) {
      best = n;
      places.clear();
    }
    if (n == best && n >= 2) places.push_back(end);
    p = previous_[static_cast<size_t>(p - base_)];
  }
  return best;
}

void SuffixDrafter::add_finished(const int32_t* ids, int64_t len) {
  if (params_.max_cached_requests == 0 || len == 0) return;
  while (static_cast<int64_t>(starts_.size()) >= params_.max_cached_requests) forget_oldest();
  starts_.push_back(base_ + static_cast<int64_t>(store_.size()));
  for (int64_t i = 0; i < len; ++i) {
    const int64_t position = base_ + static_cast<int64_t>(store_.size());
    int64_t before = -1;
    if (i > 0) {
      const auto [entry, is_new] = last_.try_emplace(pair_key(ids[i - 1], ids[i]), position);
      if (!is_new) {
        before = entry->second;
        entry->second = position;
      }
    }
    store_.push_back(ids[i]);
    previous_.push_back(before);
  }
  store_.push_back(kEnd);
  previous_.push_back(-1);
}

// Forgetting only moves the start; the memory is reclaimed when half of it is dead.
void SuffixDrafter::forget_oldest() {
  starts_.pop_front();
  const int64_t first = starts_.empty() ? base_ + static_cast<int64_t>(store_.size()) : starts_.front();
  const int64_t dead = first - base_;
  if (2 * dead < static_cast<int64_t>(store_.size())) return;
  store_.erase(store_.begin(), store_.begin() + dead);
  previous_.erase(previous_.begin(), previous_.begin() + dead);
  base_ = first;
  for (auto entry = last_.begin(); entry != last_.end();) {
    entry = entry->second < base_ ? last_.erase(entry) : std::next(entry);
  }
}

}  // namespace tellin

// Drafts for speculative decoding from token ids alone: prompt lookup (n-grams) and suffix decoding.
//
// Both look for earlier places where the text went as it does now and propose what followed there. Drafts
// change how fast ids come, never which ids: every one is verified against the model.
#pragma once
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

namespace tellin {

struct NgramParams {
  int64_t min_n;     // shortest suffix that may match, >= 1
  int64_t max_n;     // longest suffix compared, >= min_n
  bool most_recent;  // among the places of the longest match take the last one instead of the first
};

// Writes up to `limit` ids to `out` and returns how many. The longest suffix of ids[0, len) of min_n to max_n
// ids that also occurs earlier decides (occurrences may overlap it). Linear in len.
int64_t propose_ngram(const int32_t* ids, int64_t len, const NgramParams& params, int64_t limit,
                      int32_t* out);

struct SuffixParams {
  int64_t max_depth = 24;  // longest match compared, in ids
  int64_t max_cached_requests = 10000;
  double max_spec_factor = 1.0;  // draft length <= factor * match length
  double min_token_prob = 0.1;   // stop before an id whose path is less frequent than this
};

// Suffix decoding (Oliaro et al., "SuffixDecoding", 2024): like a walk down a suffix tree with counts, but
// over the places of the longest match, found by comparing backwards from equal ids. One such walk in the
// request's own ids, one over the outputs of finished requests; the one that promises more accepted ids wins.
class SuffixDrafter {
 public:
  explicit SuffixDrafter(const SuffixParams& params) : params_(params) {}

  // As propose_ngram.
  int64_t propose(const int32_t* ids, int64_t len, int64_t limit, int32_t* out) const;

  // Adds the output of a finished request; the oldest is forgotten beyond max_cached_requests.
  void add_finished(const int32_t* ids, int64_t len);

  int64_t num_cached_requests() const { return static_cast<int64_t>(starts_.size()); }

 private:
  struct Path {
    double score = 0.0;  // expected number of accepted ids
    std::vector<int32_t> ids;
  };

  Path walk(const int32_t* ids, int64_t len, std::vector<int64_t>& places, int64_t match,
            int64_t limit) const;
  int64_t match_own(const int32_t* ids, int64_t len, std::vector<int64_t>& places) const;
  int64_t match_cached(const int32_t* ids, int64_t len, std::vector<int64_t>& places) const;
  void forget_oldest();

  SuffixParams params_;
  // Outputs of finished requests, each ended by kEnd. Position p of the whole stream is store_[p - base_].
  std::vector<int32_t> store_;
  std::vector<int64_t> previous_;               // earlier position that ends the same pair of ids, or -1
  std::unordered_map<uint64_t, int64_t> last_;  // pair of ids -> last position that ends it
  std::deque<int64_t> starts_;
  int64_t base_ = 0;
};

}  // namespace tellin

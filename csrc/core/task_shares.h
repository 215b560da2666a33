// Tasks of a stage dealt to the members of a team in contiguous shares. Stages order their tasks by weights
// (few rows) or by rows (many), so a member walks its own stretch of memory, where what it prefetches beyond
// a task is what it reads next, and keeps its rows from stage to stage: they lie in its own cache. A member
// that has finished its share takes tasks from the far end of another's.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

namespace tellin {

class TaskShares {
 public:
  explicit TaskShares(int num_members) : shares_(static_cast<size_t>(num_members)) {}

  // Deals tasks [0, count), count < 2^32. Not while others take(). `bounds`: where shares begin, one per
  // member and the count; nullptr: shares are equal.
  void deal(int64_t count, const int64_t* bounds = nullptr) noexcept {
    const auto members = static_cast<int64_t>(shares_.size());
    for (int64_t i = 0; i < members; ++i) {
      const int64_t begin = bounds != nullptr ? bounds[i] : count * i / members;
      const int64_t end = bounds != nullptr ? bounds[i + 1] : count * (i + 1) / members;
      shares_[static_cast<size_t>(i)].left.store(pack(begin, end), std::memory_order_relaxed);
    }
  }

  // A task that nobody else gets. To be called once per task that was dealt, by any member: then there always
  // is one.
  int64_t take(int member) noexcept {
    const auto own = static_cast<size_t>(member);
    int64_t task = 0;
    for (size_t i = 0;; i = (i + 1) % shares_.size()) {
      if (take_from(shares_[(own + i) % shares_.size()], i == 0, &task)) return task;
    }
  }

 private:
  struct alignas(64) Share {
    std::atomic<uint64_t> left{0};  // first task << 32 | end
  };

  static uint64_t pack(int64_t begin, int64_t end) {
    return static_cast<uint64_t>(begin) << 32 | static_cast<uint64_t>(end);
  }

  static bool take_from(Share& share, bool first, int64_t* task) noexcept {
    uint64_t left = share.left.load(std::memory_order_relaxed);
    for (;;) {
      const auto begin = static_cast<int64_t>(left >> 32);
      const auto end = static_cast<int64_t>(left & 0xffffffffu);
      if (begin == end) return false;
      *task = first ? begin : end - 1;
      const uint64_t rest = first ? pack(begin + 1, end) : pack(begin, end - 1);
      if (share.left.compare_exchange_weak(left, rest, std::memory_order_relaxed)) return true;
    }
  }

  std::vector<Share> shares_;
};

}  // namespace tellin

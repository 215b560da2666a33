// A walk over blocks of rows that are quantised: the blocks of some columns, row after row.
#pragma once
#include "tellin/linear.h"

namespace tellin {
namespace {

// A row's records are stores that miss the cache: they are asked for this many rows ahead.
constexpr int64_t kRecordRowsAhead = 4;

class BlockWalk {
 public:
  // Blocks [first, end) of rows [m0, m1).
  BlockWalk(const float* x, int64_t ldx, int64_t m0, int64_t m1, int64_t first, int64_t end,
            const QuantizedRows& out)
      : row_(x + m0 * ldx),
        records_(out.data + m0 * out.row_bytes),
        block_(first),
        first_(first),
        end_(end),
        ldx_(ldx),
        row_bytes_(out.row_bytes),
        left_((m1 - m0) * (end - first)),
        fetched_left_(kRecordRowsAhead * (end - first)) {}

  int64_t left() const { return left_; }
  // The block that is next, and its row's quantised form.
  const float* values() const { return row_ + block_ * kActBlock; }
  int64_t block() const { return block_; }
  uint8_t* records() const { return records_; }
  int64_t row_bytes() const { return row_bytes_; }

  void advance() {
    --left_;
    if (++block_ == end_) {
      block_ = first_;
      row_ += ldx_;
      records_ += row_bytes_;
    }
  }

  // Asks for the record of this block some rows on, if that is of the walk.
  template <class Act>
  void fetch_ahead() const {
    if (left_ > fetched_left_) {
      __builtin_prefetch(reinterpret_cast<Act*>(records_ + kRecordRowsAhead * row_bytes_) + block_, 1);
    }
  }

 private:
  const float* row_;
  uint8_t* records_;
  int64_t block_, first_, end_, ldx_, row_bytes_, left_, fetched_left_;
};

}  // namespace
}  // namespace tellin

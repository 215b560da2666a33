// Python API of the drafters that need no model.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <stdexcept>

#include "bindings.h"
#include "tellin/drafting.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tellin {
namespace {

using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutIds = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutTable = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

// f(ids, len, limit, out) -> count for every row, without the GIL.
template <class F>
void for_each_row(const Table& history, const Ids& slots, const Ids& lens, const Ids& limits, OutTable& out,
                  OutIds& counts, F f) {
  const size_t n = slots.shape(0);
  require(lens.shape(0) == n && limits.shape(0) == n && out.shape(0) == n && counts.shape(0) == n,
          "all arrays must have one row per slot");
  for (size_t i = 0; i < n; ++i) {
    require(slots.data()[i] >= 0 && static_cast<size_t>(slots.data()[i]) < history.shape(0),
            "a slot is out of range");
    require(lens.data()[i] >= 0 && static_cast<size_t>(lens.data()[i]) <= history.shape(1),
            "a length is out of range");
  }
  const nb::gil_scoped_release release;
  const int64_t width = static_cast<int64_t>(out.shape(1));
  for (size_t i = 0; i < n; ++i) {
    const int32_t* ids = history.data() + slots.data()[i] * static_cast<int64_t>(history.shape(1));
    const int64_t limit = std::min<int64_t>(limits.data()[i], width);
    counts.data()[i] =
        static_cast<int32_t>(f(ids, lens.data()[i], limit, out.data() + static_cast<int64_t>(i) * width));
  }
}

}  // namespace

void bind_drafting(nb::module_& m) {
  m.def(
      "propose_ngram",
      [](Table history, Ids slots, Ids lens, Ids limits, int64_t min_n, int64_t max_n, bool most_recent,
         OutTable out, OutIds counts) {
        require(1 <= min_n && min_n <= max_n, "n-gram lengths must satisfy 1 <= min <= max");
        const NgramParams params{min_n, max_n, most_recent};
        for_each_row(history, slots, lens, limits, out, counts,
                     [&](const int32_t* ids, int64_t len, int64_t limit, int32_t* to) {
                       return propose_ngram(ids, len, params, limit, to);
                     });
      },
      "history"_a, "slots"_a, "lens"_a, "limits"_a, "min_n"_a, "max_n"_a, "most_recent"_a, "out"_a,
      "counts"_a);
  nb::class_<SuffixDrafter>(m, "SuffixDrafter")
      .def(
          "__init__",
          [](SuffixDrafter* self, int64_t max_depth, int64_t max_cached_requests, double max_spec_factor,
             double min_token_prob) {
            require(max_depth >= 1 && max_cached_requests >= 0,
                    "max_depth or max_cached_requests is out of range");
            new (self) SuffixDrafter({max_depth, max_cached_requests, max_spec_factor, min_token_prob});
          },
          "max_depth"_a, "max_cached_requests"_a, "max_spec_factor"_a, "min_token_prob"_a)
      .def(
          "propose",
          [](const SuffixDrafter& self, Table history, Ids slots, Ids lens, Ids limits, OutTable out,
             OutIds counts) {
            for_each_row(history, slots, lens, limits, out, counts,
                         [&](const int32_t* ids, int64_t len, int64_t limit, int32_t* to) {
                           return self.propose(ids, len, limit, to);
                         });
          },
          "history"_a, "slots"_a, "lens"_a, "limits"_a, "out"_a, "counts"_a)
      .def(
          "add_finished",
          [](SuffixDrafter& self, Ids ids) {
            self.add_finished(ids.data(), static_cast<int64_t>(ids.shape(0)));
          },
          "ids"_a)
      .def_prop_ro("num_cached_requests", &SuffixDrafter::num_cached_requests);
}

}  // namespace tellin

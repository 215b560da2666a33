// Linear kernels one call at a time, for tests: pack a file tensor, run any variant on NumPy arrays, look up
// rows.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "tellin/linear.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tellin {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutFloats = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

struct FreeDeleter {
  void operator()(uint8_t* p) const { std::free(p); }
};
using AlignedBytes = std::unique_ptr<uint8_t, FreeDeleter>;

AlignedBytes allocate_aligned(size_t bytes) {
  auto* p = static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 64) / 64 * 64));
  if (p == nullptr) throw std::bad_alloc();
  return AlignedBytes(p);
}

const LinearKernels* find_kernels(const std::string& isa) {
  const LinearKernels* kernels = linear_kernels(isa.c_str());
  if (kernels == nullptr)
    throw std::invalid_argument("no linear kernels for isa '" + isa + "' on this machine");
  return kernels;
}

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> copy_bytes(const uint8_t* data, size_t size) {
  auto copy = std::make_unique<uint8_t[]>(size);
  std::memcpy(copy.get(), data, size);
  nb::capsule owner(copy.get(), [](void* p) noexcept { delete[] static_cast<uint8_t*>(p); });
  return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(copy.release(), {size}, owner);
}

// A packed weight matrix of one variant.
class PackedLinear {
 public:
  PackedLinear(const std::string& isa, int quant_type, const Bytes& data, int64_t n, int64_t k,
               const std::string& precision)
      : kernels_(find_kernels(isa)), precision_(act_precision_named(precision)) {
    const auto type = static_cast<QuantType>(quant_type);
    const size_t group_bytes = kernels_->packed_group_bytes(type, k, precision_);
    if (group_bytes == 0) throw std::invalid_argument("no packed layout for this type, k and precision");
    if (n <= 0 || data.size() == 0) throw std::invalid_argument("empty tensor");
    const int64_t groups = (n + kGroupRows - 1) / kGroupRows;
    storage_ = allocate_aligned(group_bytes * static_cast<size_t>(groups));
    kernels_->pack_groups(type, precision_, data.data(), n, k, 0, groups, storage_.get());
    matrix_ = {type, kernels_->layout_id(type, precision_), n, k, groups, group_bytes, storage_.get()};
  }

  // Writes the rectangle tokens [m0, m1) x groups [g0, g1) of x @ w.T to out.
  void run(const Floats& x, const OutFloats& out, int64_t m0, int64_t m1, int64_t g0, int64_t g1) const {
    const auto rows = static_cast<int64_t>(x.shape(0));
    if (static_cast<int64_t>(x.shape(1)) != matrix_.k) throw std::invalid_argument("x must be [m, k]");
    if (static_cast<int64_t>(out.shape(0)) != rows || static_cast<int64_t>(out.shape(1)) != matrix_.n) {
      throw std::invalid_argument("out must be [m, n]");
    }
    if (m0 < 0 || m0 > m1 || m1 > rows || g0 < 0 || g0 > g1 || g1 > matrix_.num_groups) {
      throw std::invalid_argument("rectangle out of range");
    }
    if (precision_ == ActPrecision::kFloat32) {
      kernels_->linear_f32(matrix_, x.data(), matrix_.k, m0, m1, g0, g1, out.data(), matrix_.n);
      return;
    }
    const size_t row_bytes = kernels_->quantized_row_bytes(matrix_.k, precision_);
    const AlignedBytes storage = allocate_aligned(row_bytes * static_cast<size_t>(rows));
    const QuantizedRows quantized = {storage.get(), static_cast<int64_t>(row_bytes)};
    for (int64_t m = 0; m < rows; ++m)
      kernels_->quantize_row(precision_, x.data() + m * matrix_.k, matrix_.k, m, quantized);
    const auto linear = precision_ == ActPrecision::kInt8 ? kernels_->linear_int8 : kernels_->linear_int16;
    linear(matrix_, quantized, m0, m1, g0, g1, out.data(), matrix_.n);
  }

  int64_t num_groups() const { return matrix_.num_groups; }
  // A copy of the packed groups, [packed_bytes].
  nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> bytes() const {
    return copy_bytes(storage_.get(), packed_bytes());
  }
  size_t packed_bytes() const { return matrix_.group_bytes * static_cast<size_t>(matrix_.num_groups); }

 private:
  const LinearKernels* kernels_;
  ActPrecision precision_;
  AlignedBytes storage_;
  PackedMatrix matrix_;
};

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> quantize_rows(const std::string& isa, const Floats& x,
                                                           const std::string& precision_name,
                                                           int64_t columns) {
  const LinearKernels* kernels = find_kernels(isa);
  const ActPrecision precision = act_precision_named(precision_name);
  if (precision == ActPrecision::kFloat32) throw std::invalid_argument("float32 rows are not quantised");
  const auto rows = static_cast<int64_t>(x.shape(0)), k = static_cast<int64_t>(x.shape(1));
  const size_t row_bytes = kernels->quantized_row_bytes(k, precision);
  const AlignedBytes storage = allocate_aligned(row_bytes * static_cast<size_t>(rows));
  const QuantizedRows quantized = {storage.get(), static_cast<int64_t>(row_bytes)};
  if (columns == 0) {
    for (int64_t m = 0; m < rows; ++m) kernels->quantize_row(precision, x.data() + m * k, k, m, quantized);
  } else {
    if (columns < 0 || columns % kActBlock != 0 || k % kActBlock != 0)
      throw std::invalid_argument("columns must be whole blocks of 32");
    for (int64_t m = 0; m < rows; ++m) kernels->pad_row(precision, k, m, quantized);
    for (int64_t begin = 0; begin < k; begin += columns) {
      kernels->quantize_part(precision, x.data(), k, 0, rows, begin, std::min(begin + columns, k), quantized);
    }
  }
  return copy_bytes(storage.get(), row_bytes * static_cast<size_t>(rows));
}

std::vector<std::string> variant_names() {
  std::vector<std::string> names;
  for (int i = 0; i < num_linear_variants(); ++i) {
    const char* isa = linear_variant(i)->isa;
    if (linear_kernels(isa) != nullptr) names.emplace_back(isa);
  }
  return names;
}

void dequantize_rows(const std::string& isa, int quant_type, const Bytes& data, const OutFloats& out) {
  const LinearKernels* kernels = find_kernels(isa);
  const auto k = static_cast<int64_t>(out.shape(1));
  for (size_t row = 0; row < out.shape(0); ++row) {
    kernels->dequantize_row(static_cast<QuantType>(quant_type), data.data(), static_cast<int64_t>(row), k,
                            out.data() + static_cast<int64_t>(row) * k);
  }
}

}  // namespace

ActPrecision act_precision_named(const std::string& name) {
  if (name == "int8") return ActPrecision::kInt8;
  if (name == "int16") return ActPrecision::kInt16;
  if (name == "float32") return ActPrecision::kFloat32;
  throw std::invalid_argument("unknown precision '" + name + "'; known: int8, int16, float32");
}

void bind_linear(nb::module_& m) {
  m.def("linear_variants", &variant_names, "Kernel variants this machine runs, best first.");
  m.def("dequantize_rows", &dequantize_rows, "isa"_a, "quant_type"_a, "data"_a, "out"_a,
        "Dequantises the rows of a file tensor (uint8 bytes) to out: [rows, k] float32.");
  m.def("quantize_rows", &quantize_rows, "isa"_a, "x"_a, "precision"_a = "int8", "columns"_a = 0,
        "Records of float32 rows [m, k] as a variant quantises them: their bytes, row after row. With "
        "`columns`, a "
        "multiple of 32 as k must be then, so many columns of all rows at a time, as a layer's tasks do.");
  nb::class_<PackedLinear>(m, "PackedLinear", "A weight matrix packed for one kernel variant.")
      .def(nb::init<const std::string&, int, const Bytes&, int64_t, int64_t, const std::string&>(), "isa"_a,
           "quant_type"_a, "data"_a, "n"_a, "k"_a, "precision"_a = "int8")
      .def("run", &PackedLinear::run, "x"_a, "out"_a, "m0"_a, "m1"_a, "g0"_a, "g1"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("bytes", &PackedLinear::bytes, "A copy of the packed groups, one after the other.")
      .def_prop_ro("num_groups", &PackedLinear::num_groups)
      .def_prop_ro("packed_bytes", &PackedLinear::packed_bytes);
}

}  // namespace tellin

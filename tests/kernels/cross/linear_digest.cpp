// Prints a digest of the linear kernels' results for every storage type and precision of the variant named on
// the command line. Variants that round in the same order print the same lines, whatever processor they run
// on (or are emulated on). Fails if a result depends on the rectangle it was computed in, or a quantised row
// on the parts it was quantised in.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "tellin/linear.h"

namespace {

using namespace tellin;

struct Type {
  const char* name;
  QuantType type;
  int elements, bytes;
  int scales[2];  // offsets of float16 scales in a block, -1: none
};
constexpr Type kTypes[] = {
    {"F32", QuantType::F32, 1, 4, {-1, -1}},          {"F16", QuantType::F16, 1, 2, {-1, -1}},
    {"BF16", QuantType::BF16, 1, 2, {-1, -1}},        {"Q4_0", QuantType::Q4_0, 32, 18, {0, -1}},
    {"Q4_1", QuantType::Q4_1, 32, 20, {0, 2}},        {"Q5_0", QuantType::Q5_0, 32, 22, {0, -1}},
    {"Q5_1", QuantType::Q5_1, 32, 24, {0, 2}},        {"Q8_0", QuantType::Q8_0, 32, 34, {0, -1}},
    {"Q2_K", QuantType::Q2_K, 256, 84, {80, 82}},     {"Q3_K", QuantType::Q3_K, 256, 110, {108, -1}},
    {"Q4_K", QuantType::Q4_K, 256, 144, {0, 2}},      {"Q5_K", QuantType::Q5_K, 256, 176, {0, 2}},
    {"Q6_K", QuantType::Q6_K, 256, 210, {208, -1}},   {"IQ4_NL", QuantType::IQ4_NL, 32, 18, {0, -1}},
    {"IQ4_XS", QuantType::IQ4_XS, 256, 136, {0, -1}}, {"MXFP4", QuantType::MXFP4, 32, 17, {-1, -1}}};

constexpr int64_t kTokens = 13, kRowsOut = 70;

uint32_t next_random() {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 33);
}

float random_float() {
  return static_cast<float>(static_cast<int32_t>(next_random() % 20001) - 10000) * 1e-4f;
}

std::vector<uint8_t> random_tensor(const Type& type, int64_t k) {
  const size_t blocks = static_cast<size_t>(kRowsOut * k / type.elements);
  std::vector<uint8_t> data(blocks * static_cast<size_t>(type.bytes));
  for (size_t b = 0; b < blocks; ++b) {
    uint8_t* block = &data[b * static_cast<size_t>(type.bytes)];
    for (int i = 0; i < type.bytes; ++i) block[i] = static_cast<uint8_t>(next_random());
    for (const int offset : type.scales) {
      if (offset >= 0)
        block[offset + 1] = static_cast<uint8_t>(0x20 | (block[offset + 1] & 0x83));  // about 0.01
    }
    if (type.type == QuantType::MXFP4) block[0] = static_cast<uint8_t>(118 + block[0] % 4);
    if (type.elements > 1) continue;
    const float value = random_float();
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const auto high = static_cast<uint16_t>(bits >> 16);
    const auto half = static_cast<uint16_t>(0x3000 | (high & 0x83ff));
    if (type.type == QuantType::F32) std::memcpy(block, &bits, 4);
    if (type.type == QuantType::BF16) std::memcpy(block, &high, 2);
    if (type.type == QuantType::F16) std::memcpy(block, &half, 2);
  }
  return data;
}

struct Run {
  const LinearKernels& kernels;
  PackedMatrix weights;
  ActPrecision precision;
  const std::vector<float>& x;
  QuantizedRows rows;

  void operator()(int64_t m0, int64_t m1, int64_t g0, int64_t g1, float* out) const {
    if (precision == ActPrecision::kFloat32) {
      kernels.linear_f32(weights, x.data(), weights.k, m0, m1, g0, g1, out, kRowsOut);
    } else {
      const auto linear = precision == ActPrecision::kInt8 ? kernels.linear_int8 : kernels.linear_int16;
      linear(weights, rows, m0, m1, g0, g1, out, kRowsOut);
    }
  }
};

// Whether rows that are quantised together, in two parts with the second one first, are those of
// quantize_row.
bool parts_equal(const LinearKernels& kernels, ActPrecision precision, const std::vector<float>& x, int64_t k,
                 const QuantizedRows& rows) {
  const size_t bytes = static_cast<size_t>(rows.row_bytes * kTokens);
  auto* storage = static_cast<uint8_t*>(std::aligned_alloc(64, bytes));
  std::memset(storage, 0, bytes);
  const QuantizedRows parts = {storage, rows.row_bytes};
  for (int64_t m = 0; m < kTokens; ++m) kernels.pad_row(precision, k, m, parts);
  kernels.quantize_part(precision, x.data(), k, 0, kTokens, 3 * kActBlock, k, parts);
  kernels.quantize_part(precision, x.data(), k, 0, kTokens, 0, 3 * kActBlock, parts);
  const bool equal = std::memcmp(rows.data, parts.data, bytes) == 0;
  std::free(storage);
  return equal;
}

bool digest(const LinearKernels& kernels, const Type& type, ActPrecision precision, const char* name) {
  const int64_t k = type.elements == 256 ? 512 : type.elements == 32 ? 608 : 301;
  const std::vector<uint8_t> data = random_tensor(type, k);
  std::vector<float> x(static_cast<size_t>(kTokens * k));
  for (float& value : x) value = random_float() * random_float() * 8;
  const size_t group_bytes = kernels.packed_group_bytes(type.type, k, precision);
  const int64_t groups = (kRowsOut + kGroupRows - 1) / kGroupRows;
  auto* packed = static_cast<uint8_t*>(std::aligned_alloc(64, group_bytes * static_cast<size_t>(groups)));
  kernels.pack_groups(type.type, precision, data.data(), kRowsOut, k, 0, groups, packed);
  const size_t row_bytes =
      precision == ActPrecision::kFloat32 ? 64 : kernels.quantized_row_bytes(k, precision);
  auto* quantized = static_cast<uint8_t*>(std::aligned_alloc(64, row_bytes * kTokens));
  const QuantizedRows rows = {quantized, static_cast<int64_t>(row_bytes)};
  for (int64_t m = 0; m < kTokens && precision != ActPrecision::kFloat32; ++m) {
    kernels.quantize_row(precision, &x[static_cast<size_t>(m * k)], k, m, rows);
  }
  const int32_t layout = kernels.layout_id(type.type, precision);
  const Run run = {
      kernels, {type.type, layout, kRowsOut, k, groups, group_bytes, packed}, precision, x, rows};
  std::vector<float> out(static_cast<size_t>(kTokens * kRowsOut)), part(out.size());
  run(0, kTokens, 0, groups, out.data());
  for (int64_t m = 0; m < kTokens; ++m) {
    for (int64_t g = 0; g < groups; ++g) run(m, m + 1, g, g + 1, part.data());
  }
  const bool same = std::memcmp(out.data(), part.data(), out.size() * sizeof(float)) == 0 &&
                    (precision == ActPrecision::kFloat32 || parts_equal(kernels, precision, x, k, rows));
  uint64_t hash = 14695981039346656037u;
  for (const float value : out) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    hash = (hash ^ bits) * 1099511628211u;
  }
  std::printf("%s %s %016llx %.6g %s\n", type.name, name, static_cast<unsigned long long>(hash),
              static_cast<double>(out[17]), same ? "same" : "DIFFERS");
  std::free(packed);
  std::free(quantized);
  return same;
}

}  // namespace

int main(int argc, char** argv) {
  const LinearKernels* kernels = argc > 1 ? linear_kernels(argv[1]) : nullptr;
  if (kernels == nullptr) {
    std::fprintf(stderr, "no such variant here\n");
    return 2;
  }
  bool ok = true;
  for (const Type& type : kTypes) {
    if (type.elements > 1) {
      ok &= digest(*kernels, type, ActPrecision::kInt8, "int8");
      ok &= digest(*kernels, type, ActPrecision::kInt16, "int16");
    }
    ok &= digest(*kernels, type, ActPrecision::kFloat32, "float32");
  }
  return ok ? 0 : 1;
}

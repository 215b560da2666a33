// Linear layers over packed weights: the border between the plan executor and the matrix kernels.
//
// A weight matrix [n, k] (n output features, k input features) is packed once, in groups of kGroupRows output
// rows, losslessly in value. A kernel call computes a rectangle of the output: tokens [m0, m1) x groups [g0,
// g1). Kernels do not allocate, do not throw and know no threads. The value of an output element is one fixed
// sequence of floating-point operations over k: it does not depend on the rectangle it was computed in.
//
// PODs only (see quant_types.h): included by every instruction-set unit.
#pragma once
#include <cstddef>
#include <cstdint>

#include "tellin/quant_types.h"

namespace tellin {

constexpr int64_t kGroupRows = 16;  // output rows interleaved in a packed group
constexpr int64_t kActBlock = 32;   // input features that share one activation scale

// Rectangles whose number of groups is a multiple of this run fastest (groups are walked side by side).
constexpr int64_t kGroupsPerTask = 4;

// Arithmetic of a layer: activations of 8 or 15 bits (one scale per kActBlock), or float32 activations.
// Matrices packed for kInt8 and for kInt16 are the same.
enum class ActPrecision : int32_t { kInt8 = 0, kFloat32 = 1, kInt16 = 2 };

struct PackedMatrix {
  QuantType source;     // storage type the values came from
  int32_t layout;       // id of the packed layout (owned by the kernels)
  int64_t n, k;         // logical sizes; groups are padded with zero rows to a multiple of kGroupRows
  int64_t num_groups;   // ceil(n / kGroupRows)
  size_t group_bytes;   // bytes of one group; groups are contiguous
  const uint8_t* data;  // [num_groups * group_bytes], 64-byte aligned
  // What the caller reads after the groups of a call: a group of this layout, for kernels to prefetch;
  // nullptr if that is the group behind them.
  const uint8_t* follow = nullptr;
};

// Rows of quantised activations. What lies in a row (values, scales, sums) is the kernels' business.
struct QuantizedRows {
  uint8_t* data;      // [rows * row_bytes], 64-byte aligned
  int64_t row_bytes;  // quantized_row_bytes(), a multiple of 64
};

struct LinearKernels {
  const char* isa;

  // Bytes of one packed group; 0 if there is no layout for this type, precision and k (k must be a whole
  // number of the type's blocks).
  size_t (*packed_group_bytes)(QuantType type, int64_t k, ActPrecision precision);
  // Packs groups [g0, g1) of the row-major file tensor `src` ([n, k], rows contiguous, any alignment; scales
  // must be finite) to dst + g * group_bytes. Needs no state: different groups may be packed by different
  // threads.
  void (*pack_groups)(QuantType type, ActPrecision precision, const uint8_t* src, int64_t n, int64_t k,
                      int64_t g0, int64_t g1, uint8_t* dst);
  // Layout id for PackedMatrix::layout.
  int32_t (*layout_id)(QuantType type, ActPrecision precision);

  // Bytes of one row of quantised activations (kInt8, kInt16) for k input features (a multiple of 64).
  size_t (*quantized_row_bytes)(int64_t k, ActPrecision precision);
  // Quantises one float32 row [k] into row `row` of `out`. A block of kActBlock values that holds a NaN or an
  // infinity (or, in 8 bits, a magnitude above 2^100) makes every output of that row NaN.
  void (*quantize_row)(ActPrecision precision, const float* x, int64_t k, int64_t row,
                       const QuantizedRows& out);

  // out[m * ldo + n] = sum over k, for m in [m0, m1) and n in the groups [g0, g1) (only n < w.n is written).
  // `out` points to row 0, column 0 of the whole result. linear_int8 and linear_int16 take matrices
  // packed for kInt8 and rows quantised for kInt8 and kInt16; linear_f32 takes matrices packed for kFloat32
  // (x + m * ldx is row m, [k]).
  void (*linear_int8)(const PackedMatrix& w, const QuantizedRows& x, int64_t m0, int64_t m1, int64_t g0,
                      int64_t g1, float* out, int64_t ldo);
  void (*linear_int16)(const PackedMatrix& w, const QuantizedRows& x, int64_t m0, int64_t m1, int64_t g0,
                       int64_t g1, float* out, int64_t ldo);
  void (*linear_f32)(const PackedMatrix& w, const float* x, int64_t ldx, int64_t m0, int64_t m1, int64_t g0,
                     int64_t g1, float* out, int64_t ldo);

  // Dequantises row `row` of the unpacked file tensor (embedding lookup) to float32 [k].
  void (*dequantize_row)(QuantType type, const uint8_t* src, int64_t row, int64_t k, float* out);

  // Quantises features [begin, end) of rows [m0, m1) as quantize_row does; both are multiples of kActBlock.
  // x + m * ldx is row m's feature 0. What lies behind the last block of a row is not written: pad_row does,
  // once.
  void (*quantize_part)(ActPrecision precision, const float* x, int64_t ldx, int64_t m0, int64_t m1,
                        int64_t begin, int64_t end, const QuantizedRows& out);

  // Writes what lies behind the last of a row's k features (a multiple of kActBlock).
  void (*pad_row)(ActPrecision precision, int64_t k, int64_t row, const QuantizedRows& out);
};

// Table of the best variant this machine runs (isa == nullptr), or of the one named: "amx", "avx512",
// "avxvnni", "avx2", "neon" or "portable" (nullptr if it is unknown or cannot run here). "amx-bf16" is never
// the best: weights and activations are bfloat16 there where others have 8-bit activations.
const LinearKernels* linear_kernels(const char* isa);

// The variants this machine runs that may be the best, best first.
int num_linear_variants();
const LinearKernels* linear_variant(int index);

}  // namespace tellin

// Row, attention and recurrence kernels: the border between the plan executor and everything that is not a
// matrix product.
//
// Kernels do not allocate, do not throw and know no threads. Each value is one fixed sequence of
// floating-point operations: it depends on its row, never on how rows were grouped into calls.
//
// PODs only: included by every instruction-set unit (see linear.h).
#pragma once
#include <cstddef>
#include <cstdint>

namespace tellin {

// kSwigluOai is a product of two values, never an activation of one: with g cut to at most 7 and u to [-7,
// 7], g sigmoid(1.702 g) (u + 1). Source: OpenAI 2025 (gpt-oss model card), section 2.
enum class Activation : int32_t {
  kSilu = 0,
  kGelu = 1,
  kGeluTanh = 2,
  kRelu = 3,
  kQuickGelu = 4,
  kSwigluOai = 5,
  kSigmoid = 6,
  kIdentity = 7
};
enum class KvDtype : int32_t { kFloat32 = 0, kFloat16 = 1, kInt8 = 2, kInt16 = 3 };

constexpr int64_t kTilePositions = 16;  // positions per KV tile: one 512-bit or two 256-bit vectors of scores
constexpr int64_t kPartition = 256;     // positions reduced as one unit of softmax; absolute multiples
constexpr int64_t kPartitionTiles = kPartition / kTilePositions;

constexpr int64_t kMaxHeadDim = 576;
constexpr int64_t kQueryStride = kMaxHeadDim + 32;  // of rows of query codes, and what is written with them

struct VectorKernels {
  const char* isa;

  // All rows are contiguous float32 [n]. `out` may be an input.
  void (*rms_norm)(const float* x, const float* weight, int64_t n, float eps, float* out);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, int64_t n, float eps,
                     float* out);
  void (*add)(const float* x, const float* y, int64_t n, float* out);
  void (*scale)(const float* x, float factor, int64_t n, float* out);
  void (*softcap)(const float* x, float cap, int64_t n, float* out);
  void (*activation)(Activation act, const float* x, int64_t n, float* out);
  void (*act_mul)(Activation act, const float* gate, const float* up, int64_t n, float* out);
  // Rotates 2 * half values of one head in place by the angles whose cosines and sines are given.
  void (*rope)(float* head, const float* cos, const float* sin, int64_t half, bool interleaved);
  // out += factor * x, in one rounding where the machine has one for it.
  void (*add_scaled)(const float* x, float factor, int64_t n, float* out);
};

// One tile of the KV cache: 16 consecutive positions of one kv head, K as [head_dim][16], V as
// [16][value_dim]; tiles made from int8 end with the scales of K [16] and of V [16], float32. Tiles of kInt16
// hold pairs of codes of 13 bits, K as [head_dim / 2][16][2] and V as [8][value_dim][2], and end with a word
// per position, whose upper halves are float32 scales: of K the lower 16 bits, of V the upper ones.
struct KvLayout {
  KvDtype dtype;
  int64_t head_dim;      // of keys: a multiple of 8, at most kMaxHeadDim
  int64_t value_dim;     // of values: a multiple of 8, at most head_dim
  int64_t value_offset;  // bytes from the start of a tile to V
  int64_t scale_offset;  // bytes to the scales; 0 = the tile has none
  int64_t tile_bytes;    // a multiple of 64; rows of V may be read 32 bytes past the last one
};

// Query rows that attend to one partition of one kv head. Rows are ordered by query position.
struct AttentionRows {
  // [num_rows, head_dim], already multiplied by the attention scale and, without a soft cap, by log2(e)
  const float* q;
  int64_t num_rows;
  const int32_t*
      begin;  // [num_rows] visible positions [begin, end), relative to the partition: 0 <= begin, end
  const int32_t* end;  //            <= kPartition; begin >= end: the row sees nothing here
  float softcap;       // 0 = none
  // Tiles to be fetched into cache while those attended to are read, one for each: what comes next, or the
  // same again.
  const uint8_t* const* next;
  // For tiles of 16-bit codes instead of q: the same as codes [num_rows, kQueryStride] and a scale per row.
  const int16_t* q_codes = nullptr;
  const float* q_scales = nullptr;
};

// Softmax state of one row: acc[value_dim] (not normalised), then the running maximum and sum.
constexpr int64_t kStatePadding = 16;  // floats after acc; [0] = maximum, [1] = sum

struct AttentionKernels {
  const char* isa;

  // Writes k [head_dim] and v [value_dim], float32, of one position into `lane` of a tile.
  void (*kv_store)(const KvLayout& layout, const float* k, const float* v, int64_t lane, uint8_t* tile);
  // Queries, multiplied by a factor, as codes [num_rows, kQueryStride] and scales [num_rows] for kInt16.
  void (*encode_queries)(const float* q, float factor, int64_t num_rows, int64_t head_dim, int16_t* codes,
                         float* scales);
  // Expands a tile to float32, exactly: scales are copied, not applied. `out` has dtype kFloat32. Not for
  // kInt16, which is attended to as it is.
  void (*kv_expand)(const KvLayout& layout, const uint8_t* tile, const KvLayout& out_layout, uint8_t* out);
  // Attention over one partition: states[num_rows] of stride value_dim + kStatePadding are overwritten.
  // tiles[kPartitionTiles]: those that hold no visible position are not read and may be null.
  // scratch: kScratchRows * kPartition floats.
  void (*attend)(const KvLayout& layout, const uint8_t* const* tiles, const AttentionRows& rows,
                 float* scratch, float* states);
  // Merges the states of the next partition into the running states (sum 0 = empty).
  void (*fold)(int64_t num_rows, int64_t value_dim, const float* states, float* running);
  // out[value_dim] = acc / sum (zeros if the state is empty).
  void (*finish)(int64_t value_dim, const float* running, float* out);
};
constexpr int64_t kScratchRows = 8;

// Columns that lie side by side in a recurrence's matrix: [columns / kStateColumns][depth][kStateColumns],
// the last block as wide as what is left. What is read again for every row then fits the first-level cache.
constexpr int64_t kStateColumns = 32;
constexpr int64_t kMaxConvKernel = 8;

// Rows of one request in a short convolution, and some of its columns.
struct ConvRows {
  const float* x;
  int64_t x_stride;
  float* out;
  int64_t out_stride;
  int64_t num_rows, columns;
  const float* weight;  // [kernel] rows of weight_stride
  int64_t weight_stride;
  int64_t kernel;
  const float* bias;  // nullptr = none
  bool has_act;
  Activation act;
  float* state;  // [kernel - 1, columns]: the rows before; changed
};

// Rows of one request in one head of a gated delta rule, and some of its value columns.
struct DeltaRows {
  const float *q, *k, *v, *a, *b;
  int64_t q_stride, k_stride, v_stride, a_stride, b_stride;
  float* out;
  int64_t out_stride;
  int64_t num_rows, depth, columns;  // depth: of q and k
  float decay, dt_bias;
  float* state;  // [depth, columns] in blocks of kStateColumns; changed
};

// Rows of one request in one head of a selective scan, and some of its columns.
struct ScanRows {
  const float *x, *b, *c, *dt;
  int64_t x_stride, b_stride, c_stride, dt_stride;
  float* out;
  int64_t out_stride;
  int64_t num_rows, depth, columns;  // depth: of b and c
  float decay, skip, dt_bias, dt_min, dt_max;
  float* state;  // as in DeltaRows
};

// Recurrences: what they compute stands in models/plan/ir.py. A row's values are one sequence of operations
// from those of the row before, whatever the calls.
struct RecurrentKernels {
  const char* isa;
  void (*short_conv)(const ConvRows& rows);
  void (*gated_delta)(const DeltaRows& rows);
  void (*selective_scan)(const ScanRows& rows);
};

// Tables of the named variant (as returned in LinearKernels::isa), or nullptr if it was not built.
const VectorKernels* vector_kernels(const char* isa);
const AttentionKernels* attention_kernels(const char* isa);
const RecurrentKernels* recurrent_kernels(const char* isa);

}  // namespace tellin

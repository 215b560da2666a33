// Tiles of the KV cache: how they are read, written and expanded. Include a simd_*.h first.
#pragma once

#include "tellin/vector_kernels.h"
#include "vector/math.h"

namespace {

using tellin::kMaxHeadDim;
using tellin::kQueryStride;
using tellin::kTilePositions;
using tellin::KvDtype;
using tellin::KvLayout;

// How one storage type is read: a vector of values from element index i of a K or V array.
struct ReadFloat32 {
  static constexpr int64_t kBytes = 4;
  static constexpr bool kPrefetch = false;  // mostly panels that were just made
  static inline V load(const uint8_t* p) { return Simd::load(reinterpret_cast<const float*>(p)); }
};
struct ReadFloat16 {
  static constexpr int64_t kBytes = 2;
  static constexpr bool kPrefetch = true;
  static inline V load(const uint8_t* p) { return Simd::load_f16(reinterpret_cast<const uint16_t*>(p)); }
};
struct ReadInt8 {
  static constexpr int64_t kBytes = 1;
  static constexpr bool kPrefetch = true;
  static inline V load(const uint8_t* p) { return Simd::load_i8(reinterpret_cast<const int8_t*>(p)); }
};

// Finite values beyond the range of float16 become its largest, so that one outlier cannot turn into
// infinity.
inline V clamp_half(V x) {
  return Simd::max(Simd::set1(-65504.0f), Simd::min(Simd::set1(65504.0f), x));
}

// Largest magnitude / 127, and the row in units of it, rounded to nearest even.
inline float quantize_head(const float* x, int64_t head_dim, int8_t* out, int64_t out_stride) {
  float top = 0.0f;
  for (int64_t d = 0; d < head_dim; ++d) {
    const float magnitude = __builtin_fabsf(x[d]);
    top = magnitude > top ? magnitude : top;
  }
  const float scale = top / 127.0f;
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  for (int64_t d = 0; d < head_dim; ++d) {
    const float value = x[d] * inverse;
    const float bounded = value > 127.0f ? 127.0f : (value > -127.0f ? value : -127.0f);
    out[d * out_stride] = static_cast<int8_t>(__builtin_nearbyintf(bounded));
  }
  return scale;
}

// A vector as codes = rint(x / scale) of 13 bits: products of up to 128 pairs of codes are exact in 32 bits.
// The scale is largest magnitude / 4095, rounded up to the upper half of a float, which is what is returned.
// All are 0 where that magnitude is below 1e-30; codes are 0 and the scale NaN where the vector holds NaN or
// infinity. Up to 8 codes behind the last are written.
constexpr float kCodeTop = 4095.0f;
constexpr float kLeastTop = 1e-30f;
inline float upper_half(uint32_t half) {
  const uint32_t bits = half << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t encode_codes(const float* x, int64_t n, int16_t* codes) {
  V top = Simd::zero();
  int64_t d = 0;
  for (; d + Simd::kWidth <= n; d += Simd::kWidth) top = Simd::max_or_nan(top, Simd::abs(Simd::load(x + d)));
  const int rest = static_cast<int>(n - d);
  if (rest > 0) top = Simd::max_or_nan(top, Simd::abs(Simd::load_partial(x + d, rest)));
  const float row_top = Simd::reduce_max_or_nan(top);
  const bool is_finite = row_top < __builtin_inff();
  const float least = row_top >= kLeastTop ? row_top / kCodeTop : 0.0f;
  uint32_t scale;
  __builtin_memcpy(&scale, &least, sizeof scale);
  scale = is_finite ? (scale + 0xffff) >> 16 : 0x7fc0;
  const float inverse = is_finite && scale != 0 ? 1.0f / upper_half(scale) : 0.0f;
  const V factor = Simd::set1(inverse);
  for (d = 0; d + Simd::kWidth <= n; d += Simd::kWidth) {
    Simd::store_codes(codes + d, Simd::mul(Simd::load(x + d), factor));
  }
  if (rest > 0) Simd::store_codes(codes + d, Simd::mul(Simd::load_partial(x + d, rest), factor));
  if (!is_finite) __builtin_memset(codes, 0, static_cast<size_t>(n) * sizeof(int16_t));
  return scale;
}

// Neighbouring positions share pairs: no store may touch the other code, which another thread may write.
inline void store_int16(const KvLayout& layout, const float* k, const float* v, int64_t lane, uint8_t* tile) {
  const int64_t head_dim = layout.head_dim;
  const int64_t value_dim = layout.value_dim;
  alignas(64) int16_t codes[kMaxHeadDim + 16];
  uint32_t scales = encode_codes(k, head_dim, codes);
  auto* k_out = reinterpret_cast<int16_t*>(tile) + 2 * lane;
  for (int64_t d = 0; d < head_dim; d += 2) {
    __builtin_memcpy(k_out + d * kTilePositions, codes + d, 2 * sizeof(int16_t));
  }
  scales |= encode_codes(v, value_dim, codes) << 16;
  __builtin_memcpy(tile + layout.scale_offset + lane * 4, &scales, sizeof scales);
  auto* v_out = reinterpret_cast<int16_t*>(tile + layout.value_offset) + lane / 2 * 2 * value_dim;
  Simd::store_halves(v_out, lane % 2 != 0, codes, value_dim);
}

void encode_queries(const float* q, float factor, int64_t num_rows, int64_t head_dim, int16_t* codes,
                    float* scales) {
  for (int64_t r = 0; r < num_rows; ++r) {
    scales[r] = upper_half(encode_codes(q + r * head_dim, head_dim, codes + r * kQueryStride)) * factor;
  }
}

void kv_store(const KvLayout& layout, const float* k, const float* v, int64_t lane, uint8_t* tile) {
  const int64_t head_dim = layout.head_dim, value_dim = layout.value_dim;
  uint8_t* value_tile = tile + layout.value_offset;
  switch (layout.dtype) {
    case KvDtype::kFloat32: {
      float* k_out = reinterpret_cast<float*>(tile) + lane;
      float* v_out = reinterpret_cast<float*>(value_tile) + lane * value_dim;
      for (int64_t d = 0; d < head_dim; ++d) k_out[d * kTilePositions] = k[d];
      for (int64_t d = 0; d < value_dim; ++d) v_out[d] = v[d];
      return;
    }
    case KvDtype::kFloat16: {
      uint16_t* k_out = reinterpret_cast<uint16_t*>(tile) + lane;
      uint16_t* v_out = reinterpret_cast<uint16_t*>(value_tile) + lane * value_dim;
      for (int64_t d = 0; d < value_dim; d += 8) {
        float part[16];
        uint16_t halves[16];
        for (int i = 0; i < 8; ++i) {
          part[i] = k[d + i];
          part[8 + i] = v[d + i];
        }
        for (int i = 0; i < 16; i += Simd::kWidth)
          Simd::store_f16(halves + i, clamp_half(Simd::load(part + i)));
        for (int i = 0; i < 8; ++i) {
          k_out[(d + i) * kTilePositions] = halves[i];
          v_out[d + i] = halves[8 + i];
        }
      }
      for (int64_t d = value_dim; d < head_dim; d += 8) {  // keys may be longer
        float part[16] = {0};
        uint16_t halves[16];
        for (int i = 0; i < 8; ++i) part[i] = k[d + i];
        for (int i = 0; i < 16; i += Simd::kWidth)
          Simd::store_f16(halves + i, clamp_half(Simd::load(part + i)));
        for (int i = 0; i < 8; ++i) k_out[(d + i) * kTilePositions] = halves[i];
      }
      return;
    }
    case KvDtype::kInt16:
      return store_int16(layout, k, v, lane, tile);
    case KvDtype::kInt8: {
      float* scales = reinterpret_cast<float*>(tile + layout.scale_offset);
      scales[lane] = quantize_head(k, head_dim, reinterpret_cast<int8_t*>(tile) + lane, kTilePositions);
      scales[kTilePositions + lane] =
          quantize_head(v, value_dim, reinterpret_cast<int8_t*>(value_tile) + lane * value_dim, 1);
      return;
    }
  }
}

template <class Read>
inline void expand_as(const KvLayout& layout, const uint8_t* tile, const KvLayout& out_layout, uint8_t* out) {
  const int64_t k_count = layout.head_dim * kTilePositions, v_count = layout.value_dim * kTilePositions;
  float* k = reinterpret_cast<float*>(out);
  float* v = reinterpret_cast<float*>(out + out_layout.value_offset);
  for (int64_t i = 0; i < k_count; i += Simd::kWidth) Simd::store(k + i, Read::load(tile + i * Read::kBytes));
  const uint8_t* values = tile + layout.value_offset;
  for (int64_t i = 0; i < v_count; i += Simd::kWidth)
    Simd::store(v + i, Read::load(values + i * Read::kBytes));
  if (layout.scale_offset == 0) return;
  const float* scales = reinterpret_cast<const float*>(tile + layout.scale_offset);
  float* out_scales = reinterpret_cast<float*>(out + out_layout.scale_offset);
  for (int64_t i = 0; i < 2 * kTilePositions; ++i) out_scales[i] = scales[i];
}

void kv_expand(const KvLayout& layout, const uint8_t* tile, const KvLayout& out_layout, uint8_t* out) {
  switch (layout.dtype) {
    case KvDtype::kFloat32:
      return expand_as<ReadFloat32>(layout, tile, out_layout, out);
    case KvDtype::kFloat16:
      return expand_as<ReadFloat16>(layout, tile, out_layout, out);
    case KvDtype::kInt8:
      return expand_as<ReadInt8>(layout, tile, out_layout, out);
    case KvDtype::kInt16:
      return;  // attended to as it is
  }
}

}  // namespace

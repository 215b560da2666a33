// Linear kernels in plain C++ for the ABI floor: every format, no speed claims.
//
// One group (16 rows) at a time; codes of a 32-feature block are unpacked to bytes once per token tile.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "tellin/linear.h"
#include "tellin/packed_format.h"

namespace tellin {

const LinearKernels* portable_linear_table();

namespace {

constexpr int kTile = 8;  // tokens that share an unpacked block

float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float bfloat_to_float(uint16_t b) {
  const uint32_t bits = static_cast<uint32_t>(b) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A 32-feature block of a group: codes [quad][row * 4 + i], scales and minima per 16 features.
struct Block {
  uint8_t codes[8][kVectorBytes];
  float scale[2][kRows];
  float minimum[2][kRows];
};

template <QuantType T>
void unpack_codes(const uint8_t* p, Block* out) {
  constexpr int kBits = format_of(T).bits;
  for (int j = 0; j < 8; ++j) {
    for (int i = 0; i < kVectorBytes; ++i) {
      int code = 0;
      if constexpr (kBits == 8) {
        code = p[kVectorBytes * j + i];
      } else if constexpr (kBits <= 3) {
        code = (p[kVectorBytes * (j / 4) + i] >> (2 * (j % 4))) & 3;
        if (kBits == 3) code |= ((p[kVectorBytes * 2 + i] >> j) & 1) << 2;
      } else {
        code = (p[kVectorBytes * (j % 4) + i] >> (j / 4 * 4)) & 15;
        if (kBits == 5) code |= ((p[kVectorBytes * 4 + i] >> j) & 1) << 4;
        if (kBits == 6) code |= ((p[kVectorBytes * (4 + j / 4) + i] >> (2 * (j % 4))) & 3) << 4;
      }
      out->codes[j][i] = format_of(T).has_table() ? format_of(T).code(code) : static_cast<uint8_t>(code);
    }
  }
}

template <QuantType T>
void unpack_scales(const uint8_t* header, int b, Block* out) {
  constexpr PackedFormat kFormat = format_of(T);
  for (int half = 0; half < 2; ++half) {
    for (int r = 0; r < kRows; ++r) {
      float scale = 0.0f, minimum = 0.0f;
      if constexpr (kFormat.scales == ScaleKind::kHalf32) {
        const auto* h = reinterpret_cast<const uint16_t*>(header);
        scale = half_to_float(h[kRows * b + r]);
        if (kFormat.has_min) minimum = half_to_float(h[2 * kRows + kRows * b + r]);
      } else if constexpr (kFormat.scales == ScaleKind::kSixBit32) {
        const auto* h = reinterpret_cast<const SixBitHeader*>(header);
        const int low = h->low[b][r], high = h->high[b % 4][r] >> (b / 4 * 4);
        scale = half_to_float(h->d[r]) * static_cast<float>((low & 15) | (high & 3) << 4);
        minimum = -(half_to_float(h->dmin[r]) * static_cast<float>(low >> 4 | (high >> 2 & 3) << 4));
      } else if constexpr (kFormat.scales == ScaleKind::kSignedSixBit32) {
        const auto* h = reinterpret_cast<const SignedSixBitHeader*>(header);
        const int low = h->low[b % 4][r] >> (b / 4 * 4) & 15, high = h->high[b % 2][r] >> (b / 2 * 2) & 3;
        scale = half_to_float(h->d[r]) * static_cast<float>((low | high << 4) - 32);
      } else if constexpr (kFormat.scales == ScaleKind::kExponent32) {
        const uint32_t e = header[kRows * b + r], bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
        std::memcpy(&scale, &bits, sizeof scale);
      } else if constexpr (kFormat.scales == ScaleKind::kInt8Per16) {
        const auto* h = reinterpret_cast<const Int8Per16Header*>(header);
        scale = h->d[r] * static_cast<float>(h->scale[2 * b + half][r]);
      } else {
        const auto* h = reinterpret_cast<const Nibble16Header*>(header);
        const int both = h->scale_min[2 * b + half][r];
        scale = half_to_float(h->d[r]) * static_cast<float>(both & 15);
        minimum = -(half_to_float(h->dmin[r]) * static_cast<float>(both >> 4));
      }
      out->scale[half][r] = scale;
      out->minimum[half][r] = minimum;
    }
  }
}

template <QuantType T>
void unpack_block(const uint8_t* super_block, int b, Block* out) {
  constexpr PackedFormat kFormat = format_of(T);
  unpack_codes<T>(super_block + kFormat.header_bytes() + b * kFormat.block_bytes(), out);
  unpack_scales<T>(super_block, b, out);
}

int32_t whole_value(const Act8& x, int i) {
  return x.q[0][i] + x.zero_pair[0][0];
}
int32_t whole_value(const Act16& x, int i) {
  return x.q[0][i] * (1 << kPlaneShift) + x.q[1][i];
}

// acc += sum * scale of weights * scale of activations, of one scale or of two. The product of the scales is
// exact in 8 bits; in 15 bits the sum is multiplied by the scale of weights first.
template <bool kPer16>
void add_scaled(const int32_t (&sums)[2][kRows], const Block& w, const Act8& x, int r, float* acc) {
  if (kPer16) {
    *acc += static_cast<float>(sums[0][r]) * (x.scale * w.scale[0][r]);
    *acc += static_cast<float>(sums[1][r]) * (x.scale * w.scale[1][r]);
  } else {
    *acc += static_cast<float>(sums[0][r] + sums[1][r]) * (x.scale * w.scale[0][r]);
  }
}

template <bool kPer16>
void add_scaled(const int32_t (&sums)[2][kRows], const Block& w, const Act16& x, int r, float* acc) {
  if (kPer16) {
    float t = static_cast<float>(sums[0][r]) * w.scale[0][r];
    t += static_cast<float>(sums[1][r]) * w.scale[1][r];
    *acc += t * x.scale;
  } else {
    *acc += static_cast<float>(sums[0][r] + sums[1][r]) * w.scale[0][r] * x.scale;
  }
}

// acc[16] += block * activations. Order: the block's integer sums, scaled and added, then the minima.
template <QuantType T, class Act>
void accumulate_block(const Block& w, const Act& x, float* acc) {
  constexpr PackedFormat kFormat = format_of(T);
  constexpr int kZero = kFormat.zero_point();
  int32_t sums[2][kRows];
  for (int half = 0; half < 2; ++half) {
    for (int r = 0; r < kRows; ++r) sums[half][r] = 0;
    for (int j = 4 * half; j < 4 * half + 4; ++j) {
      for (int r = 0; r < kRows; ++r) {
        int32_t sum = 0;
        for (int i = 0; i < 4; ++i) sum += (w.codes[j][4 * r + i] - kZero) * whole_value(x, 4 * j + i);
        sums[half][r] += sum;
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    add_scaled<kFormat.per16()>(sums, w, x, r, acc + r);
    if constexpr (kFormat.has_min && kFormat.per16()) {
      acc[r] += w.minimum[0][r] * x.half_sum[0];
      acc[r] += w.minimum[1][r] * x.half_sum[1];
    } else if constexpr (kFormat.has_min) {
      acc[r] += w.minimum[0][r] * x.sum;
    }
  }
}

void store_rows(const float* acc, int64_t g, int64_t n, float* out_row) {
  const int64_t rows = std::min<int64_t>(kRows, n - g * kRows);
  std::memcpy(out_row + g * kRows, acc, static_cast<size_t>(rows) * sizeof(float));
}

template <class Act>
const Act* act_row(const QuantizedRows& x, int64_t m) {
  return reinterpret_cast<const Act*>(x.data + m * x.row_bytes);
}

template <QuantType T, class Act>
void linear_int(const PackedMatrix& w, const QuantizedRows& x, int64_t m0, int64_t m1, int64_t g0, int64_t g1,
                float* out, int64_t ldo) {
  constexpr PackedFormat kFormat = format_of(T);
  const int64_t num_super = static_cast<int64_t>(w.group_bytes / kFormat.super_bytes());
  Block block;
  for (int64_t g = g0; g < g1; ++g) {
    for (int64_t m = m0; m < m1; m += kTile) {
      const int tile = static_cast<int>(std::min<int64_t>(kTile, m1 - m));
      float acc[kTile][kRows] = {};
      const uint8_t* p = w.data + g * w.group_bytes;
      for (int64_t s = 0; s < num_super; ++s, p += kFormat.super_bytes()) {
        for (int b = 0; b < kFormat.blocks(); ++b) {
          unpack_block<T>(p, b, &block);
          for (int t = 0; t < tile; ++t) {
            accumulate_block<T>(block, act_row<Act>(x, m + t)[s * kFormat.blocks() + b], acc[t]);
          }
        }
      }
      for (int t = 0; t < tile; ++t) store_rows(acc[t], g, w.n, out + (m + t) * ldo);
    }
  }
}

// Expands features [k0, k0 + count) of a group to float32 [count][16]; k0 is a multiple of 32. Codes of E4M3
// begin at codes_offset.
template <QuantType T>
void expand_group(const uint8_t* group, [[maybe_unused]] size_t codes_offset, int64_t k0, int64_t count,
                  float* panel) {
  constexpr PackedFormat kFormat = format_of(T);
  if constexpr (kFormat.is_quantized()) {
    Block block;
    unpack_block<T>(group + k0 / kFormat.super_k() * kFormat.super_bytes(),
                    static_cast<int>(k0 % kFormat.super_k() / kBlockK), &block);
    for (int i = 0; i < count; ++i) {
      for (int r = 0; r < kRows; ++r) {
        const float code = static_cast<float>(block.codes[i / 4][4 * r + i % 4] - kFormat.zero_point());
        panel[i * kRows + r] = code * block.scale[i / 16][r] + block.minimum[i / 16][r];
      }
    }
  } else if constexpr (T == QuantType::F32) {
    std::memcpy(panel, group + k0 * kRows * 4, static_cast<size_t>(count) * kRows * 4);
  } else if constexpr (T == QuantType::E4M3) {
    const auto* scale = reinterpret_cast<const float*>(group) + k0 / kE4m3K * kRows;
    const uint8_t* p = group + codes_offset + k0 * kRows;
    for (int i = 0; i < count * kRows; ++i) {
      const auto half = static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7);
      panel[i] = half_to_float(half) * scale[i % kRows];
    }
  } else {
    const auto* p = reinterpret_cast<const uint16_t*>(group) + k0 * kRows;
    for (int i = 0; i < count; ++i) {
      for (int r = 0; r < kRows; ++r) {
        panel[i * kRows + r] = T == QuantType::F16 ? half_to_float(p[i * kRows + r])
                                                   : bfloat_to_float(p[i / 2 * 2 * kRows + r * 2 + i % 2]);
      }
    }
  }
}

template <QuantType T>
void linear_f32(const PackedMatrix& w, const float* x, int64_t ldx, int64_t m0, int64_t m1, int64_t g0,
                int64_t g1, float* out, int64_t ldo) {
  float panel[kBlockK * kRows];
  for (int64_t g = g0; g < g1; ++g) {
    for (int64_t m = m0; m < m1; m += kTile) {
      const int tile = static_cast<int>(std::min<int64_t>(kTile, m1 - m));
      float acc[kTile][kRows] = {};
      for (int64_t k0 = 0; k0 < w.k; k0 += kBlockK) {
        const int64_t count = std::min<int64_t>(kBlockK, w.k - k0);
        expand_group<T>(w.data + g * w.group_bytes, e4m3_codes_offset(w.k), k0, count, panel);
        for (int t = 0; t < tile; ++t) {
          const float* row = x + (m + t) * ldx + k0;
          for (int64_t i = 0; i < count; ++i) {
            for (int r = 0; r < kRows; ++r) acc[t][r] += panel[i * kRows + r] * row[i];
          }
        }
      }
      for (int t = 0; t < tile; ++t) store_rows(acc[t], g, w.n, out + (m + t) * ldo);
    }
  }
}

// Scale and sums of a block whose whole values are v + zero.
template <class Act>
void store_sums(float scale, int zero, const int (&sums)[2], Act* out) {
  out->scale = scale;
  out->sum = scale * static_cast<float>(sums[0] + sums[1] + kBlockK * zero);
  for (int h = 0; h < 2; ++h) out->half_sum[h] = scale * static_cast<float>(sums[h] + kBlockK / 2 * zero);
}

// Rounded up to three significant bits.
float to_grid(float need) {
  uint32_t bits;
  std::memcpy(&bits, &need, sizeof bits);
  bits = (bits + kAct8ScaleRest) & ~kAct8ScaleRest;
  std::memcpy(&need, &bits, sizeof bits);
  return need;
}

void quantize_finite(const float (&x)[kBlockK], float, Act8* out) {
  const float low = *std::min_element(x, x + kBlockK), high = *std::max_element(x, x + kBlockK);
  const float most = kMostZeroSteps;
  const float middle = (high + low) * kAct8StepsPerMiddle / (high - low);
  const int steps = static_cast<int>(std::nearbyintf(std::clamp(middle, -most, most)));
  const int zero = kZeroUnit * steps, entry = steps + kMostZeroSteps;
  const float scale = to_grid(std::max(high * kAct8Up[entry], -low * kAct8Down[entry]));
  const float inverse = 1.0f / scale;
  uint32_t bits;
  std::memcpy(&bits, &scale, sizeof bits);
  out->scale_offset = static_cast<uint16_t>((bits >> 21 & 3) * kEntryBytes);
  out->zero_offset = static_cast<uint16_t>(entry * kEntryBytes);
  int sums[2] = {0, 0};
  for (int i = 0; i < kBlockK; ++i) {
    const int q = static_cast<int>(std::nearbyintf(x[i] * inverse)) - zero;
    out->q[0][i] = static_cast<int8_t>(q);
    sums[i / 16] += q;
  }
  store_sums(scale, zero, sums, out);
  for (auto& pair : out->zero_pair) pair[0] = static_cast<int16_t>(zero);
  out->zero_pair[0][1] = static_cast<int16_t>(-(sums[0] + sums[1]));
  out->zero_pair[1][1] = static_cast<int16_t>(-sums[0]);
  out->zero_pair[2][1] = static_cast<int16_t>(-sums[1]);
}

void quantize_finite(const float (&x)[kBlockK], float magnitude, Act16* out) {
  const float inverse = kAct16Largest / magnitude;
  int sums[2] = {0, 0};
  for (int i = 0; i < kBlockK; ++i) {
    const int v = static_cast<int>(std::nearbyintf(x[i] * inverse));
    const int high = (v + (1 << (kPlaneShift - 1))) >> kPlaneShift;  // leaves a rest within [-64, 63]
    out->q[0][i] = static_cast<int8_t>(high);
    out->q[1][i] = static_cast<int8_t>(v - high * (1 << kPlaneShift));
    sums[i / 16] += v;
  }
  store_sums(magnitude / kAct16Largest, 0, sums, out);
  out->neg_sums[0] = -sums[0];
  out->neg_sums[1] = -sums[1];
}

template <class Act>
void quantize_block(const float (&x)[kBlockK], Act* out) {
  constexpr bool kEight = Act::kPlanes == 1;
  constexpr float kLargest = kEight ? kAct8LargestMagnitude : std::numeric_limits<float>::max();
  float magnitude = 0.0f;
  bool finite = true;
  for (const float value : x) {
    finite = finite && std::fabs(value) <= kLargest;
    magnitude = std::max(magnitude, std::fabs(value));
  }
  if (!finite) {
    store_nan_record(out);
  } else if (magnitude < (kEight ? kTinyAct8 : kTinyAct)) {
    store_zero_record(out);
  } else {
    quantize_finite(x, magnitude, out);
  }
}

template <class Act>
void quantize_records(const float* x, int64_t k, int64_t row, const QuantizedRows& out) {
  auto* blocks = reinterpret_cast<Act*>(out.data + row * out.row_bytes);
  const int64_t num_blocks = (k + 255) / 256 * 8;
  for (int64_t b = 0; b < num_blocks; ++b) {
    float block[kBlockK] = {};
    const int64_t count = std::clamp<int64_t>(k - b * kBlockK, 0, kBlockK);
    if (count > 0) std::memcpy(block, x + b * kBlockK, static_cast<size_t>(count) * sizeof(float));
    quantize_block(block, blocks + b);
  }
}

void quantize_row(ActPrecision precision, const float* x, int64_t k, int64_t row, const QuantizedRows& out) {
  if (precision == ActPrecision::kInt8) {
    quantize_records<Act8>(x, k, row, out);
  } else {
    quantize_records<Act16>(x, k, row, out);
  }
}

void quantize_part(ActPrecision precision, const float* x, int64_t ldx, int64_t m0, int64_t m1, int64_t begin,
                   int64_t end, const QuantizedRows& out) {
  for (int64_t m = m0; m < m1; ++m) {
    uint8_t* target = out.data + m * out.row_bytes;
    for (int64_t b = begin / kBlockK; b < end / kBlockK; ++b) {
      float block[kBlockK];
      std::memcpy(block, x + m * ldx + b * kBlockK, sizeof block);
      if (precision == ActPrecision::kInt8) {
        quantize_block(block, reinterpret_cast<Act8*>(target) + b);
      } else {
        quantize_block(block, reinterpret_cast<Act16*>(target) + b);
      }
    }
  }
}

template <class Act>
void linear_int_any(const PackedMatrix& w, const QuantizedRows& x, int64_t m0, int64_t m1, int64_t g0,
                    int64_t g1, float* out, int64_t ldo) {
  switch (w.source) {
#define TELLIN_CASE(type) \
  case QuantType::type:   \
    return linear_int<QuantType::type, Act>(w, x, m0, m1, g0, g1, out, ldo);
    TELLIN_CASE(Q4_0)
    TELLIN_CASE(Q4_1)
    TELLIN_CASE(Q5_0)
    TELLIN_CASE(Q5_1)
    TELLIN_CASE(Q8_0)
    TELLIN_CASE(Q2_K)
    TELLIN_CASE(Q3_K)
    TELLIN_CASE(Q4_K)
    TELLIN_CASE(Q5_K)
    TELLIN_CASE(Q6_K)
    TELLIN_CASE(IQ4_NL)
    TELLIN_CASE(IQ4_XS)
    TELLIN_CASE(MXFP4)
#undef TELLIN_CASE
    default:
      return;  // float weights have no integer path (packed_group_bytes is 0)
  }
}

void linear_f32_any(const PackedMatrix& w, const float* x, int64_t ldx, int64_t m0, int64_t m1, int64_t g0,
                    int64_t g1, float* out, int64_t ldo) {
  switch (w.source) {
#define TELLIN_CASE(type) \
  case QuantType::type:   \
    return linear_f32<QuantType::type>(w, x, ldx, m0, m1, g0, g1, out, ldo);
    TELLIN_CASE(F32)
    TELLIN_CASE(F16)
    TELLIN_CASE(BF16)
    TELLIN_CASE(E4M3)
    TELLIN_CASE(Q4_0)
    TELLIN_CASE(Q4_1)
    TELLIN_CASE(Q5_0)
    TELLIN_CASE(Q5_1)
    TELLIN_CASE(Q8_0)
    TELLIN_CASE(Q2_K)
    TELLIN_CASE(Q3_K)
    TELLIN_CASE(Q4_K)
    TELLIN_CASE(Q5_K)
    TELLIN_CASE(Q6_K)
    TELLIN_CASE(IQ4_NL)
    TELLIN_CASE(IQ4_XS)
    TELLIN_CASE(MXFP4)
#undef TELLIN_CASE
  }
}

}  // namespace

const LinearKernels* portable_linear_table() {
  static const LinearKernels table = {"portable",
                                      nullptr,
                                      nullptr,
                                      nullptr,
                                      nullptr,
                                      quantize_row,
                                      linear_int_any<Act8>,
                                      linear_int_any<Act16>,
                                      linear_f32_any,
                                      nullptr,
                                      quantize_part,
                                      nullptr};
  return &table;
}

}  // namespace tellin

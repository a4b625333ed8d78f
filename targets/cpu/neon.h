// The vectors of kernels.cpp on 64-bit ARM processors, and with BF16 instructions where they are compiled in. See avx512.h.
#include <arm_neon.h>

constexpr int LANES = 4;
constexpr int TILE = 6;
constexpr int PASS = 2;
constexpr int TOGETHER = 4;
constexpr int PARTS_HELD = 1;
constexpr int registers(int M) { return M <= 3 ? 8 : 4; }

using Floats = float32x4_t;
using Pairs = uint16x8_t;

inline Floats all(float x) { return vdupq_n_f32(x); }
inline Floats load(const float* from) { return vld1q_f32(from); }
inline void store(float* to, Floats x) { vst1q_f32(to, x); }
inline Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
inline Floats max(Floats a, Floats b) { return vmaxq_f32(a, b); }
inline Floats min(Floats a, Floats b) { return vminq_f32(a, b); }
inline Floats nearest(Floats x) { return vrndnq_f32(x); }

inline Floats times_2_to(Floats x, Floats n) {
  return x * vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}

inline float sum(Floats x) { return vaddvq_f32(x); }
inline float largest(Floats x) { return vmaxvq_f32(x); }

inline Floats behind(Floats x, int64_t n, float other) {
  const uint32_t lanes[] = {0, 1, 2, 3};
  uint32_t num = n < 0 ? 0 : n > LANES ? LANES : n;
  return vbslq_f32(vcltq_u32(vld1q_u32(lanes), vdupq_n_u32(num)), x, all(other));
}

inline uint32_t equal(Floats a, Floats b) {
  const uint32_t bits[] = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(vceqq_f32(a, b), vld1q_u32(bits)));
}

// The upper halves of its lanes are x in bf16, the lower ones what is left over.
inline uint32x4_t nearly_bf16(Floats x) {
  uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  return vbslq_u32(vceqq_f32(x, x), up, vdupq_n_u32(0x7fc00000));
}

inline Floats odd(Pairs x) { return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u16(x), vdupq_n_u32(0xffff0000))); }
inline Floats even(Pairs x) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u16(x), 16)); }
inline Floats rounded(Floats x) { return odd(vreinterpretq_u16_u32(nearly_bf16(x))); }

inline Pairs pairs_of(Floats even, Floats odd) {
  return vreinterpretq_u16_u32(vsriq_n_u32(nearly_bf16(odd), nearly_bf16(even), 16));
}

inline Floats load(const bf16* from, int64_t n) {
  bf16 held[LANES] = {};
  if (n < LANES) from = (bf16*)std::memcpy(held, from, std::max<int64_t>(n, 0) * sizeof *from);
  return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(from)), 16));
}

inline void store(bf16* to, Floats x, int64_t n) {
  uint16x4_t narrow = vshrn_n_u32(nearly_bf16(x), 16);
  if (n >= LANES)
    vst1_u16(to, narrow);
  else
    std::memcpy(to, &narrow, std::max<int64_t>(n, 0) * sizeof *to);
}

inline Pairs load_pairs(const bf16* from) { return vld1q_u16(from); }

inline Pairs load_pairs(const bf16* from, int64_t n) {
  bf16 held[2 * LANES] = {};
  std::memcpy(held, from, std::min<int64_t>(n, 2 * LANES) * sizeof *from);
  return vld1q_u16(held);
}

inline void store_pairs(bf16* to, Pairs x, int64_t n) { std::memcpy(to, &x, std::min<int64_t>(n, 2 * LANES) * sizeof *to); }

inline Pairs everywhere(const bf16* pair) {
  uint32_t both;
  std::memcpy(&both, pair, sizeof both);
  return vreinterpretq_u16_u32(vdupq_n_u32(both));
}

// The sums of 4 vectors, one per lane.
inline Floats sums_of(const Floats* x) { return vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])); }

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define PAIR_PRODUCTS
inline Floats dot_pairs(Pairs a, Pairs b, Floats sum) {
  return vbfdotq_f32(sum, vreinterpretq_bf16_u16(a), vreinterpretq_bf16_u16(b));
}
inline Pairs zip_low(Pairs a, Pairs b) { return vzip1q_u16(a, b); }  // the first four numbers
inline Pairs zip_high(Pairs a, Pairs b) { return vzip2q_u16(a, b); }
inline Pairs unzipped(Floats low, Floats high) {
  return vcombine_u16(vshrn_n_u32(nearly_bf16(low), 16), vshrn_n_u32(nearly_bf16(high), 16));
}
#endif

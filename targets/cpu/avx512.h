// The vectors of kernels.cpp on x86 processors with AVX-512 (F, BW, DQ, VL), and with AVX512-BF16 where it is compiled in.
#include <immintrin.h>

constexpr int LANES = 16;    // numbers of a register
constexpr int TILE = 8;      // tokens of a tile, at most
constexpr int PASS = 2;      // registers of 2 * LANES channels for which values are mixed at once
constexpr int TOGETHER = 4;  // queries whose attention is computed together, at most
constexpr int PARTS_HELD = 2;  // of the weights, see Wide in kernels.cpp, in registers at once
constexpr int registers(int) { return 2; }  // of a block of 32 outputs that a tile of M tokens has at once

using Floats = __m512;
using Pairs = __m512i;  // 2 * LANES numbers in bf16

inline __mmask16 first(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1; }

inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats nearest(Floats x) { return _mm512_roundscale_ps(x, 0); }
inline Floats times_2_to(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }
inline float sum(Floats x) { return _mm512_reduce_add_ps(x); }
inline float largest(Floats x) { return _mm512_reduce_max_ps(x); }
inline Floats behind(Floats x, int64_t n, float other) { return _mm512_mask_mov_ps(all(other), first(n), x); }
inline uint32_t equal(Floats a, Floats b) { return _mm512_cmpeq_ps_mask(a, b); }

inline Floats widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

inline __m256i narrowed(Floats x) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  up = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
#endif
}

inline Floats load(const bf16* from, int64_t n) { return widened(_mm256_maskz_loadu_epi16(first(n), from)); }
inline void store(bf16* to, Floats x, int64_t n) { _mm256_mask_storeu_epi16(to, first(n), narrowed(x)); }
inline Floats rounded(Floats x) { return widened(narrowed(x)); }

inline __mmask32 first_pairs(int64_t n) { return n >= 32 ? 0xffffffff : (1u << n) - 1; }

inline Pairs load_pairs(const bf16* from) { return _mm512_loadu_si512(from); }
inline Pairs load_pairs(const bf16* from, int64_t n) { return _mm512_maskz_loadu_epi16(first_pairs(n), from); }
inline void store_pairs(bf16* to, Pairs x, int64_t n) { _mm512_mask_storeu_epi16(to, first_pairs(n), x); }

inline Pairs everywhere(const bf16* pair) {
  int32_t both;
  std::memcpy(&both, pair, sizeof both);
  return _mm512_set1_epi32(both);
}

inline Floats even(Pairs x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
inline Floats odd(Pairs x) { return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(0xffff0000))); }

inline Pairs pairs_of(Floats even, Floats odd) {
  __m512i low = _mm512_cvtepu16_epi32(narrowed(even)), high = _mm512_cvtepu16_epi32(narrowed(odd));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// The sums of 16 vectors, one per lane.
inline Floats sums_of(const Floats* x) {
  Floats pairs[8], fours[4], halves[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    pairs[i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]) + _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m512d low = _mm512_castps_pd(pairs[2 * i]), high = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high)) + _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    halves[i] = _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88) +
                _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xdd);
  return _mm512_shuffle_f32x4(halves[0], halves[1], 0x88) + _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd);
}

#ifdef __AVX512BF16__
#define PAIR_PRODUCTS
inline Floats dot_pairs(Pairs a, Pairs b, Floats sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
inline Pairs zip_low(Pairs a, Pairs b) { return _mm512_unpacklo_epi16(a, b); }  // of each 8 numbers the first four
inline Pairs zip_high(Pairs a, Pairs b) { return _mm512_unpackhi_epi16(a, b); }
inline Pairs unzipped(Floats low, Floats high) {
  return _mm512_packus_epi32(_mm512_cvtepu16_epi32(narrowed(low)), _mm512_cvtepu16_epi32(narrowed(high)));
}
#endif

// The vectors of kernels.cpp on x86 processors with AVX2 and FMA. See avx512.h.
#include <immintrin.h>

constexpr int LANES = 8;
constexpr int TILE = 6;
constexpr int PASS = 1;
constexpr int TOGETHER = 4;
constexpr int PARTS_HELD = 1;
constexpr int registers(int M) { return M <= 2 ? 4 : 2; }

using Floats = __m256;
using Pairs = __m256i;

inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Floats x) { _mm256_storeu_ps(to, x); }

// In this form, as GCC else takes other registers for sums and runs out of the 16: 38 instead of 34 G products per second
// and core for 6 tokens on a Sapphire Rapids.
inline Floats fma(Floats a, Floats b, Floats c) {
  asm("vfmadd231ps %1, %2, %0" : "+x"(c) : "x"(a), "x"(b));
  return c;
}

inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats nearest(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline Floats times_2_to(Floats x, Floats n) {
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return x * _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}

inline float sum(Floats x) {
  __m128 four = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
  four = four + _mm_movehl_ps(four, four);
  return _mm_cvtss_f32(four + _mm_movehdup_ps(four));
}

inline float largest(Floats x) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ps(four, _mm_movehdup_ps(four)));
}

inline Floats behind(Floats x, int64_t n, float other) {
  __m256 lanes = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_blendv_ps(all(other), x, _mm256_cmp_ps(lanes, all((float)n), _CMP_LT_OQ));
}

inline uint32_t equal(Floats a, Floats b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }

// The upper halves of its lanes are x in bf16, the lower ones what is left over.
inline __m256i nearly_bf16(Floats x) {
  __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
  return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(up), nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}

inline Floats odd(Pairs x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(0xffff0000))); }

inline Floats even(Pairs x) {  // not by a shift, which on Intel's processors takes the place of a multiply-add
  __m128i up = _mm_setr_epi8(-1, -1, 0, 1, -1, -1, 4, 5, -1, -1, 8, 9, -1, -1, 12, 13);
  return _mm256_castsi256_ps(_mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(up)));
}

inline Floats rounded(Floats x) { return odd(nearly_bf16(x)); }

inline Pairs pairs_of(Floats even, Floats odd) {
  return _mm256_blend_epi16(_mm256_srli_epi32(nearly_bf16(even), 16), nearly_bf16(odd), 0xaa);
}

inline Floats load(const bf16* from, int64_t n) {
  alignas(16) bf16 held[LANES] = {};
  if (n < LANES) from = (bf16*)std::memcpy(held, from, std::max<int64_t>(n, 0) * sizeof *from);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16));
}

inline void store(bf16* to, Floats x, int64_t n) {
  __m256i upper = _mm256_srli_epi32(nearly_bf16(x), 16);
  __m128i narrow = _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
  if (n >= LANES)
    _mm_storeu_si128((__m128i*)to, narrow);
  else
    std::memcpy(to, &narrow, std::max<int64_t>(n, 0) * sizeof *to);
}

inline Pairs load_pairs(const bf16* from) { return _mm256_loadu_si256((const __m256i*)from); }

inline Pairs load_pairs(const bf16* from, int64_t n) {
  Pairs x = _mm256_setzero_si256();
  std::memcpy(&x, from, std::min<int64_t>(n, 2 * LANES) * sizeof *from);
  return x;
}

inline void store_pairs(bf16* to, Pairs x, int64_t n) { std::memcpy(to, &x, std::min<int64_t>(n, 2 * LANES) * sizeof *to); }

inline Pairs everywhere(const bf16* pair) {
  int32_t both;
  std::memcpy(&both, pair, sizeof both);
  return _mm256_set1_epi32(both);
}

// The sums of 8 vectors, one per lane.
inline Floats sums_of(const Floats* x) {
  Floats a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  Floats b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
}

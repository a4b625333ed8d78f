// The decoder layers of a Llama-shaped model, or of a head, in bf16 on a CPU with AVX512-BF16, for a few tokens at a time.
//
// A step of one token reads every weight once, and is as fast as these are read: weights lie in blocks of 32 outputs in
// the order in which they are multiplied, a forward is one parallel region, and nothing between products is written
// wider than it must be.
//
// What a token gives does not depend on the tokens beside it: each sum over channels runs in one order whatever the
// number of tokens, and attention goes through the slots that a token sees in their order, passing over the others. So
// verifying drafted tokens at once gives, bit for bit, what decoding them one by one gives.
//
// Called from cpu_decoder.py and cpu_kernels.py, which builds it. All tensors are bf16 and contiguous unless strides are
// given.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

using bf16 = uint16_t;
constexpr int64_t BLOCK = 32;  // outputs of a product that are computed together
constexpr int TILE = 8;        // tokens likewise

// Products [N, K] as blocks [N / 32, K / 2, 32, 2], zeros behind N; gate_up has the blocks of gate and up by turns.
// The norms and bias may be null: there are none.
struct Layer {
  const bf16 *attention_norm, *qkv, *bias, *query_norm, *key_norm, *output, *mlp_norm, *gate_up, *down;
  bf16* kept;  // [M, D] for what enters the layer; null: not wanted
};

// One forward over B rows of Q tokens each. Keys of layer i lie in the cache at i * layer_stride, [B, Nkv, slots, H], and
// its values at value_stride behind them; strides are in elements.
struct Forward {
  int64_t hidden, num_heads, num_kv_heads, head_dim, mlp, read_size;
  int64_t num_rows, num_queries, extent;  // B, Q, and the slots that a mask tells of
  int64_t layer_stride, value_stride, row_stride, head_stride;
  int64_t num_threads;
  bf16* cache;
  const bf16 *cos, *sin;             // [positions, H]
  const int64_t *positions, *slots;  // [B, Q] in these tables, and where keys and values are written
  const int64_t* last;               // [B, Q] each token sees the slots up to this one; null where there is
  const bf16* mask;                  // [B, Q, extent], negative where a slot is hidden
  const bf16* read;                  // [B, Q, read_size] what the first layer's attention reads; null: x, normalised
  const bf16* final_norm;            // null: none
  const bf16* output;                // blocked, of the largest of whose num_outputs products of a token the index
  int64_t* best;                     // goes here, [B, Q]; null: they are not computed
  int64_t num_outputs;
  float eps;
};

// How a head of one layer goes on from its own output: the layer reads the embedding of the token drafted last beside the
// layer's output before that token, both normalised.
struct Chain {
  const bf16 *embedding, *embedding_norm, *hidden_norm;  // [V, D]; gains [D]
  const bf16 *output_norm, *output;                      // gain [D]; blocked, num_outputs of them
  const int64_t* to_target;                              // the token of each output; null: the same number
  int64_t num_outputs, num_tokens;                       // K tokens are drafted
};

namespace {

inline __mmask16 first(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1; }

inline __m512 load(const bf16* from, int64_t n) {
  __m256i half = _mm256_maskz_loadu_epi16(first(n), from);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline void store(bf16* to, __m512 x, int64_t n) {
  _mm256_mask_storeu_epi16(to, first(n), (__m256i)_mm512_cvtneps_pbh(x));
}

inline __m512 rounded(__m512 x) {  // to bf16 and back
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
}

// exp(x) = 2^n exp(r), |r| <= ln(2) / 2, by its Taylor polynomial
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(88.0f)), _mm512_set1_ps(-87.0f));
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 y = _mm512_set1_ps(1.0f / 720);
  for (float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(factor));
  return _mm512_scalef_ps(y, n);
}

// What a tile asks of the block of weights behind its own, so that memory works while several tiles multiply one block.
struct Ahead {
  const char* at;
  int64_t step;  // bytes for each pair of channels: 128, divided by the tiles

  inline void fetch() {
    _mm_prefetch(at, _MM_HINT_T1);
    _mm_prefetch(at + step / 2, _MM_HINT_T1);
    at += step;
  }
};

template <int M>
inline void store_sums(const __m512 (&sums)[M][2], float* out) {
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) {
    _mm512_storeu_ps(out + m * BLOCK, sums[m][0]);
    _mm512_storeu_ps(out + m * BLOCK + 16, sums[m][1]);
  }
}

// out [M, 32] = x [M, K] of a block of weights
template <int M>
void tile(const bf16* x, int64_t K, const bf16* w, float* out, Ahead ahead) {
  __m512 sums[M][2];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) sums[m][0] = sums[m][1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < K; k += 2, w += 2 * BLOCK) {
    _mm_prefetch((const char*)(w + 1024), _MM_HINT_T0);
    _mm_prefetch((const char*)(w + 1056), _MM_HINT_T0);
    ahead.fetch();
    __m512bh low = (__m512bh)_mm512_loadu_si512(w), high = (__m512bh)_mm512_loadu_si512(w + BLOCK);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      int32_t pair;
      std::memcpy(&pair, x + m * K + k, sizeof pair);
      __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      sums[m][0] = _mm512_dpbf16_ps(sums[m][0], low, both);
      sums[m][1] = _mm512_dpbf16_ps(sums[m][1], high, both);
    }
  }
  store_sums(sums, out);
}

// The same of x in fp32, by two multiply-adds of 16 numbers for each product of 32 pairs.
template <int M>
void wide_tile(const float* x, int64_t K, const bf16* w, float* out, Ahead ahead) {
  const __m512i upper = _mm512_set1_epi32(0xffff0000);
  __m512 sums[M][2];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) sums[m][0] = sums[m][1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < K; k += 2, w += 2 * BLOCK) {
    _mm_prefetch((const char*)(w + 1024), _MM_HINT_T0);
    _mm_prefetch((const char*)(w + 1056), _MM_HINT_T0);
    ahead.fetch();
    __m512i low = _mm512_loadu_si512(w), high = _mm512_loadu_si512(w + BLOCK);
    __m512 even[2] = {_mm512_castsi512_ps(_mm512_slli_epi32(low, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(high, 16))};
    __m512 odd[2] = {_mm512_castsi512_ps(_mm512_and_si512(low, upper)), _mm512_castsi512_ps(_mm512_and_si512(high, upper))};
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      __m512 first = _mm512_set1_ps(x[m * K + k]), second = _mm512_set1_ps(x[m * K + k + 1]);
      sums[m][0] = _mm512_fmadd_ps(even[0], first, sums[m][0]);
      sums[m][1] = _mm512_fmadd_ps(even[1], first, sums[m][1]);
      sums[m][0] = _mm512_fmadd_ps(odd[0], second, sums[m][0]);
      sums[m][1] = _mm512_fmadd_ps(odd[1], second, sums[m][1]);
    }
  }
  store_sums(sums, out);
}

// Intel's processors take two cycles for a product of bf16 pairs and half of one for a multiply-add in fp32; AMD's take
// one for each. 8 tokens at once: 78 against 45 G products per second and core on an Emerald Rapids.
bool widens = __builtin_cpu_is("intel");

// The rows [M, K] of a product. Made by each thread, since it may hold them in fp32.
struct Rows {
  const bf16* x;
  int64_t M, K;
  const float* wide = nullptr;

  Rows(const bf16* x, int64_t M, int64_t K) : x(x), M(M), K(K) {
    if (!widens) return;
    static thread_local std::vector<float> held;
    held.resize(M * K);
    for (int64_t i = 0; i < M * K; i += 16) _mm512_mask_storeu_ps(&held[i], first(M * K - i), load(x + i, M * K - i));
    wide = held.data();
  }

  // out [count, 32] of the rows from m on, count at most TILE
  void multiply(int64_t m, int count, const bf16* w, float* out) const {
    static constexpr void (*tiles[])(const bf16*, int64_t, const bf16*, float*, Ahead) = {
        tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>, tile<7>, tile<8>};
    static constexpr void (*wide_tiles[])(const float*, int64_t, const bf16*, float*, Ahead) = {
        wide_tile<1>, wide_tile<2>, wide_tile<3>, wide_tile<4>, wide_tile<5>, wide_tile<6>, wide_tile<7>, wide_tile<8>};
    int64_t num_tiles = (M + TILE - 1) / TILE, size = BLOCK * K * sizeof(bf16);
    Ahead ahead{(const char*)w + size + m / TILE * size / num_tiles, 4 * BLOCK / num_tiles};
    wide ? wide_tiles[count - 1](wide + m * K, K, w, out, ahead) : tiles[count - 1](x + m * K, K, w, out, ahead);
  }
};

// Within a parallel region: then(token, output, sums, n) for each token and 16 outputs from `output` on, n of them real.
template <class Then>
void product(const bf16* x, int64_t M, int64_t K, const bf16* w, int64_t N, Then then) {
  const Rows rows(x, M, K);
#pragma omp for
  for (int64_t block = 0; block < (N + BLOCK - 1) / BLOCK; block++) {
    alignas(64) float out[TILE * BLOCK];
    for (int64_t m = 0; m < M; m += TILE) {
      int count = std::min<int64_t>(TILE, M - m);
      rows.multiply(m, count, w + block * BLOCK * K, out);
      for (int i = 0; i < count; i++)
        for (int64_t n = block * BLOCK, j = 0; j < BLOCK && n < N; j += 16, n += 16)
          then(m + i, n, _mm512_load_ps(out + i * BLOCK + j), std::min<int64_t>(16, N - n));
    }
  }
}

// y = x / rms(x) * gain over n channels; x in fp32 of bf16, as transformers rounds it
void normalise(const bf16* x, const bf16* gain, bf16* y, int64_t n, float eps) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += 16) {
    __m512 part = load(x + i, n - i);
    squares = _mm512_fmadd_ps(part, part, squares);
  }
  __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / n + eps));
  for (int64_t i = 0; i < n; i += 16) {
    __m512 part = rounded(_mm512_mul_ps(load(x + i, n - i), scale));
    store(y + i, _mm512_mul_ps(part, load(gain + i, n - i)), n - i);
  }
}

// x [H], normalised where there is a gain, then rotated, to y
void position(const bf16* x, const bf16* gain, const bf16* cos, const bf16* sin, bf16* y, int64_t H, float eps) {
  std::vector<bf16> held;
  if (gain) {
    held.resize(H);
    normalise(x, gain, held.data(), H, eps);
    x = held.data();
  }
  int64_t half = H / 2;
  for (int64_t i = 0; i < half; i += 16) {
    int64_t n = half - i;
    __m512 low = load(x + i, n), high = load(x + half + i, n);
    __m512 a = _mm512_mul_ps(low, load(cos + i, n)), b = _mm512_mul_ps(high, load(cos + half + i, n));
    store(y + i, _mm512_fnmadd_ps(high, load(sin + i, n), a), n);
    store(y + half + i, _mm512_fmadd_ps(low, load(sin + half + i, n), b), n);
  }
}

// The sums of 16 vectors, one per lane.
inline __m512 sums_of(const __m512* x) {
  __m512 pairs[8], fours[4], halves[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m512d low = _mm512_castps_pd(pairs[2 * i]), high = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                              _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88), _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
}

// What one query head of a token attends to: the n slots that the token sees, in their order.
struct Query {
  const bf16* q;         // [H]
  const int32_t* slots;  // [n]
  int64_t n;
  bf16* out;      // [H], the result
  float* scores;  // [n], and room behind them for 16
};

// Heads of size H, of which C registers hold the channels: C = H / 32, rounded up. T queries that read the same keys and
// values, the first `common` slots of all being the same, so that these are read once for all.
template <int C, int T>
struct Attention {
  const Query* queries;
  int64_t common, H;
  __mmask32 some[C];

  Attention(const Query* queries, int64_t common, int64_t H) : queries(queries), common(common), H(H) {
    for (int c = 0; c < C; c++) some[c] = H - 32 * c >= 32 ? 0xffffffff : (1u << (H - 32 * c)) - 1;
  }

  // Scores of queries `from` to `to`, which agree on these slots, for the slots at [i, i + 16) of their lists, up to `end`.
  inline __attribute__((always_inline)) void score(const bf16* keys, int from, int to, int64_t i, int64_t end) const {
    __m512 sums[T][16], scale = _mm512_set1_ps(1.0f / std::sqrt((float)H));
    __m512bh query[T][C];
#pragma GCC unroll 8
    for (int t = from; t < to; t++)
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) query[t][c] = (__m512bh)_mm512_maskz_loadu_epi16(some[c], queries[t].q + 32 * c);
    for (int j = 0; j < 16; j++) {
      const bf16* k = keys + queries[from].slots[std::min(i + j, end - 1)] * H;
#pragma GCC unroll 8
      for (int t = from; t < to; t++) sums[t][j] = _mm512_setzero_ps();
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) {
        __m512bh key = (__m512bh)_mm512_maskz_loadu_epi16(some[c], k + 32 * c);
#pragma GCC unroll 8
        for (int t = from; t < to; t++)
          sums[t][j] = _mm512_dpbf16_ps(sums[t][j], query[t][c], key);
      }
    }
#pragma GCC unroll 8
    for (int t = from; t < to; t++) _mm512_storeu_ps(queries[t].scores + i, _mm512_mul_ps(sums_of(sums[t]), scale));
  }

  // Scores to weights in bf16, in their place, zero behind n; not divided by their sum, which is returned
  static float weigh(float* scores, int64_t n) {
    __m512 most = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += 16) most = _mm512_mask_max_ps(most, first(n - i), most, _mm512_loadu_ps(scores + i));
    most = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    for (int64_t i = 0; i < n; i += 16) {
      __m512 part = _mm512_maskz_mov_ps(first(n - i), exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + i), most)));
      total = _mm512_add_ps(total, part);
      store((bf16*)scores + i, part, 16);
    }
    return _mm512_reduce_add_ps(total);
  }

  void operator()(const bf16* keys, const bf16* values) const {
    int64_t whole = common / 16 * 16;
    for (int64_t i = 0; i < whole; i += 16) score(keys, 0, T, i, common);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++)
      for (int64_t i = whole; i < queries[t].n; i += 16) score(keys, t, t + 1, i, queries[t].n);
    float totals[T];
    for (int t = 0; t < T; t++) totals[t] = weigh(queries[t].scores, queries[t].n);
    mix(values, totals);
  }

  // The values weighted and summed, two slots at a time: a register has, of each 8 channels, four of both slots.
  void mix(const bf16* values, const float* totals) const {
    __m512 low[T][C], high[T][C];
#pragma GCC unroll 8
    for (int t = 0; t < T; t++)
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) low[t][c] = high[t][c] = _mm512_setzero_ps();
    auto add = [&](int from, int to, int64_t i) __attribute__((always_inline)) {
      const int32_t* slots = queries[from].slots;
      const bf16 *one = values + slots[i] * H, *two = values + slots[std::min(i + 1, queries[from].n - 1)] * H;
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) {
        __m512i x = _mm512_maskz_loadu_epi16(some[c], one + 32 * c), y = _mm512_maskz_loadu_epi16(some[c], two + 32 * c);
        __m512bh lower = (__m512bh)_mm512_unpacklo_epi16(x, y), upper = (__m512bh)_mm512_unpackhi_epi16(x, y);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++)
          if (t >= from && t < to) {
            int32_t pair;
            std::memcpy(&pair, (const bf16*)queries[t].scores + i, sizeof pair);
            __m512bh weights = (__m512bh)_mm512_set1_epi32(pair);
            low[t][c] = _mm512_dpbf16_ps(low[t][c], lower, weights);
            high[t][c] = _mm512_dpbf16_ps(high[t][c], upper, weights);
          }
      }
    };
    int64_t whole = common / 2 * 2;
    for (int64_t i = 0; i < whole; i += 2) add(0, T, i);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      for (int64_t i = whole; i < queries[t].n; i += 2) add(t, t + 1, i);
      __m512 total = _mm512_set1_ps(totals[t]);
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) {
        __m512i lower = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_div_ps(low[t][c], total)));
        __m512i upper = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_div_ps(high[t][c], total)));
        _mm512_mask_storeu_epi16(queries[t].out + 32 * c, some[c], _mm512_packus_epi32(lower, upper));
      }
    }
  }
};

template <int C, int T>
void attend(const Query* queries, int64_t common, int64_t H, const bf16* keys, const bf16* values) {
  Attention<C, T>(queries, common, H)(keys, values);
}

using Attend = void (*)(const Query*, int64_t, int64_t, const bf16*, const bf16*);
constexpr int TOGETHER[] = {8, 4, 2, 2, 1, 1, 1, 1};  // most queries by C: 16 registers hold what they sum up
constexpr Attend by_size[][8] = {
    {attend<1, 1>, attend<1, 2>, attend<1, 3>, attend<1, 4>, attend<1, 5>, attend<1, 6>, attend<1, 7>, attend<1, 8>},
    {attend<2, 1>, attend<2, 2>, attend<2, 3>, attend<2, 4>},
    {attend<3, 1>, attend<3, 2>},
    {attend<4, 1>, attend<4, 2>},
    {attend<5, 1>},
    {attend<6, 1>},
    {attend<7, 1>},
    {attend<8, 1>}};

}  // namespace

// Within a parallel region: keys and values of M tokens to their slots, from projected [M, width], where the heads from
// `first` on are those of keys, then those of values; heads before it are queries, which stay where they are.
static void place(const Forward& s, const Layer& w, bf16* keys, bf16* projected, int64_t width, int64_t first) {
  int64_t H = s.head_dim, kv = s.num_kv_heads, num = width / H;
#pragma omp for
  for (int64_t task = 0; task < s.num_rows * s.num_queries * num; task++) {
    int64_t m = task / num, head = task % num, at = head - first;
    bf16 *from = &projected[m * width + head * H], *to = keys + m / s.num_queries * s.row_stride + s.slots[m] * H;
    const bf16 *cos = s.cos + s.positions[m] * H, *sin = s.sin + s.positions[m] * H;
    if (at < 0)
      position(from, w.query_norm, cos, sin, from, H, s.eps);
    else if (at < kv)
      position(from, w.key_norm, cos, sin, to + at * s.head_stride, H, s.eps);
    else
      std::memcpy(to + s.value_stride + (at - kv) * s.head_stride, from, H * sizeof(bf16));
  }
}

// Only keys and values, of x [B, Q, read_size] as it is, in every layer. N * H is a multiple of 32.
extern "C" void write(const Layer* layers, int64_t num_layers, const Forward* forward, const bf16* x) {
  const Forward& s = *forward;
  int64_t D = s.read_size, H = s.head_dim, M = s.num_rows * s.num_queries, width = 2 * s.num_kv_heads * H;
  std::vector<bf16> projected(M * width);
#pragma omp parallel num_threads(s.num_threads)
  for (int64_t i = 0; i < num_layers; i++) {
    product(x, M, D, layers[i].qkv + s.num_heads * H * D, width, [&](int64_t m, int64_t n, __m512 sum, int64_t count) {
      if (layers[i].bias) sum = _mm512_add_ps(rounded(sum), load(layers[i].bias + s.num_heads * H + n, count));
      store(&projected[m * width + n], sum, count);
    });
    place(s, layers[i], s.cache + i * s.layer_stride, projected.data(), width, 0);
  }
}

extern "C" void multiply_argmax(const bf16*, int64_t, int64_t, const bf16*, int64_t, int64_t*, int64_t);

// x [B, Q, D] goes through the layers in place, and through the final norm.
extern "C" void decode(const Layer* layers, int64_t num_layers, const Forward* forward, bf16* x) {
  const Forward& s = *forward;
  int64_t D = s.hidden, H = s.head_dim, N = s.num_heads, kv = s.num_kv_heads, Q = s.num_queries, M = s.num_rows * Q;
  int64_t width = (N + 2 * kv) * H, extent = s.mask ? s.extent : *std::max_element(s.last, s.last + M) + 1;
  std::vector<bf16> normed(M * D), projected(M * width), mixed(M * N * H), active(M * s.mlp);
  std::vector<int32_t> seen(M * extent);
  std::vector<int64_t> num_seen(M, 0);  // how many slots a token sees
  std::vector<int64_t> shared(M, 0);    // how many of the first of these are those of the token before it
  for (int64_t m = 0; m < M; m++) {
    int32_t *own = &seen[m * extent], *before = own - extent;
    for (int64_t p = 0; p < extent; p++)
      if (s.mask ? !(s.mask[m * extent + p] >> 15) : p <= s.last[m]) own[num_seen[m]++] = p;
    if (m % Q) shared[m] = std::mismatch(own, own + std::min(num_seen[m], num_seen[m - 1]), before).first - own;
  }
  // a row's queries of one key head go in tiles, at least four for each thread where there are as many queries
  int64_t group = N / kv, most = TOGETHER[(H - 1) / 32], tiles = (Q * group + most - 1) / most;
  while (s.num_rows * kv * tiles < 4 * s.num_threads && tiles < Q * group) tiles++;

#pragma omp parallel num_threads(s.num_threads)
  {
    std::vector<float> scores(most * (extent + 16));
    for (int64_t i = 0; i < num_layers; i++) {
      const Layer& w = layers[i];
      bf16* keys = s.cache + i * s.layer_stride;
      const bf16* read = i == 0 && s.read ? s.read : w.attention_norm ? normed.data() : x;
#pragma omp for
      for (int64_t m = 0; m < M; m++) {
        if (w.kept) std::memcpy(w.kept + m * D, x + m * D, D * sizeof(bf16));
        if (read == normed.data()) normalise(x + m * D, w.attention_norm, &normed[m * D], D, s.eps);
      }
      product(read, M, read == s.read ? s.read_size : D, w.qkv, width, [&](int64_t m, int64_t n, __m512 sum, int64_t count) {
        if (w.bias) sum = _mm512_add_ps(rounded(sum), load(w.bias + n, count));
        store(&projected[m * width + n], sum, count);
      });
      place(s, w, keys, projected.data(), width, N);
#pragma omp for
      for (int64_t task = 0; task < s.num_rows * kv * tiles; task++) {
        int64_t row = task / (kv * tiles), key_head = task / tiles % kv, tile = task % tiles;
        int64_t begin = Q * group * tile / tiles, count = Q * group * (tile + 1) / tiles - begin, common = extent;
        Query queries[TILE];
        for (int64_t k = 0; k < count; k++) {
          int64_t m = row * Q + (begin + k) / group, head = key_head * group + (begin + k) % group;
          queries[k] = {&projected[m * width + head * H], &seen[m * extent], num_seen[m], &mixed[(m * N + head) * H],
                        &scores[k * (extent + 16)]};
          common = std::min(common, k && (begin + k) % group == 0 ? shared[m] : num_seen[m]);
        }
        const bf16* at = keys + row * s.row_stride + key_head * s.head_stride;
        by_size[(H - 1) / 32][count - 1](queries, common, H, at, at + s.value_stride);
      }
      auto add = [&](int64_t m, int64_t n, __m512 sum, int64_t count) {
        store(x + m * D + n, _mm512_add_ps(load(x + m * D + n, count), rounded(sum)), count);
      };
      product(mixed.data(), M, N * H, w.output, D, add);
#pragma omp for
      for (int64_t m = 0; m < M; m++) normalise(x + m * D, w.mlp_norm, &normed[m * D], D, s.eps);
      const Rows rows(normed.data(), M, D);
#pragma omp for
      for (int64_t block = 0; block < (s.mlp + BLOCK - 1) / BLOCK; block++) {
        alignas(64) float gate[TILE * BLOCK], up[TILE * BLOCK];
        const bf16* weights = w.gate_up + 2 * block * BLOCK * D;
        for (int64_t m = 0; m < M; m += TILE) {
          int count = std::min<int64_t>(TILE, M - m);
          rows.multiply(m, count, weights, gate);
          rows.multiply(m, count, weights + BLOCK * D, up);
          for (int k = 0; k < count; k++)
            for (int64_t n = block * BLOCK, j = 0; j < BLOCK && n < s.mlp; j += 16, n += 16) {
              __m512 g = rounded(_mm512_load_ps(gate + k * BLOCK + j)), u = rounded(_mm512_load_ps(up + k * BLOCK + j));
              __m512 one = _mm512_set1_ps(1.0f), divisor = _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), g)));
              store(&active[(m + k) * s.mlp + n], _mm512_mul_ps(rounded(_mm512_div_ps(g, divisor)), u), s.mlp - n);
            }
        }
      }
      product(active.data(), M, s.mlp, w.down, D, add);
    }
#pragma omp for
    for (int64_t m = 0; m < M; m++)
      if (s.final_norm) normalise(x + m * D, s.final_norm, x + m * D, D, s.eps);
  }
  if (s.best) multiply_argmax(x, M, D, s.output, s.num_outputs, s.best, s.num_threads);
}

// Multiply in fp32, or by pairs of bf16, from now on; returns what was done before. Texts must not change on the way.
extern "C" bool widen(bool wanted) { return std::exchange(widens, wanted); }

// y [M, n] = x / rms(x) * gain
extern "C" void normalise_rows(const bf16* x, const bf16* gain, bf16* y, int64_t M, int64_t n, float eps) {
  for (int64_t m = 0; m < M; m++) normalise(x + m * n, gain, y + m * n, n, eps);
}

// y [M, N] = x [M, K] of a blocked weight
extern "C" void multiply(const bf16* x, int64_t M, int64_t K, const bf16* w, int64_t N, bf16* y, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads)
  product(x, M, K, w, N, [&](int64_t m, int64_t n, __m512 sum, int64_t count) { store(y + m * N + n, sum, count); });
}

// best [M]: where the largest of each row [n] is, the first of those that tie
extern "C" void argmax(const bf16* x, int64_t M, int64_t n, int64_t* best) {
  for (int64_t m = 0; m < M; m++, x += n) {
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < n; i += 16) most = _mm512_mask_max_ps(most, first(n - i), most, load(x + i, n - i));
    most = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    best[m] = 0;
    for (int64_t i = 0; i < n; i += 16)
      if (__mmask16 found = _mm512_mask_cmpeq_ps_mask(first(n - i), most, load(x + i, n - i))) {
        best[m] = i + __builtin_ctz(found);
        break;
      }
  }
}

// best [M]: where the products [N] of each row of x with a blocked weight are largest. They are written to memory that is
// kept: to be given new pages by the system takes longer than to look for the largest.
extern "C" void multiply_argmax(const bf16* x, int64_t M, int64_t K, const bf16* w, int64_t N, int64_t* best,
                                int64_t num_threads) {
  static thread_local std::vector<bf16> products;
  products.resize(M * N);
  multiply(x, M, K, w, N, products.data(), num_threads);
  argmax(products.data(), M, N, best);
}

// The probability of the largest of logits [n].
static float probability(const bf16* logits, int64_t n, int64_t best) {
  __m512 most = _mm512_set1_ps(_mm512_cvtss_f32(load(logits + best, 1))), total = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += 16)
    total = _mm512_mask_add_ps(total, first(n - i), total, exponential(_mm512_sub_ps(load(logits + i, n - i), most)));
  return 1.0f / _mm512_reduce_add_ps(total);
}

// Greedy chains behind hidden [B, D], the layer's output for the tokens at the positions of `forward` [B], which are their
// slots too: logits [K, B, num_outputs], tokens [B, K] and their probabilities. `hidden` becomes the layer's last output.
extern "C" void draft(const Layer* layer, const Forward* forward, const Chain* chain, bf16* hidden, bf16* logits,
                      int64_t* tokens, float* probabilities) {
  Forward s = *forward;
  const Chain& c = *chain;
  int64_t D = s.hidden, B = s.num_rows, K = c.num_tokens;
  std::vector<bf16> normed(B * D), read(B * 2 * D);
  std::vector<int64_t> at(s.positions, s.positions + B), best(B);
  s.positions = s.slots = s.last = at.data();
  s.read = read.data();
  for (int64_t k = 0; k < K; k++, logits += B * c.num_outputs) {
    normalise_rows(hidden, c.output_norm, normed.data(), B, D, s.eps);
    multiply(normed.data(), B, D, c.output, c.num_outputs, logits, s.num_threads);
    argmax(logits, B, c.num_outputs, best.data());
    for (int64_t b = 0; b < B; b++) {
      int64_t token = c.to_target ? c.to_target[best[b]] : best[b];
      tokens[b * K + k] = token;
      probabilities[b * K + k] = probability(logits + b * c.num_outputs, c.num_outputs, best[b]);
      normalise(c.embedding + token * D, c.embedding_norm, &read[b * 2 * D], D, s.eps);
      normalise(hidden + b * D, c.hidden_norm, &read[b * 2 * D + D], D, s.eps);
      at[b]++;
    }
    if (k + 1 < K) decode(layer, 1, &s, hidden);
  }
}

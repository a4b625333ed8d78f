// The decoder layers of a dense model, or of a head, in bf16 on a CPU, for a few tokens at a time.
//
// A step of one token reads every weight once, and is as fast as these are read: weights lie in blocks of 32 outputs in
// the order in which they are multiplied, a forward is one parallel region, and nothing between products is written
// wider than it must be. Weights stay in bf16, also where a processor multiplies in fp32 only: it widens them by a shift.
//
// What a token gives does not depend on the tokens beside it: each sum over channels runs in one order whatever the
// number of tokens, and attention goes through the slots that a token sees in their order, passing over the others. So
// verifying drafted tokens at once gives, bit for bit, what decoding them one by one gives.
//
// Compiled once for each instruction set, whose vectors are in a header of its own, by build.py. All tensors are bf16
// and contiguous unless strides are given.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

using bf16 = uint16_t;

namespace {
#if defined(__AVX512F__)
#include "avx512.h"
#elif defined(__AVX2__)
#include "avx2.h"
#elif defined(__ARM_NEON)
#include "neon.h"
#else
#error "no vectors for this processor"
#endif
}  // namespace

constexpr int64_t BLOCK = 32;  // outputs of a product that are computed together
constexpr int64_t PART = 256;  // rows of a product that a thread holds in fp32
constexpr int64_t WIDE = 2 * LANES;
constexpr int64_t MOST_CHANNELS = 256;  // of an attention head

// Products [N, K] as blocks [N / 32, K / 2, 32, 2], zeros behind N; gate_up has the blocks of gate and up by turns.
// The norms and biases may be null: there are none. So may the convolutions: taps [2, 2, D], of which the first index says
// whether before or behind attention or MLP, and the product [2 * 2 * num_groups, D] that corrects them.
struct Layer {
  const bf16 *attention_norm, *qkv, *bias, *query_norm, *key_norm, *output, *mlp_norm, *gate_up, *down;
  const bf16 *attention_taps, *attention_correction, *mlp_taps, *mlp_correction;
  const bf16 *attention_after, *mlp_after;           // gains [D] of norms behind attention and MLP
  const bf16 *output_bias, *gate_up_bias, *down_bias;  // [D]; [2 F], the gate's first; [D]
  const bf16* sinks;                                 // [N] scores of nothing, to which a head may attend
  const bf16* router;  // scores of the experts, whose gate_up and down follow each other; null: one MLP for all tokens
  bf16* kept;  // [M, D] for what enters the layer; null: not wanted
  int64_t window;  // a token sees so many slots, its own included; 0: all
  int64_t rope;    // which of the rotary tables; -1: none
  int64_t mlp;     // channels of the MLP, or of each expert's
  int64_t num_experts, num_chosen;  // of these for each token
  float scale;     // of the attention's scores
};

enum Activation : int64_t { SILU, GELU_TANH };

// How a norm computes: y = x / rms(x) * gain. Centred: of x - mean(x). With adds_one the gain is stored as gain - 1. Where
// it rounds, x / rms(x) is rounded to bf16 before it is multiplied.
struct Norm {
  float eps;
  bool centred, adds_one, rounds;
};

// Where a cache keeps positions: the first `sink` in slots of their own, later ones by turns in `size` slots behind; a
// token sees the first, and of the later ones `window` up to its own. size 0: position p is in slot p, and all are seen.
struct Ring {
  int64_t sink, size, window;

  int64_t slot(int64_t position) const { return size && position >= sink ? sink + (position - sink) % size : position; }
  bool sees(int64_t last, int64_t slot) const {
    if (!size || slot < sink) return slot <= last;
    int64_t back = ((last - slot) % size + size) % size;
    return back < window && last - back >= sink;
  }
};

// One forward over B rows of Q tokens each. Keys of layer i lie in the cache at i * layer_stride, [B, Nkv, slots, H], and
// its values at value_stride behind them; strides are in elements.
struct Forward {
  int64_t hidden, num_heads, num_kv_heads, head_dim, read_size;
  int64_t num_rows, num_queries, extent;  // B, Q, and the slots that a mask tells of
  int64_t layer_stride, value_stride, row_stride, head_stride;
  int64_t num_threads;
  bf16* cache;
  const bf16 *cos[2], *sin[2];       // [positions, rotary_size], of which a layer uses one
  const int64_t *positions, *slots;  // [B, Q] in these tables, and where keys and values are written
  const int64_t* last;               // [B, Q] each token sees the slots up to this position's; null where there is
  const bf16* mask;                  // [B, Q, extent], negative where a slot is hidden
  const bf16* read;                  // [B, Q, read_size] what the first layer's attention reads; null: x, normalised
  const bf16* final_norm;            // null: none
  const bf16* output;                // blocked, of whose num_outputs products of a token the index of that
  int64_t* best;                     // with the largest logit goes here, [B, Q]; null: they are not computed
  const float* logits;               // by product, see Logits
  int64_t num_outputs;
  int64_t num_groups;  // of channels with a correction of the convolutions each
  int64_t rotary_size;  // of a head's first channels, which are rotated
  Activation activation;
  float soft_cap, residual_scale;  // of scores, 0: none; of what attention and MLP add
  Norm norm;
  bool by_pairs;        // whether channels 2i and 2i + 1 are rotated together, instead of i and rotary_size / 2 + i
  bool norms_all_heads;  // whether query_norm and key_norm are of all heads together
  bool is_parallel;     // whether attention and MLP read the same, by attention_norm
  bool shares_add_up;   // whether the shares of a token's experts are divided by their sum
  Ring ring;
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

// exp(x) = 2^n exp(r), |r| <= ln(2) / 2, by its Taylor polynomial
inline Floats exponential(Floats x) {
  x = max(min(x, all(88.0f)), all(-87.0f));
  Floats n = nearest(x * all(1.44269504f)), r = fma(n, all(-0.693359375f), x), y = all(1.0f / 720);
  r = fma(n, all(2.12194440e-4f), r);
  for (float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = fma(y, r, all(factor));
  return times_2_to(y, n);
}

Floats activated(Floats x, Activation activation) {
  Floats y = x;
  if (activation == GELU_TANH) y = fma(x * x * x, all(0.044715f), x) * all(1.5957691216f);  // 2 sqrt(2 / pi)
  return x / (all(1.0f) + exponential(all(0) - y));
}

// Products of pairs in bf16, in two parts by multiply-adds in fp32.
struct Wide {
  static constexpr int PARTS = 2;
  using Row = float;  // what rows are kept as, so that they are widened once
  using Factor = Floats;
  static Factor of(Pairs x, int part) { return part ? odd(x) : even(x); }
  static Factor all_of(const Row* pair, int part) { return all(pair[part]); }
  static Floats dot(Factor a, Factor b, Floats sum) { return fma(a, b, sum); }

  // The values of two slots, by the weights of both, added to the sums of these channels.
  static void mix(Pairs one, Pairs two, Pairs weights, Floats& low, Floats& high) {
    low = fma(even(two), odd(weights), fma(even(one), even(weights), low));
    high = fma(odd(two), odd(weights), fma(odd(one), even(weights), high));
  }
  static Pairs mixed(Floats low, Floats high) { return pairs_of(low, high); }  // the channels in their order again
};

#ifdef PAIR_PRODUCTS
// The same by instructions for products of pairs in bf16, in one part.
struct PairProducts {
  static constexpr int PARTS = 1;
  using Row = bf16;
  using Factor = Pairs;
  static Factor of(Pairs x, int) { return x; }
  static Factor all_of(const Row* pair, int) { return everywhere(pair); }
  static Floats dot(Factor a, Factor b, Floats sum) { return dot_pairs(a, b, sum); }
  static void mix(Pairs one, Pairs two, Pairs weights, Floats& low, Floats& high) {
    low = dot(zip_low(one, two), weights, low);
    high = dot(zip_high(one, two), weights, high);
  }
  static Pairs mixed(Floats low, Floats high) { return unzipped(low, high); }
};
using Usual = PairProducts;
#else
using Usual = Wide;
#endif

// What a tile asks of the block of weights behind its own, so that memory works while several tiles multiply one block.
struct Ahead {
  const char* at;
  int64_t step;  // bytes for each pair of channels: 128, divided by the tiles

  inline void fetch() {
    __builtin_prefetch(at, 0, 2);
    __builtin_prefetch(at + step / 2, 0, 2);
    at += step;
  }
};

// out [M, 32], of which R registers, = x [M, K] of as many columns of a block of weights
template <class Way, int M, int R>
void tile(const typename Way::Row* x, int64_t K, const bf16* w, float* out, Ahead ahead) {
  constexpr int held = std::min(PARTS_HELD, Way::PARTS);
  Floats sums[M][R];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sums[m][r] = all(0);
  for (int64_t k = 0; k < K; k += 2, w += 2 * BLOCK) {
#pragma GCC unroll 2
    for (int64_t line = 0; line < R * WIDE; line += 32) __builtin_prefetch(w + 1024 + line, 0, 3);
    ahead.fetch();
#pragma GCC unroll 2
    for (int first = 0; first < Way::PARTS; first += held) {
      typename Way::Factor weights[held][R];
#pragma GCC unroll 2
      for (int part = 0; part < held; part++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) weights[part][r] = Way::of(load_pairs(w + r * WIDE), first + part);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int part = 0; part < held; part++) {
          typename Way::Factor row = Way::all_of(x + m * K + k, first + part);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) sums[m][r] = Way::dot(weights[part][r], row, sums[m][r]);
        }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) store(out + m * BLOCK + r * LANES, sums[m][r]);
}

// out [M, 32] = x [M, K] of a block of weights, in as many parts as the registers for sums ask for.
template <class Way, int M>
void block(const typename Way::Row* x, int64_t K, const bf16* w, float* out, Ahead ahead) {
  constexpr int whole = BLOCK / LANES, R = registers(M);
  ahead.step = ahead.step * R / whole;
  for (int r = 0; r < whole; r += R, ahead.at += K / 2 * ahead.step) tile<Way, M, R>(x, K, w + r * WIDE, out + r * LANES, ahead);
}

#if !defined(PAIR_PRODUCTS)
bool widens = true;
#elif defined(__x86_64__)
// Intel's processors take two cycles for a product of bf16 pairs and half of one for a multiply-add in fp32; AMD's take
// one for each. 8 tokens at once: 78 against 45 G products per second and core on an Emerald Rapids.
bool widens = __builtin_cpu_is("intel");
#else
bool widens = false;
#endif

// The rows [M, K] of a product. Made by each thread, since it may hold them in fp32.
struct Rows {
  const bf16* x;
  int64_t M, K;
  const float* wide = nullptr;

  Rows(const bf16* x, int64_t M, int64_t K) : x(x), M(M), K(K) {
    if (!widens) return;
    static thread_local std::vector<float> held;
    held.resize(M * K + LANES);
    for (int64_t i = 0; i < M * K; i += LANES) store(&held[i], load(x + i, M * K - i));
    wide = held.data();
  }

  int num_tiles() const { return (M + TILE - 1) / TILE; }
  int64_t begin(int tile) const { return M * tile / num_tiles(); }

  // out [TILE, 32] of the rows of a tile
  void multiply(int tile, const bf16* w, float* out) const {
    int64_t m = begin(tile), size = BLOCK * K * sizeof(bf16), step = 4 * BLOCK / num_tiles();
    Ahead ahead{(const char*)w + size + tile * K / 2 * step, step};
#ifdef PAIR_PRODUCTS
    if (!wide) return by_count<PairProducts>(begin(tile + 1) - m, x + m * K, w, out, ahead);
#endif
    by_count<Wide>(begin(tile + 1) - m, wide + m * K, w, out, ahead);
  }

  template <class Way>
  void by_count(int64_t count, const typename Way::Row* x, const bf16* w, float* out, Ahead ahead) const {
    static constexpr void (*blocks[])(const typename Way::Row*, int64_t, const bf16*, float*, Ahead) = {
        block<Way, 1>, block<Way, 2>, block<Way, 3>, block<Way, 4>, block<Way, 5>, block<Way, 6>, block<Way, 7>, block<Way, 8>};
    blocks[count - 1](x, K, w, out, ahead);
  }
};

// each(first, rows) for parts of the rows [M, K], since each thread may hold those of a part in fp32.
template <class Each>
void in_parts(const bf16* x, int64_t M, int64_t K, Each each) {
  for (int64_t first = 0; first < M; first += PART) each(first, Rows(x + first * K, std::min(PART, M - first), K));
}

constexpr int64_t num_blocks(int64_t N) { return (N + BLOCK - 1) / BLOCK; }

// One block of `product`, of the tokens from `first` on that the rows hold.
template <class Then>
void product_block(const Rows& rows, int64_t first, const bf16* w, int64_t N, int64_t block, Then then) {
  alignas(64) float out[TILE * BLOCK];
  for (int tile = 0; tile < rows.num_tiles(); tile++) {
    rows.multiply(tile, w + block * BLOCK * rows.K, out);
    for (int64_t m = rows.begin(tile), i = 0; m < rows.begin(tile + 1); m++, i++)
      for (int64_t n = block * BLOCK, j = 0; j < BLOCK && n < N; j += LANES, n += LANES)
        then(first + m, n, load(out + i * BLOCK + j), std::min<int64_t>(LANES, N - n));
  }
}

// Within a parallel region: then(token, output, sums, n) for each token and LANES outputs from `output` on, n of them real.
template <class Then>
void product(const bf16* x, int64_t M, int64_t K, const bf16* w, int64_t N, Then then) {
  in_parts(x, M, K, [&](int64_t first, const Rows& rows) {
#pragma omp for
    for (int64_t block = 0; block < num_blocks(N); block++) product_block(rows, first, w, N, block, then);
  });
}

// y = x / rms(x) * gain over n channels, in fp32 of bf16; y may be x
void normalise(const bf16* x, const bf16* gain, bf16* y, int64_t n, Norm norm) {
  Floats squares = all(0), mean = all(0);
  if (norm.centred) {
    for (int64_t i = 0; i < n; i += LANES) mean = mean + load(x + i, n - i);
    mean = all(sum(mean) / n);
  }
  for (int64_t i = 0; i < n; i += LANES) {
    Floats part = load(x + i, n - i);
    if (norm.centred) part = behind(part - mean, n - i, 0);
    squares = fma(part, part, squares);
  }
  Floats scale = all(1.0f / std::sqrt(sum(squares) / n + norm.eps)), one = all(norm.adds_one ? 1 : 0);
  for (int64_t i = 0; i < n; i += LANES) {
    Floats part = (load(x + i, n - i) - mean) * scale;
    store(y + i, (norm.rounds ? rounded(part) : part) * (load(gain + i, n - i) + one), n - i);
  }
}

// The rotary embedding of one position; no cosines: none.
struct Rotation {
  const bf16 *cos, *sin;  // [size]
  int64_t size;
  bool by_pairs;
};

// x [H], normalised where there is a gain, then rotated, to y, which may be x
void position(const bf16* x, const bf16* gain, Rotation rotation, bf16* y, int64_t H, Norm norm) {
  bf16 held[MOST_CHANNELS], turned[MOST_CHANNELS];
  if (gain) {
    normalise(x, gain, held, H, norm);
    x = held;
  }
  const bf16 *cos = rotation.cos, *sin = rotation.sin;
  int64_t size = cos ? rotation.size : 0, half = size / 2;
  if (x != y) std::memcpy(y + size, x + size, (H - size) * sizeof(bf16));
  if (rotation.by_pairs) {
    for (int64_t i = 0; i < size; i += 2) turned[i] = x[i + 1] ^ 0x8000, turned[i + 1] = x[i];
    for (int64_t i = 0; i < size; i += LANES) {
      int64_t n = size - i;
      store(y + i, fma(load(turned + i, n), load(sin + i, n), load(x + i, n) * load(cos + i, n)), n);
    }
    return;
  }
  for (int64_t i = 0; i < half; i += LANES) {
    int64_t n = half - i;
    Floats low = load(x + i, n), high = load(x + half + i, n);
    Floats a = low * load(cos + i, n), b = high * load(cos + half + i, n);
    store(y + i, fma(all(0) - high, load(sin + i, n), a), n);
    store(y + half + i, fma(low, load(sin + half + i, n), b), n);
  }
}

// What one query head of a token attends to: the n slots that the token sees, in their order.
struct Query {
  const bf16* q;         // [H]
  const int32_t* slots;  // [n]
  int64_t n;
  bf16* out;      // [H], the result
  float* scores;  // [n], and room behind them for LANES
  float sink;     // the score of nothing; -INFINITY: there is none
};

// What becomes of a product of query and key.
struct Scores {
  float scale, cap;  // cap 0: none

  Floats of(Floats products) const {
    products = products * all(scale);
    if (cap == 0) return products;
    Floats twice = exponential(products * all(2 / cap));  // tanh(x) = 1 - 2 / (1 + exp(2x))
    return (all(1) - all(2) / (all(1) + twice)) * all(cap);
  }
};

// T queries that read the same keys and values, the first `common` slots of all being the same, so that these are read
// once for all.
template <int T>
struct Attention {
  using Factor = Usual::Factor;
  const Query* queries;
  int64_t common, H;
  Scores scores;
  Factor q[T][MOST_CHANNELS / WIDE][Usual::PARTS];

  Attention(const Query* queries, int64_t common, int64_t H, Scores scores)
      : queries(queries), common(common), H(H), scores(scores) {
    for (int t = 0; t < T; t++)
      for (int64_t h = 0; h < H; h += WIDE)
        for (int part = 0; part < Usual::PARTS; part++)
          q[t][h / WIDE][part] = Usual::of(load_pairs(queries[t].q + h, H - h), part);
  }

  // Scores of `Num` queries from `from` on, which agree on these slots, for LANES slots of their lists from the i-th on,
  // up to `end`.
  template <int Num>
  void score(const bf16* keys, int from, int64_t i, int64_t end) const {
    Floats sums[Num][LANES];
    for (int j = 0; j < LANES; j++) {
      const bf16* k = keys + queries[from].slots[std::min(i + j, end - 1)] * H;
      Floats own[Num];
      auto add = [&](Pairs key, int64_t c) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int part = 0; part < Usual::PARTS; part++)
#pragma GCC unroll 8
          for (int t = 0; t < Num; t++) own[t] = Usual::dot(Usual::of(key, part), q[from + t][c][part], own[t]);
      };
#pragma GCC unroll 8
      for (int t = 0; t < Num; t++) own[t] = all(0);
      int64_t whole = H / WIDE;
      for (int64_t c = 0; c < whole; c++) add(load_pairs(k + c * WIDE), c);
      if (H % WIDE) add(load_pairs(k + whole * WIDE, H % WIDE), whole);
#pragma GCC unroll 8
      for (int t = 0; t < Num; t++) sums[t][j] = own[t];
    }
#pragma GCC unroll 8
    for (int t = 0; t < Num; t++) store(queries[from + t].scores + i, scores.of(sums_of(sums[t])));
  }

  // Scores to weights in bf16, in their place, zero behind n; not divided by their sum, which is returned
  static float weigh(float* scores, int64_t n, float sink) {
    Floats most = all(sink), total = all(0);
    for (int64_t i = 0; i < n; i += LANES) most = max(most, behind(load(scores + i), n - i, -INFINITY));
    most = all(largest(most));
    if (sink > -INFINITY) total = behind(exponential(all(sink) - most), 1, 0);
    for (int64_t i = 0; i < n; i += LANES) {
      Floats part = behind(exponential(load(scores + i) - most), n - i, 0);
      total = total + part;
      store((bf16*)scores + i, part, LANES);
    }
    return sum(total);
  }

  void operator()(const bf16* keys, const bf16* values) const {
    int64_t whole = common / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) score<T>(keys, 0, i, common);
    float totals[T];
    for (int t = 0; t < T; t++) {
      for (int64_t i = whole; i < queries[t].n; i += LANES) score<1>(keys, t, i, queries[t].n);
      totals[t] = weigh(queries[t].scores, queries[t].n, queries[t].sink);
    }
    for (int64_t h = 0; h < H; h += PASS * WIDE) mix(values + h, totals, h);
  }

  // The values of PASS * WIDE channels from h on, weighted and summed, two slots at a time.
  void mix(const bf16* values, const float* totals, int64_t h) const {
    Floats low[T][PASS], high[T][PASS];
    const bool is_whole = H - h >= PASS * WIDE;
#pragma GCC unroll 8
    for (int t = 0; t < T; t++)
#pragma GCC unroll 8
      for (int c = 0; c < PASS; c++) low[t][c] = high[t][c] = all(0);
    auto add = [&](int from, int to, int64_t i) __attribute__((always_inline)) {
      const int32_t* slots = queries[from].slots;
      const bf16 *one = values + slots[i] * H, *two = values + slots[std::min(i + 1, queries[from].n - 1)] * H;
#pragma GCC unroll 8
      for (int c = 0; c < PASS; c++) {
        int64_t rest = std::max<int64_t>(H - h - c * WIDE, 0);
        Pairs x = is_whole ? load_pairs(one + c * WIDE) : load_pairs(one + c * WIDE, rest);
        Pairs y = is_whole ? load_pairs(two + c * WIDE) : load_pairs(two + c * WIDE, rest);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++)
          if (t >= from && t < to) Usual::mix(x, y, everywhere((const bf16*)queries[t].scores + i), low[t][c], high[t][c]);
      }
    };
    int64_t whole = common / 2 * 2;
    for (int64_t i = 0; i < whole; i += 2) add(0, T, i);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      for (int64_t i = whole; i < queries[t].n; i += 2) add(t, t + 1, i);
      Floats total = all(totals[t]);
#pragma GCC unroll 8
      for (int c = 0; c < PASS; c++)
        if (int64_t rest = H - h - c * WIDE; rest > 0)
          store_pairs(queries[t].out + h + c * WIDE, Usual::mixed(low[t][c] / total, high[t][c] / total), rest);
    }
  }
};

template <int T>
void attend(const Query* queries, int64_t common, int64_t H, Scores scores, const bf16* keys, const bf16* values) {
  Attention<T>(queries, common, H, scores)(keys, values);
}

constexpr decltype(&attend<1>) by_number[] = {attend<1>, attend<2>, attend<3>, attend<4>};
static_assert(TOGETHER == 4);

}  // namespace

// Within a parallel region: keys and values of M tokens to their slots, from projected [M, width], where the heads from
// `first` on are those of keys, then those of values; heads before it are queries, which stay where they are.
static void place(const Forward& s, const Layer& w, bf16* keys, bf16* projected, int64_t width, int64_t first) {
  int64_t H = s.head_dim, kv = s.num_kv_heads, num = width / H, M = s.num_rows * s.num_queries, R = s.rotary_size;
  const bf16 *query_norm = w.query_norm, *key_norm = w.key_norm;
  if (s.norms_all_heads && key_norm) {
#pragma omp for
    for (int64_t m = 0; m < M; m++) {
      bf16 *queries = projected + m * width, *new_keys = queries + first * H;
      if (first) normalise(queries, query_norm, queries, first * H, s.norm);
      normalise(new_keys, key_norm, new_keys, kv * H, s.norm);
    }
    query_norm = key_norm = nullptr;
  }
#pragma omp for
  for (int64_t task = 0; task < M * num; task++) {
    int64_t m = task / num, head = task % num, at = head - first;
    bf16 *from = &projected[m * width + head * H], *to = keys + m / s.num_queries * s.row_stride + s.slots[m] * H;
    Rotation rotation{nullptr, nullptr, R, s.by_pairs};
    if (w.rope >= 0) rotation.cos = s.cos[w.rope] + s.positions[m] * R, rotation.sin = s.sin[w.rope] + s.positions[m] * R;
    if (at < 0)
      position(from, query_norm, rotation, from, H, s.norm);
    else if (at < kv)
      position(from, key_norm, rotation, to + at * s.head_stride, H, s.norm);
    else
      std::memcpy(to + s.value_stride + (at - kv) * s.head_stride, from, H * sizeof(bf16));
  }
}

static Floats all_of(bf16 number) {
  uint32_t bits = uint32_t(number) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return all(wide);
}

// The tokens of a forward by the experts that a router chose for them: pair p = m * num_chosen + j is token m's j-th.
struct Routed {
  std::vector<int64_t> experts, places;  // by pair: its expert, and where it is in the order of experts
  std::vector<int64_t> begins, hit;      // where an expert's places begin; the experts that have any
  std::vector<float> shares;             // by pair, of what is added

  // The num_chosen largest of scores [num_experts], the first of those that tie, and their softmax over all.
  void choose(int64_t m, const bf16* scores, const Layer& w, bool shares_add_up) {
    std::vector<float> held(w.num_experts + LANES);
    Floats most = all(-INFINITY), total = all(0);
    for (int64_t i = 0; i < w.num_experts; i += LANES)
      most = max(most, behind(load(scores + i, w.num_experts - i), w.num_experts - i, -INFINITY));
    most = all(largest(most));
    for (int64_t i = 0; i < w.num_experts; i += LANES) {
      Floats part = behind(exponential(load(scores + i, w.num_experts - i) - most), w.num_experts - i, 0);
      total = total + part;
      store(&held[i], part);
    }
    float whole = sum(total), chosen = 0;
    for (int64_t p = m * w.num_chosen; p < (m + 1) * w.num_chosen; p++) {
      auto best = std::max_element(held.begin(), held.begin() + w.num_experts);
      experts[p] = best - held.begin();
      chosen += shares[p] = *best / whole;
      *best = -1;
    }
    for (int64_t p = m * w.num_chosen; shares_add_up && p < (m + 1) * w.num_chosen; p++) shares[p] /= chosen;
  }

  void resize(int64_t num_pairs) {
    experts.resize(num_pairs);
    places.resize(num_pairs);
    shares.resize(num_pairs);
  }

  void sort(int64_t num_experts) {
    begins.assign(num_experts + 1, 0);
    hit.clear();
    for (int64_t expert : experts) begins[expert + 1]++;
    for (int64_t e = 0; e < num_experts; e++) {
      if (begins[e + 1]) hit.push_back(e);
      begins[e + 1] += begins[e];
    }
    std::vector<int64_t> next(begins);
    for (int64_t p = 0; p < (int64_t)experts.size(); p++) places[p] = next[experts[p]]++;
  }
};

// Within a parallel region: each(rows, first, expert, block) for every block of N outputs of every expert of `hit`, whose
// tokens begin at begins[expert] and of which `rows` are those from place `first` on.
template <class Each>
void by_experts(const int64_t* begins, const std::vector<int64_t>& hit, const bf16* x, int64_t K, int64_t N, Each each) {
  int64_t blocks = num_blocks(N), num = hit.size();
#pragma omp for
  for (int64_t task = 0; task < num * blocks; task++) {
    int64_t e = hit[task / blocks], begin = begins[e];
    in_parts(x + begin * K, begins[e + 1] - begin, K,
             [&](int64_t first, const Rows& rows) { each(rows, begin + first, e, task % blocks); });
  }
}

// Within a parallel region: y [S, N] of tokens [S, K] in the order of their experts, by the weights of each.
static void multiply_by_experts(const int64_t* begins, const std::vector<int64_t>& hit, const bf16* x, int64_t K,
                                const bf16* w, int64_t N, bf16* y) {
  int64_t size = num_blocks(N) * BLOCK * K;
  by_experts(begins, hit, x, K, N, [&](const Rows& rows, int64_t first, int64_t e, int64_t block) {
    product_block(rows, first, w + e * size, N, block, [&](int64_t place, int64_t n, Floats sum, int64_t count) {
      store(y + place * N + n, sum, count);
    });
  });
}

// Within a parallel region: x [M, D] becomes, in place, (taps[0] + a) x + (taps[1] + b) x of the token before, nothing for
// a row's first; a and b, one for each group of channels, lie in corrections [M, 2, 2, num_groups], where `corrections`
// points to those of these taps.
static void convolve(const Forward& s, bf16* x, const bf16* taps, const bf16* corrections) {
  int64_t D = s.hidden, Q = s.num_queries, groups = s.num_groups, size = D / groups;
#pragma omp for
  for (int64_t task = 0; task < s.num_rows * groups; task++) {
    int64_t row = task / groups, group = task % groups;
    for (int64_t m = (row + 1) * Q - 1; m >= row * Q; m--) {
      const bf16* own = corrections + m * 4 * groups + group;
      Floats a = all_of(own[0]), b = all_of(own[groups]);
      for (int64_t n = group * size, end = n + size; n < end; n += LANES) {
        Floats sum = load(x + m * D + n, end - n) * (load(taps + n, end - n) + a);
        if (m > row * Q) sum = fma(load(x + (m - 1) * D + n, end - n), load(taps + D + n, end - n) + b, sum);
        store(x + m * D + n, sum, end - n);
      }
    }
  }
}

// the bytes of Layer, Forward and Chain, which structs.py compares with its own
extern "C" void struct_sizes(int64_t* sizes) {
  sizes[0] = sizeof(Layer), sizes[1] = sizeof(Forward), sizes[2] = sizeof(Chain);
}

// Only keys and values, of x [B, Q, read_size] as it is, in every layer. N * H is a multiple of 32.
extern "C" void write(const Layer* layers, int64_t num_layers, const Forward* forward, const bf16* x) {
  const Forward& s = *forward;
  int64_t D = s.read_size, H = s.head_dim, M = s.num_rows * s.num_queries, width = 2 * s.num_kv_heads * H;
  std::vector<bf16> projected(M * width);
#pragma omp parallel num_threads(s.num_threads)
  for (int64_t i = 0; i < num_layers; i++) {
    product(x, M, D, layers[i].qkv + s.num_heads * H * D, width, [&](int64_t m, int64_t n, Floats sum, int64_t count) {
      if (layers[i].bias) sum = rounded(sum) + load(layers[i].bias + s.num_heads * H + n, count);
      store(&projected[m * width + n], sum, count);
    });
    place(s, layers[i], s.cache + i * s.layer_stride, projected.data(), width, 0);
  }
}

extern "C" void multiply_argmax(const bf16*, int64_t, int64_t, const bf16*, int64_t, const float*, int64_t*, int64_t);

// x [B, Q, D] goes through the layers in place, and through the final norm.
extern "C" void decode(const Layer* layers, int64_t num_layers, const Forward* forward, bf16* x) {
  const Forward& s = *forward;
  int64_t D = s.hidden, H = s.head_dim, N = s.num_heads, kv = s.num_kv_heads, Q = s.num_queries, M = s.num_rows * Q;
  int64_t width = (N + 2 * kv) * H, extent = s.mask ? s.extent : *std::max_element(s.last, s.last + M) + 1;
  if (s.ring.size) extent = std::min(extent, s.ring.sink + s.ring.size);
  std::vector<bf16> normed(M * D), projected(M * width), mixed(M * N * H), corrections(M * 4 * s.num_groups);
  std::vector<bf16> scored, gathered, active, given;  // of the experts, or of the MLP
  Routed routed;
  for (int64_t i = 0; i < num_layers; i++) {
    const Layer& w = layers[i];
    int64_t num = w.router ? M * w.num_chosen : M;
    active.resize(std::max<int64_t>(active.size(), num * w.mlp));
    if (!w.router) continue;
    routed.resize(num);
    scored.resize(M * w.num_experts);
    gathered.resize(num * D);
    given.resize(num * D);
  }
  std::vector<int32_t> seen(M * extent);
  std::vector<int64_t> num_seen(M, 0);  // how many slots a token sees
  std::vector<int64_t> shared(M, 0);    // how many of the first of these are those of the token before it
  for (int64_t m = 0; m < M; m++) {
    int32_t *own = &seen[m * extent], *before = own - extent;
    for (int64_t p = 0; p < extent; p++)
      if (s.mask ? !(s.mask[m * extent + p] >> 15) : s.ring.sees(s.last[m], p)) own[num_seen[m]++] = p;
    if (m % Q) shared[m] = std::mismatch(own, own + std::min(num_seen[m], num_seen[m - 1]), before).first - own;
  }
  // a row's queries of one key head go in tiles, at least four for each thread where there are as many queries
  int64_t group = N / kv, most = TOGETHER, tiles = (Q * group + most - 1) / most;
  while (s.num_rows * kv * tiles < 4 * s.num_threads && tiles < Q * group) tiles++;

#pragma omp parallel num_threads(s.num_threads)
  {
    std::vector<float> scores(most * (extent + LANES));
    auto convolve_before = [&](const bf16* taps, const bf16* correction) {
      if (!taps) return;
      int64_t num = 4 * s.num_groups;
      product(normed.data(), M, D, correction, num, [&](int64_t m, int64_t n, Floats sum, int64_t count) {
        store(&corrections[m * num + n], sum, count);
      });
      convolve(s, normed.data(), taps, corrections.data());
    };
    auto added = [&](bf16* at, Floats y, int64_t count) {
      if (s.residual_scale != 1) y = rounded(y * all(s.residual_scale));
      store(at, load(at, count) + y, count);
    };
    auto add_product = [&](const bf16* from, int64_t K, const bf16* weights, const bf16* bias, const bf16* taps,
                           const bf16* after) {
      bf16* to = normed.data();
      product(from, M, K, weights, D, [&](int64_t m, int64_t n, Floats sum, int64_t count) {
        if (bias) sum = rounded(sum) + load(bias + n, count);
        if (taps || after)
          store(to + m * D + n, sum, count);
        else
          added(x + m * D + n, rounded(sum), count);
      });
      if (!taps && !after) return;
      if (taps) convolve(s, to, taps + 2 * D, corrections.data() + 2 * s.num_groups);
#pragma omp for
      for (int64_t m = 0; m < M; m++) {
        if (after) normalise(to + m * D, after, to + m * D, D, s.norm);
        for (int64_t n = 0; n < D; n += LANES) added(x + m * D + n, load(to + m * D + n, D - n), D - n);
      }
    };
    // What a token's experts give, by their shares: one sum in the order of its experts, so no token depends on others.
    auto mixture = [&](const bf16* from, const Layer& w, auto activate) {
      int64_t E = w.num_experts, k = w.num_chosen;
      product(from, M, D, w.router, E, [&](int64_t m, int64_t n, Floats sum, int64_t count) {
        store(&scored[m * E + n], sum, count);
      });
#pragma omp for
      for (int64_t m = 0; m < M; m++) routed.choose(m, &scored[m * E], w, s.shares_add_up);
#pragma omp single
      routed.sort(E);
#pragma omp for
      for (int64_t p = 0; p < M * k; p++) std::memcpy(&gathered[routed.places[p] * D], from + p / k * D, D * sizeof(bf16));
      const int64_t* begins = routed.begins.data();
      int64_t size = 2 * num_blocks(w.mlp) * BLOCK * D;
      by_experts(begins, routed.hit, gathered.data(), D, w.mlp,
                 [&](const Rows& rows, int64_t first, int64_t e, int64_t block) {
                   activate(rows, first, w.gate_up + e * size, block);
                 });
      multiply_by_experts(begins, routed.hit, active.data(), w.mlp, w.down, D, given.data());
#pragma omp for
      for (int64_t m = 0; m < M; m++) {
        bf16* to = normed.data() + m * D;
        for (int64_t n = 0; n < D; n += LANES) {
          Floats sum = all(0);
          for (int64_t p = m * k; p < (m + 1) * k; p++)
            sum = sum + rounded(load(&given[routed.places[p] * D + n], D - n) * all(routed.shares[p]));
          store(to + n, sum, D - n);
        }
        if (w.mlp_after) normalise(to, w.mlp_after, to, D, s.norm);
        for (int64_t n = 0; n < D; n += LANES) added(x + m * D + n, load(to + n, D - n), D - n);
      }
    };
    for (int64_t i = 0; i < num_layers; i++) {
      const Layer& w = layers[i];
      bf16* keys = s.cache + i * s.layer_stride;
      const bf16* read = i == 0 && s.read ? s.read : w.attention_norm ? normed.data() : x;
#pragma omp for
      for (int64_t m = 0; m < M; m++) {
        if (w.kept) std::memcpy(w.kept + m * D, x + m * D, D * sizeof(bf16));
        if (read == normed.data()) normalise(x + m * D, w.attention_norm, &normed[m * D], D, s.norm);
      }
      convolve_before(w.attention_taps, w.attention_correction);
      product(read, M, read == s.read ? s.read_size : D, w.qkv, width, [&](int64_t m, int64_t n, Floats sum, int64_t count) {
        if (w.bias) sum = rounded(sum) + load(w.bias + n, count);
        store(&projected[m * width + n], sum, count);
      });
      place(s, w, keys, projected.data(), width, N);
#pragma omp for
      for (int64_t task = 0; task < s.num_rows * kv * tiles; task++) {
        int64_t row = task / (kv * tiles), key_head = task / tiles % kv, tile = task % tiles;
        int64_t begin = Q * group * tile / tiles, count = Q * group * (tile + 1) / tiles - begin, common = extent;
        Query queries[TOGETHER];
        // of a list of slots, which are those of positions 0 and on, a window is the end
        auto hidden = [&](int64_t m) { return w.window ? std::max<int64_t>(num_seen[m] - w.window, 0) : 0; };
        for (int64_t k = 0; k < count; k++) {
          int64_t m = row * Q + (begin + k) / group, head = key_head * group + (begin + k) % group, before = hidden(m);
          queries[k] = {&projected[m * width + head * H], &seen[m * extent + before], num_seen[m] - before,
                        &mixed[(m * N + head) * H], &scores[k * (extent + LANES)],
                        w.sinks ? largest(behind(load(w.sinks + head, 1), 1, -INFINITY)) : -INFINITY};
          bool is_next = k && (begin + k) % group == 0;
          int64_t same = !is_next ? num_seen[m] : before == hidden(m - 1) ? shared[m] : 0;
          common = std::min(common, std::max<int64_t>(same - before, 0));
        }
        const bf16* at = keys + row * s.row_stride + key_head * s.head_stride;
        by_number[count - 1](queries, common, H, {w.scale, s.soft_cap}, at, at + s.value_stride);
      }
      add_product(mixed.data(), N * H, w.output, w.output_bias, w.attention_taps, w.attention_after);
      const bf16* mlp_read = s.is_parallel ? read : w.mlp_norm ? normed.data() : x;
      if (w.mlp_norm) {
#pragma omp for
        for (int64_t m = 0; m < M; m++) normalise(x + m * D, w.mlp_norm, &normed[m * D], D, s.norm);
      }
      convolve_before(w.mlp_taps, w.mlp_correction);
      auto activate = [&](const Rows& rows, int64_t first, const bf16* weights, int64_t block) {
        alignas(64) float gate[TILE * BLOCK], up[TILE * BLOCK];
        weights += 2 * block * BLOCK * D;
        for (int tile = 0; tile < rows.num_tiles(); tile++) {
          rows.multiply(tile, weights, gate);
          rows.multiply(tile, weights + BLOCK * D, up);
          for (int64_t m = rows.begin(tile), k = 0; m < rows.begin(tile + 1); m++, k++)
            for (int64_t n = block * BLOCK, j = 0; j < BLOCK && n < w.mlp; j += LANES, n += LANES) {
              Floats g = rounded(load(gate + k * BLOCK + j)), u = rounded(load(up + k * BLOCK + j));
              if (w.gate_up_bias) {
                g = rounded(g + load(w.gate_up_bias + n, w.mlp - n));
                u = rounded(u + load(w.gate_up_bias + w.mlp + n, w.mlp - n));
              }
              store(&active[(first + m) * w.mlp + n], rounded(activated(g, s.activation)) * u, w.mlp - n);
            }
        }
      };
      if (w.router) {
        mixture(mlp_read, w, activate);
        continue;
      }
      in_parts(mlp_read, M, D, [&](int64_t first, const Rows& rows) {
#pragma omp for
        for (int64_t block = 0; block < num_blocks(w.mlp); block++) activate(rows, first, w.gate_up, block);
      });
      add_product(active.data(), w.mlp, w.down, w.down_bias, w.mlp_taps, w.mlp_after);
    }
#pragma omp for
    for (int64_t m = 0; m < M; m++)
      if (s.final_norm) normalise(x + m * D, s.final_norm, x + m * D, D, s.norm);
  }
  if (s.best) multiply_argmax(x, M, D, s.output, s.num_outputs, s.logits, s.best, s.num_threads);
}

// Multiply in fp32, or by pairs of bf16, from now on; returns what was done before. Texts must not change on the way.
extern "C" bool widen(bool wanted) {
#ifdef PAIR_PRODUCTS
  return std::exchange(widens, wanted);
#else
  return true;
#endif
}

// y [M, n] = x / rms(x) * gain
extern "C" void normalise_rows(const bf16* x, const bf16* gain, bf16* y, int64_t M, int64_t n, float eps) {
  for (int64_t m = 0; m < M; m++) normalise(x + m * n, gain, y + m * n, n, {eps, false, false, true});
}

// y [M, N] = x [M, K] of a blocked weight
extern "C" void multiply(const bf16* x, int64_t M, int64_t K, const bf16* w, int64_t N, bf16* y, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads)
  product(x, M, K, w, N, [&](int64_t m, int64_t n, Floats sum, int64_t count) { store(y + m * N + n, sum, count); });
}

// y [S, N] of tokens [S, K] in the order of their experts: those from begins[e] to begins[e + 1] by the e-th blocked weight
extern "C" void multiply_experts(const bf16* x, const int64_t* begins, int64_t num_experts, int64_t K, const bf16* w,
                                 int64_t N, bf16* y, int64_t num_threads) {
  std::vector<int64_t> hit;
  for (int64_t e = 0; e < num_experts; e++)
    if (begins[e + 1] > begins[e]) hit.push_back(e);
#pragma omp parallel num_threads(num_threads)
  multiply_by_experts(begins, hit, x, K, w, N, y);
}

// best [M]: where the largest of each row [n] is, the first of those that tie
extern "C" void argmax(const bf16* x, int64_t M, int64_t n, int64_t* best) {
  for (int64_t m = 0; m < M; m++, x += n) {
    Floats most = all(-INFINITY);
    for (int64_t i = 0; i < n; i += LANES) most = max(most, behind(load(x + i, n - i), n - i, -INFINITY));
    most = all(largest(most));
    best[m] = 0;
    for (int64_t i = 0; i < n; i += LANES)
      if (uint32_t found = equal(most, behind(load(x + i, n - i), n - i, NAN))) {
        best[m] = i + __builtin_ctz(found);
        break;
      }
  }
}

// What a model makes of a product of its output layer: it may scale and cap it, so that other products give one logit. By
// the bits of the product, and no less for larger ones; null: logits are the products.
struct Logits {
  const float* by_bits;

  float of(float product) const {
    uint32_t bits;
    std::memcpy(&bits, &product, sizeof bits);
    return by_bits ? by_bits[bits >> 16] : product;
  }
};

// best [M]: where the logits [N] of each row of x by a blocked weight are largest, the first of those that tie. They are
// not written: each thread keeps the largest of its own.
extern "C" void multiply_argmax(const bf16* x, int64_t M, int64_t K, const bf16* w, int64_t N, const float* by_bits,
                                int64_t* best, int64_t num_threads) {
  const Logits logits{by_bits};
  std::vector<float> most(M, -INFINITY);
  std::fill(best, best + M, 0);
#pragma omp parallel num_threads(num_threads)
  {
    std::vector<float> products(M, -INFINITY), own(M, -INFINITY);  // the largest of this thread, and its logit
    std::vector<int64_t> at(M, 0);
    product(x, M, K, w, N, [&](int64_t m, int64_t n, Floats sum, int64_t count) {
      Floats y = behind(rounded(sum), count, -INFINITY), before = all(products[m]);
      if (equal(max(y, before), before) == equal(before, before)) return;
      products[m] = largest(y);
      if (!(logits.of(products[m]) > own[m])) return;
      own[m] = logits.of(products[m]);
      alignas(64) float lanes[LANES];
      store(lanes, y);
      for (at[m] = n; logits.of(lanes[at[m] - n]) != own[m]; at[m]++) {}
    });
#pragma omp critical
    for (int64_t m = 0; m < M; m++)
      if (own[m] > most[m] || (own[m] == most[m] && own[m] > -INFINITY && at[m] < best[m])) most[m] = own[m], best[m] = at[m];
  }
}

// Greedy chains [B, K] behind anchors [B]. Each token is the best of `num` candidates by their scores, which go to `scores`
// [B, K, num]: unary [B, K, num] + successors [B, K, num, rank] . (predecessors [V, rank] of the token before * gates
// [B, K, rank]). ids are theirs among the outputs, to_target the token of each output; null: the same number.
extern "C" void choose(const bf16* unary, const int64_t* ids, const bf16* gates, const bf16* successors,
                       const bf16* predecessors, const int64_t* to_target, const int64_t* anchors, int64_t B, int64_t K,
                       int64_t num, int64_t rank, int64_t* tokens, bf16* scores) {
  std::vector<float> gate(rank + LANES);
  for (int64_t b = 0; b < B; b++) {
    int64_t token = anchors[b];
    for (int64_t k = 0; k < K; k++, gates += rank, ids += num, unary += num, scores += num) {
      for (int64_t i = 0; i < rank; i += LANES)
        store(&gate[i], rounded(load(predecessors + token * rank + i, rank - i) * load(gates + i, rank - i)));
      int64_t best = 0;
      float most = -INFINITY;
      for (int64_t j = 0; j < num; j++, successors += rank) {
        Floats products = all(0);
        for (int64_t i = 0; i < rank; i += LANES) products = fma(load(successors + i, rank - i), load(&gate[i]), products);
        Floats score = rounded(load(unary + j, 1) + rounded(all(sum(products))));
        store(scores + j, score, 1);
        if (float own = largest(behind(score, 1, -INFINITY)); own > most) most = own, best = ids[j];
      }
      tokens[b * K + k] = token = to_target ? to_target[best] : best;
    }
  }
}

// The probability of the largest of logits [n].
static float probability(const bf16* logits, int64_t n, int64_t best) {
  Floats most = all(largest(behind(load(logits + best, 1), 1, -INFINITY))), total = all(0);
  for (int64_t i = 0; i < n; i += LANES)
    total = total + behind(exponential(load(logits + i, n - i) - most), n - i, 0);
  return 1.0f / sum(total);
}

// Greedy chains behind hidden [B, D], the layer's output for the tokens at the positions of `forward` [B]: logits
// [K, B, num_outputs], tokens [B, K] and their probabilities. `hidden` becomes the layer's last output.
extern "C" void draft(const Layer* layer, const Forward* forward, const Chain* chain, bf16* hidden, bf16* logits,
                      int64_t* tokens, float* probabilities) {
  Forward s = *forward;
  const Chain& c = *chain;
  int64_t D = s.hidden, B = s.num_rows, K = c.num_tokens;
  std::vector<bf16> normed(B * D), read(B * 2 * D);
  std::vector<int64_t> at(s.positions, s.positions + B), slots(B), best(B);
  s.positions = s.last = at.data();
  s.slots = slots.data();
  s.read = read.data();
  for (int64_t k = 0; k < K; k++, logits += B * c.num_outputs) {
    for (int64_t b = 0; b < B; b++) normalise(hidden + b * D, c.output_norm, &normed[b * D], D, s.norm);
    multiply(normed.data(), B, D, c.output, c.num_outputs, logits, s.num_threads);
    argmax(logits, B, c.num_outputs, best.data());
    for (int64_t b = 0; b < B; b++) {
      int64_t token = c.to_target ? c.to_target[best[b]] : best[b];
      tokens[b * K + k] = token;
      probabilities[b * K + k] = probability(logits + b * c.num_outputs, c.num_outputs, best[b]);
      normalise(c.embedding + token * D, c.embedding_norm, &read[b * 2 * D], D, s.norm);
      normalise(hidden + b * D, c.hidden_norm, &read[b * 2 * D + D], D, s.norm);
      slots[b] = s.ring.slot(++at[b]);
    }
    if (k + 1 < K) decode(layer, 1, &s, hidden);
  }
}

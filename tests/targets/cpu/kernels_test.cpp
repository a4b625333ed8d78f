// The kernels against plain C++, for instruction sets that this machine lacks: cross compiled and run by an emulator.
// Prints what differs and exits with 1, or prints how many numbers were compared.

#include "../../../targets/cpu/kernels.cpp"

#include <cstdio>
#include <cstdlib>

static int64_t num_compared = 0, num_wrong = 0;

static float wide(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

static bf16 narrow(double x) {  // to the nearest, ties to even
  float y = (float)x;
  uint32_t bits;
  std::memcpy(&bits, &y, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static double round_bf16(double x) { return wide(narrow(x)); }

static uint32_t state = 1;
static float uniform() {
  state = state * 1664525 + 1013904223;
  return (state >> 8) / 8388608.0f - 1;
}

static std::vector<bf16> random(int64_t n, float scale = 1) {
  std::vector<bf16> x(n);
  for (auto& each : x) each = narrow(scale * uniform());
  return x;
}

// `size` is what rounding is relative to: of a sum, the largest that its terms could make it
static void close(const char* what, double found, double wanted, double size) {
  num_compared++;
  if (std::abs(found - wanted) <= std::max(std::abs(wanted) * 0x1p-7, size * 0x1p-18)) return;
  if (num_wrong++ < 10) std::printf("%s: %g, expected %g\n", what, found, wanted);
}

static void same(const char* what, const void* a, const void* b, size_t bytes) {
  num_compared++;
  if (std::memcmp(a, b, bytes) && num_wrong++ < 10) std::printf("%s: other bits\n", what);
}

static std::vector<bf16> blocked(const std::vector<bf16>& w, int64_t N, int64_t K) {
  std::vector<bf16> out((N + BLOCK - 1) / BLOCK * BLOCK * K, 0);
  for (int64_t n = 0; n < N; n++)
    for (int64_t k = 0; k < K; k++) out[n / BLOCK * BLOCK * K + k / 2 * 2 * BLOCK + n % BLOCK * 2 + k % 2] = w[n * K + k];
  return out;
}

static void products() {
  std::vector<float> coarse(1 << 16);  // logits by the bits of products, of which many tie
  for (size_t bits = 0; bits < coarse.size(); bits++) coarse[bits] = std::floor(wide(bits) / 4);
  for (int64_t M : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 21})
    for (auto [N, K] : {std::pair<int64_t, int64_t>{32, 64}, {47, 30}, {1, 2}, {100, 576}}) {
      auto x = random(M * K), w = random(N * K), packed = blocked(w, N, K);
      packed.resize(packed.size() + 4096);  // behind the end it is asked for ahead
      std::vector<bf16> y(M * N), alone(N);
      multiply(x.data(), M, K, packed.data(), N, y.data(), 1);
      std::vector<int64_t> best(M), best_coarse(M);
      multiply_argmax(x.data(), M, K, packed.data(), N, nullptr, best.data(), 1);
      multiply_argmax(x.data(), M, K, packed.data(), N, coarse.data(), best_coarse.data(), 1);
      for (int64_t m = 0; m < M; m++) {
        int64_t largest = 0, largest_coarse = 0;
        for (int64_t n = 0; n < N; n++) {
          double sum = 0, size = 0;
          for (int64_t k = 0; k < K; k++) {
            double term = (double)wide(x[m * K + k]) * wide(w[n * K + k]);
            sum += term, size += std::abs(term);
          }
          close("product", wide(y[m * N + n]), round_bf16(sum), size);
          if (wide(y[m * N + n]) > wide(y[m * N + largest])) largest = n;
          if (coarse[y[m * N + n]] > coarse[y[m * N + largest_coarse]]) largest_coarse = n;
        }
        close("argmax", best[m], largest, 0);
        close("argmax of logits", best_coarse[m], largest_coarse, 0);
        multiply(&x[m * K], 1, K, packed.data(), N, alone.data(), 1);
        same("product beside others", alone.data(), &y[m * N], N * sizeof(bf16));
      }
    }
}

static void norms() {
  for (int64_t n : {2, 30, 64, 100, 576}) {
    auto x = random(3 * n), gain = random(n);
    std::vector<bf16> y(3 * n);
    normalise_rows(x.data(), gain.data(), y.data(), 3, n, 1e-5f);
    for (int64_t m = 0; m < 3; m++) {
      double squares = 0;
      for (int64_t i = 0; i < n; i++) squares += (double)wide(x[m * n + i]) * wide(x[m * n + i]);
      for (int64_t i = 0; i < n; i++)
        close("norm", wide(y[m * n + i]), round_bf16(wide(x[m * n + i]) / std::sqrt(squares / n + 1e-5)) * wide(gain[i]), 1);
    }
  }
}

struct Sizes {
  int64_t D, N, kv, H, F, slots = 48;
};

struct Model {
  Sizes z;
  std::vector<std::vector<bf16>> plain, packed;  // norms as they are
  std::vector<bf16> cos, sin, cache;
  Layer layer{};

  explicit Model(Sizes z) : z(z) {
    int64_t width = (z.N + 2 * z.kv) * z.H;
    plain = {random(z.D), random(width * z.D, 0.3f), random(z.H), random(z.H), random(z.D * z.N * z.H, 0.3f),
             random(z.D), random(z.F * z.D, 0.3f), random(z.F * z.D, 0.3f), random(z.D * z.F, 0.3f)};
    auto gate = blocked(plain[6], z.F, z.D), up = blocked(plain[7], z.F, z.D);
    std::vector<bf16> both;
    for (size_t at = 0; at < gate.size(); at += BLOCK * z.D) {
      both.insert(both.end(), &gate[at], &gate[at] + BLOCK * z.D);
      both.insert(both.end(), &up[at], &up[at] + BLOCK * z.D);
    }
    packed = {blocked(plain[1], width, z.D), blocked(plain[4], z.D, z.N * z.H), both, blocked(plain[8], z.D, z.F)};
    for (auto& each : packed) each.resize(each.size() + 4096);
    layer = {plain[0].data(), packed[0].data(), nullptr, plain[2].data(), plain[3].data(), packed[1].data(),
             plain[5].data(), packed[2].data(), packed[3].data()};
    layer.scale = 1 / std::sqrt((float)z.H), layer.mlp = z.F;
    for (int64_t p = 0; p < z.slots; p++)
      for (int64_t h = 0; h < z.H; h++) {
        double angle = p / std::pow(10000.0, (double)(h % (z.H / 2)) / (z.H / 2));
        cos.push_back(narrow(std::cos(angle))), sin.push_back(narrow(std::sin(angle)));
      }
    cache.assign(2 * z.kv * z.slots * z.H, 0);
  }

  // x [Q, D] of one row, written to `at` and on; mask [Q, extent] where it is not a chain
  void read(std::vector<bf16>& x, const std::vector<int64_t>& positions, int64_t at, const bf16* mask = nullptr) {
    int64_t Q = positions.size();
    std::vector<int64_t> slots(Q);
    for (int64_t i = 0; i < Q; i++) slots[i] = at + i;
    Forward s{};
    s.hidden = z.D, s.num_heads = z.N, s.num_kv_heads = z.kv, s.head_dim = z.H, s.read_size = z.D;
    s.num_rows = 1, s.num_queries = Q, s.extent = at + Q, s.layer_stride = cache.size();
    s.value_stride = z.kv * z.slots * z.H, s.row_stride = 2 * s.value_stride, s.head_stride = z.slots * z.H;
    s.num_threads = 1, s.cache = cache.data(), s.cos[0] = cos.data(), s.sin[0] = sin.data();
    s.rotary_size = z.H, s.residual_scale = 1, s.norm = {1e-5f, false, false, true};
    s.positions = positions.data(), s.slots = slots.data(), s.last = slots.data(), s.mask = mask;
    decode(&layer, 1, &s, x.data());
  }
};

static std::vector<double> norm_of(const std::vector<double>& x, const std::vector<bf16>& gain, int64_t at, int64_t n) {
  double squares = 0;
  for (int64_t i = 0; i < n; i++) squares += x[at + i] * x[at + i];
  std::vector<double> y(n);
  for (int64_t i = 0; i < n; i++) y[i] = round_bf16(round_bf16(x[at + i] / std::sqrt(squares / n + 1e-5)) * wide(gain[i]));
  return y;
}

static std::vector<double> times(const std::vector<double>& x, const std::vector<bf16>& w, int64_t N) {
  int64_t K = x.size();
  std::vector<double> y(N, 0);
  for (int64_t n = 0; n < N; n++) {
    for (int64_t k = 0; k < K; k++) y[n] += x[k] * wide(w[n * K + k]);
    y[n] = round_bf16(y[n]);
  }
  return y;
}

// One layer over a text, in doubles rounded where transformers rounds to bf16: [T, D]
static std::vector<double> reference(const Model& m, const std::vector<bf16>& x) {
  auto z = m.z;
  int64_t T = x.size() / z.D, group = z.N / z.kv;
  std::vector<std::vector<double>> keys, values;
  std::vector<double> out;
  for (int64_t t = 0; t < T; t++) {
    std::vector<double> residual(z.D), mixed;
    for (int64_t i = 0; i < z.D; i++) residual[i] = wide(x[t * z.D + i]);
    auto projected = times(norm_of(residual, m.plain[0], 0, z.D), m.plain[1], (z.N + 2 * z.kv) * z.H);
    for (int64_t head = 0; head < z.N + z.kv; head++) {
      auto own = norm_of(projected, m.plain[head < z.N ? 2 : 3], head * z.H, z.H);
      for (int64_t h = 0; h < z.H; h++) {
        int64_t half = z.H / 2, other = h < half ? h + half : h - half, at = t * z.H + h;
        projected[head * z.H + h] = round_bf16(own[h] * wide(m.cos[at]) + (h < half ? -1 : 1) * own[other] * wide(m.sin[at]));
      }
    }
    keys.emplace_back(projected.begin() + z.N * z.H, projected.begin() + (z.N + z.kv) * z.H);
    values.emplace_back(projected.begin() + (z.N + z.kv) * z.H, projected.end());
    for (int64_t head = 0; head < z.N; head++) {
      int64_t at = head / group * z.H;
      std::vector<double> scores(t + 1, 0), sum(z.H, 0);
      double most = -1e30, total = 0;
      for (int64_t p = 0; p <= t; p++) {
        for (int64_t h = 0; h < z.H; h++) scores[p] += projected[head * z.H + h] * keys[p][at + h] / std::sqrt((double)z.H);
        most = std::max(most, scores[p]);
      }
      for (int64_t p = 0; p <= t; p++) total += std::exp(scores[p] - most);
      for (int64_t p = 0; p <= t; p++)
        for (int64_t h = 0; h < z.H; h++) sum[h] += std::exp(scores[p] - most) / total * values[p][at + h];
      for (double each : sum) mixed.push_back(round_bf16(each));
    }
    auto attended = times(mixed, m.plain[4], z.D);
    for (int64_t i = 0; i < z.D; i++) residual[i] = round_bf16(residual[i] + attended[i]);
    auto normed = norm_of(residual, m.plain[5], 0, z.D), gate = times(normed, m.plain[6], z.F), up = times(normed, m.plain[7], z.F);
    for (int64_t i = 0; i < z.F; i++) gate[i] = round_bf16(round_bf16(gate[i] / (1 + std::exp(-gate[i]))) * up[i]);
    auto down = times(gate, m.plain[8], z.D);
    for (int64_t i = 0; i < z.D; i++) out.push_back(round_bf16(residual[i] + down[i]));
  }
  return out;
}

static void layers() {
  for (Sizes z : {Sizes{64, 6, 2, 16, 96}, Sizes{96, 4, 4, 80, 64}, Sizes{64, 2, 1, 8, 100}, Sizes{64, 2, 2, 256, 64}}) {
    int64_t T = 24;
    Model m(z);
    auto text = random(T * z.D), one = text;
    std::vector<int64_t> positions(T);
    for (int64_t t = 0; t < T; t++) positions[t] = t;
    auto wanted = reference(m, text);
    auto together = text;
    m.read(together, positions, 0);
    double size = 0;
    for (double each : wanted) size = std::max(size, std::abs(each));
      // where two roundings fall to the other side, it goes on through the layer: a step of the largest
    for (int64_t i = 0; i < T * z.D; i++) close("layer", wide(together[i]), wanted[i], size * 0x1p11);
    Model other(m);
    for (int64_t t = 0; t < T; t++) {  // one by one
      std::vector<bf16> x(&text[t * z.D], &text[t * z.D] + z.D);
      other.layer = m.layer;
      other.read(x, {t}, t);
      same("token beside others", x.data(), &together[t * z.D], z.D * sizeof(bf16));
    }
    // behind 16 tokens a tree: two paths by turns, of which the second goes on with the text
    std::vector<bf16> tree, mask;
    std::vector<int64_t> at;
    for (int64_t depth = 0; depth < 3; depth++)
      for (int64_t path = 0; path < 2; path++) {
        tree.insert(tree.end(), &text[(path ? 16 + depth : depth) * z.D], &text[(path ? 16 + depth : depth) * z.D] + z.D);
        at.push_back(16 + depth);
        for (int64_t p = 0; p < 22; p++) mask.push_back(p < 16 || (p % 2 == path && p <= 16 + 2 * depth + path) ? 0 : 0xff7f);
      }
    m.read(tree, at, 16, mask.data());
    for (int64_t depth = 0; depth < 3; depth++)
      same("node of a tree", &tree[(2 * depth + 1) * z.D], &together[(16 + depth) * z.D], z.D * sizeof(bf16));
  }
}

int main() {
  products();
  norms();
  layers();
  std::printf("%ld compared, %ld wrong\n", (long)num_compared, (long)num_wrong);
  return num_wrong > 0;
}

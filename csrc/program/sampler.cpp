#include "program/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "octavo/partition.h"

namespace octavo {
namespace {

constexpr double kFloor = -9999.0;           // clients' word for "impossible"; JSON has no -infinity
constexpr float kHead = 1.0f / 4096.0f;      // weights above it hold the nucleus in most steps
constexpr float kLeast = -std::numeric_limits<float>::infinity();

/// At most the logit whose weight is `weight`; looser than rounding could ever matter, so nothing is missed.
float logit_bound(float top, float temperature, float weight) {
  const double bound = double(top) + double(temperature) * (std::log(double(weight)) - 1e-3);
  return std::nextafterf(float(bound), kLeast);
}

/// First index whose running sum exceeds `target`, else the last positive entry; `before`: the sum before it.
int64_t first_above(const float* weights, int64_t n, double target, double* before) {
  double sum = 0.0;
  int64_t last = 0;
  for (int64_t i = 0; i < n; i++) {
    if (weights[i] <= 0.0f) continue;
    *before = sum;
    last = i;
    sum += weights[i];
    if (sum > target) break;
  }
  return last;
}

/// The sum, in an order that depends on n only.
double total(const float* x, int64_t n) {
  double sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; j++) sums[j] += x[i + j];
  }
  for (; i < n; i++) sums[0] += x[i];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

}  // namespace

double uniform(uint64_t seed, uint64_t sample_index, uint64_t position) {
  __extension__ typedef unsigned __int128 Wide;
  uint64_t c[4] = {position + 1, position + 1 == 0, 0, 0};  // NumPy counts before it draws
  uint64_t k[2] = {seed, sample_index};
  for (int round = 0; round < 10; round++) {
    const Wide a = Wide(0xD2E7470EE14C6C93u) * c[0], b = Wide(0xCA5A826395121157u) * c[2];
    const uint64_t next[4] = {uint64_t(b >> 64) ^ c[1] ^ k[0], uint64_t(b), uint64_t(a >> 64) ^ c[3] ^ k[1],
                              uint64_t(a)};
    std::memcpy(c, next, sizeof c);
    k[0] += 0x9E3779B97F4A7C15u;
    k[1] += 0xBB67AE8584CAA73Bu;
  }
  return double(c[0] >> 11) * 0x1p-53;
}

/// The steps of octavo/worker/sample/, on one row at a time.
class RowSampler {
 public:
  RowSampler(const SamplingKernels& kernels) : kernels_(kernels) {}

  void sample(Rows logits, Rows adjusted, Masks masks, const SampleRow& row, int64_t index,
              const SampleResult& result) {
    prepare(logits.width);
    const float* raw = logits.row(row.logit_row);
    result.token_ids[index] = kNotFinite;
    if (!scan_logits(logits, row.logit_row)) return;
    int32_t token = row.given_token;
    if (token < 0) {
      const float* x = row.adjusted_row < 0 ? raw : adjusted.row(row.adjusted_row);
      if (row.mask_row >= 0) x = masked(x, masks.row(row.mask_row));
      if (x != raw) scan(x);
      if (top_ == kLeast) {
        result.token_ids[index] = kNothingAllowed;
        return;
      }
      token = choose(x, row);
      if (x != raw && row.num_logprobs >= 0) scan_logits(logits, row.logit_row);
    }
    result.token_ids[index] = token;
    if (row.num_logprobs >= 0) take_logprobs(raw, token, row.num_logprobs, index, result);
  }

 private:
  void prepare(int64_t n) {
    if (n == n_) return;
    n_ = n;
    scanned_.resize(maxima_size(n));
    sums_.resize(ceil_div(n, kChunkLogits));
    ids_.resize(maxima_size(n) + n + 16);
    values_.resize(n);
    weights_.resize(std::max(n, kChunkLogits));
  }

  /// maxima_ and top_ of numbers, false if one is not finite.
  bool scan(const float* x) {
    const bool finite = kernels_.scan(x, n_, scanned_.data());
    maxima_ = scanned_.data();
    top_ = kernels_.greatest_of(maxima_, maxima_size(n_));
    return finite;
  }

  /// The same for a row of logits.
  bool scan_logits(Rows logits, int64_t index) {
    if (logits.maxima == nullptr) return scan(logits.row(index));
    maxima_ = logits.maxima + index * logits.maxima_stride;
    top_ = kernels_.greatest_of(maxima_, maxima_size(n_));
    return top_ < std::numeric_limits<float>::infinity();
  }

  /// A copy of x with -infinity where the mask has no bit.
  const float* masked(const float* x, const uint32_t* mask) {
    masked_.resize(n_);
    for (int64_t start = 0; start < n_; start += 32) {
      const uint32_t bits = mask[start / 32];
      const int64_t size = std::min<int64_t>(32, n_ - start);
      if (bits == 0) {
        std::fill_n(masked_.begin() + start, size, kLeast);
      } else {
        for (int64_t i = 0; i < size; i++) masked_[start + i] = bits >> i & 1 ? x[start + i] : kLeast;
      }
    }
    return masked_.data();
  }

  int32_t choose(const float* x, const SampleRow& row) {
    if (row.temperature == 0.0f) return argmax(x);
    const float top = top_;
    const double u = uniform(row.seed, row.sample_index, row.position);
    const bool all = (row.top_k <= 0 || row.top_k >= n_) && row.min_p <= 0.0f;
    if (all) kernels_.chunk_sums(x, n_, top, row.temperature, sums_.data());
    if (all && row.top_p >= 1.0) return draw_from_all(x, top, row.temperature, u);
    // Candidates: their ids in ids_, their weights in weights_, in the order in which they are drawn.
    int64_t count;
    double mass = 0.0;
    if (0 < row.top_k && row.top_k < n_) {
      count = take_top(x, row.top_k);
      weigh(x, count, top, row.temperature);
    } else {
      const float least = row.min_p > 0.0f ? row.min_p : kHead;
      count = kernels_.at_least(x, n_, logit_bound(top, row.temperature, least), ids_.data());
      weigh(x, count, top, row.temperature);
    }
    if (row.min_p > 0.0f) count = keep(count, row.min_p, 0);
    if (row.top_p < 1.0) {
      const double held = total(weights_.data(), count);
      mass = row.top_p * (all ? total(sums_.data(), sums_.size()) : held);
      if (all && held < mass) {  // the head was too small
        count = kernels_.at_least(x, n_, kLeast, ids_.data());
        weigh(x, count, top, row.temperature);
      }
      count = keep_nucleus(count, mass);
    }
    const double target = u * total(weights_.data(), count);
    double before = 0.0;
    return ids_[first_above(weights_.data(), count, target, &before)];
  }

  int32_t argmax(const float* x) {
    kernels_.at_least(maxima_, maxima_size(n_), top_, ids_.data());
    const int64_t start = ids_[0] / kGroupLanes * kGroupLogits;  // equals elsewhere come later
    kernels_.at_least(x + start, std::min(kGroupLogits, n_ - start), top_, ids_.data());
    return int32_t(start + ids_[0]);
  }

  /// Temperature alone: chunks of the vocabulary are summed, and only one is looked at again.
  int32_t draw_from_all(const float* x, float top, float temperature, double u) {
    const double target = u * total(sums_.data(), sums_.size());
    double before = 0.0;
    const int64_t start = first_above(sums_.data(), sums_.size(), target, &before) * kChunkLogits;
    const int64_t size = std::min(kChunkLogits, n_ - start);
    kernels_.weights(x + start, size, top, temperature, weights_.data());
    return int32_t(start + first_above(weights_.data(), size, target - before, &before));
  }

  /// ids_ = the k < n ids of the greatest values, greatest first, equals by id. Needs the maxima of x.
  int64_t take_top(const float* x, int64_t k) {
    float bound = kLeast;
    if (k < maxima_size(n_)) {  // k lanes hold at least one value each that reaches the k-th maximum
      sorted_.assign(maxima_, maxima_ + maxima_size(n_));
      std::nth_element(sorted_.begin(), sorted_.begin() + (k - 1), sorted_.end(), std::greater<float>());
      bound = sorted_[k - 1];
    }
    const int64_t count = kernels_.at_least(x, n_, bound, ids_.data());
    const auto before = [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
    const auto first = ids_.begin();
    if (k < count) std::nth_element(first, first + k, first + count, before);
    std::sort(first, first + k, before);
    return k;
  }

  void weigh(const float* x, int64_t count, float top, float temperature) {
    for (int64_t i = 0; i < count; i++) values_[i] = x[ids_[i]];
    kernels_.weights(values_.data(), count, top, temperature, weights_.data());
  }

  /// Keeps the candidates with weights above `least`, and the first `equals` (0: all) of those equal to it.
  int64_t keep(int64_t count, float least, int64_t equals) {
    int64_t kept = 0, left = equals > 0 ? equals : count;
    for (int64_t i = 0; i < count; i++) {
      const float weight = weights_[i];
      if (!(weight > least || (weight == least && left-- > 0))) continue;
      ids_[kept] = ids_[i];
      weights_[kept++] = weight;
    }
    return kept;
  }

  /// The smallest head of the ranking by weight that holds `mass`. Only the weights between which the border lies are
  /// sorted: a histogram over exponents and three bits of mantissa finds them.
  int64_t keep_nucleus(int64_t count, double mass) {
    const auto bucket = [](float weight) {
      uint32_t bits;
      std::memcpy(&bits, &weight, sizeof bits);
      return bits >> 20;
    };
    histogram_.assign(1024, 0.0);  // weights are at most 1: bits below 0x3F800000 + 1
    for (int64_t i = 0; i < count; i++) histogram_[bucket(weights_[i])] += weights_[i];
    double sum = 0.0;
    int64_t border = 1023;
    while (border > 0 && sum + histogram_[border] < mass) sum += histogram_[border--];
    sorted_.clear();
    for (int64_t i = 0; i < count; i++) {
      if (bucket(weights_[i]) == border) sorted_.push_back(weights_[i]);
    }
    if (sorted_.empty()) return count;  // rounding left less than the mass: everything
    std::sort(sorted_.begin(), sorted_.end(), std::greater<float>());
    size_t last = 0;
    for (; last + 1 < sorted_.size(); last++) {
      sum += sorted_[last];
      if (sum >= mass) break;
    }
    int64_t equals = 1;
    while (int64_t(last) - equals >= 0 && sorted_[last - equals] == sorted_[last]) equals++;
    return keep(count, sorted_[last], equals);
  }

  /// The token itself, then the top k. Needs the maxima of `raw`.
  void take_logprobs(const float* raw, int32_t token, int64_t k, int64_t index, const SampleResult& result) {
    const float top = top_;
    kernels_.chunk_sums(raw, n_, top, 1.0f, sums_.data());
    const double log_sum = double(top) + std::log(total(sums_.data(), sums_.size()));
    k = std::min(k, n_);
    if (k > 0) take_top(raw, k);
    int32_t* ids = result.logprob_ids + index * result.width;
    double* values = result.logprobs + index * result.width;
    for (int64_t i = 0; i <= k; i++) {
      ids[i] = i == 0 ? token : ids_[i - 1];
      values[i] = std::max(double(raw[ids[i]]) - log_sum, kFloor);
    }
    const float value = raw[token];
    result.ranks[index] =
        int32_t(1 + kernels_.count_above(raw, n_, value) + std::count(raw, raw + token, value));
  }

  const SamplingKernels& kernels_;
  int64_t n_ = 0;
  const float* maxima_ = nullptr;  // of the numbers in hand
  float top_ = 0.0f;               // the greatest of them
  std::vector<float> scanned_, sums_, values_, weights_, sorted_, masked_;
  std::vector<double> histogram_;
  std::vector<int32_t> ids_;
};

Sampler::Sampler(const SamplingKernels& kernels, std::shared_ptr<ThreadPool> pool)
    : kernels_(kernels), pool_(std::move(pool)) {
  for (int i = 0; i < pool_->threads(); i++) samplers_.push_back(std::make_unique<RowSampler>(kernels_));
}

Sampler::~Sampler() = default;

void Sampler::sample(Rows logits, Rows adjusted, Masks masks, const std::vector<SampleRow>& rows,
                     const SampleResult& result) {
  if (adjusted.count > 0 && adjusted.width != logits.width) throw std::invalid_argument("rows differ in width");
  if (masks.count > 0 && 32 * masks.words < logits.width) throw std::invalid_argument("masks are too narrow");
  for (const SampleRow& row : rows) {
    const bool fits = row.logit_row >= 0 && row.logit_row < logits.count && row.adjusted_row < adjusted.count &&
                      row.mask_row < masks.count && row.given_token < logits.width && row.num_logprobs < result.width &&
                      row.temperature >= 0.0f && row.temperature < std::numeric_limits<float>::infinity();
    if (!fits) throw std::invalid_argument("a row to sample points outside, or its temperature is none");
  }
  const int64_t count = int64_t(rows.size());
  const auto sample_share = [&](int thread, int threads) {
    const Range mine = split(count, thread, threads);
    for (int64_t i = mine.first; i < mine.last; i++) {
      samplers_[thread]->sample(logits, adjusted, masks, rows[i], i, result);
    }
  };
  if (count == 1) {
    sample_share(0, 1);  // not worth to wake anybody
  } else {
    pool_->run(sample_share);
  }
}

}  // namespace octavo

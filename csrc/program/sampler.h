// From logits to tokens: every row alone, many rows at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "octavo/sampling.h"
#include "program/thread_pool.h"
#include "sample_row.h"  // made of octavo/backends/sample_row.py

namespace octavo {

/// Float32 rows of `width` numbers. `maxima`: theirs (octavo/maxima.h), one infinite where a number of the row is not
/// finite, rows `maxima_stride` apart; or null, and they are looked for.
struct Rows {
  const float* data;
  int64_t count, width;
  const float* maxima = nullptr;
  int64_t maxima_stride = 0;
  const float* row(int64_t i) const { return data + i * width; }
};

/// One bit per token, bit t % 32 of word t / 32; only tokens whose bit is set may be chosen.
struct Masks {
  const uint32_t* data;
  int64_t count, words;
  const uint32_t* row(int64_t i) const { return data + i * words; }
};

/// Instead of a token: what was wrong with the row.
constexpr int32_t kNotFinite = -1, kNothingAllowed = -2;

/// Where results go: token_ids and ranks [N]; logprob_ids and logprobs [N][width], width 0 if nobody wants any.
struct SampleResult {
  int32_t *token_ids, *ranks, *logprob_ids;
  double* logprobs;
  int64_t width;
};

/// A number in [0, 1), a multiple of 2^-53: Philox 4x64-10 (Salmon et al., SC 2011), bit-equal to NumPy's.
double uniform(uint64_t seed, uint64_t sample_index, uint64_t position);

class RowSampler;  // one thread's scratch memory

/// A token is a pure function of its rows of logits and its SampleRow: neither batch nor threads matter.
class Sampler {
 public:
  Sampler(const SamplingKernels& kernels, std::shared_ptr<ThreadPool> pool);
  ~Sampler();
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;

  /// Throws std::invalid_argument if a row points outside of logits, adjusted, masks or the vocabulary. Rows whose
  /// logits are not all finite get the token kNotFinite, rows of which a mask leaves nothing kNothingAllowed; neither
  /// gets logprobs. `adjusted` may hold -infinity, but has a finite maximum.
  void sample(Rows logits, Rows adjusted, Masks masks, const std::vector<SampleRow>& rows,
              const SampleResult& result);

 private:
  const SamplingKernels& kernels_;
  std::shared_ptr<ThreadPool> pool_;
  std::vector<std::unique_ptr<RowSampler>> samplers_;  // by thread
};

}  // namespace octavo

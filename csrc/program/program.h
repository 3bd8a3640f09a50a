// A model, ready to run: stages in phases, static buffers, the KV cache.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "octavo/kernels.h"
#include "program/stages.h"

namespace octavo {

/// Built once from Python with the add_* methods, then run once per step. A step is one parallel region: phases with a
/// barrier between them. Buffers are columns of one arena, at places that Python planned.
class Program {
 public:
  /// What a layer keeps of a token, and the group whose blocks it lies in, behind the group's layers before it.
  struct LayerShape {
    int64_t group, kv_heads, key_dim, value_dim;
  };
  struct Shape {
    StepLimits limits;
    std::vector<LayerShape> kv_layers;
    int64_t arena_floats;
    KvFormat kv_format;
  };
  /// Floats from the start of the arena, and floats between rows.
  using Place = std::pair<int64_t, int64_t>;

  /// Blocks lie a little more than their size apart: at a power of two, the same layer of all blocks would compete for
  /// the same sets of the caches.
  static constexpr int64_t kBlockGap = 33 * 64;

  /// Bytes from a block to the next: the widest group's layers, and the gap.
  static int64_t block_bytes(const std::vector<LayerShape>& layers, int64_t block_size, KvFormat format);

  Program(const KernelTable& kernels, std::shared_ptr<ThreadPool> pool, const Shape& shape);

  /// A linear or table made of packed parts, which the caller keeps alive; returns its number.
  int64_t add_weights(std::vector<LinearPart> parts, const float* bias);

  /// Starts a phase of row stages over the tokens or the logit rows of a step.
  void begin_rows(bool per_token);
  void add_embed(int64_t table, float scale, Place out);
  void add_rms_norm(Place x, const float* weight, float eps, Place out, int64_t groups, int64_t width);
  void add_add(Place a, Place b, Place out, int64_t width);
  void add_silu_mul(Place x, Place out, int64_t width);
  void add_gelu_mul(Place x, Place out, int64_t width);
  void add_gather(Place x, Place out, int64_t width);
  void add_rope_table(std::vector<float> inv_freq, float factor, Place out);
  void add_rope(Place x, Place out, Place table, int64_t heads, int64_t head_dim, int64_t pairs);
  void add_write_kv(int64_t layer, Place k, Place v);

  /// What a linear reads: x, through an rms_norm of these weights if they are not null; and floats from the start of the
  /// arena to where the stage `linear_prepare` leaves it converted.
  struct LinearInput {
    int64_t linear;
    Place x;
    const float* norm;
    float eps;
    int64_t scratch;
    bool per_token;
  };
  void add_linear_prepare(const LinearInput& input);

  /// Wide stages are phases of their own. `residual` may be null, and so may `maxima`, where the linear that makes the
  /// logits puts their maxima. `out` is not where x is.
  void add_linear(const LinearInput& input, Place out, const Place* residual, const Place* maxima, Gate gate);
  void add_attention(int64_t layer, Place q, Place out, int64_t heads, float scale, std::optional<int64_t> window);

  void set_logits(Place logits) { logits_ = view(logits); }

  /// Throws std::invalid_argument for a step beyond the limits; nothing is written then.
  void run(const Step& step);

  /// Logits of the last step: [rows(), vocab_size], contiguous.
  float* logits() const { return logits_.data; }
  /// Their maxima (LinearCall::maxima), rows `stride` apart; data is null where nobody took them.
  View logit_maxima() const { return logit_maxima_; }
  int64_t groups() const { return shape_.limits.groups; }
  int64_t rows() const { return rows_; }
  int64_t vocab_size() const { return shape_.limits.vocab_size; }

  /// Copies whole blocks, all layers, in order. Throws std::invalid_argument.
  void copy_blocks(const std::vector<std::pair<int64_t, int64_t>>& pairs);

  /// From now on, or no longer, measure phases; earlier measurements are dropped.
  void measure(bool on);

  /// What each phase does, and the seconds it took in all steps measured: thread 0's, waiting for the others included.
  std::vector<std::pair<std::string, double>> measurements() const;

  size_t kv_bytes() const { return cache_->size(); }
  /// Blocks follow each other from here on, each with all layers in one piece of block_stride().
  char* kv_data() const { return cache_->data(); }
  int64_t block_stride() const { return block_stride_; }

 private:
  struct Phase {
    bool per_token = true;
    std::string name;
    std::vector<std::unique_ptr<RowStage>> rows;
    std::unique_ptr<WideStage> wide;
    void run(const Step& step, int thread, int threads) const;
    bool idle(const Step& step) const;
  };

  struct Layer {
    int64_t group;
    KvLayer kv;
  };

  View view(Place place) const { return {arena_->at<float>(0) + place.first, place.second}; }
  const Layer& layer(int64_t number) const;
  void add_row_stage(const char* name, std::unique_ptr<RowStage> stage);
  void add_wide_stage(const char* name, std::unique_ptr<WideStage> stage);
  void run_phases(const Step& step, int thread, int threads);
  LinearCall linear_call(const LinearInput& input) const;

  const KernelTable& kernels_;
  std::shared_ptr<ThreadPool> pool_;
  Shape shape_;
  std::unique_ptr<Memory> arena_;
  std::unique_ptr<Memory> cache_;  // [block][layer of its group][keys, values]
  int64_t block_stride_;           // bytes
  std::vector<Layer> layers_;
  std::deque<std::vector<LinearPart>> parts_;
  std::deque<Linear> linears_;  // stages refer to them: a deque does not move its elements
  std::vector<Phase> phases_;
  ThreadScratch own_scratch_;
  AttentionShared attention_;
  View logits_ = {nullptr, 0}, logit_maxima_ = {nullptr, 0};
  int64_t rows_ = 0;
  std::vector<double> seconds_;  // by phase; empty: not measuring
  std::mutex one_step_;
};

}  // namespace octavo

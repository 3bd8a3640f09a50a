// A model, ready to run: stages in phases, static buffers, the KV cache.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "octavo/kernels.h"
#include "program/shared.h"
#include "program/thread_pool.h"
#include "stages/stage.h"

namespace octavo {

/// Built once from Python, stage by stage, then run once per step. A step is one parallel region: phases with a
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

  struct Layer {
    int64_t group;
    KvLayer kv;
  };

  Program(const KernelTable& kernels, std::shared_ptr<ThreadPool> pool, const Shape& shape);

  /// A linear or table made of packed parts, which the caller keeps alive; returns its number.
  int64_t add_weights(std::vector<LinearPart> parts, const float* bias);

  /// Starts a phase of row stages over the tokens or the logit rows of a step.
  void begin_rows(bool per_token);

  /// Writes what Python gives for a field to `to`.
  using FillField = std::function<void(const Field& field, void* to)>;

  /// Appends the op (csrc/ops) or the stage (csrc/stages) of this name. A wide stage is a phase of its own; row stages
  /// belong to the phase that begin_rows started. Throws std::invalid_argument.
  void add(const std::string& kind, const FillField& fill);

  void set_logits(Place logits) { logits_ = view(logits); }

  // What stages are made of, while the program is built.
  const KernelTable& kernels() const { return kernels_; }
  ThreadPool& pool() { return *pool_; }
  ThreadScratch& own_scratch() { return own_scratch_; }
  AttentionShared& attention() { return attention_; }
  View view(Place place) const { return {arena_->at<float>(0) + place.first, place.second}; }
  const Linear* linear(int64_t number) const { return &linears_.at(number); }
  const Layer& layer(int64_t number) const;
  /// Copies that live as long as the program.
  Numbers keep(std::vector<float> numbers);
  const char* keep(std::string text);
  void add_row_stage(const std::string& name, std::unique_ptr<RowStage> stage);
  void add_wide_stage(const std::string& name, std::unique_ptr<WideStage> stage);
  void set_logit_maxima(View maxima) { logit_maxima_ = maxima; }

  /// Throws std::invalid_argument for a step beyond the limits; nothing is written then.
  void run(const Step& step);

  /// Logits of the last step: [rows(), vocab_size], contiguous; null where a program has none.
  float* logits() const { return logits_.data; }
  /// Their maxima (LinearCall::maxima), rows `stride` apart; data is null where nobody took them.
  View logit_maxima() const { return logit_maxima_; }
  int64_t groups() const { return shape_.limits.groups; }
  int64_t tokens() const { return tokens_; }  // of the last step
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

  void run_phases(const Step& step, int thread, int threads);

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
  int64_t tokens_ = 0, rows_ = 0;
  std::deque<std::vector<float>> kept_numbers_;
  std::deque<std::string> kept_text_;
  std::vector<double> seconds_;  // by phase; empty: not measuring
  std::mutex one_step_;
};

}  // namespace octavo

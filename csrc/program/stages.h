// What a program is made of: row stages, which treat each row alone, and wide stages, in which every thread takes a
// share of the whole.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "octavo/kernels.h"
#include "octavo/partition.h"
#include "program/attention_plan.h"
#include "program/memory.h"
#include "program/step.h"
#include "program/thread_pool.h"

namespace octavo {

/// Columns of a buffer: rows `stride` floats apart.
struct View {
  float* data;
  int64_t stride;
  float* row(int64_t i) const { return data + i * stride; }
};

/// Makes rows first .. last - 1 of its outputs from the same rows of its inputs. Stages of one phase run after each
/// other on small blocks of rows, so that rows stay in the cache.
class RowStage {
 public:
  virtual ~RowStage() = default;
  virtual void run(const Step& step, int64_t first, int64_t last) const = 0;
  /// Whether there is nothing to run in this step. A phase of idle stages costs no barrier.
  virtual bool idle(const Step&) const { return false; }
};

/// Runs on all threads, between barriers.
class WideStage {
 public:
  virtual ~WideStage() = default;
  /// Once per step, on one thread, before the threads start.
  virtual void begin(const Step&) {}
  virtual void run(const Step& step, int thread, int threads) = 0;
};

class EmbedStage final : public RowStage {
 public:
  EmbedStage(const KernelTable& kernels, const Linear& table, float scale, View out)
      : kernels_(kernels), table_(table), scale_(scale), out_(out) {}
  void run(const Step& step, int64_t first, int64_t last) const override;

 private:
  const KernelTable& kernels_;
  const Linear& table_;
  float scale_;
  View out_;
};

/// Each of the `groups` parts of a row, `width` wide, alone.
class RmsNormStage final : public RowStage {
 public:
  RmsNormStage(const ElementwiseKernels& kernels, View x, const float* weight, float eps, View out, int64_t groups,
               int64_t width)
      : kernels_(kernels), x_(x), weight_(weight), eps_(eps), out_(out), groups_(groups), width_(width) {}
  void run(const Step& step, int64_t first, int64_t last) const override;

 private:
  const ElementwiseKernels& kernels_;
  View x_;
  const float* weight_;
  float eps_;
  View out_;
  int64_t groups_, width_;
};

class AddStage final : public RowStage {
 public:
  AddStage(const ElementwiseKernels& kernels, View a, View b, View out, int64_t width)
      : kernels_(kernels), a_(a), b_(b), out_(out), width_(width) {}
  void run(const Step& step, int64_t first, int64_t last) const override;

 private:
  const ElementwiseKernels& kernels_;
  View a_, b_, out_;
  int64_t width_;
};

/// A gate and what it lets through, side by side: silu_mul or gelu_mul.
class GateStage final : public RowStage {
 public:
  using Kernel = decltype(ElementwiseKernels::silu_mul);

  GateStage(Kernel kernel, View x, View out, int64_t width) : kernel_(kernel), x_(x), out_(out), width_(width) {}
  void run(const Step& step, int64_t first, int64_t last) const override;

 private:
  Kernel kernel_;
  View x_, out_;
  int64_t width_;
};

/// Rows of x picked by the step's logit_rows.
class GatherStage final : public RowStage {
 public:
  GatherStage(View x, View out, int64_t width) : x_(x), out_(out), width_(width) {}
  void run(const Step& step, int64_t first, int64_t last) const override;

 private:
  View x_, out_;
  int64_t width_;
};

/// Cosines and sines of a token's position, once per step for all layers: [T, pairs | pairs].
class RopeTableStage final : public RowStage {
 public:
  RopeTableStage(std::vector<float> inv_freq, float factor, View out)
      : inv_freq_(std::move(inv_freq)), factor_(factor), out_(out) {}
  void run(const Step& step, int64_t first, int64_t last) const override;

 private:
  std::vector<float> inv_freq_;
  float factor_;
  View out_;
};

class RopeStage final : public RowStage {
 public:
  RopeStage(const ElementwiseKernels& kernels, View x, View out, View table, int64_t heads, int64_t head_dim,
            int64_t pairs)
      : kernels_(kernels), x_(x), out_(out), table_(table), heads_(heads), head_dim_(head_dim), pairs_(pairs) {}
  void run(const Step& step, int64_t first, int64_t last) const override;

 private:
  const ElementwiseKernels& kernels_;
  View x_, out_, table_;
  int64_t heads_, head_dim_, pairs_;
};

/// K and V of the step's tokens into their slots.
class WriteKvStage final : public RowStage {
 public:
  WriteKvStage(const AttentionKernels& kernels, int64_t group, KvLayer kv, View k, View v)
      : kernels_(kernels), group_(group), kv_(kv), k_(k), v_(v) {}
  void run(const Step& step, int64_t first, int64_t last) const override;

 private:
  const AttentionKernels& kernels_;
  int64_t group_;
  KvLayer kv_;
  View k_, v_;
};

/// Memory of its own for every thread, as large as any stage wants it.
struct ThreadScratch {
  explicit ThreadScratch(int threads) : threads(threads) {}

  const int threads;
  size_t bytes = 0;  // of a thread
  std::unique_ptr<Memory> memory;

  void reserve(size_t most) {
    if (most <= bytes) return;
    bytes = round_up(most, 64);
    memory = std::make_unique<Memory>(threads * bytes);
  }
  void* of(int thread) const { return memory->data() + thread * bytes; }
};

/// A linear's activations in the format its weights want, for all threads; of many rows. With as many rows as threads
/// or fewer, each thread converts them all for itself (`own`): it takes no longer than to wait for another who does it,
/// and needs no barrier.
class LinearPrepareStage final : public RowStage {
 public:
  LinearPrepareStage(const LinearKernels& kernels, const ThreadScratch& own, const LinearCall& call, bool per_token)
      : kernels_(kernels), own_(own), call_(call), per_token_(per_token) {}
  void run(const Step& step, int64_t first, int64_t last) const override;
  bool idle(const Step& step) const override;

 private:
  const LinearKernels& kernels_;
  const ThreadScratch& own_;
  LinearCall call_;
  bool per_token_;
};

class LinearStage final : public WideStage {
 public:
  LinearStage(const LinearKernels& kernels, const ThreadScratch& own, const LinearCall& call, bool per_token)
      : kernels_(kernels), own_(own), call_(call), per_token_(per_token) {}
  void run(const Step& step, int thread, int threads) override;

 private:
  const LinearKernels& kernels_;
  const ThreadScratch& own_;
  LinearCall call_;
  bool per_token_;
};

/// What the attention stages of a program share: plans of the step and memory.
struct AttentionShared {
  explicit AttentionShared(int threads) : scratch(threads) {}

  std::map<AttentionShape, AttentionPlan> plans;
  std::vector<float> partials;
  ThreadScratch scratch;
};

class AttentionStage final : public WideStage {
 public:
  AttentionStage(const AttentionKernels& kernels, ThreadPool& pool, AttentionShared& shared, int64_t group,
                 const AttentionCall& call)
      : kernels_(kernels),
        pool_(pool),
        shared_(shared),
        plan_(shared.plans[{call.group, call.kv.kv_heads, call.kv.value_dim, call.window}]),
        group_(group),
        call_(call) {}
  void begin(const Step& step) override;
  void run(const Step& step, int thread, int threads) override;

 private:
  const AttentionKernels& kernels_;
  ThreadPool& pool_;
  AttentionShared& shared_;
  const AttentionPlan& plan_;
  int64_t group_;
  AttentionCall call_;
  std::atomic<size_t> next_task_{0};
};

}  // namespace octavo

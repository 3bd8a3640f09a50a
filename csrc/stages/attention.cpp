// K and V into the cache, and attention over it.
#include <atomic>
#include <stdexcept>

#include "program/program.h"
#include "stages/stage.h"

namespace octavo {
namespace {

/// K and V of the step's tokens into their slots of `layer`.
struct WriteKv {
  int64_t layer;
  View k, v;
};
constexpr Field kWriteKv[] = {OCTAVO_FIELD(WriteKv, layer), OCTAVO_FIELD(WriteKv, k), OCTAVO_FIELD(WriteKv, v)};

class WriteKvStage final : public RowStage {
 public:
  WriteKvStage(const AttentionKernels& kernels, const Program::Layer& layer, const WriteKv& args)
      : kernels_(kernels), layer_(layer), args_(args) {}

  void run(const Step& step, int64_t first, int64_t last) const override {
    const int32_t* slots = step.slots(layer_.group);
    for (int64_t i = first; i < last; i++) kernels_.write_kv(layer_.kv, slots[i], args_.k.row(i), args_.v.row(i));
  }

 private:
  const AttentionKernels& kernels_;
  Program::Layer layer_;
  WriteKv args_;
};

void add_write_kv(Program& program, const WriteKv& args) {
  program.add_row_stage("write_kv", std::make_unique<WriteKvStage>(*program.kernels().attention,
                                                                   program.layer(args.layer), args));
}

/// `heads` query heads over the keys of `layer`. `window`: keys that a token sees at most; 0: all before it.
struct Attention {
  int64_t layer;
  View q, out;
  int64_t heads;
  float scale;
  int64_t window;
};
constexpr Field kAttention[] = {OCTAVO_FIELD(Attention, layer), OCTAVO_FIELD(Attention, q),
                                OCTAVO_FIELD(Attention, out),   OCTAVO_FIELD(Attention, heads),
                                OCTAVO_FIELD(Attention, scale), OCTAVO_FIELD(Attention, window)};

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

  void begin(const Step& step) override {
    next_task_.store(0, std::memory_order_relaxed);
    call_.partials = shared_.partials.data();
    call_.block_tables = step.tables(group_);
    call_.blocks_per_seq = step.blocks_per_seq;
  }

  void run(const Step&, int thread, int threads) override {
    const std::vector<AttentionTask>& tasks = plan_.tasks;
    void* scratch = shared_.scratch.of(thread);
    // Who takes which task does not matter for results: tasks share nothing.
    for (size_t i; (i = next_task_.fetch_add(1, std::memory_order_relaxed)) < tasks.size();) {
      // Likely the next of this thread, if the others are as fast; a wrong guess costs some useless fetches.
      const size_t guess = next_task_.load(std::memory_order_relaxed) + static_cast<size_t>(threads) - 1;
      kernels_.attend(call_, tasks[i], guess < tasks.size() ? &tasks[guess] : nullptr, scratch);
    }
    const std::vector<AttentionTask>& merges = plan_.merges;
    if (merges.empty()) return;
    pool_.barrier();
    const Range mine = split(static_cast<int64_t>(merges.size()), thread, threads);
    for (int64_t i = mine.first; i < mine.last; i++) kernels_.merge(call_, merges[i]);
  }

 private:
  const AttentionKernels& kernels_;
  ThreadPool& pool_;
  AttentionShared& shared_;
  const AttentionPlan& plan_;
  int64_t group_;
  AttentionCall call_;
  std::atomic<size_t> next_task_{0};
};

void add_attention(Program& program, const Attention& args) {
  const auto& [group, kv] = program.layer(args.layer);
  if (args.heads < kv.kv_heads || args.heads % kv.kv_heads != 0) throw std::invalid_argument("heads of no group");
  AttentionCall call = {};
  call.kv = kv;
  call.q = args.q.data;
  call.ldq = args.q.stride;
  call.out = args.out.data;
  call.ldo = args.out.stride;
  call.group = args.heads / kv.kv_heads;
  call.scale = args.scale;
  call.window = args.window > 0 ? args.window : kNoWindow;
  const AttentionKernels& kernels = *program.kernels().attention;
  AttentionShared& shared = program.attention();
  shared.scratch.reserve(kernels.scratch_bytes(call.group, kv.key_dim, kv.value_dim));
  program.add_wide_stage("attention",
                         std::make_unique<AttentionStage>(kernels, program.pool(), shared, group, call));
}

constexpr StageKind kKinds[] = {stage_kind<WriteKv, add_write_kv>("write_kv", kWriteKv),
                                stage_kind<Attention, add_attention>("attention", kAttention)};

}  // namespace

const StageKinds attention_stages = stage_kinds(kKinds);

}  // namespace octavo

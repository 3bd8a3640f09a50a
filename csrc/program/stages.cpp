#include "program/stages.h"

#include <cmath>
#include <cstring>

namespace octavo {

void EmbedStage::run(const Step& step, int64_t first, int64_t last) const {
  kernels_.linear->embed_rows(table_, step.token_ids + first, last - first, out_.row(first), out_.stride);
  if (scale_ != 1.0f) kernels_.elementwise->scale(out_.row(first), out_.stride, scale_, last - first, table_.k);
}

void RmsNormStage::run(const Step&, int64_t first, int64_t last) const {
  for (int64_t group = 0; group < groups_; group++) {
    const int64_t at = group * width_;
    kernels_.rms_norm(x_.row(first) + at, x_.stride, weight_, eps_, out_.row(first) + at, out_.stride, last - first,
                      width_);
  }
}

void AddStage::run(const Step&, int64_t first, int64_t last) const {
  kernels_.add(a_.row(first), a_.stride, b_.row(first), b_.stride, out_.row(first), out_.stride, last - first, width_);
}

void GateStage::run(const Step&, int64_t first, int64_t last) const {
  kernel_(x_.row(first), x_.stride, out_.row(first), out_.stride, last - first, width_);
}

void GatherStage::run(const Step& step, int64_t first, int64_t last) const {
  for (int64_t i = first; i < last; i++) {
    std::memcpy(out_.row(i), x_.row(step.logit_rows[i]), width_ * sizeof(float));
  }
}

void RopeTableStage::run(const Step& step, int64_t first, int64_t last) const {
  const int64_t pairs = static_cast<int64_t>(inv_freq_.size());
  for (int64_t i = first; i < last; i++) {
    float* cosine = out_.row(i);
    float* sine = cosine + pairs;
    for (int64_t j = 0; j < pairs; j++) {
      const double angle = static_cast<double>(step.positions[i]) * inv_freq_[j];
      cosine[j] = static_cast<float>(std::cos(angle)) * factor_;
      sine[j] = static_cast<float>(std::sin(angle)) * factor_;
    }
  }
}

void RopeStage::run(const Step&, int64_t first, int64_t last) const {
  for (int64_t i = first; i < last; i++) {
    const float* table = table_.row(i);
    kernels_.rope(x_.row(i), heads_, head_dim_, pairs_, table, table + pairs_, out_.row(i));
  }
}

void WriteKvStage::run(const Step& step, int64_t first, int64_t last) const {
  const int32_t* slots = step.slots(group_);
  for (int64_t i = first; i < last; i++) kernels_.write_kv(kv_, slots[i], k_.row(i), v_.row(i));
}

namespace {

LinearCall with_rows(LinearCall call, const Step& step, bool per_token) {
  call.rows = per_token ? step.tokens : step.rows;
  return call;
}

}  // namespace

void LinearPrepareStage::run(const Step& step, int64_t first, int64_t last) const {
  kernels_.prepare(with_rows(call_, step, per_token_), first, last);
}

bool LinearPrepareStage::idle(const Step& step) const {
  return with_rows(call_, step, per_token_).rows <= own_.threads;
}

void LinearStage::run(const Step& step, int thread, int threads) {
  LinearCall call = with_rows(call_, step, per_token_);
  if (call.rows == 0) return;
  if (call.rows <= own_.threads) {
    call.scratch = own_.of(thread);
    kernels_.prepare(call, 0, call.rows);
  }
  kernels_.columns(call, thread, threads);
}

void AttentionStage::begin(const Step& step) {
  next_task_.store(0, std::memory_order_relaxed);
  call_.partials = shared_.partials.data();
  call_.block_tables = step.tables(group_);
  call_.blocks_per_seq = step.blocks_per_seq;
}

void AttentionStage::run(const Step&, int thread, int threads) {
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

}  // namespace octavo

#include "program/program.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>

namespace octavo {

namespace {

constexpr int64_t kRowBlock = 16;  // rows that go through a phase's stages together

/// An op of csrc/ops with its arguments.
class OpStage final : public RowStage {
 public:
  OpStage(const RowOp& op, std::unique_ptr<std::byte[]> args) : op_(op), args_(std::move(args)) {}
  void run(const Step& step, int64_t first, int64_t last) const override { op_.run(args_.get(), step, first, last); }

 private:
  const RowOp& op_;
  std::unique_ptr<std::byte[]> args_;
};

const RowOp* find_row_op(const KernelTable& table, const std::string& name) {
  for (int64_t file = 0; file < table.num_row_ops; file++) {
    const RowOps& ops = *table.row_ops[file];
    for (int64_t i = 0; i < ops.count; i++) {
      if (name == ops.first[i].name) return ops.first + i;
    }
  }
  return nullptr;
}

}  // namespace

int64_t Program::block_bytes(const std::vector<LayerShape>& layers, int64_t block_size, KvFormat format) {
  std::map<int64_t, int64_t> used;  // by group
  int64_t most = 0;
  for (const LayerShape& layer : layers) {
    int64_t& bytes = used[layer.group];
    bytes += part_bytes(format, block_size, layer.kv_heads, layer.key_dim);
    bytes += part_bytes(format, block_size, layer.kv_heads, layer.value_dim);
    most = max_of(most, bytes);
  }
  return most + kBlockGap;
}

Program::Program(const KernelTable& kernels, std::shared_ptr<ThreadPool> pool, const Shape& shape)
    : kernels_(kernels),
      pool_(std::move(pool)),
      shape_(shape),
      block_stride_(static_cast<int64_t>(block_bytes(shape.kv_layers, shape.limits.block_size, shape.kv_format))),
      own_scratch_(pool_->threads()),
      attention_(pool_->threads()) {
  arena_ = std::make_unique<Memory>(shape.arena_floats * sizeof(float));
  cache_ = std::make_unique<Memory>(shape.limits.blocks * block_stride_);
  std::map<int64_t, int64_t> used;  // bytes of a block, by group
  const int64_t block_size = shape.limits.block_size;
  for (const auto& [group, kv_heads, key_dim, value_dim] : shape.kv_layers) {
    if (group < 0 || group >= shape.limits.groups) throw std::invalid_argument("no group " + std::to_string(group));
    char* keys = cache_->data() + used[group];
    char* values = keys + part_bytes(shape.kv_format, block_size, kv_heads, key_dim);
    used[group] = values + part_bytes(shape.kv_format, block_size, kv_heads, value_dim) - cache_->data();
    const KvLayer kv = {keys, values, block_stride_, block_size, kv_heads, key_dim, value_dim, shape.kv_format};
    layers_.push_back({group, kv});
  }
}

const Program::Layer& Program::layer(int64_t number) const {
  if (number < 0 || number >= static_cast<int64_t>(layers_.size())) {
    throw std::invalid_argument("no layer " + std::to_string(number));
  }
  return layers_[number];
}

int64_t Program::add_weights(std::vector<LinearPart> parts, const float* bias) {
  parts_.push_back(std::move(parts));
  const std::vector<LinearPart>& kept = parts_.back();
  Linear linear = {0, kept.at(0).k, static_cast<int32_t>(kept.size()), kept.data(), bias};
  for (const LinearPart& part : kept) linear.n += part.n;
  linears_.push_back(linear);
  return static_cast<int64_t>(linears_.size()) - 1;
}

void Program::begin_rows(bool per_token) {
  phases_.emplace_back();
  phases_.back().per_token = per_token;
}

void Program::add_row_stage(const std::string& name, std::unique_ptr<RowStage> stage) {
  if (phases_.empty() || phases_.back().wide) throw std::invalid_argument("begin_rows comes before row stages");
  std::string& names = phases_.back().name;
  names += names.empty() ? name : " + " + name;
  phases_.back().rows.push_back(std::move(stage));
}

void Program::add_wide_stage(const std::string& name, std::unique_ptr<WideStage> stage) {
  phases_.emplace_back();
  phases_.back().name = name;
  phases_.back().wide = std::move(stage);
}

Numbers Program::keep(std::vector<float> numbers) {
  kept_numbers_.push_back(std::move(numbers));
  return {kept_numbers_.back().data(), static_cast<int64_t>(kept_numbers_.back().size())};
}

const char* Program::keep(std::string text) {
  kept_text_.push_back(std::move(text));
  return kept_text_.back().c_str();
}

void Program::add(const std::string& kind, const FillField& fill) {
  const auto arguments = [&](const Fields& fields) {
    auto args = std::make_unique<std::byte[]>(fields.size);
    for (int64_t i = 0; i < fields.count; i++) fill(fields.first[i], args.get() + fields.first[i].offset);
    return args;
  };
  if (const RowOp* op = find_row_op(kernels_, kind)) {
    add_row_stage(kind, std::make_unique<OpStage>(*op, arguments(op->fields)));
  } else if (const StageKind* stage = find_stage_kind(kind)) {
    stage->add(*this, arguments(stage->fields).get());
  } else {
    throw std::invalid_argument("no stage '" + kind + "'");
  }
}

void Program::Phase::run(const Step& step, int thread, int threads) const {
  if (wide) {
    wide->run(step, thread, threads);
    return;
  }
  const Range mine = split(per_token ? step.tokens : step.rows, thread, threads);
  for (int64_t row = mine.first; row < mine.last; row += kRowBlock) {
    for (const auto& stage : rows) {
      if (!stage->idle(step)) stage->run(step, row, min_of(row + kRowBlock, mine.last));
    }
  }
}

bool Program::Phase::idle(const Step& step) const {
  return !wide && std::all_of(rows.begin(), rows.end(), [&](const auto& stage) { return stage->idle(step); });
}

void Program::run(const Step& step) {
  const std::lock_guard lock(one_step_);
  check_step(step, shape_.limits);
  for (auto& [shape, plan] : attention_.plans) {
    plan_attention(step, shape, pool_->threads(), plan);
    if (static_cast<int64_t>(attention_.partials.size()) < plan.partial_floats) {
      attention_.partials.resize(plan.partial_floats);
    }
  }
  for (const Phase& phase : phases_) {
    if (phase.wide) phase.wide->begin(step);
  }
  pool_->run([&](int thread, int threads) { run_phases(step, thread, threads); });
  tokens_ = step.tokens;
  rows_ = step.rows;
}

void Program::run_phases(const Step& step, int thread, int threads) {
  using Clock = std::chrono::steady_clock;
  const bool measuring = thread == 0 && !seconds_.empty();
  Clock::time_point before = measuring ? Clock::now() : Clock::time_point();
  for (size_t i = 0; i < phases_.size(); i++) {
    if (phases_[i].idle(step)) continue;  // for all threads alike
    phases_[i].run(step, thread, threads);
    if (i + 1 < phases_.size()) pool_->barrier();
    if (!measuring) continue;
    const Clock::time_point now = Clock::now();
    seconds_[i] += std::chrono::duration<double>(now - before).count();
    before = now;
  }
}

void Program::measure(bool on) {
  const std::lock_guard lock(one_step_);
  seconds_.assign(on ? phases_.size() : 0, 0.0);
}

std::vector<std::pair<std::string, double>> Program::measurements() const {
  std::vector<std::pair<std::string, double>> result;
  for (size_t i = 0; i < seconds_.size(); i++) result.emplace_back(phases_[i].name, seconds_[i]);
  return result;
}

void Program::copy_blocks(const std::vector<std::pair<int64_t, int64_t>>& pairs) {
  const std::lock_guard lock(one_step_);
  const int64_t blocks = shape_.limits.blocks;
  for (const auto& [source, destination] : pairs) {
    if (source < 0 || source >= blocks || destination < 0 || destination >= blocks) {
      throw std::invalid_argument("copy of block " + std::to_string(source) + " to " + std::to_string(destination) +
                                  ": there are " + std::to_string(blocks));
    }
  }
  for (const auto& [source, destination] : pairs) {
    if (source == destination) continue;
    std::memcpy(cache_->data() + destination * block_stride_, cache_->data() + source * block_stride_, block_stride_);
  }
}

}  // namespace octavo

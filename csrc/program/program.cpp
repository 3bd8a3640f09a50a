#include "program/program.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>

namespace octavo {

namespace {

constexpr int64_t kRowBlock = 16;  // rows that go through a phase's stages together

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

void Program::add_row_stage(const char* name, std::unique_ptr<RowStage> stage) {
  if (phases_.empty() || phases_.back().wide) throw std::invalid_argument("begin_rows comes before row stages");
  std::string& names = phases_.back().name;
  names += names.empty() ? name : std::string(" + ") + name;
  phases_.back().rows.push_back(std::move(stage));
}

void Program::add_wide_stage(const char* name, std::unique_ptr<WideStage> stage) {
  phases_.emplace_back();
  phases_.back().name = name;
  phases_.back().wide = std::move(stage);
}

void Program::add_embed(int64_t table, float scale, Place out) {
  add_row_stage("embed", std::make_unique<EmbedStage>(kernels_, linears_.at(table), scale, view(out)));
}

void Program::add_rms_norm(Place x, const float* weight, float eps, Place out, int64_t groups, int64_t width) {
  add_row_stage("rms_norm", std::make_unique<RmsNormStage>(*kernels_.elementwise, view(x), weight, eps, view(out),
                                                           groups, width));
}

void Program::add_add(Place a, Place b, Place out, int64_t width) {
  add_row_stage("add", std::make_unique<AddStage>(*kernels_.elementwise, view(a), view(b), view(out), width));
}

void Program::add_silu_mul(Place x, Place out, int64_t width) {
  add_row_stage("silu_mul", std::make_unique<GateStage>(kernels_.elementwise->silu_mul, view(x), view(out), width));
}

void Program::add_gelu_mul(Place x, Place out, int64_t width) {
  add_row_stage("gelu_mul", std::make_unique<GateStage>(kernels_.elementwise->gelu_mul, view(x), view(out), width));
}

void Program::add_gather(Place x, Place out, int64_t width) {
  add_row_stage("gather", std::make_unique<GatherStage>(view(x), view(out), width));
}

void Program::add_rope_table(std::vector<float> inv_freq, float factor, Place out) {
  add_row_stage("rope_table", std::make_unique<RopeTableStage>(std::move(inv_freq), factor, view(out)));
}

void Program::add_rope(Place x, Place out, Place table, int64_t heads, int64_t head_dim, int64_t pairs) {
  add_row_stage("rope", std::make_unique<RopeStage>(*kernels_.elementwise, view(x), view(out), view(table), heads,
                                                    head_dim, pairs));
}

void Program::add_write_kv(int64_t number, Place k, Place v) {
  const auto& [group, kv] = layer(number);
  add_row_stage("write_kv", std::make_unique<WriteKvStage>(*kernels_.attention, group, kv, view(k), view(v)));
}

LinearCall Program::linear_call(const LinearInput& input) const {
  LinearCall call = {};
  call.linear = &linears_.at(input.linear);
  call.x = view(input.x).data;
  call.ldx = input.x.second;
  call.norm = input.norm;
  call.eps = input.eps;
  call.scratch = arena_->at<float>(0) + input.scratch;
  return call;
}

void Program::add_linear_prepare(const LinearInput& input) {
  const char* name = input.norm ? "rms_norm and prepare" : "prepare";
  add_row_stage(name, std::make_unique<LinearPrepareStage>(*kernels_.linear, own_scratch_, linear_call(input),
                                                           input.per_token));
}

void Program::add_linear(const LinearInput& input, Place out, const Place* residual, const Place* maxima, Gate gate) {
  LinearCall call = linear_call(input);
  const Linear& linear = *call.linear;
  call.y = view(out).data;
  call.ldy = out.second;
  call.gate = gate;
  if (gate != Gate::none && (linear.num_parts > 1 || linear.n % kPanelOutputs != 0 || linear.bias || residual || maxima)) {
    throw std::invalid_argument("a gated linear has one part of whole panels and nothing is added to it");
  }
  if (residual) {
    call.residual = view(*residual).data;
    call.ldr = residual->second;
  }
  if (maxima && linear.num_parts == 1) {
    logit_maxima_ = view(*maxima);
    call.maxima = logit_maxima_.data;
    call.ldm = logit_maxima_.stride;
  }
  own_scratch_.reserve(kernels_.linear->scratch_bytes(linear, own_scratch_.threads));
  const char* names[] = {"linear", "linear and silu_mul", "linear and gelu_mul"};
  add_wide_stage(names[static_cast<int>(gate)],
                 std::make_unique<LinearStage>(*kernels_.linear, own_scratch_, call, input.per_token));
}

void Program::add_attention(int64_t number, Place q, Place out, int64_t heads, float scale,
                            std::optional<int64_t> window) {
  const auto& [group, kv] = layer(number);
  if (window && *window < 1) throw std::invalid_argument("window " + std::to_string(*window) + " of no token");
  AttentionCall call = {};
  call.kv = kv;
  call.q = view(q).data;
  call.ldq = q.second;
  call.out = view(out).data;
  call.ldo = out.second;
  call.group = heads / kv.kv_heads;
  call.scale = scale;
  call.window = window.value_or(kNoWindow);
  attention_.scratch.reserve(kernels_.attention->scratch_bytes(call.group, kv.key_dim, kv.value_dim));
  add_wide_stage("attention", std::make_unique<AttentionStage>(*kernels_.attention, *pool_, attention_, group, call));
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

// Linears: activations into the format that the weights want, a barrier, and each thread's share of the outputs.
#include <cstring>
#include <stdexcept>

#include "program/program.h"
#include "stages/stage.h"

namespace octavo {
namespace {

/// What a linear reads: x, through an rms_norm of these weights if they are not null; and where the stage
/// `linear_prepare` leaves it converted.
struct Prepare {
  const Linear* linear;
  View x;
  const float* norm;
  float eps;
  View scratch;
  bool per_token;
};
constexpr Field kPrepare[] = {OCTAVO_FIELD(Prepare, linear), OCTAVO_FIELD(Prepare, x),
                              OCTAVO_FIELD(Prepare, norm),   OCTAVO_FIELD(Prepare, eps),
                              OCTAVO_FIELD(Prepare, scratch), OCTAVO_FIELD(Prepare, per_token)};

/// `residual` may be none, and so may `maxima`, where the linear that makes the logits puts their maxima. `out` is not
/// where x is. `gate`: "", "silu_mul" or "gelu_mul".
struct Columns {
  const Linear* linear;
  View x;
  const float* norm;
  float eps;
  View scratch;
  bool per_token;
  View out, residual, maxima;
  const char* gate;
};
constexpr Field kColumns[] = {
    OCTAVO_FIELD(Columns, linear),  OCTAVO_FIELD(Columns, x),         OCTAVO_FIELD(Columns, norm),
    OCTAVO_FIELD(Columns, eps),     OCTAVO_FIELD(Columns, scratch),   OCTAVO_FIELD(Columns, per_token),
    OCTAVO_FIELD(Columns, out),     OCTAVO_FIELD(Columns, residual),  OCTAVO_FIELD(Columns, maxima),
    OCTAVO_FIELD(Columns, gate)};

template <class Args>
LinearCall call_of(const Args& args) {
  LinearCall call = {};
  call.linear = args.linear;
  call.x = args.x.data;
  call.ldx = args.x.stride;
  call.norm = args.norm;
  call.eps = args.eps;
  call.scratch = args.scratch.data;
  return call;
}

LinearCall with_rows(LinearCall call, const Step& step, bool per_token) {
  call.rows = per_token ? step.tokens : step.rows;
  return call;
}

/// A linear's activations in the format its weights want, for all threads; of many rows. With as many rows as threads
/// or fewer, each thread converts them all for itself (`own`): it takes no longer than to wait for another who does it,
/// and needs no barrier.
class PrepareStage final : public RowStage {
 public:
  PrepareStage(const LinearKernels& kernels, const ThreadScratch& own, const LinearCall& call, bool per_token)
      : kernels_(kernels), own_(own), call_(call), per_token_(per_token) {}

  void run(const Step& step, int64_t first, int64_t last) const override {
    kernels_.prepare(with_rows(call_, step, per_token_), first, last);
  }
  bool idle(const Step& step) const override { return with_rows(call_, step, per_token_).rows <= own_.threads; }

 private:
  const LinearKernels& kernels_;
  const ThreadScratch& own_;
  LinearCall call_;
  bool per_token_;
};

void add_prepare(Program& program, const Prepare& args) {
  const char* name = args.norm ? "rms_norm and prepare" : "prepare";
  program.add_row_stage(name, std::make_unique<PrepareStage>(*program.kernels().linear, program.own_scratch(),
                                                             call_of(args), args.per_token));
}

class ColumnsStage final : public WideStage {
 public:
  ColumnsStage(const LinearKernels& kernels, const ThreadScratch& own, const LinearCall& call, bool per_token)
      : kernels_(kernels), own_(own), call_(call), per_token_(per_token) {}

  void run(const Step& step, int thread, int threads) override {
    LinearCall call = with_rows(call_, step, per_token_);
    if (call.rows == 0) return;
    if (call.rows <= own_.threads) {
      call.scratch = own_.of(thread);
      kernels_.prepare(call, 0, call.rows);
    }
    kernels_.columns(call, thread, threads);
  }

 private:
  const LinearKernels& kernels_;
  const ThreadScratch& own_;
  LinearCall call_;
  bool per_token_;
};

Gate gate_of(const std::string& op) {
  if (op.empty()) return Gate::none;
  if (op == "silu_mul") return Gate::silu;
  if (op == "gelu_mul") return Gate::gelu;
  throw std::invalid_argument("no gate '" + op + "'");
}

void add_columns(Program& program, const Columns& args) {
  LinearCall call = call_of(args);
  const Linear& linear = *args.linear;
  const std::string gate = args.gate;
  call.y = args.out.data;
  call.ldy = args.out.stride;
  call.gate = gate_of(gate);
  call.residual = args.residual.data;
  call.ldr = args.residual.stride;
  if (!gate.empty() && (linear.num_parts > 1 || linear.n % kPanelOutputs != 0 || linear.bias || args.residual.data ||
                        args.maxima.data)) {
    throw std::invalid_argument("a gated linear has one part of whole panels and nothing is added to it");
  }
  if (args.maxima.data && linear.num_parts == 1) {
    program.set_logit_maxima(args.maxima);
    call.maxima = args.maxima.data;
    call.ldm = args.maxima.stride;
  }
  const LinearKernels& kernels = *program.kernels().linear;
  program.own_scratch().reserve(kernels.scratch_bytes(linear, program.own_scratch().threads));
  program.add_wide_stage(gate.empty() ? "linear" : "linear and " + gate,
                         std::make_unique<ColumnsStage>(kernels, program.own_scratch(), call, args.per_token));
}

constexpr StageKind kKinds[] = {stage_kind<Prepare, add_prepare>("linear_prepare", kPrepare),
                                stage_kind<Columns, add_columns>("linear", kColumns)};

}  // namespace

const StageKinds linear_stages = stage_kinds(kKinds);

}  // namespace octavo

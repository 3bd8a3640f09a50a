// Rows that come out of tables: embeddings, and the cosines and sines of positions.
#include <cmath>

#include "program/program.h"
#include "stages/stage.h"

namespace octavo {
namespace {

/// Rows of the table of weights, picked by token_ids.
struct Embed {
  const Linear* table;
  View out;
};
constexpr Field kEmbed[] = {OCTAVO_FIELD(Embed, table), OCTAVO_FIELD(Embed, out)};

class EmbedStage final : public RowStage {
 public:
  EmbedStage(const LinearKernels& kernels, const Embed& args) : kernels_(kernels), args_(args) {}

  void run(const Step& step, int64_t first, int64_t last) const override {
    kernels_.embed_rows(*args_.table, step.token_ids + first, last - first, args_.out.row(first), args_.out.stride);
  }

 private:
  const LinearKernels& kernels_;
  Embed args_;
};

void add_embed(Program& program, const Embed& args) {
  program.add_row_stage("embed", std::make_unique<EmbedStage>(*program.kernels().linear, args));
}

/// Cosines and sines of a token's position, once per step for all layers: [T, pairs | pairs].
struct RopeTable {
  Numbers inv_freq;
  float factor;
  View out;
};
constexpr Field kRopeTable[] = {OCTAVO_FIELD(RopeTable, inv_freq), OCTAVO_FIELD(RopeTable, factor),
                                OCTAVO_FIELD(RopeTable, out)};

class RopeTableStage final : public RowStage {
 public:
  explicit RopeTableStage(const RopeTable& args) : args_(args) {}

  void run(const Step& step, int64_t first, int64_t last) const override {
    const auto& [inv_freq, pairs] = args_.inv_freq;
    for (int64_t i = first; i < last; i++) {
      float* cosine = args_.out.row(i);
      float* sine = cosine + pairs;
      for (int64_t j = 0; j < pairs; j++) {
        const double angle = static_cast<double>(step.positions[i]) * inv_freq[j];
        cosine[j] = static_cast<float>(std::cos(angle)) * args_.factor;
        sine[j] = static_cast<float>(std::sin(angle)) * args_.factor;
      }
    }
  }

 private:
  RopeTable args_;
};

void add_rope_table(Program& program, const RopeTable& args) {
  program.add_row_stage("rope_table", std::make_unique<RopeTableStage>(args));
}

constexpr StageKind kKinds[] = {stage_kind<Embed, add_embed>("embed", kEmbed),
                                stage_kind<RopeTable, add_rope_table>("rope_table", kRopeTable)};

}  // namespace

const StageKinds tables_stages = stage_kinds(kKinds);

}  // namespace octavo

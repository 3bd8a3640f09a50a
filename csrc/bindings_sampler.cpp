// Sampling of the last step's logits, or of any other, for the sampler's tests.
#include "bindings_sampler.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <stdexcept>

#include "isa/select.h"
#include "program/program.h"
#include "program/sampler.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

template <class T, int Dimensions>
using Array = nb::ndarray<T, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;
using Logits = Array<const float, 2>;
using Bits = Array<const uint32_t, 2>;

Rows rows_of(const Logits& array) {
  return {array.data(), int64_t(array.shape(0)), int64_t(array.shape(1))};
}

/// Results as they are in SampleResult; their sizes follow from `rows`, the bytes of SampleRows.
void sample(Sampler& sampler, Rows logits, const std::optional<Logits>& adjusted, const std::optional<Bits>& masks,
            const Array<const uint8_t, 1>& rows, const Array<int32_t, 1>& token_ids, const Array<int32_t, 1>& ranks, const Array<int32_t, 2>& logprob_ids,
            const Array<double, 2>& logprobs) {
  const size_t count = token_ids.shape(0), width = logprob_ids.shape(1);
  if (rows.shape(0) != count * sizeof(SampleRow) || ranks.shape(0) != count || logprob_ids.shape(0) != count ||
      logprobs.shape(0) != count || logprobs.shape(1) != width) {
    throw std::invalid_argument("rows and results differ in length");
  }
  std::vector<SampleRow> wanted(count);
  std::memcpy(wanted.data(), rows.data(), rows.shape(0));
  const SampleResult result = {token_ids.data(), ranks.data(), logprob_ids.data(), logprobs.data(), int64_t(width)};
  const Rows others = adjusted ? rows_of(*adjusted) : Rows{nullptr, 0, 0};
  const Masks bits = masks ? Masks{masks->data(), int64_t(masks->shape(0)), int64_t(masks->shape(1))} : Masks{};
  const nb::gil_scoped_release release;
  sampler.sample(logits, others, bits, wanted, result);
}

}  // namespace

void bind_sampler(nb::module_& module) {
  using Bytes = Array<const uint8_t, 1>;
  using Ids = Array<int32_t, 1>;
  using IdRows = Array<int32_t, 2>;
  using Doubles = Array<double, 2>;
  nb::class_<Sampler>(module, "Sampler", "Rows of logits to tokens; the best kernels of this machine by default.")
      .def("__init__",
           [](Sampler* self, std::shared_ptr<ThreadPool> pool, const std::string& isa) {
             new (self) Sampler(*select_kernels(isa)->sampling, std::move(pool));
           },
           "pool"_a, "isa"_a = "")
      .def("sample",
           [](Sampler& self, const Logits& logits, const std::optional<Logits>& adjusted, const std::optional<Bits>& masks,
              const Bytes& rows, const Ids& token_ids, const Ids& ranks, const IdRows& logprob_ids,
              const Doubles& logprobs) {
             sample(self, rows_of(logits), adjusted, masks, rows, token_ids, ranks, logprob_ids, logprobs);
           },
           "logits"_a, "adjusted"_a.none(), "masks"_a.none(), "rows"_a, "token_ids"_a, "ranks"_a, "logprob_ids"_a, "logprobs"_a)
      .def("sample_step",
           [](Sampler& self, const Program& program, const std::optional<Logits>& adjusted, const std::optional<Bits>& masks,
              const Bytes& rows, const Ids& token_ids, const Ids& ranks, const IdRows& logprob_ids,
              const Doubles& logprobs) {
             const View maxima = program.logit_maxima();
             const Rows logits = {program.logits(), program.rows(), program.vocab_size(), maxima.data, maxima.stride};
             sample(self, logits, adjusted, masks, rows, token_ids, ranks, logprob_ids, logprobs);
           },
           "program"_a, "adjusted"_a.none(), "masks"_a.none(), "rows"_a, "token_ids"_a, "ranks"_a, "logprob_ids"_a, "logprobs"_a,
           "Of the program's last step.");
  module.def("uniform", &uniform, "seed"_a, "sample_index"_a, "position"_a);
}

}  // namespace octavo

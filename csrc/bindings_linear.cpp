// Linear layers by themselves, for the kernels' tests and measurements: the engine runs them inside a program.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings_linear.h"
#include "isa/select.h"
#include "octavo/partition.h"
#include "program/memory.h"
#include "program/thread_pool.h"

namespace nb = nanobind;

namespace octavo {
namespace {

template <class T, int Dimensions>
using Array = nb::ndarray<const T, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;
using FloatMatrix = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

FloatMatrix new_matrix(size_t rows, size_t columns) {
  float* data = new float[rows * columns];
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return FloatMatrix(data, {rows, columns}, owner);
}

/// A linear on one kernel table and its own threads.
class LinearProbe {
 public:
  LinearProbe(const std::string& isa, int threads) : kernels_(*select_kernels(isa)->linear), pool_(threads) {}

  /// Packs one part. The addresses are those of arrays as LinearSource has them (0: null).
  void add_part(const PartShape& shape, uintptr_t data, uintptr_t scale, uintptr_t minimum, uintptr_t scale_unit,
                uintptr_t minimum_unit) {
    if (linear_.num_parts > 0 && shape.k != linear_.k) throw std::invalid_argument("parts differ in their inputs");
    const LinearSource source = linear_source(shape, data, scale, minimum, scale_unit, minimum_unit);
    const size_t bytes = kernels_.packed_bytes(shape);
    memory_.push_back(std::make_unique<Memory>(bytes));
    void* panels = memory_.back()->data();
    const int64_t count = ceil_div(shape.n, kPanelOutputs);
    pool_.run([&](int thread, int threads) {
      const Range mine = split(count, thread, threads);
      kernels_.pack(source, panels, mine.first, mine.last);
    });
    parts_.push_back({shape, panels});
    bytes_ += bytes;
    linear_ = {linear_.n + shape.n, shape.k, int32_t(parts_.size()), parts_.data(), nullptr};
  }

  size_t packed_bytes() const { return bytes_; }

  /// x [M, K] W^T + bias + residual as a new array [M, N].
  FloatMatrix run(const Array<float, 2>& x, const nb::object& bias, const nb::object& residual) {
    FloatMatrix y = new_matrix(x.shape(0), size_t(linear_.n));
    LinearCall call = call_for(x, y.data());
    Array<float, 1> bias_array;
    Array<float, 2> residual_array;
    if (!bias.is_none()) bias_array = nb::cast<Array<float, 1>>(bias);
    if (!residual.is_none()) residual_array = nb::cast<Array<float, 2>>(residual);
    if (!bias.is_none() && int64_t(bias_array.shape(0)) != linear_.n) throw std::invalid_argument("bias is not [N]");
    linear_.bias = bias.is_none() ? nullptr : bias_array.data();
    if (!residual.is_none()) {
      if (residual_array.shape(0) != x.shape(0) || int64_t(residual_array.shape(1)) != linear_.n) {
        throw std::invalid_argument("residual is not [M, N]");
      }
      std::memcpy(y.data(), residual_array.data(), y.nbytes());  // the kernels must allow y to be the residual
      call.residual = y.data();
      call.ldr = linear_.n;
    }
    run_call(call);
    linear_.bias = nullptr;
    return y;
  }

  /// Rows of W as float32 [count, K].
  FloatMatrix embed(const Array<int32_t, 1>& ids) const {
    for (size_t i = 0; i < ids.shape(0); ++i) {
      if (ids.data()[i] < 0 || ids.data()[i] >= linear_.n) throw std::invalid_argument("row beyond the table");
    }
    FloatMatrix out = new_matrix(ids.shape(0), size_t(linear_.k));
    kernels_.embed_rows(linear_, ids.data(), int64_t(ids.shape(0)), out.data(), linear_.k);
    return out;
  }

  /// Seconds of one pass over `copies` copies of the weights, the best of `repeats`. The copies keep the caches cold.
  double time(const Array<float, 2>& x, int64_t copies, int64_t repeats) {
    std::vector<std::unique_ptr<Memory>> panels;
    std::vector<std::vector<LinearPart>> parts(size_t(copies), parts_);
    std::vector<Linear> linears(size_t(copies), linear_);
    for (size_t i = 0; i < size_t(copies); ++i) {
      for (size_t p = 0; p < parts_.size(); ++p) {
        panels.push_back(std::make_unique<Memory>(memory_[p]->size()));
        std::memcpy(panels.back()->data(), memory_[p]->data(), memory_[p]->size());
        parts[i][p].panels = panels.back()->data();
      }
      linears[i].parts = parts[i].data();
    }
    std::vector<float> y(x.shape(0) * size_t(linear_.n));
    LinearCall call = call_for(x, y.data());
    double best = 1e30;
    nb::gil_scoped_release release;
    for (int64_t repeat = 0; repeat < repeats; ++repeat) {
      const double start = seconds();
      for (const Linear& linear : linears) {
        call.linear = &linear;
        run_call(call);
      }
      best = std::min(best, (seconds() - start) / double(copies));
    }
    return best;
  }

  /// Multiply-adds a second of the format's innermost instruction, all threads together, the best of ten tries.
  double peak(int format, int64_t rounds) {
    std::vector<int64_t> counts(size_t(pool_.threads()));
    double best = 0;
    for (int i = 0; i < 10; ++i) {
      const double start = seconds();
      pool_.run([&](int thread, int) {
        counts[size_t(thread)] = kernels_.multiply_adds(WeightFormat(format), rounds);
      });
      best = std::max(best, double(counts[0]) * pool_.threads() / (seconds() - start));
    }
    return best;
  }

  /// Bytes a second of reading `bytes` of memory that no cache holds, all threads together.
  double read_bandwidth(size_t bytes) {
    const Memory memory(bytes);
    std::memset(memory.data(), 1, bytes);
    std::vector<uint64_t> sums(size_t(pool_.threads()) * 8);
    double best = 0;
    for (int repeat = 0; repeat < 4; ++repeat) {
      const double start = seconds();
      pool_.run([&](int thread, int threads) {
        const Range mine = split(int64_t(bytes / 64), thread, threads);
        const uint64_t* line = memory.at<uint64_t>(size_t(mine.first) * 64);
        uint64_t sum[8] = {};
        for (int64_t i = mine.first; i < mine.last; ++i, line += 8) {
          __builtin_prefetch(line + 512);
          for (int j = 0; j < 8; ++j) sum[j] ^= line[j];
        }
        std::memcpy(&sums[size_t(thread) * 8], sum, sizeof sum);
      });
      best = std::max(best, double(bytes) / (seconds() - start));
    }
    return best;
  }

 private:
  LinearCall call_for(const Array<float, 2>& x, float* y) {
    if (int64_t(x.shape(1)) != linear_.k) throw std::invalid_argument("x is not [M, K]");
    const int64_t rows = int64_t(x.shape(0));
    scratch_ = std::make_unique<Memory>(kernels_.scratch_bytes(linear_, rows));
    return {&linear_, rows, x.data(), linear_.k, y, linear_.n, nullptr, 0, scratch_->data(), nullptr, 0, nullptr, 0.0f, Gate::none};
  }

  void run_call(const LinearCall& call) {
    pool_.run([&](int thread, int threads) {
      const Range rows = split(call.rows, thread, threads);
      kernels_.prepare(call, rows.first, rows.last);
      pool_.barrier();
      kernels_.columns(call, thread, threads);
    });
  }

  const LinearKernels& kernels_;
  ThreadPool pool_;
  std::vector<std::unique_ptr<Memory>> memory_;  // of each part
  std::vector<LinearPart> parts_;
  Linear linear_{};
  size_t bytes_ = 0;
  std::unique_ptr<Memory> scratch_;
};

}  // namespace

void bind_linear(nb::module_& module) {
  nb::class_<LinearProbe>(module, "LinearProbe")
      .def(nb::init<const std::string&, int>(), nb::arg("isa") = "", nb::arg("threads") = 1)
      .def("add_part", &LinearProbe::add_part)
      .def_prop_ro("packed_bytes", &LinearProbe::packed_bytes)
      .def("run", &LinearProbe::run, nb::arg("x"), nb::arg("bias") = nb::none(), nb::arg("residual") = nb::none())
      .def("embed", &LinearProbe::embed)
      .def("time", &LinearProbe::time)
      .def("peak", &LinearProbe::peak)
      .def("read_bandwidth", &LinearProbe::read_bandwidth);
}

}  // namespace octavo

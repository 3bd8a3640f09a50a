// octavo.backends.cpu._kernels: the native side of the CPU backend. Addresses cross as integers; the Python side keeps
// what they point to alive.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bindings_linear.h"
#include "bindings_sampler.h"
#include "isa/select.h"
#include "program/memory.h"
#include "program/program.h"
#include "program/thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

template <class T>
const T* pointer(uintptr_t address) {
  return reinterpret_cast<const T*>(address);
}

/// A C-contiguous int32 array, held for the length of a call. Several times cheaper than nb::ndarray.
class Int32Array {
 public:
  Int32Array(nb::handle object, const char* name, int dimensions) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) throw nb::python_error();
    const char kind = buffer_.format ? buffer_.format[0] : 'B';
    if (buffer_.ndim == dimensions && buffer_.itemsize == 4 && (kind == 'i' || kind == 'l')) return;
    PyBuffer_Release(&buffer_);
    throw std::invalid_argument(std::string(name) + " is not an int32 array of " + std::to_string(dimensions) +
                                " dimensions");
  }
  ~Int32Array() { PyBuffer_Release(&buffer_); }
  Int32Array(const Int32Array&) = delete;
  Int32Array& operator=(const Int32Array&) = delete;

  const int32_t* data() const { return static_cast<const int32_t*>(buffer_.buf); }
  int64_t size(int axis) const { return buffer_.shape[axis]; }
  void expect(bool ok, const char* rule) const {
    if (!ok) throw std::invalid_argument(rule);
  }

 private:
  Py_buffer buffer_;
};

void run_step(Program& program, nb::handle token_ids, nb::handle positions, nb::handle slot_mapping,
              nb::handle query_start_loc, nb::handle seq_lens, nb::handle block_tables, nb::handle logit_rows) {
  const Int32Array ids(token_ids, "token_ids", 1), places(positions, "positions", 1);
  const Int32Array slots(slot_mapping, "slot_mapping", 1), starts(query_start_loc, "query_start_loc", 1);
  const Int32Array lengths(seq_lens, "seq_lens", 1), tables(block_tables, "block_tables", 2);
  const Int32Array rows(logit_rows, "logit_rows", 1);
  ids.expect(places.size(0) == ids.size(0) && slots.size(0) == program.groups() * ids.size(0),
             "token_ids, positions and slot_mapping differ in length");
  starts.expect(starts.size(0) == lengths.size(0) + 1 && tables.size(0) == program.groups() * lengths.size(0),
                "query_start_loc, seq_lens and block_tables differ in the number of sequences");
  const Step step = {ids.size(0),  rows.size(0),  lengths.size(0), tables.size(1), ids.data(),    places.data(),
                     slots.data(), starts.data(), lengths.data(),  tables.data(),  rows.data()};
  const nb::gil_scoped_release release;
  program.run(step);
}

/// A kernel table with the packing of weights.
struct Kernels {
  const KernelTable* table;

  size_t packed_bytes(const PartShape& shape) const { return table->linear->packed_bytes(shape); }

  void pack(ThreadPool& pool, const PartShape& shape, uintptr_t panels, uintptr_t data, uintptr_t scale,
            uintptr_t minimum, uintptr_t scale_unit, uintptr_t minimum_unit) const {
    const LinearSource source = linear_source(shape, data, scale, minimum, scale_unit, minimum_unit);
    pool.run([&](int thread, int threads) {
      const Range mine = split(ceil_div(shape.n, kPanelOutputs), thread, threads);
      table->linear->pack(source, reinterpret_cast<void*>(panels), mine.first, mine.last);
    });
  }

  size_t scratch_bytes(const std::vector<LinearPart>& parts, int64_t rows) const {
    Linear linear = {0, parts.at(0).k, static_cast<int32_t>(parts.size()), parts.data(), nullptr};
    for (const LinearPart& part : parts) linear.n += part.n;
    return table->linear->scratch_bytes(linear, rows);
  }

  nb::frozenset row_ops() const {
    nb::set names;
    for (int64_t file = 0; file < table->num_row_ops; file++) {
      const RowOps& ops = *table->row_ops[file];
      for (int64_t i = 0; i < ops.count; i++) names.add(ops.first[i].name);
    }
    return nb::frozenset(names);
  }
};

void bind_weights(nb::module_& m) {
  nb::class_<Memory>(m, "Memory", "Zeroed memory, touched lazily, aligned for kernels.")
      .def(nb::init<size_t>(), "num_bytes"_a)
      .def_prop_ro("address", [](const Memory& memory) { return reinterpret_cast<uintptr_t>(memory.data()); })
      .def_prop_ro("num_bytes", &Memory::size);
  nb::class_<PartShape>(m, "PartShape", "What the numbers of a part are; see csrc/include/octavo/linear.h.")
      .def("__init__",
           [](PartShape* self, int32_t format, int64_t n, int64_t k, int32_t group, bool centred, bool has_minimum,
              int32_t scales) {
             new (self) PartShape{WeightFormat(format), n, k, group, centred, has_minimum, ScaleKind(scales)};
           },
           "format"_a, "n"_a, "k"_a, "group"_a = 0, "centred"_a = false, "has_minimum"_a = false, "scales"_a = 0);
  nb::class_<LinearPart>(m, "LinearPart", "Packed weights at an address that the caller keeps alive.")
      .def("__init__",
           [](LinearPart* self, const PartShape& shape, uintptr_t panels) {
             new (self) LinearPart{shape, pointer<void>(panels)};
           },
           "shape"_a, "panels"_a);
  nb::class_<Kernels>(m, "Kernels", "The kernels of one instruction set; the best one of this machine by default.")
      .def("__init__", [](Kernels* self, const std::string& isa) { new (self) Kernels{select_kernels(isa)}; },
           "isa"_a = "")
      .def_prop_ro("isa", [](const Kernels& k) { return k.table->isa; })
      .def_prop_ro("features", [](const Kernels& k) { return k.table->features; })
      .def_prop_ro("row_ops", &Kernels::row_ops, "Names of the ops in csrc/ops.")
      .def("packed_bytes", &Kernels::packed_bytes, "shape"_a)
      .def("pack", &Kernels::pack, "pool"_a, "shape"_a, "panels"_a, "data"_a, "scale"_a, "minimum"_a,
           "scale_unit"_a, "minimum_unit"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("scratch_bytes", &Kernels::scratch_bytes, "parts"_a, "rows"_a);
  m.def("usable_isas", [] {
    std::vector<std::string> names;
    for (const KernelTable* table : usable_kernels()) names.emplace_back(table->isa);
    return names;
  }, "Names of the instruction sets that were built and that this machine runs, best first.");
}

/// The arguments of a stage, one by one. Each field must be among them, and nothing else.
class Arguments {
 public:
  Arguments(Program& program, std::string kind, nb::dict values)
      : program_(program), kind_(std::move(kind)), values_(std::move(values)) {}

  void fill(const Field& field, void* to) {
    if (!values_.contains(field.name)) throw std::invalid_argument(kind_ + " lacks " + field.name);
    read(field.type, values_[field.name], to);
    filled_++;
  }

  void check_all_used() const {
    if (filled_ != values_.size()) throw std::invalid_argument(kind_ + " has no room for all its arguments");
  }

 private:
  template <class T>
  static void put(void* to, T value) {
    new (to) T(value);
  }

  void read(FieldType type, nb::handle value, void* to) const {
    switch (type) {
      case FieldType::view:
        return put(to, value.is_none() ? View{nullptr, 0} : program_.view(nb::cast<Program::Place>(value)));
      case FieldType::vector:
        return put(to, pointer<float>(nb::cast<uintptr_t>(value)));
      case FieldType::linear:
        return put(to, program_.linear(nb::cast<int64_t>(value)));
      case FieldType::numbers:
        return put(to, program_.keep(nb::cast<std::vector<float>>(value)));
      case FieldType::text:
        return put(to, program_.keep(nb::cast<std::string>(value)));
      case FieldType::real:
        return put(to, nb::cast<float>(value));
      case FieldType::integer:
        return put(to, nb::cast<int64_t>(value));
      case FieldType::boolean:
        return put(to, nb::cast<bool>(value));
    }
  }

  Program& program_;
  std::string kind_;
  nb::dict values_;
  size_t filled_ = 0;
};

void add_stage(Program& program, const std::string& kind, const nb::dict& values) {
  Arguments arguments(program, kind, values);
  program.add(kind, [&](const Field& field, void* to) { arguments.fill(field, to); });
  arguments.check_all_used();
}

/// Rows of the last step at a place of the arena, as a view.
nb::ndarray<nb::numpy, float, nb::ndim<2>> rows_at(nb::object self, Program::Place place, int64_t width,
                                                   bool per_token) {
  Program& program = nb::cast<Program&>(self);
  const View view = program.view(place);
  const size_t shape[2] = {static_cast<size_t>(per_token ? program.tokens() : program.rows()),
                           static_cast<size_t>(width)};
  const int64_t strides[2] = {view.stride, 1};
  return {view.data, 2, shape, self, strides};
}

KvFormat kv_format_of(const std::string& name) {
  constexpr std::pair<const char*, KvFormat> kNames[] = {{"bfloat16", KvFormat::kBf16},
                                                         {"int8", KvFormat::kInt8},
                                                         {"fp8_e4m3", KvFormat::kE4m3},
                                                         {"fp8_e5m2", KvFormat::kE5m2}};
  for (const auto& [known, format] : kNames) {
    if (name == known) return format;
  }
  throw std::invalid_argument("no KV format '" + name + "'");
}

using KvNumbers = std::tuple<int64_t, int64_t, int64_t, int64_t>;  // of a Program::LayerShape, in order

std::vector<Program::LayerShape> layer_shapes(const std::vector<KvNumbers>& layers) {
  std::vector<Program::LayerShape> shapes;
  for (const auto& [group, kv_heads, key_dim, value_dim] : layers) {
    shapes.push_back({group, kv_heads, key_dim, value_dim});
  }
  return shapes;
}

void bind_program(nb::module_& m) {
  nb::class_<ThreadPool>(m, "ThreadPool")
      .def(nb::init<int>(), "threads"_a)
      .def_prop_ro("threads", &ThreadPool::threads);
  nb::class_<Program>(m, "Program")
      .def("__init__",
           [](Program* self, const Kernels& kernels, std::shared_ptr<ThreadPool> pool, int64_t tokens, int64_t rows,
              int64_t sequences, int64_t blocks_per_seq, int64_t blocks, int64_t block_size, int64_t vocab_size,
              int64_t max_position, const std::vector<KvNumbers>& kv_layers, int64_t groups, int64_t arena_floats,
              const std::string& kv_format) {
             const StepLimits limits = {tokens, rows,       sequences,  blocks_per_seq,
                                        blocks, block_size, vocab_size, max_position,
                                        groups};
             new (self) Program(*kernels.table, std::move(pool),
                                {limits, layer_shapes(kv_layers), arena_floats, kv_format_of(kv_format)});
           },
           "kernels"_a, "pool"_a, nb::kw_only(), "tokens"_a, "rows"_a, "sequences"_a, "blocks_per_seq"_a, "blocks"_a,
           "block_size"_a, "vocab_size"_a, "max_position"_a, "kv_layers"_a, "groups"_a, "arena_floats"_a, "kv_format"_a = "bfloat16")
      .def("add_weights",
           [](Program& p, std::vector<LinearPart> parts, uintptr_t bias) {
             return p.add_weights(std::move(parts), pointer<float>(bias));
           },
           "parts"_a, "bias"_a)
      .def("begin_rows", &Program::begin_rows, "per_token"_a)
      .def("add", &add_stage, "kind"_a, "args"_a, "A stage by name; ValueError where its arguments are not its own.")
      .def("set_logits", &Program::set_logits, "logits"_a)
      .def("run", &run_step, "token_ids"_a, "positions"_a, "slot_mapping"_a, "query_start_loc"_a, "seq_lens"_a,
           "block_tables"_a, "logit_rows"_a, "One step; ValueError when it does not fit the limits.")
      .def("rows_at", &rows_at, "place"_a, "width"_a, "per_token"_a, "Rows of the last step, a view.")
      .def("copy_blocks", &Program::copy_blocks, "pairs"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("measure", &Program::measure, "on"_a)
      .def("measurements", &Program::measurements)
      .def_prop_ro("kv_bytes", &Program::kv_bytes)
      .def_prop_ro("kv_address", [](const Program& p) { return reinterpret_cast<uintptr_t>(p.kv_data()); })
      .def_prop_ro("block_bytes", &Program::block_stride);
  m.def("block_bytes", [](const std::vector<KvNumbers>& layers, int64_t block_size, const std::string& kv_format) {
    return Program::block_bytes(layer_shapes(layers), block_size, kv_format_of(kv_format));
  }, "kv_layers"_a, "block_size"_a, "kv_format"_a, "Bytes from a KV block to the next.");
}

}  // namespace
}  // namespace octavo

NB_MODULE(_kernels, m) {
  m.doc() = "Kernels, thread pool and programs of the CPU backend.";
  nb::set_leak_warnings(false);  // an engine that lives until the interpreter ends is no leak
  octavo::bind_weights(m);
  octavo::bind_program(m);
  octavo::bind_linear(m);
  octavo::bind_sampler(m);
}

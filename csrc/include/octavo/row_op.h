// Ops that treat each row alone: the files of csrc/ops. Each has a name, an argument struct whose fields are told to
// Python, and a function; csrc/ops is compiled once per instruction set and found by name, so that a new op is one file.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

struct Step;
struct Linear;

/// Columns of a buffer: rows `stride` floats apart.
struct View {
  float* data;
  int64_t stride;
  [[gnu::always_inline]] float* row(int64_t i) const { return data + i * stride; }
};

/// Numbers that outlive the program.
struct Numbers {
  const float* data;
  int64_t count;
};

/// What a field of an argument struct is, and what Python gives for it: a place (None: no data), the address of a
/// vector (0: null), the number of a linear, a sequence of floats, a string, a float, an int or a bool.
enum class FieldType { view, vector, linear, numbers, text, real, integer, boolean };

template <class T>
inline constexpr FieldType kFieldType = FieldType::view;
template <>
inline constexpr FieldType kFieldType<const float*> = FieldType::vector;
template <>
inline constexpr FieldType kFieldType<const Linear*> = FieldType::linear;
template <>
inline constexpr FieldType kFieldType<Numbers> = FieldType::numbers;
template <>
inline constexpr FieldType kFieldType<const char*> = FieldType::text;
template <>
inline constexpr FieldType kFieldType<float> = FieldType::real;
template <>
inline constexpr FieldType kFieldType<int64_t> = FieldType::integer;
template <>
inline constexpr FieldType kFieldType<bool> = FieldType::boolean;

struct Field {
  const char* name;
  FieldType type;
  size_t offset;
};

#define OCTAVO_FIELD(Struct, member) \
  ::octavo::Field { #member, ::octavo::kFieldType<decltype(Struct::member)>, offsetof(Struct, member) }

/// The fields of an argument struct, all of them.
struct Fields {
  const Field* first;
  int64_t count;
  size_t size;  // bytes of the struct
};

template <class Struct, size_t Count>
constexpr Fields fields_of(const Field (&fields)[Count]) {
  static_assert(__is_trivially_copyable(Struct));
  return {fields, Count, sizeof(Struct)};
}

/// Makes rows first .. last - 1 of its outputs from the same rows of its inputs.
struct RowOp {
  const char* name;
  Fields fields;
  void (*run)(const void* args, const Step& step, int64_t first, int64_t last);
};

/// The ops of a file.
struct RowOps {
  const RowOp* first;
  int64_t count;
};

}  // namespace octavo

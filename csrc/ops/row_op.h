// For the files of csrc/ops: how to write an op and make it known. csrc/ops/<file>.cpp ends with
//
//   constexpr RowOp kOps[] = {row_op<Add, add>("add", kAdd), ...};
//   const RowOps <file>_ops = row_ops(kOps);
//
// Where the struct Add holds the arguments of `void add(const Add&, const Step&, int64_t first, int64_t last)` and kAdd
// its fields. The rules of include/octavo/kernels.h hold.
#pragma once

#include "kernels/row_math.h"
#include "octavo/row_op.h"
#include "ops_list.h"
#include "program/step.h"

namespace octavo::OCTAVO_ISA {

#define OCTAVO_OPS_FILE(name) extern const RowOps name##_ops;
OCTAVO_OPS_FILES
#undef OCTAVO_OPS_FILE

template <class Args, void (*Run)(const Args&, const Step&, int64_t, int64_t)>
static void run_row_op(const void* args, const Step& step, int64_t first, int64_t last) {
  Run(*static_cast<const Args*>(args), step, first, last);
}

template <class Args, void (*Run)(const Args&, const Step&, int64_t, int64_t), size_t Count>
constexpr RowOp row_op(const char* name, const Field (&fields)[Count]) {
  return {name, fields_of<Args>(fields), run_row_op<Args, Run>};
}

template <size_t Count>
constexpr RowOps row_ops(const RowOp (&ops)[Count]) {
  return {ops, Count};
}

/// y[i ..] = f(i, lanes) over a row; the last call has fewer than 16 lanes when the width is ragged.
template <class Function>
OCTAVO_INLINE void map_row(float* y, int64_t width, Function f) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) store(y + i, f(i, kLanes));
  if (i < width) store_partial(y + i, f(i, width - i), width - i);
}

}  // namespace octavo::OCTAVO_ISA

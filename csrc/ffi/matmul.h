// ffi/matmul.h: what the two collective matmuls share: attributes dtype, batch, rows, inner,
// columns (matmul/matmul_work.h), x_is_transposed and w_is_transposed (0 or 1).
#pragma once

#include <memory>  // std::unique_ptr

#include "ffi/site.h"
#include "matmul/matmul_work.h"

namespace jaxcoll {

inline std::unique_ptr<const Work> ReadMatmul(AttributeReader& reader, MatmulKind kind) {
  const MatmulLayout layout{.kind = kind,
                            .dtype = reader.AsType(reader.Int("dtype")),
                            .num_ranks = reader.Size("group_size"),
                            .batch = reader.Size("batch"),
                            .rows = reader.Size("rows"),
                            .inner = reader.Size("inner"),
                            .columns = reader.Size("columns"),
                            .x_is_transposed = reader.Int("x_is_transposed") != 0,
                            .w_is_transposed = reader.Int("w_is_transposed") != 0};
  if (reader.ok() && layout.dtype != DType::kF32 && layout.dtype != DType::kF64) {
    reader.Problem("dtype: expected float32 or float64");
  }
  if (reader.ok() && (layout.batch == 0 || layout.rows == 0 || layout.inner == 0 ||
                      layout.columns == 0 || layout.rows % layout.batch != 0)) {
    reader.Problem("batch, rows, inner, columns: nothing to multiply");
  }
  return reader.ok() ? MakeMatmulWork(layout) : nullptr;
}

}  // namespace jaxcoll

#include "engine/box_read.h"

#include <algorithm>
#include <utility>

#include "base/checked.h"
#include "boxes/direct_read.h"
#include "codec/tensor_table.h"

namespace loadstone {

std::optional<BoxRead> box_read(const ValueSet& values, const Box& box, Dtype target) {
  const auto& tensors = values.tensors();
  if (is_empty(box) || box_defect(box, UINT64_MAX, tensors, values.decodings)) return std::nullopt;
  std::optional<BoxRead> found(std::in_place);
  BoxRead& read = *found;
  read.box = &box;
  if (box.decoding != no_decoding) {
    read.decoding = &values.decodings[box.decoding];
    read.stored = read.decoding->dtype;
    if (check_decoding(tensors, *read.decoding, read.form)) return std::nullopt;
  } else {
    const Encoding encoding = tensors[box.source].encoding;
    if (!encoding.is_dtype()) return std::nullopt;
    read.stored = encoding.dtype();
  }
  for (const BoxDim& dim : box.dims) static_cast<void>(read.dims.append(dim));
  read.dims.sort_by_source();
  const auto dims = std::as_const(read.dims).dims();
  const std::uint64_t width = std::max<std::uint64_t>(element_bytes(read.stored), 1);
  read.is_direct = read.decoding == nullptr && read.stored == target && reads_directly(dims, width);
  read.is_transposed = transposes(dims);
  read.run = source_run(dims, (read.is_direct ? skipped_bytes_max : staged_hole_bytes_max) / width);
  for (const BoxDim& dim : dims.first(read.run.outer_dims)) {
    read.runs = saturating_mul(read.runs, dim.extent);
  }
  return found;
}

}  // namespace loadstone

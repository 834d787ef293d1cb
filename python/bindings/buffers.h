// Declares views of the caller's buffers, which kernels read and write.
#pragma once

#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "bindings.h"

namespace loadstone::python {

using SourceBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using TargetBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline const std::byte* bytes_of(const SourceBytes& bytes) {
  return reinterpret_cast<const std::byte*>(bytes.data());
}
inline std::byte* bytes_of(const TargetBytes& bytes) {
  return reinterpret_cast<std::byte*>(bytes.data());
}

inline void require_bytes(const std::string& name, std::uint64_t found, std::uint64_t expected) {
  if (found == expected) return;
  throw Error(
      "usage", "the size of a buffer does not fit the sizes of the others",
      {.field = name, .found = std::to_string(found), .expected = std::to_string(expected)});
}

}  // namespace loadstone::python

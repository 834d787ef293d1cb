#include "catalog/check_decoding.h"

#include <fmt/format.h>

#include "base/text.h"

namespace loadstone {

std::optional<DecodeProblem> check_decoding(const std::vector<TensorInfo>& tensors,
                                            const Decoding& decoding, DecodeForm& form) {
  std::vector<DecodePart> parts;
  parts.reserve(decoding.sources.size());
  for (const std::uint32_t source : decoding.sources) {
    if (source >= tensors.size()) {
      return DecodeProblem{"the decoding's source does not exist", fmt::format("source {}", source),
                           fmt::format("one of {}", tensors.size())};
    }
    if (!tensors[source].strides.empty()) {
      return DecodeProblem{"what is decoded has to stand in C order",
                           "'" + printable(tensors[source].name) + "', a view with strides",
                           "a contiguous tensor"};
    }
    parts.push_back({tensors[source].encoding, tensors[source].shape});
  }
  return prepare_decoding(decoding.kernel, parts, decoding.shape, decoding.dtype, decoding.offset,
                          form);
}

}  // namespace loadstone

#include "plan/decodings.h"

#include <fmt/format.h>

#include <unordered_set>

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

Encoding encoding_of(const Box& box, const std::vector<TensorInfo>& tensors,
                     std::span<const Decoding> decodings) noexcept {
  if (box.decoding != no_decoding) return decodings[box.decoding].dtype;
  return tensors[box.source].encoding;
}

std::vector<std::uint32_t> sources_of(const std::vector<Box>& boxes,
                                      std::span<const Decoding> decodings) {
  std::vector<std::uint32_t> sources;
  std::unordered_set<std::uint32_t> seen;
  const auto add = [&](std::uint32_t source) {
    if (!sources.empty() && sources.back() == source) return;
    if (seen.insert(source).second) sources.push_back(source);
  };
  for (const Box& box : boxes) {
    if (box.decoding == no_decoding) {
      add(box.source);
    } else if (box.decoding < decodings.size()) {
      for (const std::uint32_t source : decodings[box.decoding].sources) add(source);
    }
  }
  return sources;
}

}  // namespace loadstone

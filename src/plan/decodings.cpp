#include "plan/decodings.h"

#include <unordered_set>

namespace loadstone {

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

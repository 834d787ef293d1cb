#include "boxes/sources.h"

#include <unordered_set>

namespace loadstone {

Encoding encoding_of(const Box& box, const std::vector<TensorInfo>& tensors,
                     std::span<const Decoding> decodings) noexcept {
  if (box.decoding != no_decoding) return decodings[box.decoding].dtype;
  return tensors[box.source].encoding;
}

std::vector<std::uint32_t> sources_of(std::span<const Box> boxes,
                                      std::span<const Decoding> decodings, const Merge* merge) {
  std::vector<std::uint32_t> sources;
  std::unordered_set<std::uint32_t> seen;
  const auto add = [&](std::uint32_t source) {
    if (!sources.empty() && sources.back() == source) return;
    if (seen.insert(source).second) sources.push_back(source);
  };
  const auto add_all = [&](std::span<const Box> of) {
    for (const Box& box : of) {
      if (box.decoding == no_decoding) {
        add(box.source);
      } else if (box.decoding < decodings.size()) {
        for (const std::uint32_t source : decodings[box.decoding].sources) add(source);
      }
    }
  };
  add_all(boxes);
  if (merge != nullptr) for_each_operand(*merge, [&](const Operand& each) { add_all(each.boxes); });
  return sources;
}

}  // namespace loadstone

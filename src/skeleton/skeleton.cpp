#include "loadstone/skeleton.h"

#include <fmt/format.h>

#include "base/named.h"
#include "base/only_errors.h"
#include "loadstone/catalog.h"
#include "loadstone/error.h"
#include "loadstone/name_hash.h"
#include "loadstone/quantized_tensors.h"
#include "skeleton/ties.h"

namespace loadstone {

namespace {

[[noreturn]] void refuse(std::size_t index, const Target& target, std::string_view field,
                         std::string_view message, std::string found = {},
                         std::string expected = {}) {
  throw Error("skeleton.json", std::string(message),
              {.tensor = target.name,
               .field = fmt::format("targets[{}].{}", index, field),
               .found = std::move(found),
               .expected = std::move(expected)});
}

void check_tie(const std::vector<Target>& targets, std::size_t at, const Target& root) {
  const Target& target = targets[at];
  if (root.shape != target.shape) {
    refuse(at, target, "shape", "tied targets must have the same shape", target.shape.text(),
           root.shape.text());
  }
  if (root.slice != target.slice)
    refuse(at, target, "slice", "tied targets must have the same slice");
  if (root.dtype != target.dtype) {
    refuse(at, target, "dtype", "tied targets must have the same dtype",
           std::string(name(target.dtype)), std::string(name(root.dtype)));
  }
}

}  // namespace

std::vector<std::size_t> tie_roots(const std::vector<Target>& targets) {
  NameMap<std::size_t> index;
  index.reserve(targets.size());
  for (std::size_t i = 0; i < targets.size(); ++i) index.emplace(targets[i].name, i);
  constexpr auto unknown = static_cast<std::size_t>(-1);
  std::vector<std::size_t> roots(targets.size(), unknown);
  std::vector<std::size_t> chain;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    chain.clear();
    std::size_t at = i;
    while (roots[at] == unknown && !targets[at].tie_of.empty()) {
      const Target& target = targets[at];
      const auto next = index.find(target.tie_of);
      if (next == index.end()) {
        refuse(at, target, "tie_of", "a tie refers to a target that does not exist", target.tie_of);
      }
      chain.push_back(at);
      at = next->second;
      if (chain.size() > targets.size()) {
        refuse(i, targets[i], "tie_of", "a target cannot be tied to itself", targets[i].tie_of);
      }
    }
    const std::size_t root = roots[at] == unknown ? at : roots[at];
    roots[at] = root;
    for (const std::size_t each : chain) roots[each] = root;
  }
  return roots;
}

std::string_view name(TargetKind kind) noexcept {
  return name_among({"parameter", "persistent_buffer", "non_persistent_buffer", "attribute"}, kind);
}

std::optional<TargetKind> parse_target_kind(std::string_view name) noexcept {
  return from_name<TargetKind>(name);
}

void Skeleton::validate() const {
  only_errors([&] {
    NameSet names;
    names.reserve(targets.size());
    for (std::size_t i = 0; i < targets.size(); ++i) {
      const Target& target = targets[i];
      if (!names.insert(target.name).second) {
        refuse(i, target, "name", "the name is repeated");
      }
      const auto elements = target.shape.numel();
      if (!elements || !Encoding(target.dtype).byte_count(*elements)) {
        refuse(i, target, "shape", "the size is not a whole number of bytes that fits in 64 bits",
               fmt::format("{} {}", name(target.dtype), target.shape.text()));
      }
      if (target.slice && !target.slice->is_inside(target.shape)) {
        refuse(i, target, "slice", "the slice exceeds the tensor", target.slice->text(),
               target.shape.text());
      }
    }
    const std::vector<std::size_t> roots = tie_roots(targets);
    for (std::size_t i = 0; i < targets.size(); ++i) check_tie(targets, i, targets[roots[i]]);
  });
}

Skeleton Skeleton::from_catalog(const Catalog& catalog) {
  return only_errors([&] {
    Skeleton skeleton;
    const std::uint32_t count = catalog.tensors_of(0).end;
    skeleton.targets.reserve(count);
    std::vector<bool> is_left_out(catalog.tensors().size(), false);
    for (const QuantizedTensor& each : catalog.quantized().tensors()) {
      if (each.data == QuantizedTensor::none) continue;
      if (catalog.tensors()[each.data].encoding.is_dtype()) continue;
      // Decoded blocks already include their scale.
      for (const std::uint32_t i : each.companions()) is_left_out[i] = true;
      for (const std::uint32_t i : each.unneeded) is_left_out[i] = true;
    }
    for (std::uint32_t i = 0; i < count; ++i) {
      if (is_left_out[i]) continue;
      const TensorInfo& tensor = catalog.tensors()[i];
      Target target;
      target.name = tensor.name;
      target.shape = tensor.shape;
      target.dtype = tensor.encoding.is_dtype() ? tensor.encoding.dtype() : Dtype::f32;
      skeleton.targets.push_back(std::move(target));
    }
    return skeleton;
  });
}

}  // namespace loadstone

#include "verify/pairs.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "boxes/cast_kind.h"
#include "codec/decode.h"
#include "codec/gguf/gguf.h"
#include "convert/experts.h"
#include "convert/lossless.h"
#include "kernels/cast.h"
#include "verify/element_reader.h"

namespace loadstone {

namespace {

// Returns the name of the codes in blocks of this encoding. MXFP4 blocks have the name of the
// layout that stores the same codes as components.
std::string codes_of(Encoding encoding) {
  if (encoding.is_dtype()) return {};
  return encoding == Encoding(BlockFormat::mxfp4) ? "mxfp4" : std::string(encoding.name());
}

bool is_numbers(Encoding encoding) {
  return !encoding.is_dtype() || kind(encoding.dtype()) == DtypeKind::floating;
}

// Returns true for two float dtypes that can be cast to each other, so that one value can be the
// other one rounded.
bool are_floats(Encoding first, Encoding second) {
  return first.is_dtype() && second.is_dtype() && is_numbers(first) && is_numbers(second) &&
         can_cast(first.dtype(), second.dtype());
}

// Returns true if the components have the same names, shapes and encodings, so that they can be
// compared in pairs.
bool stand_alike(const Catalog& first, const QuantizedTensor& a, const Catalog& second,
                 const QuantizedTensor& b) {
  return std::ranges::equal(
      a.decoding.sources, b.decoding.sources, [&](std::uint32_t left, std::uint32_t right) {
        const TensorInfo& one = first.tensors()[left];
        const TensorInfo& other = second.tensors()[right];
        return one.name == other.name && one.shape == other.shape && one.encoding == other.encoding;
      });
}

// Four roundings: of the inverse, of both scales, and of a value.
constexpr double inverse_tolerance = 4 * inverse_error;

// Returns true if scales are divided by a global scale.
bool divides(const Side& side) {
  return std::ranges::any_of(side.value.decodings, [](const Decoding& decoding) {
    const DecodeKernel* const kernel = find_decode_kernel(decoding.kernel);
    return kernel != nullptr && kernel->divides_by_outer;
  });
}

// Turns a layout's target into a separate value, whose boxes refer to the layout's decodings.
Side side_of(const Catalog& catalog, const TargetRecipe& target,
             const std::vector<Decoding>& decodings) {
  Side side = {.value = {target.shape, target.dtype, target.boxes, {}}, .encoding = {}};
  std::map<std::uint32_t, std::uint32_t> taken;  // index in the value's decodings, by key
  const QuantizedTensor* stored = nullptr;
  Encoding encoding = target.dtype;
  for (Box& box : side.value.boxes) {
    encoding = catalog.tensors()[box.source].encoding;
    if (const auto* const found = catalog.quantized().find(box.source)) stored = found;
    if (box.decoding == no_decoding && encoding.is_dtype()) continue;
    // Blocks are not decoded in the layout, so the key is derived from their source.
    const bool is_block = box.decoding == no_decoding;
    const std::uint32_t key =
        is_block ? static_cast<std::uint32_t>(decodings.size()) + box.source : box.decoding;
    const auto [known, is_new] =
        taken.try_emplace(key, static_cast<std::uint32_t>(side.value.decodings.size()));
    if (is_new) {
      side.value.decodings.push_back(is_block ? numbers_decoding(catalog, box.source, Dtype::f32)
                                              : decodings[box.decoding]);
    }
    box.decoding = known->second;
  }
  const bool is_decoded = stored != nullptr && !side.value.decodings.empty();
  side.encoding = is_decoded ? stored->encoding : std::string(encoding.name());
  side.codes = is_decoded ? stored->encoding : codes_of(encoding);
  side.tensors = sources_of(side.value.boxes, side.value.decodings);
  return side;
}

}  // namespace

Pairs::Pairs(const Catalog& first, const Catalog& second)
    : first_(first),
      second_(second),
      in_first_(first.tensors().size(), false),
      in_second_(second.tensors().size(), false) {
  const Names first_names = names_of(first_);
  const Names second_names = names_of(second_);
  for (const auto& [name, named] : first_names) {
    const auto partner = second_names.find(name);
    if (partner != second_names.end()) add_named(std::string(name), named, partner->second);
  }
  add_layouts(first_names, second_names);
}

// Returns the names of quantized tensors that can be decoded, and of tensors that are not
// components.
Pairs::Names Pairs::names_of(const Catalog& catalog) {
  Names names;
  std::vector<bool> is_component(catalog.tensors().size(), false);
  for (const QuantizedTensor& stored : catalog.quantized().tensors()) {
    if (!stored.is_readable()) continue;
    names.insert_or_assign(stored.name, Named{&stored, stored.data});
    for (const std::uint32_t source : stored.decoding.sources) is_component[source] = true;
    for (const std::uint32_t source : stored.unneeded) is_component[source] = true;
  }
  for (std::uint32_t i = 0; i < catalog.tensors().size(); ++i) {
    if (!is_component[i]) names.try_emplace(catalog.tensors()[i].name, Named{nullptr, i});
  }
  return names;
}

Side Pairs::side_of(const Catalog& catalog, const Named& named) {
  const Encoding encoding = catalog.tensors()[named.tensor].encoding;
  Side side = {.value = tensor_recipe(catalog, named.tensor), .encoding = {}};
  if (named.stored == nullptr) {
    side.encoding = encoding.name();
    side.codes = codes_of(encoding);
    side.tensors = {named.tensor};
    return side;
  }
  side.encoding = side.codes = named.stored->encoding;
  side.tensors = named.stored->decoding.sources;
  side.tensors.insert(side.tensors.end(), named.stored->unneeded.begin(),
                      named.stored->unneeded.end());
  return side;
}

void Pairs::add_named(const std::string& name, const Named& first, const Named& second) {
  const auto is_undecoded = [](const Catalog& catalog, const Named& named) {
    return named.stored == nullptr && catalog.quantized().find(named.tensor) != nullptr;
  };
  if (is_undecoded(first_, first) || is_undecoded(second_, second)) return;
  const Encoding a = first_.tensors()[first.tensor].encoding;
  const Encoding b = second_.tensors()[second.tensor].encoding;
  if (first.stored != nullptr && second.stored != nullptr) {
    if (stand_alike(first_, *first.stored, second_, *second.stored)) return;
  } else if (first.stored == nullptr && second.stored == nullptr) {
    if (a == b) return;
    const bool has_blocks = !a.is_dtype() || !b.is_dtype();
    if (!(has_blocks && is_numbers(a) && is_numbers(b)) && !are_floats(a, b)) return;
  }
  Pair pair = {.name = name, .first = side_of(first_, first), .second = side_of(second_, second)};
  const Shape& shape = pair.first.value.shape;
  if (shape != pair.second.value.shape || shape.numel() == 0u) return;
  cover(pair.first, in_first_);
  keep(std::move(pair));
}

void Pairs::add_layouts(const Names& first, const Names& second) {
  const auto is_lost = [&](const auto& each) {
    return !second.contains(each.first) && !in_first_[each.second.tensor];
  };
  const auto is_new = [&](const auto& each) {
    return !first.contains(each.first) && !in_second_[each.second.tensor];
  };
  if (std::ranges::none_of(first, is_lost) || std::ranges::none_of(second, is_new)) return;
  for (const Recipes& layout : expert_layouts(borrowed(first_))) {
    add_layout(layout, first, second);
  }
}

// Adds pairs of values that the second checkpoint stores under the layout's names.
void Pairs::add_layout(const Recipes& layout, const Names& first, const Names& second) {
  std::set<std::uint32_t> taken;
  const auto is_free = [&](std::uint32_t tensor) {
    const QuantizedTensor* const stored = first_.quantized().find(tensor);
    const std::string& name = stored == nullptr ? first_.tensors()[tensor].name : stored->name;
    return !in_first_[tensor] &&
           (!second.contains(name) || first_.quantized().is_companion(tensor));
  };
  std::vector<const TargetRecipe*> absent;
  for (const TargetRecipe& target : layout.targets) {
    if (first.contains(target.target) || target.constant != nullptr) continue;
    const auto sources = sources_of(target.boxes, layout.decodings);
    if (!std::ranges::all_of(sources, is_free)) continue;
    const auto partner = second.find(target.target);
    if (partner == second.end()) {
      absent.push_back(&target);
      continue;
    }
    Pair pair = {.name = target.target,
                 .first = loadstone::side_of(first_, target, layout.decodings),
                 .second = side_of(second_, partner->second)};
    taken.insert(pair.first.tensors.begin(), pair.first.tensors.end());
    keep(std::move(pair));
  }
  for (const TargetRecipe* const target : absent) {
    const auto sources = sources_of(target->boxes, layout.decodings);
    const auto is_taken = [&](std::uint32_t source) { return taken.contains(source); };
    if (!std::ranges::any_of(sources, is_taken)) continue;
    const Side side = loadstone::side_of(first_, *target, layout.decodings);
    differences_.push_back({target->target, DifferenceKind::missing, "nothing",
                            fmt::format("{} {}", side.encoding, target->shape.text())});
    taken.insert(sources.begin(), sources.end());
  }
  for (const std::uint32_t tensor : taken) {
    in_first_[tensor] = true;
    const QuantizedTensor* const stored = first_.quantized().find(tensor);
    if (stored == nullptr) continue;
    for (const std::uint32_t other : stored->unneeded) in_first_[other] = true;
  }
}

void Pairs::keep(Pair pair) {
  const Side& a = pair.first;
  const Side& b = pair.second;
  cover(b, in_second_);
  const bool is_plain = !a.is_quantized() && !b.is_quantized();
  if (a.value.shape != b.value.shape) {
    differences_.push_back(
        {pair.name, DifferenceKind::shape, b.value.shape.text(), a.value.shape.text()});
  } else if (is_plain && a.value.dtype != b.value.dtype &&
             !are_floats(a.value.dtype, b.value.dtype)) {
    differences_.push_back({pair.name, DifferenceKind::encoding, b.encoding, a.encoding});
  } else if (a.value.shape.numel() != 0u) {
    pair.is_exact = is_plain || a.codes == b.codes;
    pair.dtype = is_plain ? b.value.dtype : Dtype::f32;
    if (!is_plain && divides(a) != divides(b)) pair.tolerance = inverse_tolerance;
    pairs_.push_back(std::move(pair));
  }
}

void Pairs::cover(const Side& side, std::vector<bool>& covered) {
  for (const std::uint32_t tensor : side.tensors) covered[tensor] = true;
}

}  // namespace loadstone

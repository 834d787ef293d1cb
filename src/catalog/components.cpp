#include "catalog/components.h"

#include <algorithm>
#include <array>
#include <functional>
#include <initializer_list>
#include <map>
#include <numeric>
#include <utility>

namespace loadstone {

namespace {

constexpr std::uint32_t none = Components::none;

// Scales of a weight "P.weight" in layouts that are not decoded: Comfy's, Mistral's, and that of
// DeepSeek's own inference code. They start where "weight" does.
constexpr std::array<std::string_view, 4> foreign_scales = {"scale_weight", "qscale_weight",
                                                            "scale", "scale_inv"};

// A module has a few tensors; what begins like one and has more is no module.
constexpr unsigned siblings_max = 64;

bool is_dtype(const TensorInfo& tensor, std::initializer_list<Dtype> dtypes) {
  return std::ranges::any_of(dtypes,
                             [&](Dtype dtype) { return tensor.encoding == Encoding(dtype); });
}

bool is_scale_name(std::string_view name) {
  return name.ends_with("_scale") || name.ends_with("_scale_inv") || name.ends_with("_scales");
}

// A column of bytes is how bitsandbytes packs 4 bits, whatever the matrix.
bool is_packed_by_bnb(const TensorInfo& tensor) {
  return is_dtype(tensor, {Dtype::u8}) && tensor.shape.rank() == 2 && tensor.shape[1] == 1 &&
         tensor.shape[0] > 1 && tensor.name.ends_with(".weight");
}

std::string without_suffix(const std::string& name, std::string_view suffix) {
  return name.substr(0, name.size() - suffix.size());
}

// Goes through a catalog once. Not thread-safe.
class Finder {
 public:
  explicit Finder(const Catalog& catalog) : catalog_(catalog) {}

  std::vector<Components> run() && {
    for (std::uint32_t i = 0; i < catalog_.tensors().size(); ++i) look_at(i);
    for (Components& components : found_) look_beside(components);
    return std::move(found_);
  }

 private:
  [[nodiscard]] std::uint32_t find(const std::string& name) const {
    return catalog_.find(name).value_or(none);
  }

  // The first of these names that is there.
  [[nodiscard]] std::uint32_t find_any(const std::string& stem,
                                       std::initializer_list<std::string_view> suffixes) const {
    for (const std::string_view suffix : suffixes) {
      if (const auto index = find(stem + std::string(suffix)); index != none) return index;
    }
    return none;
  }

  void look_at(std::uint32_t index) {
    const TensorInfo& tensor = catalog_.tensors()[index];
    if (!is_fp8(tensor) && !is_dtype(tensor, {Dtype::u8, Dtype::i8, Dtype::i32})) return;
    const std::string& name = tensor.name;
    if (const auto other = scale_of_others(name); other != none) {
      add(name, ComponentNaming::foreign, index).scale = other;
    } else if (is_fp8(tensor)) {
      add_fp8(index);
    } else if (is_dtype(tensor, {Dtype::i8})) {
      add_int8(index);
    } else if (name.ends_with("_packed")) {
      add_packed(index, without_suffix(name, "_packed"));
    } else if (is_dtype(tensor, {Dtype::i32})) {
      return;
    } else if (const auto at = name.find(bnb_state_infix); at != std::string::npos) {
      add_bnb_state(index, name.substr(0, at));
    } else if (name.ends_with("_blocks")) {
      add_mxfp4_blocks(index, without_suffix(name, "_blocks"));
    } else if (find_any(name, {"_scale", "_weight_scale", "_scale_2", "_weight_scale_2"}) != none) {
      add_nibbles(index);
    } else if (is_packed_by_bnb(tensor)) {
      require_state(index);
    }
  }

  // GPTQ's and AWQ's "P.qweight" with "P.scales", and Quanto's "P._data" with "P._scale".
  [[nodiscard]] std::uint32_t scale_of_others(const std::string& name) const {
    if (name.ends_with(".qweight")) return find(without_suffix(name, "qweight") + "scales");
    if (name.ends_with("._data")) return find(without_suffix(name, "data") + "scale");
    return none;
  }

  // Some tensors change the meaning of codes in a way that no codec here knows: zero points, an
  // order of columns, a factor for the activations, the scales of ComfyUI in an order of its own.
  void look_beside(Components& components) {
    if (components.data == none || components.naming == ComponentNaming::foreign) return;
    const std::string& name = components.name;
    std::uint32_t other = find_any(name, {"_zero_point", "_g_idx"});
    if (other == none && name.ends_with("weight")) {
      const std::string module = without_suffix(name, "weight");
      other = find(module + "pre_quant_scale");
      if (other == none && components.naming == ComponentNaming::nibbles) {
        other = find(module + "comfy_quant");
      }
    }
    if (other == none) return;
    components.naming = ComponentNaming::foreign;
    components.states.push_back(other);
  }

  Components& add(std::string name, ComponentNaming naming, std::uint32_t data) {
    Components& made = found_.emplace_back();
    made.name = std::move(name);
    made.naming = naming;
    made.data = data;
    return made;
  }

  void add_fp8(std::uint32_t index) {
    const TensorInfo& data = catalog_.tensors()[index];
    if (is_scale_name(data.name)) return;  // scales can be FP8 too
    const auto scale = find_any(data.name, {"_scale_inv", "_scale", "_weight_scale"});
    if (scale != none) {
      // Only one of two can be right.
      const auto second = find(data.name + "_scale");
      const bool is_one = second == none || second == scale;
      Components& made =
          add(data.name, is_one ? ComponentNaming::fp8 : ComponentNaming::foreign, index);
      made.scale = scale;
      if (!is_one) made.states.push_back(second);
      return;
    }
    if (const auto foreign = foreign_scale(data.name); foreign != none) {
      add(data.name, ComponentNaming::foreign, index).scale = foreign;
      return;
    }
    if (data.shape.rank() < 2 || !catalog_.quantization_claim().is_made) return;
    add(data.name, ComponentNaming::fp8, index).missing = {data.name + "_scale",
                                                           data.name + "_scale_inv"};
  }

  [[nodiscard]] std::uint32_t foreign_scale(const std::string& name) {
    if (const auto beside = find_any(name, {".scale", "_scales"}); beside != none) return beside;
    constexpr std::string_view weight = "weight";
    if (!name.ends_with(weight)) return none;
    const std::string stem = without_suffix(name, weight);
    for (const std::string_view leaf : foreign_scales) {
      if (const auto index = find(stem + std::string(leaf)); index != none) return index;
    }
    return unknown_scale(stem);
  }

  // A float of the same module whose name speaks of a scale: whoever wrote it means this weight.
  [[nodiscard]] std::uint32_t unknown_scale(const std::string& stem) {
    const auto& tensors = catalog_.tensors();
    if (by_name_.empty()) {
      by_name_.resize(tensors.size());
      std::iota(by_name_.begin(), by_name_.end(), std::uint32_t{0});
      std::ranges::sort(by_name_, {},
                        [&](std::uint32_t i) { return std::string_view(tensors[i].name); });
    }
    auto at = std::ranges::lower_bound(by_name_, std::string_view(stem), {}, [&](std::uint32_t i) {
      return std::string_view(tensors[i].name);
    });
    for (unsigned looked_at = 0; at != by_name_.end() && looked_at < siblings_max;
         ++at, ++looked_at) {
      const TensorInfo& tensor = tensors[*at];
      if (!tensor.name.starts_with(stem)) break;
      const std::string_view leaf = std::string_view(tensor.name).substr(stem.size());
      const bool is_own = leaf.find('.') == std::string_view::npos || leaf.starts_with("weight.") ||
                          leaf.starts_with("quantizer.");
      const bool is_scale =
          leaf.find("scale") != std::string_view::npos || leaf == "s" || leaf == "weight_s";
      if (is_own && is_scale &&
          is_dtype(tensor, {Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::f8_e8m0})) {
        return *at;
      }
    }
    return none;
  }

  void add_int8(std::uint32_t index) {
    const std::string& name = catalog_.tensors()[index].name;
    if (name.ends_with("weight")) {
      if (const auto scale = find(without_suffix(name, "weight") + "SCB"); scale != none) {
        add(name, ComponentNaming::bnb_int8, index).scale = scale;
        return;
      }
    }
    if (const auto scale = find_any(name, {"_scale", "_weight_scale"}); scale != none) {
      add(name, ComponentNaming::int8, index).scale = scale;
    }
  }

  // Of two numbers a byte; integers of 4 bits in words have a shape of their own beside them.
  void add_packed(std::uint32_t index, std::string name) {
    const auto scale = find(name + "_scale");
    const bool has_shape = find(name + "_shape") != none;
    if (has_shape || is_dtype(catalog_.tensors()[index], {Dtype::i32})) {
      if (scale != none) add(std::move(name), ComponentNaming::foreign, index).scale = scale;
      return;
    }
    Components& made = add(std::move(name), ComponentNaming::packed, index);
    made.scale = scale;
    made.scale_of_scales = find(made.name + "_global_scale");
    require_scales(made, "_scale", "_global_scale");
  }

  void add_nibbles(std::uint32_t index) {
    Components& made = add(catalog_.tensors()[index].name, ComponentNaming::nibbles, index);
    made.scale = find_any(made.name, {"_scale", "_weight_scale"});
    made.scale_of_scales = find_any(made.name, {"_scale_2", "_weight_scale_2"});
    require_scales(made, "_scale", "_scale_2");
  }

  // Scales that are FP8 numbers have scales themselves.
  void require_scales(Components& made, std::string_view suffix, std::string_view second) {
    if (made.scale == none) {
      made.missing = {made.name + std::string(suffix)};
    } else if (made.scale_of_scales == none &&
               is_dtype(catalog_.tensors()[made.scale], {Dtype::f8_e4m3})) {
      made.missing = {made.name + std::string(second)};
    }
  }

  void add_mxfp4_blocks(std::uint32_t index, std::string name) {
    Components& made = add(std::move(name), ComponentNaming::mxfp4_blocks, index);
    made.scale = find(made.name + "_scales");
    if (made.scale == none) made.missing = {made.name + "_scales"};
  }

  // Packed bytes without a state; it may be of either type.
  void require_state(std::uint32_t index) {
    const std::string& name = catalog_.tensors()[index].name;
    std::vector<std::string> wanted;
    for (const char* type : {"nf4", "fp4"}) {
      wanted.push_back(name + std::string(bnb_state_infix) + type);
      if (find(wanted.back()) != none) return;
    }
    add(name, ComponentNaming::bnb_4bit, index).missing = std::move(wanted);
  }

  void add_bnb_state(std::uint32_t index, std::string name) {
    if (const auto known = bnb_.find(name); known != bnb_.end()) {
      found_[known->second].states.push_back(index);
      return;
    }
    bnb_.emplace(name, found_.size());
    const auto data = find(name);
    Components& made = add(std::move(name), ComponentNaming::bnb_4bit, data);
    made.states.push_back(index);
    made.scale = find(made.name + ".absmax");
    made.scale_of_scales = find(made.name + ".nested_absmax");
    if (data == none) made.missing.push_back(made.name);
    if (made.scale == none) made.missing.push_back(made.name + ".absmax");
  }

  const Catalog& catalog_;
  std::vector<std::uint32_t> by_name_;  // made when it is needed
  std::vector<Components> found_;
  std::map<std::string, std::size_t, std::less<>> bnb_;  // index into found_, by name
};

}  // namespace

bool is_fp8(const TensorInfo& tensor) noexcept {
  return is_dtype(tensor, {Dtype::f8_e4m3, Dtype::f8_e5m2});
}

std::vector<Components> find_components(const Catalog& catalog) { return Finder(catalog).run(); }

std::vector<bool> mark_companions(const Catalog& catalog,
                                  const std::vector<Components>& components) {
  std::vector<bool> marks;
  if (components.empty()) return marks;
  const auto& tensors = catalog.tensors();
  marks.resize(tensors.size());
  std::vector<bool> is_data(tensors.size());
  for (const Components& each : components) {
    if (each.data != none) is_data[each.data] = true;
    for (const std::uint32_t companion : as_quantized_tensor(each).companions()) {
      marks[companion] = true;
    }
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::string& name = tensors[i].name;
    const auto mark = [&](std::string_view suffix, std::initializer_list<std::string_view> data) {
      if (!name.ends_with(suffix)) return;
      for (const std::string_view leaf : data) {
        const auto known = catalog.find(without_suffix(name, suffix) + std::string(leaf));
        if (known && is_data[*known]) marks[i] = true;
      }
    };
    mark(".quant_map", {""});
    mark(".nested_quant_map", {""});
    for (const std::string_view scale :
         {"input_scale", "input_global_scale", "output_scale", "pre_quant_scale"}) {
      mark(scale, {"weight", "weight_packed"});
    }
  }
  return marks;
}

QuantizedTensor as_quantized_tensor(const Components& components) {
  QuantizedTensor made = {.name = components.name, .data = components.data};
  for (const std::uint32_t scale : {components.scale, components.scale_of_scales}) {
    if (scale != none) made.scales.push_back(scale);
  }
  made.states = components.states;
  return made;
}

QuantizedTensors name_quantized_tensors(const Catalog& catalog) {
  const std::vector<Components> components = find_components(catalog);
  std::vector<QuantizedTensor> tensors;
  tensors.reserve(components.size());
  for (const Components& each : components) tensors.push_back(as_quantized_tensor(each));
  return {std::move(tensors), {}, mark_companions(catalog, components), catalog.tensors().size()};
}

}  // namespace loadstone

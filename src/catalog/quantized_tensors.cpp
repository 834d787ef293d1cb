#include "loadstone/quantized_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "base/ceil_div.h"
#include "base/text.h"
#include "catalog/bnb_state.h"
#include "catalog/check_decoding.h"
#include "catalog/components.h"
#include "catalog/int4.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

bool is_dtype(const TensorInfo& tensor, std::initializer_list<Dtype> dtypes) {
  for (const Dtype dtype : dtypes) {
    if (tensor.encoding == Encoding(dtype)) return true;
  }
  return false;
}

Shape doubled(const Shape& shape) {
  auto extents = shape.extents();
  if (!extents.empty()) extents.back() *= 2;  // overflow: the kernel then gives another shape
  return Shape(std::move(extents));
}

// Groups of numbers with a scale each, flat: [..., groups, 16] bytes are [..., groups * 32].
Shape ungrouped(const Shape& shape) {
  auto extents = shape.extents();
  if (extents.size() < 2) return shape;
  const std::uint64_t bytes = extents.back();
  extents.pop_back();
  extents.back() *= 2 * bytes;
  return Shape(std::move(extents));
}

std::string quoted(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) {
    text += fmt::format("{}'{}'", text.empty() ? "" : ", ", printable(name));
  }
  return text;
}

// Goes through a catalog once. Not thread-safe.
class Finder {
 public:
  Finder(const Catalog& catalog, Storage* storage)
      : catalog_(catalog),
        storage_(catalog.storage(storage)),
        used_(catalog.tensors().size(), false),
        sources_(catalog.shards().size()) {}

  QuantizedTensors run() && {
    const std::vector<Components> components = find_components(catalog_);
    std::vector<QuantizedTensor> tensors;
    tensors.reserve(components.size());
    for (const Components& each : components) {
      current_ = as_quantized_tensor(each);
      look_at(each);
      tensors.push_back(std::move(current_));
    }
    for (std::uint32_t i = 0; i < catalog_.tensors().size(); ++i) report_unused(i);
    return {std::move(tensors), std::move(warnings_), mark_companions(catalog_, components),
            catalog_.tensors().size()};
  }

 private:
  [[nodiscard]] std::optional<std::uint32_t> find(const std::string& name) const {
    return catalog_.find(name);
  }

  void look_at(const Components& components) {
    switch (components.naming) {
      case ComponentNaming::fp8:
        return add_fp8(components);
      case ComponentNaming::int8:
      case ComponentNaming::bnb_int8:
        return add_int8(components);
      case ComponentNaming::nibbles:
        return add_nibbles(components, "nvfp4");
      case ComponentNaming::packed:
        return add_nibbles(components, "nvfp4_divided");
      case ComponentNaming::mxfp4_blocks:
        return add_mxfp4_blocks(components);
      case ComponentNaming::bnb_4bit:
        return add_bnb4(components);
      case ComponentNaming::foreign:
        return refuse_foreign(components);
    }
  }

  void refuse_foreign(const Components& components) {
    std::vector<std::string> sources = {catalog_.tensors()[components.data].name};
    for (const std::uint32_t companion : current_.companions()) {
      used_[companion] = true;
      sources.push_back(catalog_.tensors()[companion].name);
    }
    fail(components.name, "plan.encoding",
         "is quantized in a layout that this version does not decode", std::move(sources));
  }

  // Rows and columns of a block.
  [[nodiscard]] std::array<std::uint64_t, 2> block_size() const {
    constexpr std::array<std::uint64_t, 2> usual = {128, 128};
    const auto claimed = catalog_.quantization_claim().block.value_or(usual);
    return claimed[0] == 0 ? usual : claimed;
  }

  // How many blocks a matrix has, down and across.
  [[nodiscard]] Shape blocks_of(const TensorInfo& weight) const {
    const std::size_t rank = weight.shape.rank();
    const auto size = block_size();
    return Shape(
        {ceil_div(weight.shape[rank - 2], size[0]), ceil_div(weight.shape[rank - 1], size[1])});
  }

  void refuse_blocks(const TensorInfo& weight, const TensorInfo& scales, const char* what) {
    fail(weight.name, "q.scale_shape", what, {scales.name}, scales.shape.text(),
         blocks_of(weight).text());
  }

  // Of scales that have as many dims as the weight. Null: they are refused.
  const char* kernel_of_blocks(const TensorInfo& weight, const TensorInfo& scales) {
    const auto& claimed = catalog_.quantization_claim().block;
    const std::size_t rank = weight.shape.rank();
    const auto size = block_size();
    const Shape blocks = blocks_of(weight);
    const bool has_blocks =
        scales.shape[rank - 2] == blocks[0] && scales.shape[rank - 1] == blocks[1];
    if (claimed && (*claimed)[0] == 0) {
      fail(weight.name, "plan.encoding", "is FP8, and the config gives several sizes of its blocks",
           {weight.name, scales.name});
      return nullptr;
    }
    if (claimed && !has_blocks) {
      refuse_blocks(weight, scales, "has other scales than the config's blocks ask for");
      return nullptr;
    }
    if (has_blocks && size[0] == 128 && size[1] == 128) return "fp8_block_128";
    const bool is_whole =
        weight.shape[rank - 2] % size[0] == 0 && weight.shape[rank - 1] % size[1] == 0;
    if (claimed && !is_whole) {
      fail(weight.name, "plan.encoding", "has cut blocks of a size that is not decoded",
           {weight.name, scales.name}, fmt::format("{} by {}", size[0], size[1]));
      return nullptr;
    }
    return "fp8_block";
  }

  void add_fp8(const Components& components) {
    const std::uint32_t index = components.data;
    const TensorInfo& weight = catalog_.tensors()[index];
    if (components.scale == Components::none) {
      fail(weight.name, "q.scale_missing", "has no scales, and its numbers mean nothing without",
           components.missing);
      return;
    }
    if (weight.shape.rank() < 2) {
      fail(weight.name, "q.shape", "is FP8 with scales, but no matrix",
           {weight.name, catalog_.tensors()[components.scale].name}, weight.shape.text());
      return;
    }
    const std::uint32_t scale = components.scale;
    const TensorInfo& scales = catalog_.tensors()[scale];
    const std::uint64_t columns = weight.shape[weight.shape.rank() - 1];
    const std::uint64_t count = scales.shape.numel().value_or(0);
    const std::size_t rank = scales.shape.rank();
    // ModelOpt's blocks: [a, 1, b, 1].
    const bool is_spread =
        rank == 4 && weight.shape.rank() == 2 && scales.shape[1] == 1 && scales.shape[3] == 1;
    const bool is_grid = rank == weight.shape.rank();
    const std::uint64_t rows = weight.shape[weight.shape.rank() - 2];
    const bool has_one_a_matrix =
        (is_grid && scales.shape[rank - 2] == 1 && scales.shape[rank - 1] == 1) ||
        (weight.shape.rank() == 3 && scales.shape == Shape({weight.shape[0]}));
    const bool has_one_a_row =
        (is_grid && rows > 1 && scales.shape[rank - 2] == rows && scales.shape[rank - 1] == 1) ||
        (rank + 1 == weight.shape.rank() && rank > 0 && count != 1);
    constexpr std::uint64_t mx_columns = 32;
    const bool is_mx = is_grid && is_dtype(scales, {Dtype::u8, Dtype::f8_e8m0}) &&
                       scales.shape[rank - 2] == rows &&
                       scales.shape[rank - 1] == ceil_div(columns, mx_columns);
    // By its name it is of blocks, and one scale is that of one block.
    const Shape blocks = blocks_of(weight);
    const bool is_inverse = is_grid && scales.name.ends_with("_inv");
    if (has_one_a_matrix && is_inverse && blocks.numel() != 1u) {
      refuse_blocks(weight, scales, "has one scale for several blocks");
      return;
    }
    const char* kernel = "fp8_block";
    const char* encoding = "fp8-block";
    if (is_mx) {
      kernel = "mxfp8";
      encoding = "mxfp8";
    } else if (has_one_a_row) {
      kernel = "fp8_rows";
      encoding = "fp8-channel";
    } else if (is_spread) {
      kernel = "fp8_block_128";
    } else if ((count == 1 || has_one_a_matrix) && !is_inverse) {
      encoding = "fp8";
    } else if (is_grid) {
      kernel = kernel_of_blocks(weight, scales);
    }
    if (kernel == nullptr) return;
    add(weight.name, encoding, {kernel, {index, scale}, weight.shape, Dtype::bf16});
  }

  void add_int8(const Components& components) {
    const TensorInfo& weight = catalog_.tensors()[components.data];
    const std::vector<std::uint32_t> sources = {components.data, components.scale};
    if (components.naming == ComponentNaming::int8) {
      add(weight.name, "int8-channel", {"int8_rows", sources, weight.shape, Dtype::bf16});
      return;
    }
    add(weight.name, "int8", {"bnb_int8", sources, weight.shape, Dtype::f16});
    const std::string prefix = weight.name.substr(0, weight.name.size() - 6);
    const auto format = find(prefix + "weight_format");
    if (!format) return;
    beside(*format);
    check_weight_format(weight.name, catalog_.tensors()[*format]);
  }

  // Old GPUs kept tiles, which bitsandbytes itself no longer reads.
  void check_weight_format(const std::string& value, const TensorInfo& format) {
    constexpr std::uint64_t bytes_max = 8;  // one integer
    std::string text(1, '\1');
    if (format.byte_count() <= bytes_max) text = text_of(format);
    if (std::ranges::all_of(text, [](char byte) { return byte == 0; })) return;
    fail(value, "q.weight_format", "is kept in the tiles of an old GPU", {format.name},
         std::to_string(static_cast<unsigned char>(text.front())), "0, rows");
  }

  // NVFP4 where there is a scale of scales, MXFP4 where the scales are powers of two.
  void add_nibbles(const Components& components, const char* nvfp4) {
    if (!components.missing.empty()) {
      const bool lacks_all = components.scale == Components::none;
      fail(components.name, "q.scale_missing", lacks_all ? "has no scales" : "has no global scale",
           components.missing);
      return;
    }
    const Shape shape = doubled(catalog_.tensors()[components.data].shape);
    const TensorInfo& scale = catalog_.tensors()[components.scale];
    std::vector<std::uint32_t> sources = {components.data, components.scale};
    if (is_dtype(scale, {Dtype::u8, Dtype::f8_e8m0})) {
      add(components.name, "mxfp4", {"fp4_block", std::move(sources), shape, Dtype::bf16});
    } else if (is_dtype(scale, {Dtype::f8_e4m3})) {
      sources.push_back(components.scale_of_scales);
      add(components.name, "nvfp4", {nvfp4, std::move(sources), shape, Dtype::bf16});
    } else if (!is_dtype(scale, {Dtype::f32, Dtype::f16, Dtype::bf16}) || !add_int4(components)) {
      refuse_foreign(components);
    }
  }

  // ModelOpt's integers. False: tensors of other shapes, which are bytes of somebody else.
  bool add_int4(const Components& components) {
    if (components.naming != ComponentNaming::nibbles) return false;
    const std::uint32_t index = components.data;
    const std::uint32_t scales = components.scale;
    const TensorInfo& weight = catalog_.tensors()[index];
    const Int4Shapes shapes = int4_shapes(weight.shape, catalog_.tensors()[scales].shape);
    const bool may_be_pairs =
        shapes.row_pairs && is_dtype(catalog_.tensors()[scales], {Dtype::f32});
    const auto known = int4_encoding(catalog_.metadata());
    const bool is_flat = shapes.blocks && (!may_be_pairs || known == "int4");
    if (shapes.blocks && may_be_pairs && known.empty()) {
      fail(weight.name, "q.scale_shape", "may be int4 or int4-awq: its scales fit both",
           {catalog_.tensors()[scales].name}, catalog_.tensors()[scales].shape.text());
    } else if (is_flat) {
      add(weight.name, "int4", {"int4_blocks", {index, scales}, *shapes.blocks, Dtype::bf16});
    } else if (may_be_pairs) {
      add(weight.name, "int4-awq",
          {"int4_row_pairs", {index, scales}, *shapes.row_pairs, Dtype::bf16});
    } else {
      return false;
    }
    return true;
  }

  void add_mxfp4_blocks(const Components& components) {
    const TensorInfo& blocks = catalog_.tensors()[components.data];
    if (!components.missing.empty()) {
      fail(components.name, "q.scale_missing", "has blocks and no scales", components.missing);
      return;
    }
    constexpr std::uint64_t block_bytes = 16;
    if (blocks.shape.rank() < 2 || blocks.shape[blocks.shape.rank() - 1] != block_bytes) {
      fail(components.name, "q.block", "has blocks of another size", {blocks.name},
           blocks.shape.text(), "16 bytes a block");
      return;
    }
    const Shape shape = ungrouped(blocks.shape);
    add(components.name, "mxfp4",
        {"mxfp4", {components.data, components.scale}, shape, Dtype::bf16});
    current_.is_transposed = shape.rank() == 3;
  }

  void add_bnb4(const Components& components) {
    const std::string& value = components.name;
    if (components.states.empty()) {
      fail(value, "q.scale_missing", "is packed and has no state that says how",
           components.missing);
      return;
    }
    const TensorInfo& tensor = catalog_.tensors()[components.states.front()];
    if (components.states.size() > 1) {
      fail(value, "q.quant_state", "has two states, and only one can be right",
           {tensor.name, catalog_.tensors()[components.states[1]].name});
      return;
    }
    const std::string type = tensor.name.substr(value.size() + bnb_state_infix.size());
    std::vector<std::string> missing;
    const auto part = [&](const std::string& suffix) {
      const auto index = find(value + suffix);
      if (!index) missing.push_back(value + suffix);
      return index.value_or(0);
    };
    try {
      const BnbState state = parse_bnb_state(text_of(tensor), tensor.name);
      Decoding decoding = {"bnb_" + type, {part(""), part(".absmax")}, state.shape, state.dtype};
      std::vector<std::uint32_t> others = components.states;
      if (state.nested_offset) {
        decoding.sources.push_back(part(".nested_absmax"));
        decoding.sources.push_back(part(".nested_quant_map"));
        decoding.offset = *state.nested_offset;
      }
      if (const auto map = find(value + ".quant_map")) {
        others.push_back(*map);
      }
      if (!missing.empty()) {
        fail(value, "q.scale_missing", "lacks parts", std::move(missing));
        return;
      }
      if (!has_sizes(value, decoding, state.block_size)) return;
      check_tables(value, type, decoding);
      add(value, type, std::move(decoding));
      for (const std::uint32_t other : others) beside(other);
    } catch (const Error& error) {
      const Where& where = error.where();
      fail(value, error.code(), (where.field.empty() ? "" : where.field + ": ") + error.message(),
           {where.tensor.empty() ? tensor.name : where.tensor}, where.found, where.expected);
    }
  }

  void check_tables(const std::string& value, const std::string& type, const Decoding& decoding) {
    if (const auto map = find(value + ".quant_map")) {
      const TensorInfo& table = catalog_.tensors()[*map];
      check_bnb_map(table, text_of(table), type);
    }
    if (decoding.sources.size() < 4) return;
    const TensorInfo& table = catalog_.tensors()[decoding.sources[3]];
    check_bnb_nested_map(table, text_of(table));
  }

  // The kernel tells the size of blocks by the number of scales; the state says it too.
  bool has_sizes(const std::string& value, const Decoding& decoding, std::uint64_t block_size) {
    const TensorInfo& data = catalog_.tensors()[decoding.sources[0]];
    const TensorInfo& absmax = catalog_.tensors()[decoding.sources[1]];
    const std::uint64_t elements = decoding.shape.numel().value_or(0);
    if (data.byte_count() != ceil_div(elements, 2)) {
      fail(value, "q.shape", "has other bytes than its shape asks for", {data.name},
           human_bytes(data.byte_count()), decoding.shape.text());
      return false;
    }
    if (absmax.shape.numel() != ceil_div(elements, block_size)) {
      fail(value, "q.scale_shape", "has other scales than its shape asks for", {absmax.name},
           absmax.shape.text(), fmt::format("{}", ceil_div(elements, block_size)));
      return false;
    }
    return true;
  }

  [[nodiscard]] std::string text_of(const TensorInfo& tensor) {
    if (tensor.byte_count() > bnb_state_bytes_max) {
      throw Error("q.quant_state", "too large to be a state or a table of codes",
                  {.tensor = tensor.name,
                   .found = human_bytes(tensor.byte_count()),
                   .expected = human_bytes(bnb_state_bytes_max)});
    }
    auto& source = sources_[tensor.shard];
    if (!source) source = storage_.open(catalog_.shards()[tensor.shard].path);
    std::string text(tensor.byte_count(), '\0');
    source->read(tensor.offset_begin, std::as_writable_bytes(std::span(text)));
    return text;
  }

  void add(const std::string& name, std::string_view encoding, Decoding decoding) {
    DecodeForm form;
    if (const auto problem = check_decoding(catalog_.tensors(), decoding, form)) {
      std::vector<std::string> sources;
      for (const std::uint32_t source : decoding.sources) {
        sources.push_back(catalog_.tensors()[source].name);
        used_[source] = true;
      }
      std::rotate(sources.begin(), sources.begin() + 1,
                  sources.end());  // the scales first: they are the misfit
      fail(name, "q.scale_shape", "cannot be decoded: " + problem->message, std::move(sources),
           problem->found, problem->expected);
      return;
    }
    for (const std::uint32_t source : decoding.sources) used_[source] = true;
    current_.encoding = encoding;
    current_.decoding = std::move(decoding);
    for (const char* suffix : {"input_scale", "input_global_scale"}) {
      const auto at = name.rfind("weight");
      if (at == std::string::npos || at + 6 != name.size()) break;
      if (const auto other = find(name.substr(0, at) + suffix)) beside(*other);
    }
  }

  void beside(std::uint32_t index) {
    if (used_[index]) return;
    used_[index] = true;
    current_.unneeded.push_back(index);
  }

  void report_unused(std::uint32_t index) {
    const std::string& name = catalog_.tensors()[index].name;
    if (used_[index] || !(name.ends_with("weight_scale_inv") || name.ends_with("weight_scale"))) {
      return;
    }
    warnings_.push_back(
        {.severity = Severity::warning,
         .code = "q.scale_unused",
         .sources = {name},
         .message = fmt::format("'{}' is a scale, and nothing that it belongs to is quantized",
                                printable(name))});
  }

  void fail(const std::string& value, std::string code, const std::string& what,
            std::vector<std::string> sources, std::string found = {}, std::string expected = {}) {
    current_.decoding = {};
    current_.encoding.clear();
    current_.defect = {.severity = Severity::error,
                       .code = std::move(code),
                       .target = value,
                       .sources = std::move(sources),
                       .message = fmt::format("'{}' {}", printable(value), what),
                       .found = std::move(found),
                       .expected = std::move(expected)};
    // One finding is enough: its scales are not told to be scales of nothing.
    for (const char* suffix : {"_scale", "_scale_inv"}) {
      if (const auto index = find(value + suffix)) used_[*index] = true;
    }
    const auto& named = current_.defect.sources;
    if (!named.empty()) current_.defect.message += fmt::format(" ({})", quoted(named));
  }

  const Catalog& catalog_;
  Storage& storage_;
  std::vector<bool> used_;
  std::vector<std::shared_ptr<ByteSource>> sources_;
  QuantizedTensor current_;
  std::vector<Finding> warnings_;
};

}  // namespace

Shape QuantizedTensor::shape() const {
  auto extents = decoding.shape.extents();
  if (is_transposed) std::swap(extents[extents.size() - 2], extents.back());
  return Shape(std::move(extents));
}

std::string QuantizedTensor::role(std::uint32_t tensor) const {
  if (tensor == data) return "data";
  constexpr std::size_t nested_code = 3;  // of a decoding's sources
  const auto& sources = decoding.sources;
  if (sources.size() > nested_code && sources[nested_code] == tensor) return "nested_code";
  const bool is_of_bnb = decoding.kernel.starts_with("bnb_");
  const auto at = std::ranges::find(scales, tensor) - scales.begin();
  if (at == 0) return is_of_bnb ? "absmax" : "scale";
  if (at == 1) return is_of_bnb ? "nested_absmax" : "scale_2";
  const auto state = std::ranges::find(states, tensor) - states.begin();
  return state == 0 ? "state" : fmt::format("state_{}", state + 1);
}

std::vector<std::uint32_t> QuantizedTensor::companions() const {
  std::vector<std::uint32_t> all = scales;
  all.insert(all.end(), states.begin(), states.end());
  return all;
}

QuantizedTensors::QuantizedTensors(std::vector<QuantizedTensor> tensors,
                                   std::vector<Finding> warnings, std::vector<bool> companions,
                                   std::size_t count)
    : tensors_(std::move(tensors)), is_companion_(std::move(companions)) {
  if (!tensors_.empty()) by_data_.assign(count, QuantizedTensor::none);
  for (std::uint32_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].data != QuantizedTensor::none) by_data_[tensors_[i].data] = i;
    if (!tensors_[i].defect.code.empty()) findings_.push_back(tensors_[i].defect);
  }
  std::ranges::move(warnings, std::back_inserter(findings_));
}

bool QuantizedTensors::has_readable() const noexcept {
  return std::ranges::any_of(tensors_, &QuantizedTensor::is_readable);
}

const QuantizedTensor* QuantizedTensors::find(std::uint32_t tensor) const noexcept {
  if (tensor >= by_data_.size() || by_data_[tensor] == QuantizedTensor::none) return nullptr;
  return &tensors_[by_data_[tensor]];
}

bool QuantizedTensors::is_companion(std::uint32_t tensor) const noexcept {
  return tensor < is_companion_.size() && is_companion_[tensor];
}

QuantizedTensors find_quantized_tensors(const Catalog& catalog, Storage* storage) {
  return Finder(catalog, storage).run();
}

}  // namespace loadstone

// Reads and writes recipes as JSON (docs/plan-json.md). Boxes are arrays without field names,
// because there may be 45,000 of them.
#include <fmt/format.h>

#include <bit>
#include <span>
#include <vector>

#include "base/base64.h"
#include "base/json_fields.h"
#include "base/json_writer.h"
#include "base/only_errors.h"
#include "base/text.h"
#include "boxes/decodings.h"
#include "codec/tensor_table.h"
#include "loadstone/catalog.h"
#include "loadstone/error.h"
#include "loadstone/quantized_tensors.h"
#include "loadstone/recipe.h"
#include "plan/merge_json.h"

namespace loadstone {

namespace {

constexpr std::uint64_t version = 2;
constexpr std::size_t recipes_bytes_max = std::size_t{1} << 30;
constexpr const char* recipe_code = "plan.recipe";

// Describes the encoding and all components of a source's codes, for comparison. Empty for plain
// values.
std::string codes_of(const Catalog& catalog, std::uint32_t source) {
  const QuantizedTensor* const codes = catalog.quantized().find(source);
  if (codes == nullptr) return {};
  if (!codes->is_readable()) return "the encoding is unknown";
  const Decoding& decoding = codes->decoding;
  std::vector<std::string> names;
  for (const std::uint32_t each : decoding.sources) names.push_back(catalog.tensors()[each].name);
  std::string text = fmt::format("{} ({} {} of {}", codes->encoding, decoding.kernel,
                                 decoding.shape.text(), fmt::join(names, ", "));
  if (decoding.offset != 0) text += fmt::format(", offset {}", decoding.offset);
  if (decoding.group_size != 0) text += fmt::format(", groups of {}", decoding.group_size);
  if (codes->is_transposed) text += ", transposed";
  return text + ")";
}

// ---- writing

void write_source(JsonWriter& json, const Catalog& catalog, std::uint32_t source) {
  const TensorInfo& tensor = catalog.tensors()[source];
  const std::string codes = codes_of(catalog, source);
  if (codes.empty()) {
    json.array(tensor.name, tensor.encoding, tensor.shape);
  } else {
    json.array(tensor.name, tensor.encoding, tensor.shape, codes);
  }
}

PlanNumbers write_recipe_sources(JsonWriter& json, const Recipes& recipes, const Catalog& catalog) {
  ValueSet values = {.catalog = catalog, .decodings = recipes.decodings};
  for (const TargetRecipe& recipe : recipes.targets) {
    values.list.push_back({.name = recipe.target, .boxes = recipe.boxes});
  }
  PlanNumbers numbers = number_boxes(values);
  json.key("sources");
  json.begin_array();
  for (const std::uint32_t source : numbers.sources_used) write_source(json, catalog, source);
  json.end_array();
  return numbers;
}

void write_decodings(JsonWriter& json, const Recipes& recipes, const PlanNumbers& numbers) {
  if (numbers.decodings_used.empty()) return;
  json.key("decodings");
  json.begin_array();
  for (const std::uint32_t used : numbers.decodings_used) {
    const Decoding& decoding = recipes.decodings[used];
    json.begin_array();
    json.value(decoding.kernel);
    json.value(JsonIndices(decoding.sources, numbers.sources));
    json.value(decoding.shape);
    json.value(decoding.dtype);
    if (decoding.offset != 0 || decoding.group_size != 0) {
      json.value(std::bit_cast<std::uint32_t>(decoding.offset));
    }
    if (decoding.group_size != 0) json.value(decoding.group_size);
    json.end_array();
  }
  json.end_array();
}

void write_recipe_boxes(JsonWriter& json, const std::vector<Box>& boxes,
                        const PlanNumbers& numbers) {
  json.begin_array();
  for (const Box& box : boxes) {
    json.begin_array();
    json.value(box.decoding == no_decoding
                   ? numbers.sources.at(box.source)
                   : numbers.sources_used.size() + numbers.decodings.at(box.decoding));
    json.value(box.source_offset);
    json.value(box.target_offset);
    for (const BoxDim& dim : box.dims) {
      json.value(dim.extent);
      json.value(dim.source_stride);
      json.value(dim.target_stride);
    }
    json.end_array();
  }
  json.end_array();
}

// ---- reading

class Reading {
 public:
  explicit Reading(const Catalog& catalog) : catalog_(catalog) {}

  Recipes run(std::string_view text) {
    const JsonDocument document(text, recipe_code, recipes_bytes_max);
    const JsonPlace top;
    JsonObject fields(reader_, document.root(), top);
    fields.require_version(version);
    Recipes recipes;
    read_sources(fields.required("sources"), fields.at("sources"));
    if (fields.optional("values", recipes.values_digest)) {
      const JsonPlace place = fields.at("computed_from");
      for (const auto item : reader_.array(fields.required("computed_from"), place)) {
        const JsonPlace item_place = {&place, {}, recipes.computed_from.size()};
        recipes.computed_from.push_back(find(reader_.string(item, item_place), item_place));
      }
    }
    if (const auto decodings = fields.optional("decodings")) {
      read_decodings(*decodings, fields.at("decodings"), recipes.decodings);
    }
    decodings_ = recipes.decodings;
    const JsonPlace targets_place = fields.at("targets");
    for (const auto item : reader_.array(fields.required("targets"), targets_place)) {
      const JsonPlace place = {&targets_place, {}, recipes.targets.size()};
      recipes.targets.push_back(read_target(item, place));
    }
    fields.done();
    return recipes;
  }

 private:
  using Element = JsonReader::Element;

  [[nodiscard]] std::uint32_t find(std::string_view name, const JsonPlace& place) const {
    const auto index = catalog_.find(name);
    if (!index)
      reader_.refuse(place, "the checkpoint contains no tensor of this name", printable(name));
    return *index;
  }

  void read_sources(Element value, const JsonPlace& place) {
    for (const auto item : reader_.array(value, place)) {
      const JsonPlace item_place = {&place, {}, sources_.size()};
      const auto parts = reader_.array(item, item_place);
      if (parts.size() != 3 && parts.size() != 4) {
        reader_.refuse(item_place, "a source must have three or four parts",
                       std::to_string(parts.size()), "[name, encoding, shape, codes]");
      }
      auto part = parts.begin();
      const std::uint32_t source = find(reader_.string(*part, item_place), item_place);
      const TensorInfo& tensor = catalog_.tensors()[source];
      const auto encoding = reader_.string(*++part, item_place);
      const Shape shape = read_shape(*++part, item_place);
      if (shape != tensor.shape) require_same(tensor, "shape", tensor.shape.text(), shape.text());
      require_same(tensor, "encoding", tensor.encoding.name(), encoding);
      const auto codes = parts.size() == 4 ? reader_.string(*++part, item_place) : "";
      require_same(tensor, "codes", codes_of(catalog_, source), codes);
      sources_.push_back(source);
    }
  }

  // Requires the tensor for which the recipes were made, because boxes count its elements and
  // decodings read its codes.
  static void require_same(const TensorInfo& tensor, const char* field, std::string_view found,
                           std::string_view expected) {
    if (found == expected) return;
    const auto shown = [](std::string_view text) {
      return text.empty() ? std::string("plain values") : printable(text, 400);
    };
    throw Error(recipe_code,
                "the recipes were made for a different checkpoint: its tensor of this name differs",
                {.tensor = tensor.name,
                 .field = field,
                 .found = shown(found),
                 .expected = shown(expected)});
  }

  void read_decodings(Element value, const JsonPlace& place, std::vector<Decoding>& decodings) {
    PreparedDecoder form;
    for (const auto item : reader_.array(value, place)) {
      const JsonPlace item_place = {&place, {}, decodings.size()};
      const auto parts = reader_.array(item, item_place);
      if (parts.size() < 4 || parts.size() > 6) {
        reader_.refuse(item_place, "a decoding must have four to six parts",
                       std::to_string(parts.size()),
                       "[kernel, sources, shape, dtype, bits of the offset, group size]");
      }
      auto part = parts.begin();
      Decoding& decoding = decodings.emplace_back();
      decoding.kernel = reader_.string(*part, item_place);
      for (const auto source : reader_.array(*++part, item_place)) {
        const auto number = reader_.unsigned_number(source, item_place);
        if (number >= sources_.size()) {
          reader_.refuse(item_place, "the decoding's source does not exist",
                         fmt::format("source {}", number),
                         fmt::format("one of {}", sources_.size()));
        }
        decoding.sources.push_back(sources_[number]);
      }
      decoding.shape = read_shape(*++part, item_place);
      reader_.read(*++part, item_place, decoding.dtype);
      if (parts.size() > 4) {
        const JsonBits offset(decoding.offset, "the number does not fit in the 32 bits of an F32");
        reader_.read(*++part, item_place, offset);
      }
      if (parts.size() > 5) decoding.group_size = reader_.unsigned_number(*++part, item_place);
      if (auto problem = check_decoding(catalog_.tensors(), decoding, form)) {
        reader_.refuse(item_place, problem->message, printable(problem->found), problem->expected);
      }
    }
  }

  TargetRecipe read_target(Element value, const JsonPlace& place) {
    const auto parts = reader_.array(value, place);
    if (parts.size() != 4) {
      reader_.refuse(place, "a target must have four parts", std::to_string(parts.size()),
                     "[name, shape, dtype, boxes or constant]");
    }
    auto part = parts.begin();
    TargetRecipe recipe;
    recipe.target = reader_.string(*part, place);
    recipe.shape = read_shape(*++part, place);
    reader_.read(*++part, place, recipe.dtype);
    if ((*++part).is_string()) {
      read_constant(*part, place, recipe);
      return recipe;
    }
    const auto boxes = reader_.array(*part, place);
    recipe.boxes.reserve(boxes.size());
    for (const auto box : boxes) {
      recipe.boxes.push_back(read_box(box, {&place, {}, recipe.boxes.size()}));
    }
    return recipe;
  }

  void read_constant(Element value, const JsonPlace& place, TargetRecipe& recipe) {
    const auto bytes = bytes_from_base64(reader_.string(value, place));
    if (!bytes) reader_.refuse(place, "a constant is not base64");
    const auto elements = recipe.shape.numel().value_or(0);
    if (Encoding(recipe.dtype).byte_count(elements) != bytes->size()) {
      reader_.refuse(place, "the number of a constant's bytes does not fit its dtype and shape",
                     counted(bytes->size(), "byte"),
                     fmt::format("{} {}", name(recipe.dtype), recipe.shape.text()));
    }
    constant_bytes_ += bytes->size();
    if (constant_bytes_ > constant_bytes_max) {
      reader_.refuse(place, "the constants together are too large", human_bytes(constant_bytes_),
                     human_bytes(constant_bytes_max));
    }
    recipe.constant = std::make_shared<const std::vector<std::byte>>(*bytes);
  }

  Shape read_shape(Element value, const JsonPlace& place) const {
    std::vector<std::uint64_t> extents;
    reader_.read(value, place, JsonFlat(extents));
    Shape shape(std::move(extents));
    if (!shape.numel()) reader_.refuse(place, "the size does not fit in 64 bits", shape.text());
    return shape;
  }

  Box read_box(Element value, const JsonPlace& place) {
    numbers_.clear();
    reader_.read(value, place, JsonFlat(numbers_));
    if (numbers_.empty() || numbers_.size() % 3 != 0) {
      reader_.refuse(
          place, "a box has the wrong number of integers",
          fmt::format("{} numbers", numbers_.size()),
          "source, source_offset, target_offset, then extent, source_stride, target_stride ...");
    }
    Box box;
    if (numbers_[0] < sources_.size()) {
      box.source = sources_[numbers_[0]];
    } else if (numbers_[0] - sources_.size() < decodings_.size()) {
      box.decoding = static_cast<std::uint32_t>(numbers_[0] - sources_.size());
      box.source = decodings_[box.decoding].sources.front();
    } else {
      reader_.refuse(place, "the box's source does not exist",
                     fmt::format("source {}", numbers_[0]),
                     fmt::format("one of {}", sources_.size() + decodings_.size()));
    }
    box.source_offset = numbers_[1];
    box.target_offset = numbers_[2];
    box.dims.reserve(numbers_.size() / 3 - 1);
    for (std::size_t i = 3; i < numbers_.size(); i += 3) {
      box.dims.push_back({numbers_[i], numbers_[i + 1], numbers_[i + 2]});
    }
    return box;
  }

  const Catalog& catalog_;
  const JsonReader reader_{recipe_code};
  std::span<const Decoding> decodings_;
  std::vector<std::uint32_t> sources_;  // indices into the catalog, by position in the JSON list
  std::vector<std::uint64_t> numbers_;
  std::uint64_t constant_bytes_ = 0;
};

}  // namespace

static std::string recipes_json(const Recipes& recipes, const Catalog& catalog) {
  JsonWriter json;
  json.begin_object();
  json.member("version", version);
  const PlanNumbers numbers = write_recipe_sources(json, recipes, catalog);
  write_decodings(json, recipes, numbers);
  json.key("targets");
  json.begin_array();
  for (const TargetRecipe& recipe : recipes.targets) {
    if (recipe.merge != nullptr) {
      throw Error(recipe_code, "a merge cannot be saved as a recipe: save its plan",
                  {.tensor = recipe.target});
    }
    json.begin_array();
    json.value(recipe.target);
    json.value(recipe.shape);
    json.value(recipe.dtype);
    if (recipe.constant != nullptr) {
      json.value(base64_from(*recipe.constant));
    } else {
      write_recipe_boxes(json, recipe.boxes, numbers);
    }
    json.end_array();
  }
  json.end_array();
  if (!recipes.values_digest.empty()) {
    json.member("values", recipes.values_digest);
    std::vector<std::string_view> names;
    for (const std::uint32_t source : recipes.computed_from) {
      names.push_back(catalog.tensors().at(source).name);
    }
    json.member("computed_from", names);
  }
  json.end_object();
  return json.take();
}

std::string to_json(const Recipes& recipes, const Catalog& catalog) {
  return only_errors([&] { return recipes_json(recipes, catalog); });
}

Recipes recipes_from_json(const Catalog& catalog, std::string_view text) {
  return only_errors([&] { return Reading(catalog).run(text); });
}

}  // namespace loadstone

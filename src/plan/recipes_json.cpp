// Recipes as JSON: docs/plan-json.md. Arrays without field names, for there may be 45,000 boxes.
#include <fmt/format.h>

#include <vector>

#include "base/json_fields.h"
#include "base/json_writer.h"
#include "base/text.h"
#include "loadstone/catalog.h"
#include "loadstone/error.h"
#include "loadstone/recipe.h"

namespace loadstone {

namespace {

constexpr std::uint64_t version = 1;
constexpr std::size_t text_bytes_max = std::size_t{1} << 30;
constexpr const char* code = "plan.recipe";

// ---- writing

using SourceNumbers = std::vector<std::uint32_t>;  // by index into the catalog
constexpr std::uint32_t unnumbered = UINT32_MAX;

// The sources that boxes name, numbered in the order of their use.
SourceNumbers write_sources(JsonWriter& json, const Recipes& recipes, const Catalog& catalog) {
  SourceNumbers numbers(catalog.tensors().size(), unnumbered);
  std::uint32_t count = 0;
  json.key("sources");
  json.begin_array();
  for (const TargetRecipe& recipe : recipes.targets) {
    for (const Box& box : recipe.boxes) {
      if (box.source >= numbers.size()) {
        throw Error(code, "the recipes are not made for this catalog", {.tensor = recipe.target});
      }
      if (numbers[box.source] != unnumbered) continue;
      numbers[box.source] = count++;
      json.value(catalog.tensors()[box.source].name);
    }
  }
  json.end_array();
  return numbers;
}

void write_boxes(JsonWriter& json, const std::vector<Box>& boxes, const SourceNumbers& numbers) {
  json.begin_array();
  for (const Box& box : boxes) {
    json.begin_array();
    json.value(numbers[box.source]);
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
    const JsonDocument document(text, code, text_bytes_max);
    const JsonPlace top;
    JsonObject fields(reader_, document.root(), top);
    const auto found = reader_.unsigned_number(fields.required("version"), fields.at("version"));
    if (found != version) {
      reader_.refuse(fields.at("version"), "a version that is not known", std::to_string(found),
                     std::to_string(version));
    }
    read_sources(fields.required("sources"), fields.at("sources"));
    Recipes recipes;
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

  void read_sources(Element value, const JsonPlace& place) {
    for (const auto item : reader_.array(value, place)) {
      const JsonPlace item_place = {&place, {}, sources_.size()};
      const auto name = reader_.string(item, item_place);
      const auto index = catalog_.find(name);
      if (!index) {
        reader_.refuse(item_place, "the checkpoint holds no such tensor", printable(name));
      }
      sources_.push_back(*index);
    }
  }

  TargetRecipe read_target(Element value, const JsonPlace& place) {
    const auto parts = reader_.array(value, place);
    if (parts.size() != 4) {
      reader_.refuse(place, "a target has four parts", std::to_string(parts.size()),
                     "[name, shape, dtype, boxes]");
    }
    auto part = parts.begin();
    TargetRecipe recipe;
    recipe.target = reader_.string(*part, place);
    recipe.shape = read_shape(*++part, place);
    const auto text = reader_.string(*++part, place);
    const auto dtype = dtype_from_name(text);
    if (!dtype) reader_.refuse(place, "unknown dtype", printable(text));
    recipe.dtype = *dtype;
    const auto boxes = reader_.array(*++part, place);
    recipe.boxes.reserve(boxes.size());
    for (const auto box : boxes) {
      recipe.boxes.push_back(read_box(box, {&place, {}, recipe.boxes.size()}));
    }
    return recipe;
  }

  Shape read_shape(Element value, const JsonPlace& place) const {
    std::vector<std::uint64_t> extents;
    for (const auto extent : reader_.array(value, place)) {
      extents.push_back(reader_.unsigned_number(extent, place));
    }
    Shape shape(std::move(extents));
    if (!shape.numel()) reader_.refuse(place, "the size does not fit 64 bits", shape.text());
    return shape;
  }

  Box read_box(Element value, const JsonPlace& place) {
    numbers_.clear();
    for (const auto number : reader_.array(value, place)) {
      numbers_.push_back(reader_.unsigned_number(number, place));
    }
    if (numbers_.empty() || numbers_.size() % 3 != 0) {
      reader_.refuse(
          place, "not a box's numbers", fmt::format("{} numbers", numbers_.size()),
          "source, source_offset, target_offset, then extent, source_stride, target_stride ...");
    }
    if (numbers_[0] >= sources_.size()) {
      reader_.refuse(place, "the box's source does not exist",
                     fmt::format("source {}", numbers_[0]),
                     fmt::format("one of {}", sources_.size()));
    }
    Box box;
    box.source = sources_[numbers_[0]];
    box.source_offset = numbers_[1];
    box.target_offset = numbers_[2];
    box.dims.reserve(numbers_.size() / 3 - 1);
    for (std::size_t i = 3; i < numbers_.size(); i += 3) {
      box.dims.push_back({numbers_[i], numbers_[i + 1], numbers_[i + 2]});
    }
    return box;
  }

  const Catalog& catalog_;
  const JsonReader reader_{code};
  std::vector<std::uint32_t> sources_;  // index into the catalog, by position in the text
  std::vector<std::uint64_t> numbers_;
};

}  // namespace

std::string to_json(const Recipes& recipes, const Catalog& catalog) {
  JsonWriter json;
  json.begin_object();
  json.member("version", version);
  const SourceNumbers numbers = write_sources(json, recipes, catalog);
  json.key("targets");
  json.begin_array();
  for (const TargetRecipe& recipe : recipes.targets) {
    json.begin_array();
    json.value(recipe.target);
    json.value(recipe.shape.extents());
    json.value(name(recipe.dtype));
    write_boxes(json, recipe.boxes, numbers);
    json.end_array();
  }
  json.end_array();
  json.end_object();
  return json.take();
}

Recipes recipes_from_json(const Catalog& catalog, std::string_view text) {
  return Reading(catalog).run(text);
}

}  // namespace loadstone

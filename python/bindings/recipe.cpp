#include <algorithm>

#include "bindings.h"
#include "boxes/cast_kind.h"
#include "boxes/decodings.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone::python {

namespace {

// Returns the name, shape and dtype of each target.
nb::list target_rows(const Recipes& recipes) {
  nb::list rows;
  for (const TargetRecipe& recipe : recipes.targets) {
    rows.append(nb::make_tuple(recipe.target, nb::tuple(nb::cast(recipe.shape.extents())),
                               name(recipe.dtype)));
  }
  return rows;
}

// Returns null if no quantized tensor has the name. First looks for codes with this name, because
// most quantized tensors are named after their codes.
const QuantizedTensor* find_quantized(const Catalog& catalog, const std::string& name) {
  if (const auto index = catalog.find(name)) {
    const QuantizedTensor* const found = catalog.quantized().find(*index);
    if (found == nullptr || found->name == name) return found;
  }
  const auto& all = catalog.quantized().tensors();
  const auto found = std::ranges::find(all, name, &QuantizedTensor::name);
  return found == all.end() ? nullptr : &*found;
}

// Decodes the quantized tensor or the GGUF tensor of this name.
RecipeBuilder::Value numbers(RecipeBuilder& self, const Catalog& catalog, const std::string& name,
                             std::string_view dtype) {
  const Dtype wanted = dtype_argument(dtype);
  const QuantizedTensor* tensor = find_quantized(catalog, name);
  QuantizedTensor blocks = {.name = name};
  if (tensor == nullptr) {
    const auto index = catalog.find(name);
    if (!index)
      throw Error("plan.missing", "the checkpoint has no tensor of this name", {.tensor = name});
    blocks.decoding = numbers_decoding(catalog, *index, decoded_dtype(wanted));
    tensor = &blocks;
  } else if (!tensor->is_readable()) {
    const Finding& defect = tensor->defect;
    throw Error(defect.code, defect.message,
                {.tensor = name, .found = defect.found, .expected = defect.expected});
  }
  return self.cast(self.numbers(*tensor, decoded_dtype(wanted)), wanted);
}

}  // namespace

void bind_recipe(nb::module_& module) {
  nb::class_<Recipes>(module, "Recipes")
      .def("targets", &target_rows)
      .def("__len__", [](const Recipes& self) { return self.targets.size(); })
      .def(
          "to_json",
          [](const Recipes& self, const Catalog& catalog) { return to_json(self, catalog); },
          uses_files())
      .def("note_values", &note_values, nb::arg("catalog"), nb::arg("computed_from"), uses_files())
      .def_static("from_json", &recipes_from_json, uses_files());
  using Value = RecipeBuilder::Value;
  nb::class_<RecipeBuilder>(module, "RecipeBuilder")
      .def(nb::init<std::shared_ptr<const Catalog>>(), nb::arg("catalog"))
      .def("source", &RecipeBuilder::source, nb::arg("name"))
      .def(
          "constant",
          [](RecipeBuilder& self, const nb::bytes& bytes, Extents shape, std::string_view dtype) {
            const auto* data = static_cast<const std::byte*>(bytes.data());
            return self.constant({data, bytes.size()}, Shape(std::move(shape)),
                                 dtype_argument(dtype));
          },
          nb::arg("bytes"), nb::arg("shape"), nb::arg("dtype"))
      .def(
          "decode",
          [](RecipeBuilder& self, std::string_view kernel, const std::vector<Value>& sources,
             Extents shape, std::string_view dtype) {
            return self.decode(kernel, sources, Shape(std::move(shape)), dtype_argument(dtype));
          },
          nb::arg("kernel"), nb::arg("sources"), nb::arg("shape"), nb::arg("dtype"))
      .def("numbers", &numbers, nb::arg("catalog"), nb::arg("name"), nb::arg("dtype"), uses_files())
      .def(
          "cast",
          [](RecipeBuilder& self, Value value, std::string_view dtype, bool is_count) {
            return self.cast(value, dtype_argument(dtype), is_count);
          },
          nb::arg("value"), nb::arg("dtype"), nb::arg("is_count") = false)
      .def("transpose", &RecipeBuilder::transpose, nb::arg("value"), nb::arg("dim_a"),
           nb::arg("dim_b"))
      .def("permute", &RecipeBuilder::permute, nb::arg("value"), nb::arg("order"))
      .def("slice", &RecipeBuilder::slice, nb::arg("value"), nb::arg("dim"), nb::arg("start"),
           nb::arg("size"), nb::arg("step") = 1)
      .def(
          "reshape",
          [](RecipeBuilder& self, Value value, Extents shape) {
            return self.reshape(value, Shape(std::move(shape)));
          },
          nb::arg("value"), nb::arg("shape"))
      .def("concat", &RecipeBuilder::concat, nb::arg("values"), nb::arg("dim"))
      .def("stack", &RecipeBuilder::stack, nb::arg("values"), nb::arg("dim"))
      .def("shape", [](const RecipeBuilder& self,
                       Value value) { return nb::tuple(nb::cast(self.shape(value).extents())); })
      .def("dtype", [](const RecipeBuilder& self, Value value) { return name(self.dtype(value)); })
      .def("add", &RecipeBuilder::add, nb::arg("target"), nb::arg("value"))
      .def("finish", &RecipeBuilder::finish);
}

}  // namespace loadstone::python

#include <span>

#include "base/digest.h"
#include "bindings.h"
#include "codec/companions.h"
#include "loadstone/quantized_tensors.h"
#include "loadstone/tensor_reader.h"

namespace loadstone::python {

namespace {

nb::object to_python(const MetadataValue& item) {
  return std::visit(
      [](const auto& value) -> nb::object {
        using Value = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<Value, MetadataArray>) {
          nb::list items;
          for (const MetadataValue& each : value) items.append(to_python(each));
          return items;
        } else {
          return nb::cast(value);
        }
      },
      item.value);
}

nb::dict metadata(const Catalog& catalog) {
  nb::dict entries;
  for (const auto& [key, value] : catalog.metadata()) entries[nb::cast(key)] = to_python(value);
  return entries;
}

// Returns the fields of loadstone.TensorInfo for each tensor: name, encoding, shape, shard path,
// begin, end, strides.
nb::list tensors(const Catalog& catalog) {
  nb::list rows;
  for (const TensorInfo& tensor : catalog.tensors()) {
    rows.append(nb::make_tuple(tensor.name, tensor.encoding.name(),
                               nb::tuple(nb::cast(tensor.shape.extents())),
                               catalog.shards()[tensor.shard].path, tensor.offset_begin,
                               tensor.offset_end, nb::tuple(nb::cast(tensor.strides))));
  }
  return rows;
}

// Returns a fingerprint of all names, encodings and shapes, in file order.
std::string digest(const Catalog& catalog) {
  Digest digest;
  const auto add = [&](std::string_view text) {
    const auto size = static_cast<std::uint64_t>(text.size());
    digest.update(std::as_bytes(std::span(&size, 1)));
    digest.update(std::as_bytes(std::span(text)));
  };
  for (const TensorInfo& tensor : catalog.tensors()) {
    add(tensor.name);
    add(tensor.encoding.name());
    add(tensor.shape.text());
    if (!tensor.strides.empty()) add("strides " + Shape(tensor.strides).text());
  }
  return digest.hex();
}

// Returns the bytes of elements [begin, end) of a tensor (see TensorReader), and the shape and the
// dtype of the tensor.
nb::tuple read_tensor(const std::shared_ptr<const Catalog>& catalog, std::string_view name,
                      std::string_view dtype, std::uint64_t begin,
                      std::optional<std::uint64_t> end) {
  std::vector<std::byte> bytes;
  Shape shape;
  Dtype found = Dtype::f32;
  {
    const nb::gil_scoped_release release;
    const auto wanted = dtype.empty() ? std::nullopt : std::optional(dtype_argument(dtype));
    TensorReader reader(catalog, name, wanted);
    shape = reader.shape();
    found = reader.dtype();
    const std::uint64_t last = end.value_or(reader.elements());
    if (begin > last || last > reader.elements()) {
      throw Error("plan.box", "the range exceeds the tensor",
                  {.tensor = std::string(name),
                   .found = std::to_string(begin) + " to " + std::to_string(last),
                   .expected = "at most " + std::to_string(reader.elements())});
    }
    bytes.resize(Encoding(found).byte_count(last - begin).value_or(0));
    reader.read(begin, last, bytes);
  }
  return nb::make_tuple(nb::bytes(bytes.data(), bytes.size()), nb::tuple(nb::cast(shape.extents())),
                        loadstone::name(found));
}

// Returns the encoding of each tensor by name, for callers that need nothing else.
nb::dict encodings(const Catalog& catalog) {
  nb::dict rows;
  for (const TensorInfo& tensor : catalog.tensors()) {
    rows[nb::cast(tensor.name)] = tensor.encoding.name();
  }
  return rows;
}

// Releases the GIL, because the first call for a catalog may read files, and other threads wait for
// that call.
const QuantizedTensors& quantized_of(const Catalog& catalog) {
  const nb::gil_scoped_release release;
  return catalog.quantized();
}

// Returns one row per quantized tensor: its name, its encoding, the shape of the decoded tensor
// (None if it cannot be decoded), and the name of each component by role.
nb::list quantized_rows(const Catalog& catalog) {
  nb::list rows;
  for (const QuantizedTensor& tensor : quantized_of(catalog).tensors()) {
    nb::dict components;
    const auto add = [&](std::uint32_t index) {
      const std::string& name = catalog.tensors()[index].name;
      const std::string role = tensor.role(index, name);
      if (!components.contains(role.c_str())) components[nb::cast(role)] = name;
    };
    if (tensor.data != QuantizedTensor::none) add(tensor.data);
    for (const std::uint32_t index : tensor.companions()) add(index);
    for (const std::uint32_t index : tensor.decoding.sources) add(index);
    const nb::object shape = tensor.is_readable() ? nb::tuple(nb::cast(tensor.shape().extents()))
                                                  : nb::object(nb::none());
    rows.append(nb::make_tuple(tensor.name, tensor.encoding, shape, components));
  }
  return rows;
}

// Returns the names of the tensors that decoded values make unnecessary: scales, states and tables.
std::vector<std::string> companions(const Catalog& catalog) {
  std::vector<bool> is_companion(catalog.tensors().size());
  for (std::uint32_t i = 0; i < catalog.tensors().size(); ++i) {
    is_companion[i] = catalog.quantized().is_companion(i);
  }
  for (const QuantizedTensor& tensor : catalog.quantized().tensors()) {
    for (const std::uint32_t index : tensor.unneeded) is_companion[index] = true;
  }
  std::vector<std::string> names;
  for (std::uint32_t i = 0; i < catalog.tensors().size(); ++i) {
    if (is_companion[i]) names.push_back(catalog.tensors()[i].name);
  }
  return names;
}

}  // namespace

void bind_catalog(nb::module_& module) {
  module.def("is_companion_name", &is_companion_name, nb::arg("name"));
  nb::class_<Catalog>(module, "Catalog")
      .def_prop_ro("root", &Catalog::root)
      .def_prop_ro("total_bytes", &Catalog::total_bytes)
      .def_prop_ro("findings", &all_findings, uses_files())
      .def("read", &read_tensor, nb::arg("name"), nb::arg("dtype") = "", nb::arg("begin") = 0,
           nb::arg("end").none() = nb::none())
      .def_prop_ro("shards",
                   [](const Catalog& self) {
                     std::vector<std::string> paths;
                     for (const Shard& shard : self.shards()) paths.push_back(shard.path);
                     return paths;
                   })
      .def("tensors", &tensors)
      .def("encodings", &encodings)
      .def("quantized", &quantized_rows)
      .def("companions", &companions, uses_files())
      .def("digest", &digest)
      .def("metadata", &metadata)
      .def(
          "to_json", [](const Catalog& self) { return to_json(self); }, uses_files());
  module.def(
      "open_checkpoint",
      [](const std::vector<std::string>& paths, bool allow_links, std::uint32_t gguf_rank_max,
         Storage* storage) {
        const OpenOptions options{
            .allow_links = allow_links, .gguf_rank_max = gguf_rank_max, .storage = storage};
        return paths.size() == 1 ? open_checkpoint(paths.front(), options)
                                 : open_checkpoint(paths, options);
      },
      nb::arg("paths"), nb::arg("allow_links") = false,
      nb::arg("gguf_rank_max") = defaults::gguf_rank_max, nb::arg("storage").none() = nb::none(),
      uses_files());
  module.def(
      "join_checkpoints",
      [](std::vector<std::shared_ptr<const Catalog>> checkpoints) {
        return std::make_shared<const Catalog>(std::move(checkpoints));
      },
      nb::arg("checkpoints"));
}

}  // namespace loadstone::python

#include "codec/unknown/unknown.h"

#include "codec/unknown/foreign_scale.h"

namespace loadstone {

namespace {

// Quanto's "P._data" with "P._scale"; integers of 4 bits in words, with a shape of their own.
std::optional<QuantizedTensor> recognise(const TensorTable& table, std::uint32_t tensor) {
  const std::string& name = table[tensor].name;
  const bool is_quanto = name.ends_with("._data");
  if (!is_quanto) return std::nullopt;
  const auto scale = table.find(without_suffix(name, "data") + "scale");
  if (scale == TensorTable::none) return std::nullopt;
  QuantizedTensor made = quantized_tensor(name, tensor, {scale});
  refuse_layout(table, made);
  return made;
}

}  // namespace

const Family unknown_family = {"unknown", {}, recognise};

}  // namespace loadstone

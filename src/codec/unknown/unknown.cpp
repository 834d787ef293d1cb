// Recognises quantized layouts that loadstone cannot decode. They are rejected by name and never
// read as plain values.
#include "codec/families.h"
#include "codec/unknown/foreign_scale.h"

namespace loadstone {

namespace {

// Recognises Quanto's "P._data" with "P._scale", and its packed codes "P._data._data", which also
// have a "P._shift". Recognises packed codes of GPTQ and AWQ that are not matrices of I32.
std::optional<QuantizedTensor> recognise(const TensorTable& table, std::uint32_t tensor) {
  const std::string& name = table[tensor].name;
  if (name.ends_with(".qweight")) {
    const bool is_known = is_dtype(table[tensor], {Dtype::i32}) && table[tensor].shape.rank() == 2;
    const auto scales = table.find(without_suffix(name, "qweight") + "scales");
    if (is_known || scales == TensorTable::none) return std::nullopt;
    QuantizedTensor words =
        quantized_tensor(without_suffix(name, "qweight") + "weight", tensor, {scales});
    refuse_layout(table, words);
    return words;
  }
  std::string weight = name;
  while (weight.ends_with("._data")) weight = without_suffix(weight, "._data");
  if (weight.size() == name.size()) return std::nullopt;
  const auto scale = table.find(weight + "._scale");
  if (scale == TensorTable::none) return std::nullopt;
  QuantizedTensor made = quantized_tensor(name, tensor, {scale});
  const auto shift = table.find(weight + "._shift");
  if (shift != TensorTable::none) made.states.push_back(shift);
  refuse_layout(table, made);
  return made;
}

}  // namespace

extern const Family unknown_family = {{}, recognise};

}  // namespace loadstone

// Recognises and decodes GPTQ. See docs/formats/gptq.md
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/ceil_div.h"
#include "base/text.h"
#include "codec/families.h"
#include "codec/scaled/scaled.h"
#include "codec/words/words.h"

namespace loadstone {

namespace {

constexpr unsigned word_bits = 32;

bool is_width(std::uint64_t bits) { return bits == 2 || bits == 3 || bits == 4 || bits == 8; }

// ---- Decoding: qweight I32 [in * bits / 32, out], scales [groups, out], qzeros I32 [groups,
// ceil(out * bits / 32)], and g_idx I32 [in] if the groups are reordered. The result is [in, out].

template <unsigned zero_offset>
std::optional<Problem> prepare(const DecodeRequest& request, PreparedDecoder& made) {
  words::Packing form = {.layout = words::Layout::down, .zero_offset = zero_offset};
  if (auto wrong = words::check_module(request, form)) return wrong;
  const Shape& codes = request.parts[0].shape;
  form.bits = static_cast<unsigned>(codes[0] * word_bits / form.rows);
  const bool fits = codes[1] == form.columns && codes[0] * word_bits == form.rows * form.bits;
  if (!fits || !is_width(form.bits)) {
    return Problem{"the number of words does not fit the shape", codes.text(),
                   request.shape.text()};
  }
  const Shape zeros({form.groups, ceil_div(form.columns * form.bits, word_bits)});
  if (request.parts[2].shape != zeros) {
    return Problem{"the numbers of scales and zero points differ", request.parts[2].shape.text(),
                   zeros.text()};
  }
  words::finish(form, made);
  return std::nullopt;
}

constexpr std::array kernels = {
    DecodeKernel{"gptq_v1", prepare<1>, false, false, true},
    DecodeKernel{"gptq_v2", prepare<0>, false, false, true},
};

// ---- recognising

// Recognises one tensor. Each instance is used once.
class Recogniser {
 public:
  Recogniser(const TensorTable& table, const words::Module& module)
      : table_(table), module_(module), made_(module.quantized()) {}

  QuantizedTensor run() && {
    try {
      if (find_layout() && find_sizes() && find_order() && check_zeros()) decode();
    } catch (const Error& error) {
      refuse(made_, error, table_[module_.codes].name);
    }
    return std::move(made_);
  }

 private:
  bool fail(const char* code, std::string what, std::vector<std::string> sources,
            std::string found = {}, std::string expected = {}) {
    refuse(made_, code, what, std::move(sources), std::move(found), std::move(expected));
    return false;
  }
  bool mismatch(const char* what, std::string found, std::string expected) {
    return fail("plan.config_mismatch", what, {table_[module_.codes].name}, std::move(found),
                std::move(expected));
  }

  bool find_layout() {
    const QuantizationClaim& claim = table_.claim();
    if (!module_.lacks.empty()) return fail("q.scale_missing", "lacks components", module_.lacks);
    const TensorInfo& scales = table_[module_.scales];
    if (table_[module_.codes].shape[1] != scales.shape[1]) {
      return fail("q.scale_shape", "has scales that do not fit its words", {scales.name},
                  scales.shape.text(), table_[module_.codes].shape.text());
    }
    if (claim.method == "awq") {
      return mismatch("is packed as GPTQ, but the config declares AWQ", "gptq", "awq");
    }
    const std::string& layout = claim.layout;
    const bool is_second = layout == "gptq_v2";
    if (!is_second && !layout.empty() && layout != "gptq" && layout != "auto_round:auto_gptq") {
      return fail("plan.encoding",
                  "is packed in a layout that this version of loadstone does not decode",
                  {table_[module_.codes].name}, layout, "gptq or gptq_v2");
    }
    is_first_ = !is_second;
    if (claim.is_made && claim.method.empty() && layout.empty()) {
      return fail(
          "plan.config_mismatch",
          "is packed as GPTQ, but the config next to it is unreadable or does not mention GPTQ",
          {table_[module_.codes].name}, "no quant_method", "gptq");
    }
    if (layout.empty()) {
      table_.note({.severity = Severity::info,
                   .code = "q.version_assumed",
                   .sources = {table_[module_.codes].name},
                   .message = "no config specifies the checkpoint's version of GPTQ; loadstone "
                              "assumes the first version, which stores each zero point minus 1"});
    }
    return true;
  }

  bool find_sizes() {
    const QuantizationClaim& claim = table_.claim();
    const TensorInfo& codes = table_[module_.codes];
    const TensorInfo& scales = table_[module_.scales];
    const TensorInfo& zeros = table_[module_.zeros];
    outputs_ = scales.shape[1];
    const std::uint64_t groups = scales.shape[0];
    const std::uint64_t stored_bits = zeros.shape[1] * word_bits;
    std::uint64_t bits = outputs_ == 0 ? 0 : stored_bits / outputs_;
    if (claim.bits && ceil_div(outputs_ * *claim.bits, word_bits) == zeros.shape[1]) {
      bits = *claim.bits;
    }
    if (zeros.shape[0] != groups || groups == 0) {
      return fail("q.scale_shape", "has scales and zero points that do not fit its words",
                  {scales.name, zeros.name}, scales.shape.text(), codes.shape.text());
    }
    if (claim.bits && !is_width(*claim.bits)) {
      return fail("q.bits", "has codes with a number of bits that GPTQ does not define",
                  {codes.name}, counted(*claim.bits, "bit"), "2, 3, 4 or 8 bits");
    }
    if (claim.bits && *claim.bits != bits && !claim.has_exceptions) {
      return mismatch("has a different number of bits than the config declares",
                      std::to_string(bits), std::to_string(*claim.bits));
    }
    if (!is_width(bits) || codes.shape[0] * word_bits % bits != 0) {
      return fail("plan.encoding", "has codes with a number of bits that loadstone does not decode",
                  {codes.name}, counted(bits, "bit"), "2, 3, 4 or 8 bits");
    }
    bits_ = static_cast<unsigned>(bits);
    inputs_ = codes.shape[0] * word_bits / bits;
    group_size_ = ceil_div(inputs_, groups);
    // Without g_idx, only the config determines which inputs a short last group contains.
    const bool is_even = words::are_even(inputs_, groups);
    const bool is_told = module_.order != TensorTable::none || is_even;
    if (!is_told && (!claim.group_size || claim.has_exceptions)) {
      return fail("q.group_size", "has groups of an unknown size", {scales.name},
                  fmt::format("{} groups of {} inputs", groups, inputs_),
                  "group_size in the config, or g_idx");
    }
    if (!claim.group_size) return true;
    const std::uint64_t claimed = std::min(*claim.group_size, inputs_);
    if (claimed == 0) return fail("q.group_size", "has groups of 0 inputs", {codes.name}, "0");
    if (ceil_div(inputs_, claimed) == groups) {
      group_size_ = claimed;
    } else if (!claim.has_exceptions) {
      return mismatch("has a different group size than the config declares",
                      fmt::format("{} groups of {} inputs", groups, inputs_),
                      fmt::format("groups of {}", claimed));
    }
    return true;
  }

  // g_idx contains the group of each input. Usually it equals the default order.
  bool find_order() {
    const QuantizationClaim& claim = table_.claim();
    if (module_.order == TensorTable::none) {
      if (!claim.is_reordered.value_or(false)) return true;
      return fail("q.scale_missing",
                  "has reordered groups, but lacks the tensor with their order (g_idx)",
                  {module_.name + ".g_idx"});
    }
    const TensorInfo& tensor = table_[module_.order];
    if (!is_dtype(tensor, {Dtype::i32}) || tensor.shape != Shape({inputs_})) {
      return fail("q.scale_shape", "has an order of groups (g_idx) of the wrong size",
                  {tensor.name}, fmt::format("{} {}", tensor.encoding.name(), tensor.shape.text()),
                  fmt::format("I32 [{}]", inputs_));
    }
    const std::vector<std::int64_t> order =
        table_.integers_of(module_.order, words::order_bytes_max);
    const auto groups = static_cast<std::int64_t>(table_[module_.scales].shape[0]);
    for (std::size_t i = 0; i < order.size(); ++i) {
      if (order[i] < 0 || order[i] >= groups) {
        return fail("q.index_range", fmt::format("has input {} in a group that does not exist", i),
                    {tensor.name}, std::to_string(order[i]), fmt::format("0 to {}", groups - 1));
      }
      has_order_ = has_order_ || static_cast<std::uint64_t>(order[i]) != i / group_size_;
    }
    if (has_order_ && claim.is_reordered == false && !claim.has_exceptions) {
      return mismatch("has reordered groups, but the config declares desc_act false", "g_idx",
                      "desc_act: true");
    }
    if (!has_order_) made_.unneeded.push_back(module_.order);
    return true;
  }

  // In symmetric models all zero points are equal and reveal the version. Some readers of version 1
  // decode a stored zero point of all ones as 0, others as 2^bits, which exceeds all codes.
  bool check_zeros() {
    const std::uint32_t half = 1u << (bits_ - 1);
    const std::string name = table_[module_.zeros].name;
    if (table_.claim().is_symmetric == true && !table_.claim().has_exceptions) {
      std::uint32_t first = 0;
      const std::string bytes = table_.read(module_.zeros, sizeof(first));
      std::memcpy(&first, bytes.data(), std::min(bytes.size(), sizeof(first)));
      const std::uint32_t field = first & ((1u << bits_) - 1);
      const std::uint32_t expected = is_first_ ? half - 1 : half;
      const std::uint32_t others = is_first_ ? half : half - 1;
      if (field == others && field != expected) {
        return mismatch(
            "has the zero points of a different version of GPTQ than the config declares",
            is_first_ ? "gptq_v2" : "gptq", is_first_ ? "gptq" : "gptq_v2");
      }
    }
    if (!is_first_) return true;
    const std::string words = table_.bytes_of(module_.zeros, words::zeros_bytes_max);
    const std::uint64_t row_words = table_[module_.zeros].shape[1];
    for (std::uint64_t i = 0; i < words.size() / 4 / std::max<std::uint64_t>(row_words, 1); ++i) {
      for (std::uint64_t column = 0; column < outputs_; ++column) {
        if (words::field_at(reinterpret_cast<const std::byte*>(words.data()) + i * row_words * 4, 1,
                            column * bits_, bits_) == 2 * half - 1) {
          return fail("q.zero_point",
                      fmt::format("stores a zero point whose bits are all ones (group {}, output "
                                  "{}): some programs read it as 0, others as {}",
                                  i, column, 2 * half),
                      {name});
        }
      }
    }
    return true;
  }

  void decode() {
    Decoding decoding = {is_first_ ? "gptq_v1" : "gptq_v2",
                         {module_.codes, module_.scales, module_.zeros},
                         Shape({inputs_, outputs_}),
                         Dtype::f16,
                         0,
                         group_size_};
    if (has_order_) decoding.sources.push_back(module_.order);
    set_decoding(table_, made_, "gptq", std::move(decoding));
    made_.is_transposed = true;
  }

  const TensorTable& table_;
  const words::Module& module_;
  QuantizedTensor made_;
  bool is_first_ = true;
  bool has_order_ = false;
  unsigned bits_ = 4;
  std::uint64_t inputs_ = 0;
  std::uint64_t outputs_ = 0;
  std::uint64_t group_size_ = 0;
};

// Recognises "P.qweight" if each of its columns contains one output.
std::optional<QuantizedTensor> recognise(const TensorTable& table, std::uint32_t tensor) {
  const auto module = words::module_of(table, tensor);
  if (!module) return std::nullopt;
  const bool has_scales = module->scales != TensorTable::none;
  // AWQ has eight outputs per word.
  if (has_scales && table[tensor].shape[1] * 8 == table[module->scales].shape[1]) {
    return std::nullopt;
  }
  return Recogniser(table, *module).run();
}

}  // namespace

constexpr std::array<std::string_view, 1> encodings = {"gptq"};

extern const Family gptq_family = {.kernels = kernels,
                                   .recognise = recognise,
                                   .reads_all = true,
                                   .encodings = encodings,
                                   .method = "gptq",
                                   .stores_conv1d_transposed = true};

}  // namespace loadstone

#include "loadstone/quantized_tensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <variant>

#include "base/only_errors.h"
#include "base/text.h"
#include "catalog/assembled_file.h"
#include "catalog/contradictions.h"
#include "catalog/conv1d.h"
#include "catalog/quantized_names.h"
#include "codec/comfyui/comfyui.h"
#include "codec/companions.h"
#include "codec/families.h"
#include "codec/gguf/gguf.h"
#include "codec/tensor_table.h"
#include "codec/unknown/foreign_scale.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

class CatalogTable final : public TensorTable {
 public:
  // `storage`: null if nothing may be read.
  CatalogTable(const Catalog& catalog, Storage* storage)
      : catalog_(catalog), storage_(storage), sources_(catalog.shards().size()) {}

  [[nodiscard]] const std::vector<TensorInfo>& tensors() const noexcept override {
    return catalog_.tensors();
  }
  [[nodiscard]] std::optional<std::uint32_t> index_of(std::string_view name) const override {
    return catalog_.find(name);
  }
  [[nodiscard]] const QuantizationClaim& claim() const noexcept override {
    return catalog_.quantization_claim();
  }

  [[nodiscard]] std::vector<std::uint32_t> beginning_with(std::string_view stem,
                                                          std::size_t count_max) const override {
    const auto name_of = [&](std::uint32_t i) { return std::string_view(tensors()[i].name); };
    if (by_name_.empty()) {
      by_name_.resize(tensors().size());
      std::iota(by_name_.begin(), by_name_.end(), std::uint32_t{0});
      std::ranges::sort(by_name_, {}, name_of);
    }
    std::vector<std::uint32_t> found;
    auto at = std::ranges::lower_bound(by_name_, stem, {}, name_of);
    for (; at != by_name_.end() && name_of(*at).starts_with(stem); ++at) {
      if (found.size() == count_max) break;
      found.push_back(*at);
    }
    return found;
  }

  [[nodiscard]] std::string_view metadata(std::string_view key) const override {
    const auto found = catalog_.metadata().find(std::string(key));
    if (found == catalog_.metadata().end()) return {};
    const auto* const text = std::get_if<std::string>(&found->second.value);
    return text == nullptr ? std::string_view() : std::string_view(*text);
  }

  [[nodiscard]] std::string read(std::uint32_t index, std::uint64_t bytes) const override {
    const TensorInfo& tensor = tensors()[index];
    if (storage_ == nullptr) {
      throw Error("q.quant_state", "nothing is read", {.tensor = tensor.name});
    }
    auto& source = sources_[tensor.shard];
    if (!source) source = open_shard(*storage_, catalog_, tensor.shard);
    std::string text(std::min(bytes, tensor.byte_count()), '\0');
    source->read(tensor.offset_begin, std::as_writable_bytes(std::span(text)));
    reads_.insert(index);
    return text;
  }

  // Returns the tensors that were read since the last call.
  [[nodiscard]] std::vector<std::uint32_t> take_reads() const {
    const auto reads = std::exchange(reads_, {});
    return {reads.begin(), reads.end()};
  }

  [[nodiscard]] bool is_read() const noexcept { return storage_ != nullptr; }

  // Returns true if the model has the weight in a Conv1D layer. Reads config.json once,
  // and only for names that such weights have.
  [[nodiscard]] bool is_conv1d(const std::string& name) const {
    if (storage_ == nullptr || !is_conv1d_weight(name)) return false;
    if (!is_config_read_) has_conv1d_ = has_conv1d(catalog_, storage_);
    is_config_read_ = true;
    if (!has_conv1d_) {
      // The finding has no sources, because a plan drops findings about tensors that it takes.
      note({.severity = Severity::warning,
            .code = "q.layout_assumed",
            .message = fmt::format(
                "no config.json specifies whether '{}' belongs to a Conv1D layer, whose quantized "
                "weights are stored transposed; loadstone assumes nn.Linear for all such names",
                printable(name)),
            .suggestion = "put the model's config.json next to the checkpoint"});
    }
    return has_conv1d_.value_or(false);
  }

  // Requires is_read().
  [[nodiscard]] std::vector<Finding> contradictions_of(
      std::span<const QuantizedTensor> tensors) const {
    return contradictions(*this, tensors, {*storage_}, catalog_.root());
  }

  void note(Finding finding) const override {
    if (std::ranges::find(notes_, finding.code, &Finding::code) != notes_.end()) return;
    notes_.push_back(std::move(finding));
  }
  [[nodiscard]] const std::vector<Finding>& notes() const noexcept { return notes_; }

 private:
  const Catalog& catalog_;
  Storage* storage_;
  mutable bool is_config_read_ = false;
  mutable std::optional<bool> has_conv1d_;
  mutable std::vector<std::shared_ptr<ByteSource>> sources_;
  mutable std::set<std::uint32_t> reads_;
  mutable std::vector<std::uint32_t> by_name_;  // filled at its first use
  mutable std::vector<Finding> notes_;
};

// Returns true for floats of at most one byte, integers, packed words, and GGUF blocks with a
// scale.
bool may_hold_codes(const TensorInfo& tensor) {
  const Encoding encoding = tensor.encoding;
  const bool is_integer = encoding.is_dtype() && kind(encoding.dtype()) == DtypeKind::integer;
  return is_fp8(tensor) || is_foreign_float(tensor) || is_integer ||
         tensor.name.ends_with(".qweight") || may_have_scale(encoding);
}

// Catches errors, because an unreadable component is a defect of this tensor only.
std::optional<QuantizedTensor> recognise_by(const Family& family, const TensorTable& table,
                                            std::uint32_t tensor) {
  try {
    return family.recognise(table, tensor);
  } catch (const Error& error) {
    QuantizedTensor made = quantized_tensor(table[tensor].name, tensor, {});
    refuse(made, error, made.name);
    return made;
  }
}

// Rejects integer codes if the config names an unknown method, because names and shapes alone do
// not show how the integers are packed.
void refuse_other_method(const TensorTable& table, QuantizedTensor& made) {
  const std::string& method = table.claim().method;
  if (method.empty() || has_known_layouts(method) || !made.is_readable()) return;
  const TensorInfo& codes = table[made.data];
  if (is_fp8(codes) || !codes.encoding.is_dtype()) return;
  refuse(made, "plan.config_mismatch",
         "is quantized by a method whose layout this version of loadstone does not decode",
         {codes.name}, method,
         fmt::format("{}, or another known method", fmt::join(shared_methods(), ", ")));
}

std::vector<QuantizedTensor> recognise_all(const CatalogTable& table) {
  std::vector<QuantizedTensor> found;
  for (std::uint32_t i = 0; i < table.tensors().size(); ++i) {
    if (!may_hold_codes(table[i])) continue;
    static_cast<void>(table.take_reads());
    for (const Family* const family : families()) {
      if (family->recognise == nullptr) continue;
      auto made = recognise_by(*family, table, i);
      if (!made) continue;
      if (made->is_readable() && !is_listed(made->encoding)) {
        throw Error("internal", "no codec family lists the encoding", {.found = made->encoding});
      }
      refuse_foreign_companions(table, *made, family->reads_all);
      refuse_other_method(table, *made);
      if (family->stores_conv1d_transposed && made->decoding.shape.rank() == 2 &&
          table.is_conv1d(made->name)) {
        made->is_transposed = !made->is_transposed;
      }
      made->decided_by = table.take_reads();
      found.push_back(*std::move(made));
      break;
    }
  }
  return found;
}

// Marks the companions of quantized tensors. Returns an empty vector if nothing is quantized.
std::vector<bool> mark_companions(const TensorTable& table,
                                  const std::vector<QuantizedTensor>& found) {
  std::vector<bool> marks;
  if (found.empty()) return marks;
  marks.resize(table.tensors().size());
  std::vector<bool> is_data(marks.size());
  for (const QuantizedTensor& each : found) {
    if (each.data != TensorTable::none) is_data[each.data] = true;
    for (const std::uint32_t companion : each.companions()) marks[companion] = true;
  }
  // Marks tables, which the names of their data identify.
  for (std::size_t i = 0; i < marks.size(); ++i) {
    const std::string& name = table.tensors()[i].name;
    const auto mark = [&](std::string_view suffix, std::initializer_list<std::string_view> data) {
      if (!name.ends_with(suffix)) return;
      const auto known = table.find_any(without_suffix(name, suffix), data);
      if (known != TensorTable::none && is_data[known]) marks[i] = true;
    };
    for (const Family* const family : families()) {
      for (const std::string_view leaf : family->tables) mark(leaf, {""});
    }
  }
  return marks;
}

// Adds codes of unknown families, which are found by their unused companions. Returns true if there
// are any; `found` then stays in order.
bool add_unknown(const TensorTable& table, std::vector<QuantizedTensor>& found,
                 std::vector<bool> is_used) {
  is_used.resize(table.tensors().size());
  const std::size_t known = found.size();
  const auto use = [&](const QuantizedTensor& each) {
    if (each.data != TensorTable::none) is_used[each.data] = true;
    for (const std::uint32_t companion : each.companions()) is_used[companion] = true;
  };
  std::ranges::for_each(found, use);
  for (std::uint32_t i = 0; i < is_used.size(); ++i) {
    if (is_used[i] || !table[i].encoding.is_dtype() || !may_hold_codes(table[i])) continue;
    if (auto unknown = unknown_codes(table, i)) found.push_back(*std::move(unknown));
  }
  for (std::size_t i = known; i < found.size(); ++i) use(found[i]);
  std::ranges::move(codes_of_unused_scales(table, is_used), std::back_inserter(found));
  if (found.size() == known) return false;
  std::ranges::stable_sort(found, {}, &QuantizedTensor::data);
  for (QuantizedTensor& each : found) each.unneeded.clear();
  return true;
}

// Does not report scales of unreadable tensors, because such tensors have a finding already.
std::vector<Finding> report_unused(const TensorTable& table,
                                   const std::vector<QuantizedTensor>& found,
                                   const std::vector<bool>& is_companion) {
  NameSet named;
  for (const QuantizedTensor& each : found) named.insert(each.name);
  std::vector<Finding> findings;
  for (std::size_t i = 0; i < table.tensors().size(); ++i) {
    const std::string& name = table.tensors()[i].name;
    for (const std::string_view leaf : {"weight_scale", "weight_scale_inv"}) {
      if (!name.ends_with(leaf) || (!is_companion.empty() && is_companion[i])) continue;
      constexpr std::size_t stem = std::string_view("weight").size();
      if (named.contains(std::string_view(name).substr(0, name.size() - leaf.size() + stem))) {
        continue;
      }
      findings.push_back(
          {.severity = Severity::warning,
           .code = "q.scale_unused",
           .sources = {name},
           .message = fmt::format("'{}' is a scale, but it belongs to no quantized tensor",
                                  printable(name))});
    }
  }
  return findings;
}

QuantizedTensors find_all(const CatalogTable& table) {
  std::vector<QuantizedTensor> found = recognise_all(table);
  if (table.is_read()) comfyui::apply_markers(table, found);
  std::vector<bool> marks = mark_companions(table, found);
  attach_companions(table, found, marks);
  if (add_unknown(table, found, marks)) {
    marks = mark_companions(table, found);
    attach_companions(table, found, marks);
  }
  std::vector<Finding> warnings = report_unused(table, found, marks);
  warnings.insert(warnings.end(), table.notes().begin(), table.notes().end());
  if (table.is_read()) {
    std::ranges::move(table.contradictions_of(found), std::back_inserter(warnings));
  }
  // This step is last, because the steps before find the scales of other codes in the same module.
  for (const QuantizedTensor& each : found) {
    if (each.is_readable()) continue;
    for (const std::uint32_t index : floats_beside(table, each)) marks[index] = true;
  }
  return {std::move(found), std::move(warnings), std::move(marks), table.tensors().size()};
}

// Examines each checkpoint separately, because no tensor belongs to codes of a different
// checkpoint.
QuantizedTensors find_joined(const Catalog& catalog) {
  std::vector<QuantizedTensor> tensors;
  std::vector<Finding> warnings;
  std::vector<bool> companions(catalog.tensors().size(), false);
  for (std::uint32_t c = 0; c < catalog.checkpoints().size(); ++c) {
    const QuantizedTensors& all = catalog.checkpoints()[c]->quantized();
    const auto [begin, end] = catalog.tensors_of(c);
    const auto move_on = [begin = begin](std::vector<std::uint32_t>& indices) {
      for (std::uint32_t& index : indices) index += begin;
    };
    for (QuantizedTensor each : all.tensors()) {
      if (each.data != QuantizedTensor::none) each.data += begin;
      move_on(each.scales);
      move_on(each.states);
      move_on(each.unneeded);
      move_on(each.decided_by);
      move_on(each.decoding.sources);
      tensors.push_back(std::move(each));
    }
    for (const Finding& finding : all.findings()) {
      if (finding.severity != Severity::error) warnings.push_back(finding);
    }
    for (std::uint32_t i = begin; i < end; ++i) companions[i] = all.is_companion(i - begin);
  }
  return {std::move(tensors), std::move(warnings), std::move(companions), catalog.tensors().size()};
}

}  // namespace

Shape QuantizedTensor::shape() const {
  return only_errors([&] {
    auto extents = decoding.shape.extents();
    if (is_transposed) std::swap(extents[extents.size() - 2], extents.back());
    return Shape(std::move(extents));
  });
}

std::string QuantizedTensor::role(std::uint32_t tensor, std::string_view tensor_name) const {
  return only_errors([&]() -> std::string {
    if (tensor == data) return "data";
    const DecodeKernel* const kernel = find_decode_kernel(decoding.kernel);
    const std::size_t named =
        kernel == nullptr ? 0 : std::min(kernel->components.size(), decoding.sources.size());
    for (std::size_t i = 0; i < named; ++i) {
      if (decoding.sources[i] == tensor) return std::string(kernel->components[i]);
    }
    const auto scale = std::ranges::find(scales, tensor);
    if (scale == scales.begin() && !scales.empty()) return "scale";
    if (scale != scales.end()) return has_zero_points ? "zero_point" : "scale_2";
    for (const std::string_view role : {"g_idx", "shape"}) {
      if (tensor_name.ends_with(role)) return std::string(role);
    }
    const auto state = std::ranges::find(states, tensor) - states.begin();
    return state == 0 ? "state" : fmt::format("state_{}", state + 1);
  });
}

std::vector<std::uint32_t> QuantizedTensor::companions() const {
  return only_errors([&] {
    std::vector<std::uint32_t> all = scales;
    all.insert(all.end(), states.begin(), states.end());
    return all;
  });
}

QuantizedTensors::QuantizedTensors(std::vector<QuantizedTensor> tensors,
                                   std::vector<Finding> warnings, std::vector<bool> companions,
                                   std::size_t count) try
    : tensors_(std::move(tensors)), is_companion_(std::move(companions)) {
  if (!tensors_.empty()) by_data_.assign(count, QuantizedTensor::none);
  for (std::uint32_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].data != QuantizedTensor::none) by_data_[tensors_[i].data] = i;
    if (!tensors_[i].defect.code.empty()) findings_.push_back(tensors_[i].defect);
  }
  std::ranges::move(warnings, std::back_inserter(findings_));
} catch (...) {
  throw_as_error();
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
  return only_errors([&] {
    if (!catalog.checkpoints().empty()) return find_joined(catalog);
    return find_all(CatalogTable(catalog, &catalog.storage(storage)));
  });
}

QuantizedTensors name_quantized_tensors(const Catalog& catalog) {
  return find_all(CatalogTable(catalog, nullptr));
}

}  // namespace loadstone

// Checks adapters for problems other than tensors that do not fit the base.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <tuple>

#include "base/pattern.h"
#include "base/text.h"
#include "catalog/adapter_config.h"
#include "catalog/paths.h"
#include "catalog/tensor_values.h"
#include "loadstone/quantized_tensors.h"
#include "plan/adapter_products.h"
#include "plan/adapters.h"

namespace loadstone {

bool are_equal_products(const Catalog& catalog, const Term& first, const AddedProduct& a,
                        const Term& second, const AddedProduct& b) {
  if (!first.low_rank || !second.low_rank) {
    return first.is_added && second.is_added && first.factor == second.factor &&
           are_equal(catalog, catalog.tensors()[a.left], catalog.tensors()[b.left]);
  }
  const LowRank& one = *first.low_rank;
  const LowRank& other = *second.low_rank;
  const auto place = [](const LowRank& each) {
    return std::tuple(each.row_begin, each.column_begin, each.rows, each.columns, each.rank);
  };
  const bool is_plain = one.magnitudes.empty() && other.magnitudes.empty();
  if (first.factor != second.factor || place(one) != place(other) || !is_plain) return false;
  const auto& tensors = catalog.tensors();
  const auto are_same = [&](std::uint32_t left, std::uint32_t right) {
    return a.is_transposed == b.is_transposed
               ? are_equal(catalog, tensors[left], tensors[right])
               : are_transposes(catalog, tensors[left], tensors[right]);
  };
  const bool is_swapped = a.is_transposed != b.is_transposed;
  return are_same(a.left, is_swapped ? b.right : b.left) &&
         are_same(a.right, is_swapped ? b.left : b.right);
}

void MergeDraft::add_same(const MergeDraft& other) {
  decided_by.insert(decided_by.end(), other.decided_by.begin(), other.decided_by.end());
  if (other.is_replaced) decided_by.push_back(other.replacement);
  for (const AddedProduct& product : other.products) {
    decided_by.insert(decided_by.end(), {product.left, product.right});
  }
}

float scale_of_product(const Catalog& adapter, const std::string& module, std::uint64_t rank,
                       const TensorInfo* alpha, const AdapterConfig* config) {
  const bool has_prefix = module.starts_with(peft_prefix);
  std::optional<float> configured;
  if (config != nullptr) {
    const std::size_t skipped = has_prefix ? peft_prefix.size() : config->prefix().size();
    configured = config->scale(module.substr(skipped), rank);
  }
  if (alpha != nullptr) return stored_scale(adapter, *alpha, rank, configured);
  if (configured) return *configured;
  if (has_prefix) {
    refuse_malformed("the adapter's scale is in adapter_config.json, which is missing");
  }
  return 1;
}

void report_doubts(const AdapterConfig& config, const Catalog& adapter,
                   std::vector<Finding>& findings) {
  for (const std::string& doubt : config.doubts()) {
    findings.push_back({.severity = Severity::warning,
                        .code = "format.adapter",
                        .message = fmt::format("the configuration of the adapter in '{}' {}",
                                               printable(adapter.shown_path()), doubt)});
  }
}

namespace {

std::string encoder_folder(unsigned encoder) {
  return encoder == 1 ? "text_encoder" : fmt::format("text_encoder_{}", encoder);
}

}  // namespace

// The modules of a pipeline's text encoders have the same names, so only the name of the base's
// folder distinguishes the encoders. A folder with an unknown name counts as the first encoder.
void report_other_encoders(const Catalog& base, const Catalog& adapter,
                           const std::map<unsigned, std::vector<std::string>>& modules,
                           std::vector<Finding>& findings) {
  const std::string_view folder = file_name(base.root());
  const bool has_usual_name = folder == "text_encoder" || folder.starts_with("text_encoder_");
  for (const auto& [encoder, names] : modules) {
    const std::string expected = encoder_folder(encoder);
    if (folder == expected || (encoder == 1 && !has_usual_name)) continue;
    std::string message = fmt::format(
        "the adapter in '{}' has {} for text encoder {} of a pipeline; loadstone merges them into "
        "the base in '{}': {}",
        printable(adapter.shown_path()), counted(names.size(), "module"), encoder,
        printable(base.shown_path()), name_list(names));
    findings.push_back(
        {.severity = Severity::warning,
         .code = "merge.adapter",
         .sources = names,
         .message = std::move(message),
         .suggestion =
             "if the base is a different encoder, exclude them with a pattern (--lora-ignore)",
         .found = std::string(folder),
         .expected = expected});
  }
}

void report_idle_patterns(const Catalog& catalog, std::uint32_t first,
                          const std::vector<MergeAdapter>& adapters,
                          std::vector<Finding>& findings) {
  std::map<std::string, bool> is_used;  // by pattern
  for (std::size_t i = 0; i < adapters.size(); ++i) {
    const Catalog& adapter = *catalog.checkpoints().at(first + i);
    for (const std::string& text : adapters[i].ignore) {
      bool& found = is_used[text];
      if (found) continue;
      const Pattern pattern = compile_pattern(text, "plan.options", "ignore",
                                              pattern_memory(adapters[i].ignore.size()));
      const auto finds = [&](const auto& tensor) { return is_in(*pattern, tensor.name); };
      found = std::ranges::any_of(adapter.tensors(), finds) ||
              std::ranges::any_of(adapter.quantized().tensors(), finds);
    }
  }
  for (const auto& [text, found] : is_used) {
    if (found) continue;
    findings.push_back(
        {.severity = Severity::warning,
         .code = "plan.options",
         .message = fmt::format("the pattern '{}' (lora-ignore) matches no tensor of an adapter",
                                printable(text)),
         .found = printable(text)});
  }
}

}  // namespace loadstone

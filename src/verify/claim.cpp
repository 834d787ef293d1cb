#include "verify/claim.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "catalog/config_claim.h"
#include "catalog/config_file.h"
#include "catalog/contradictions.h"
#include "catalog/open_file.h"
#include "catalog/paths.h"
#include "codec/families.h"
#include "codec/tensor_table.h"
#include "convert/tied_head.h"
#include "load/tie_values.h"
#include "loadstone/quantized_tensors.h"
#include "verify/element_reader.h"

namespace loadstone {

namespace {

// Returns the text of a config in the folder, or an empty string.
std::string config_text(const FileOpener& opener, const std::string& folder,
                        std::string_view name) {
  return find_config(opener, folder, name).value_or("");
}

bool has(std::string_view text, std::string_view word) {
  return text.find(word) != std::string_view::npos;
}

// Recognises configs of transformers and diffusers: config.json files of other programs need not
// mention quantization.
bool is_of_library(std::string_view config) {
  return has(config, "\"model_type\"") || has(config, "\"_class_name\"");
}

// Returns true if the config, or a nested config, mentions quantization. Models of several parts
// have nested configs.
bool mentions_quantization(std::string_view config) {
  return std::ranges::any_of(quantization_members, [&](std::string_view member) {
    return has(config, fmt::format("\"{}\"", member));
  });
}

// Returns true if the folder has a file in which older tools or other programs declare
// quantization.
bool has_other_config(const FileOpener& opener, const std::string& folder) {
  const auto has_file = [&](std::string_view name) {
    return !config_text(opener, folder, name).empty();
  };
  return has_file("params.json") || std::ranges::any_of(own_configs, has_file, &OwnConfig::name);
}

// Returns true if config.json need not describe the catalog: for a single shard, which lacks some
// tensors, and for a GGUF file, which has no config.
bool is_described_elsewhere(const Catalog& catalog) {
  const std::string_view path = catalog.shards().front().path;
  const std::string_view name = path.substr(path.find_last_of('/') + 1);
  const bool is_a_part =
      catalog.shards().size() == 1 && has(name, "-of-") && !has(name, "-of-00001.");
  return is_a_part || name.ends_with(".gguf");
}

// Returns true if no tensor can be codes of a layout that loadstone does not know.
bool has_plain_matrices_only(const Catalog& catalog) {
  return std::ranges::all_of(catalog.tensors(), [](const TensorInfo& tensor) {
    return tensor.shape.rank() < 2 || is_dtype(tensor, {Dtype::f16, Dtype::bf16, Dtype::f32});
  });
}

// Returns true if the config declares quantized weights. A quantized cache, or rounding during a
// load, does not count.
bool claims_codes(const QuantizationClaim& claim, std::string_view config) {
  if (claim.method == "compressed-tensors") return claim.bits && claim.layout != "dense";
  if (claim.method == "fp8") return claim.block.has_value();
  if (claim.method == "bitsandbytes") {
    return has(config, "bit\": true") || has(config, "bit\":true");
  }
  return is_own_method(claim.method) && claim.method != "modelopt";
}

}  // namespace

std::vector<Finding> check_claim(const Catalog& catalog, Storage* storage) {
  const FileOpener opener{catalog.storage(storage)};
  const QuantizationClaim claim = quantization_claim(opener, catalog.root());
  const std::string config = config_text(opener, catalog.root(), "config.json");
  const std::string path = join_path(catalog.root(), "config.json");
  const QuantizedTensors& quantized = catalog.quantized();
  const std::string stored = described(quantized.tensors());
  std::vector<Finding> findings;
  if (stored.empty()) {
    const bool is_plain = quantized.tensors().empty() && quantized.findings().empty();
    const bool is_adapter = !config_text(opener, catalog.root(), "adapter_config.json").empty();
    const bool has_all = is_plain && !is_adapter && !is_described_elsewhere(catalog);
    const bool claims = claim.is_made && claims_codes(claim, config);
    if (has_all && claims && has_plain_matrices_only(catalog)) {
      findings.push_back(contradiction(path, fmt::format("method {}", claim.method),
                                       "none: no tensor is quantized"));
    }
  } else if (!claim.is_made) {
    const bool is_silent = is_of_library(config) && !mentions_quantization(config);
    if (is_silent && !has_other_config(opener, catalog.root())) {
      findings.push_back(contradiction(path, "nothing", stored));
    }
  }
  return findings;
}

std::vector<Finding> check_ties(const Catalog& catalog, Storage* storage, std::atomic<bool>& stop,
                                std::uint64_t& bytes_read) {
  Storage& files = catalog.storage(storage);
  const std::string config = config_text({files}, catalog.root(), "config.json");
  std::vector<Finding> findings = check_tied_shapes(catalog, config);
  if (!findings.empty()) return findings;
  for (const auto& [embedding, head] : TiedHead(config).stored_in(catalog)) {
    if (stop) break;
    const TieCheck check = {.name = catalog.tensors()[head].name,
                            .tied_to = catalog.tensors()[embedding].name,
                            .taken = embedding,
                            .other = head};
    auto finding = compare_tie(borrowed(catalog), check, files, stop, bytes_read);
    if (finding) findings.push_back(*std::move(finding));
  }
  return findings;
}

}  // namespace loadstone

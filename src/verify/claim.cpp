#include "verify/claim.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>
#include <string_view>

#include "base/text.h"
#include "catalog/config_claim.h"
#include "catalog/config_file.h"
#include "catalog/open_file.h"
#include "catalog/paths.h"
#include "codec/encode.h"
#include "codec/families.h"
#include "codec/tensor_table.h"
#include "loadstone/error.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

namespace {

const Family* family_of(std::string_view encoding) {
  for (const Family* const family : families()) {
    if (std::ranges::find(family->encodings, encoding) != family->encodings.end()) return family;
  }
  return nullptr;
}

bool has(std::string_view text, std::string_view word) {
  return text.find(word) != std::string_view::npos;
}

// Of transformers or diffusers: other programs have config.json files that need not speak of
// quantization.
bool is_of_library(std::string_view config) {
  return has(config, "\"model_type\"") || has(config, "\"_class_name\"");
}

// Anywhere in it: models of several parts have configs within configs.
bool mentions_quantization(std::string_view config) {
  return std::ranges::any_of(quantization_members, [&](std::string_view member) {
    return has(config, fmt::format("\"{}\"", member));
  });
}

// Older tools and other programs say it elsewhere.
bool has_other_config(const FileOpener& opener, const std::string& folder) {
  const auto has_file = [&](std::string_view name) {
    return !config_text(opener, folder, name).empty();
  };
  return has_file("params.json") || std::ranges::any_of(own_configs, has_file, &OwnConfig::name);
}

// One of several shards that is looked at by itself has not all tensors, and a GGUF file has
// nothing to do with the config beside it.
bool is_described_elsewhere(const Catalog& catalog) {
  const std::string_view path = catalog.shards().front().path;
  const std::string_view name = path.substr(path.find_last_of('/') + 1);
  const bool is_a_part =
      catalog.shards().size() == 1 && has(name, "-of-") && !has(name, "-of-00001.");
  return is_a_part || name.ends_with(".gguf");
}

// Nothing that could be codes of a layout that loadstone does not know.
bool has_plain_matrices_only(const Catalog& catalog) {
  return std::ranges::all_of(catalog.tensors(), [](const TensorInfo& tensor) {
    return tensor.shape.rank() < 2 || is_dtype(tensor, {Dtype::f16, Dtype::bf16, Dtype::f32});
  });
}

// That weights are stored in codes, and not only that a cache is, or that they are to be rounded.
bool claims_codes(const QuantizationClaim& claim, std::string_view config) {
  if (claim.method == "compressed-tensors") return claim.bits && claim.layout != "dense";
  if (claim.method == "fp8") return claim.block.has_value();
  if (claim.method == "bitsandbytes") {
    return has(config, "bit\": true") || has(config, "bit\":true");
  }
  return is_own_method(claim.method) && claim.method != "modelopt";
}

// What the tensors are, as far as a config can contradict it.
struct Stored {
  std::set<std::string_view> encodings;
  std::set<std::string_view> methods;  // of families that have one of their own, else empty
  std::set<unsigned> bits;             // of encodings that are written, too
  const QuantizedTensor* first = nullptr;
};

Stored stored_in(const Catalog& catalog) {
  Stored stored;
  for (const QuantizedTensor& tensor : catalog.quantized().tensors()) {
    const Family* const family = family_of(tensor.encoding);
    if (family == nullptr || !tensor.is_readable()) continue;
    if (stored.first == nullptr) stored.first = &tensor;
    stored.encodings.insert(tensor.encoding);
    stored.methods.insert(family->method);
    const WrittenEncoding* const written = find_written_encoding(tensor.encoding);
    if (written != nullptr) stored.bits.insert(written->bits);
  }
  return stored;
}

// A method with layouts of its own is wrong where none of them is there, and another one where all
// are such layouts.
bool is_method_of(std::string_view method, const Stored& stored) {
  if (stored.methods.contains(method)) return true;
  return stored.methods.contains("") && std::ranges::count(shared_methods(), method) > 0;
}

Finding disagreement(const std::string& path, std::string found, std::string expected) {
  Finding finding;
  finding.severity = Severity::warning;
  finding.code = "q.config";
  finding.message = fmt::format("{}: quantization_config: found {}; expected {}",
                                printable(path, 400), found, expected);
  finding.found = std::move(found);
  finding.expected = std::move(expected);
  return finding;
}

std::string described(const Stored& stored) {
  return fmt::format("{}, as '{}' has", fmt::join(stored.encodings, ", "),
                     printable(stored.first->name));
}

}  // namespace

std::string config_text(const FileOpener& opener, const std::string& folder,
                        std::string_view name) {
  return find_config(opener, folder, name).value_or("");
}

std::vector<Finding> check_claim(const Catalog& catalog, Storage* storage) {
  const FileOpener opener{catalog.storage(storage)};
  const QuantizationClaim claim = quantization_claim(opener, catalog.root());
  const Stored stored = stored_in(catalog);
  const std::string config = config_text(opener, catalog.root(), "config.json");
  const std::string path = join_path(catalog.root(), "config.json");
  std::vector<Finding> findings;
  const auto add = [&](std::string found, std::string expected) {
    findings.push_back(disagreement(path, std::move(found), std::move(expected)));
  };
  if (stored.first == nullptr) {
    const QuantizedTensors& found = catalog.quantized();
    const bool is_plain = found.tensors().empty() && found.findings().empty();
    const bool is_adapter = !config_text(opener, catalog.root(), "adapter_config.json").empty();
    const bool has_all = is_plain && !is_adapter && !is_described_elsewhere(catalog);
    const bool claims = claim.is_made && claims_codes(claim, config);
    if (has_all && claims && has_plain_matrices_only(catalog)) {
      add(fmt::format("method {}", claim.method), "none: no tensor is stored quantized");
    }
  } else if (!claim.is_made) {
    const bool is_silent = is_of_library(config) && !mentions_quantization(config);
    if (is_silent && !has_other_config(opener, catalog.root())) add("nothing", described(stored));
  } else if (is_own_method(claim.method) && !is_method_of(claim.method, stored)) {
    add(fmt::format("method {}", claim.method), described(stored));
  } else if (claim.method == "compressed-tensors" && claim.bits && !stored.bits.empty() &&
             !stored.bits.contains(static_cast<unsigned>(*claim.bits))) {
    add(fmt::format("{} bits", *claim.bits), described(stored));
  }
  return findings;
}

}  // namespace loadstone

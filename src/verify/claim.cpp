#include "verify/claim.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <string_view>

#include "base/text.h"
#include "catalog/config_claim.h"
#include "catalog/open_file.h"
#include "catalog/paths.h"
#include "codec/encode.h"
#include "codec/families.h"
#include "loadstone/error.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

namespace {

// Methods whose layouts loadstone reads, beside those that a family names as its own.
constexpr std::array<std::string_view, 5> shared_methods = {"compressed-tensors", "fbgemm_fp8",
                                                            "fp8", "modelopt", "mxfp4"};

const Family* family_of(std::string_view encoding) {
  for (const Family* const family : families()) {
    if (std::ranges::find(family->encodings, encoding) != family->encodings.end()) return family;
  }
  return nullptr;
}

bool is_known(std::string_view method) {
  return std::ranges::find(shared_methods, method) != shared_methods.end() ||
         std::ranges::any_of(families(), [&](const Family* family) {
           return !family->method.empty() && family->method == method;
         });
}

bool has_config(const FileOpener& opener, const std::string& folder) {
  try {
    (void)opener.open(join_path(folder, "config.json"), folder);
    return true;
  } catch (const Error&) {  // a file that cannot be opened says nothing
    return false;
  }
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
  return stored.methods.contains("") &&
         std::ranges::find(shared_methods, method) != shared_methods.end();
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

std::vector<Finding> check_claim(const Catalog& catalog, Storage* storage) {
  const FileOpener opener{catalog.storage(storage)};
  const QuantizationClaim claim = quantization_claim(opener, catalog.root());
  const Stored stored = stored_in(catalog);
  const std::string path = join_path(catalog.root(), "config.json");
  std::vector<Finding> findings;
  const auto add = [&](std::string found, std::string expected) {
    findings.push_back(disagreement(path, std::move(found), std::move(expected)));
  };
  if (stored.first == nullptr) {
    const QuantizedTensors& found = catalog.quantized();
    if (is_known(claim.method) && found.tensors().empty() && found.findings().empty()) {
      add(fmt::format("method {}", claim.method), "none: no tensor is stored quantized");
    }
  } else if (!claim.is_made) {
    if (has_config(opener, catalog.root())) add("nothing", described(stored));
  } else if (is_known(claim.method) && !is_method_of(claim.method, stored)) {
    add(fmt::format("method {}", claim.method), described(stored));
  } else if (claim.bits && !claim.has_exceptions && !stored.bits.empty() &&
             !stored.bits.contains(static_cast<unsigned>(*claim.bits))) {
    add(fmt::format("{} bits", *claim.bits), described(stored));
  }
  return findings;
}

}  // namespace loadstone

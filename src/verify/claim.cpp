#include "verify/claim.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include "base/text.h"
#include "catalog/config_claim.h"
#include "catalog/open_file.h"
#include "catalog/paths.h"
#include "codec/encode.h"
#include "codec/families.h"
#include "codec/tensor_table.h"
#include "loadstone/error.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

namespace {

// Of a config that is read for two words.
constexpr std::uint64_t config_bytes_looked_at = 1u << 20;

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

// Whether there is one of transformers or diffusers: other programs have config.json files that
// need not speak of quantization.
bool has_library_config(const FileOpener& opener, const std::string& folder) {
  try {
    const auto source = opener.open(join_path(folder, "config.json"), folder);
    std::string text(std::min(source->identity().bytes, config_bytes_looked_at), '\0');
    source->read(0, std::as_writable_bytes(std::span(text)));
    const auto has = [&](std::string_view key) { return text.find(key) != std::string::npos; };
    return has("\"model_type\"") || has("\"_class_name\"");
  } catch (const Error&) {  // a file that cannot be opened says nothing
    return false;
  }
}

// Nothing that could be codes of a layout that loadstone does not know.
bool has_plain_matrices_only(const Catalog& catalog) {
  return std::ranges::all_of(catalog.tensors(), [](const TensorInfo& tensor) {
    return tensor.shape.rank() < 2 || is_dtype(tensor, {Dtype::f16, Dtype::bf16, Dtype::f32});
  });
}

// That weights are stored in codes, and not only that a cache is, or that they are to be rounded.
bool claims_codes(const QuantizationClaim& claim) {
  if (claim.method == "compressed-tensors") return claim.bits && claim.layout != "dense";
  return is_known(claim.method) && claim.method != "modelopt";
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
    const bool is_plain = found.tensors().empty() && found.findings().empty();
    if (claims_codes(claim) && is_plain && has_plain_matrices_only(catalog)) {
      add(fmt::format("method {}", claim.method), "none: no tensor is stored quantized");
    }
  } else if (!claim.is_made) {
    if (has_library_config(opener, catalog.root())) add("nothing", described(stored));
  } else if (is_known(claim.method) && !is_method_of(claim.method, stored)) {
    add(fmt::format("method {}", claim.method), described(stored));
  } else if (claim.method == "compressed-tensors" && claim.bits && !stored.bits.empty() &&
             !stored.bits.contains(static_cast<unsigned>(*claim.bits))) {
    add(fmt::format("{} bits", *claim.bits), described(stored));
  }
  return findings;
}

}  // namespace loadstone

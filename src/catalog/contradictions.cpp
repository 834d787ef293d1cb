#include "catalog/contradictions.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <set>
#include <utility>

#include "base/text.h"
#include "catalog/config_claim.h"
#include "catalog/plain_lists.h"
#include "codec/activation_scheme.h"
#include "codec/encode.h"
#include "codec/families.h"

namespace loadstone {

namespace {

const Family* family_of(std::string_view encoding) {
  for (const Family* const family : families()) {
    if (std::ranges::find(family->encodings, encoding) != family->encodings.end()) return family;
  }
  return nullptr;
}

// Fields in compressed-tensors configs for one encoding. Empty fields and 0 are unknown.
struct Words {
  std::string_view format{};
  std::string_view code_type{};
  std::string_view strategy{};
  unsigned bits = 0;
  unsigned group_size = 0;  // 0 if it differs between files
};

Words words_of(std::string_view encoding, const Family& family) {
  const WrittenEncoding* written = find_written_encoding(encoding);
  const bool is_written = written != nullptr;
  if (!is_written && !family.written.empty()) written = &family.written.front();
  if (written == nullptr) return {};
  const bool takes_groups = find_decode_kernel(written->kernel)->takes_group_size;
  const bool is_uniform = is_written && !takes_groups;
  const bool has_block = is_uniform && !written->takes_block_size;
  return {.format = written->compressed.format,
          .code_type = written->code_type,
          .strategy = is_uniform ? written->compressed.strategy : std::string_view(),
          .bits = written->code_type == "float" ? written->bits : 0,  // int8 may store fewer bits
          .group_size = has_block ? written->compressed.group_size : 0};
}

bool has_strategy(std::string_view strategy, const TensorTable& table, const QuantizedTensor& each,
                  std::string_view written) {
  constexpr std::array<std::string_view, 3> judged = {"tensor", "channel", "block"};
  if (each.scales.empty() || std::ranges::count(judged, strategy) == 0) return true;
  const Shape& scale = table[each.scales.front()].shape;
  const std::size_t rank = each.decoding.shape.rank();
  const bool has_one = scale.numel() == 1u;
  if (strategy == "block" && has_one) return true;  // the block may be as large as the weight
  if (strategy == "channel" && has_one && rank > 1 && each.decoding.shape[rank - 2] == 1) {
    return true;
  }
  if (!written.empty()) return strategy == written;
  if (strategy == "tensor") return has_one;
  const bool has_columns = scale.rank() > 1 && scale.extents().back() > 1;
  return strategy == "block" ? has_columns : !has_columns && !has_one;
}

Finding not_compared(const ConfigList& list, std::string entries, std::string_view reason) {
  Finding finding;
  finding.severity = Severity::warning;
  finding.code = "q.config";
  finding.message = fmt::format(
      "{}: quantization_config: {} {} cannot be compared with the quantized modules: {}",
      printable(list.file, 400), list.key, entries, reason);
  finding.suggestion = "check that no entry excludes a quantized module from quantization";
  finding.found = std::move(entries);
  return finding;
}

// Compares the fields of a config with the tensors. A field is wrong only if no tensor confirms it,
// because a model can mix encodings, and its config has one field for all encodings.
class Judge {
 public:
  Judge(const TensorTable& table, const ConfigWords& words, std::string stored,
        std::span<const QuantizedTensor> tensors)
      : claim_(table.claim()), words_(words), stored_(std::move(stored)) {
    for (const QuantizedTensor& tensor : tensors) {
      const Family* const family = family_of(tensor.encoding);
      if (family == nullptr || !tensor.is_readable()) continue;
      methods_.insert(family->method);
      has_zero_points_ = has_zero_points_ || tensor.has_zero_points;
      if (const auto module = module_of(tensor)) {
        modules_.push_back({*module, tensor.encoding, family->method});
      }
      encodings_.insert(tensor.encoding);
      const Words its = words_of(tensor.encoding, *family);
      formats_.insert(its.format);
      code_types_.insert(its.code_type);
      bits_.insert(its.bits);
      group_sizes_.insert(its.group_size);
      has_strategy_ = has_strategy_ || has_strategy(words.strategy, table, tensor, its.strategy);
    }
    has_bitmask_ = std::ranges::any_of(
        table.tensors(), [](const TensorInfo& tensor) { return tensor.name.ends_with("bitmask"); });
  }

  std::vector<Finding> judge() && {
    judge_algorithm();
    if (is_own_method(claim_.method) && !is_method()) {
      add("method " + claim_.method);
    } else if (claim_.method == "compressed-tensors") {
      judge_groups();
    }
    if (is_method()) judge_lists();
    return std::move(findings_);
  }

 private:
  struct Module {
    std::string_view name;
    std::string_view encoding;
    std::string_view method;  // its family's
  };

  // Returns nullopt for stacks, and for weights of modules other than linear layers.
  static std::optional<std::string_view> module_of(const QuantizedTensor& tensor) {
    constexpr std::string_view weight = ".weight";
    const std::string_view name = tensor.name;
    if (!name.ends_with(weight) || tensor.decoding.shape.rank() != 2) return std::nullopt;
    return name.substr(0, name.size() - weight.size());
  }

  void add(std::string found) { add(words_.file, std::move(found)); }
  void add(const std::string& path, std::string found) {
    findings_.push_back(contradiction(path, std::move(found), stored_));
  }

  // Returns true if a tensor confirms the config's method: by the method's own layouts, or by
  // shared layouts if the method has only those.
  [[nodiscard]] bool is_method() const {
    return std::ranges::any_of(methods_, [&](std::string_view each) { return is_of_claim(each); });
  }

  [[nodiscard]] bool is_of_claim(std::string_view method) const {
    if (method == claim_.method) return true;
    return method.empty() && std::ranges::count(shared_methods(), claim_.method) > 0;
  }

  // Adds findings for lists that exclude quantized modules, because a library that follows such a
  // list reads the codes of the modules as values.
  void judge_lists() {
    const std::string_view stem = encoding_stem(words_.algorithm);
    std::vector<std::string_view> modules;
    for (const Module& each : modules_) {
      const bool is_known = is_of_claim(each.method) && each.encoding.starts_with(stem);
      if (is_known) modules.push_back(each.name);
    }
    for (const ConfigList& list : words_.lists) {
      const LeftPlain left = left_plain(list, modules);
      constexpr std::size_t shown_max = 3;
      if (!left.unread.empty()) {
        const std::string unread = name_list(left.unread, left.unread.size(), shown_max);
        findings_.push_back(not_compared(list, unread, left.reason));
      }
      if (left.modules.empty()) continue;
      const std::string names = name_list(left.modules, left.modules.size(), shown_max);
      const std::string entries =
          left.entries.empty() ? "[]" : name_list(left.entries, left.entries.size(), shown_max);
      findings_.push_back(
          contradiction(list.file, fmt::format("{} {}", list.key, entries),
                        fmt::format("{} for the quantized {}",
                                    left.is_lacking ? "an entry" : "no entry", names)));
    }
  }

  // Returns true if no encoding confirms the value. Returns false if the value is unknown for one
  // of the encodings.
  template <typename Value, typename Set>
  static bool is_wrong(const Value& claimed, const Set& stored) {
    return !stored.contains({}) && !stored.contains(claimed);
  }

  void judge_groups() {
    const std::string_view format = claim_.layout;
    if (is_compressed_format(format) && is_wrong(format, formats_)) {
      add(fmt::format("format {}", format));
    }
    if (claim_.bits && is_wrong(static_cast<unsigned>(*claim_.bits), bits_)) {
      add(counted(*claim_.bits, "bit"));
    }
    if (!words_.code_type.empty() && is_wrong(std::string_view(words_.code_type), code_types_)) {
      add("type " + words_.code_type);
    }
    if (!has_strategy_) add("strategy " + words_.strategy);
    if (claim_.is_symmetric == false && !has_zero_points_) add("symmetric false");
    if (words_.sparsity.starts_with("sparse-") && !has_bitmask_) {
      add("sparsity_config " + words_.sparsity);
    }
    judge_group_size(claim_.group_size, words_.file);
  }

  void judge_algorithm() {
    const std::string_view encoding = encoding_stem(words_.algorithm);
    if (encoding.empty()) return;
    const auto is_its = [&](std::string_view each) { return each.starts_with(encoding); };
    if (std::ranges::none_of(encodings_, is_its)) {
      add(words_.algorithm_file, "quant_algo " + words_.algorithm);
    } else {
      judge_group_size(words_.group_size, words_.algorithm_file);
    }
  }

  void judge_group_size(std::optional<std::uint64_t> size, const std::string& path) {
    if (size.value_or(0) == 0 || !is_wrong(static_cast<unsigned>(*size), group_sizes_)) return;
    add(path, fmt::format("group_size {}", static_cast<std::int64_t>(*size)));
  }

  const QuantizationClaim& claim_;
  const ConfigWords& words_;
  std::string stored_;
  std::vector<Module> modules_;
  std::set<std::string_view> methods_;  // empty names for families of shared layouts
  std::set<std::string_view> encodings_;
  std::set<std::string_view> formats_;
  std::set<std::string_view> code_types_;
  std::set<unsigned> bits_;
  std::set<unsigned> group_sizes_;
  bool has_strategy_ = false;
  bool has_zero_points_ = false;
  bool has_bitmask_ = false;
  std::vector<Finding> findings_;
};

}  // namespace

Finding contradiction(std::string_view path, std::string found, std::string expected) {
  Finding finding;
  finding.severity = Severity::warning;
  finding.code = "q.config";
  finding.message = fmt::format("{}: quantization_config: found {}; expected {}",
                                printable(path, 400), printable(found), expected);
  finding.found = std::move(found);
  finding.expected = std::move(expected);
  return finding;
}

std::string described(std::span<const QuantizedTensor> tensors) {
  std::set<std::string_view> encodings;
  const QuantizedTensor* first = nullptr;
  for (const QuantizedTensor& tensor : tensors) {
    if (!tensor.is_readable() || family_of(tensor.encoding) == nullptr) continue;
    if (first == nullptr) first = &tensor;
    encodings.insert(tensor.encoding);
  }
  if (first == nullptr) return {};
  return fmt::format("{}, as '{}' has", fmt::join(encodings, ", "), printable(first->name));
}

std::vector<Finding> contradictions(const TensorTable& table,
                                    std::span<const QuantizedTensor> tensors,
                                    const FileOpener& opener, const std::string& folder) {
  std::vector<Finding> findings;
  std::string stored = described(tensors);
  if (stored.empty() || !table.claim().is_made) return findings;
  const ConfigWords words = config_words(opener, folder, findings);
  std::ranges::move(Judge(table, words, std::move(stored), tensors).judge(),
                    std::back_inserter(findings));
  return findings;
}

}  // namespace loadstone

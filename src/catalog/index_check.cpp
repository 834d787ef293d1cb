#include "catalog/index_check.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "base/natural_order.h"
#include "base/text.h"
#include "loadstone/error.h"
#include "loadstone/name_hash.h"

namespace loadstone {

namespace {

// Tensors by name. Several shards may contain the same name, if a later shard replaces tensors of
// an earlier one.
using Places =
    std::unordered_multimap<std::string_view, const TensorInfo*, NameHash, std::equal_to<>>;

constexpr std::size_t told_max = 100;  // findings of one kind; further ones are only counted

Finding warning(std::string code, std::string message) {
  Finding finding;
  finding.severity = Severity::warning;
  finding.code = std::move(code);
  finding.message = std::move(message);
  return finding;
}

[[noreturn]] void refuse_missing_tensor(const std::string& index_path, const IndexEntry& entry,
                                        const Shard* elsewhere) {
  throw Error("ix.tensor_missing", "the index maps a tensor to a shard that lacks it",
              {.path = index_path,
               .tensor = entry.tensor,
               .field = "weight_map",
               .found = elsewhere == nullptr ? "no shard has it"
                                             : "it in '" + elsewhere->relative_path + "'",
               .expected = "it in '" + entry.shard + "'"});
}

void check_total_size(const std::string& index_path, const std::string& said,
                      std::uint64_t listed_bytes, std::vector<Finding>& findings) {
  // Some writers write the number as a float, such as 24.0.
  double number = 0;
  const char* end = said.data() + said.size();
  const auto [stop, problem] = std::from_chars(said.data(), end, number);
  const bool same =
      problem == std::errc{} && stop == end &&
      (said == std::to_string(listed_bytes) ||
       (said.find('.') != std::string::npos && number == static_cast<double>(listed_bytes)));
  if (same) return;
  Finding finding = warning("ix.total_size",
                            fmt::format("{}: metadata.total_size is wrong; found {}; expected {}, "
                                        "the bytes of the tensors that the index lists",
                                        printable(index_path, 400), printable(said), listed_bytes));
  finding.found = said;
  finding.expected = std::to_string(listed_bytes);
  findings.push_back(std::move(finding));
}

void warn_unlisted(const std::string& index_path, const NameSet& listed,
                   const std::vector<Shard>& shards, const std::vector<TensorInfo>& tensors,
                   std::vector<Finding>& findings) {
  std::size_t count = 0;
  for (const TensorInfo& tensor : tensors) {
    if (listed.contains(tensor.name)) continue;
    if (++count > told_max) continue;
    Finding finding =
        warning("ix.unlisted", fmt::format("{}: '{}': weight_map does not list this tensor of '{}'",
                                           printable(index_path, 400), printable(tensor.name),
                                           printable(shards[tensor.shard].relative_path)));
    finding.sources.push_back(tensor.name);
    findings.push_back(std::move(finding));
  }
  if (count > told_max) {
    findings.push_back(warning(
        "ix.unlisted", fmt::format("{}: weight_map does not list {}", printable(index_path, 400),
                                   counted(count - told_max, "more tensor"))));
  }
}

// Indices of the tensors that the index maps to a different shard, and the tensor in that shard.
using Replaced = std::map<std::size_t, const TensorInfo*>;

// Drops tensors that later shards replace, for example by an edited copy of some layers. The index
// determines which tensors count.
void drop_replaced(const std::string& index_path, const Replaced& replaced,
                   const std::vector<Shard>& shards, std::vector<TensorInfo>& tensors,
                   std::vector<Finding>& findings) {
  if (replaced.empty()) return;
  const auto file = [&](const TensorInfo& tensor) {
    return "'" + printable(shards[tensor.shard].relative_path) + "'";
  };
  Finding finding = warning("ix.replaced", {});
  std::vector<std::string> lines;
  for (const auto& [number, taken] : replaced) {
    finding.sources.push_back(taken->name);
    if (lines.size() == told_max) continue;
    lines.push_back(fmt::format("'{}' of {}, not of {}", printable(taken->name), file(*taken),
                                file(tensors[number])));
  }
  const std::size_t more = replaced.size() - lines.size();
  finding.message = fmt::format(
      "{}: several shards contain a tensor with the same name, and loadstone reads the one that "
      "weight_map selects: {}{}",
      printable(index_path, 400), fmt::join(lines, "; "),
      more == 0 ? "" : fmt::format("; {} more", more));
  finding.suggestion = "loadstone convert writes a checkpoint that contains each tensor once";
  findings.push_back(std::move(finding));
  std::vector<TensorInfo> kept;
  kept.reserve(tensors.size() - replaced.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!replaced.contains(i)) kept.push_back(std::move(tensors[i]));
  }
  tensors = std::move(kept);
}

}  // namespace

std::vector<std::string> shard_names(const ShardedIndex& index) {
  std::set<std::string> names;
  for (const IndexEntry& entry : index.entries) names.insert(plain_relative_path(entry.shard));
  std::vector<std::string> ordered(names.begin(), names.end());
  std::ranges::sort(ordered, natural_less);
  return ordered;
}

void check_index(const std::string& index_path, const ShardedIndex& index,
                 const std::vector<Shard>& shards, std::vector<TensorInfo>& tensors,
                 std::vector<Finding>& findings) {
  Replaced replaced;
  Places places(tensors.size());
  for (const TensorInfo& tensor : tensors) places.emplace(tensor.name, &tensor);
  NameSet listed(index.entries.size());
  std::uint64_t listed_bytes = 0;
  std::string_view said;  // previous entry's shard; consecutive entries often share one
  std::string shard;
  for (const IndexEntry& entry : index.entries) {
    listed.insert(entry.tensor);
    const auto [first, end] = places.equal_range(entry.tensor);
    if (first == end) refuse_missing_tensor(index_path, entry, nullptr);
    if (said != entry.shard) {
      said = entry.shard;
      shard = plain_relative_path(entry.shard);
    }
    const auto here = std::find_if(first, end, [&](const auto& place) {
      return shards[place.second->shard].relative_path == shard;
    });
    if (here == end) refuse_missing_tensor(index_path, entry, &shards[first->second->shard]);
    for (auto each = first; each != end; ++each) {
      if (each == here) continue;
      replaced.emplace(each->second - tensors.data(), here->second);
    }
    // A strided view counts only the bytes of its elements.
    const TensorInfo& tensor = *here->second;
    const auto bytes = tensor.encoding.byte_count(tensor.shape.numel().value_or(0));
    listed_bytes += bytes.value_or(tensor.byte_count());
  }
  warn_unlisted(index_path, listed, shards, tensors, findings);
  drop_replaced(index_path, replaced, shards, tensors, findings);
  if (index.total_size) check_total_size(index_path, *index.total_size, listed_bytes, findings);
}

std::vector<std::string> missing_parts(const std::vector<std::string>& names) {
  // Sets of numbered files, identified by the text around the number.
  std::map<std::tuple<std::string, std::string, std::uint64_t, int>, std::set<std::uint64_t>> sets;
  for (const std::string& name : names) {
    const std::size_t dot = name.rfind('.');
    if (dot == std::string::npos) continue;
    const auto part = parse_part_name(std::string_view(name).substr(0, dot));
    if (!part) continue;
    sets[{part->stem, name.substr(dot), part->count, part->digits}].insert(part->number);
  }
  std::vector<std::string> missing;
  for (const auto& [set, numbers] : sets) {
    const auto& [stem, suffix, count, digits] = set;
    for (std::uint64_t i = 1; i <= count && missing.size() < told_max; ++i) {
      if (!numbers.contains(i)) {
        missing.push_back(
            fmt::format("{}-{:0{}}-of-{:0{}}{}", stem, i, digits, count, digits, suffix));
      }
    }
  }
  return missing;
}

std::string no_files_text(const std::vector<std::string>& missing) {
  constexpr std::size_t named_max = 1000;
  return fmt::format("no {} {}", missing.size() == 1 ? "file" : "files",
                     name_list(missing, missing.size(), named_max));
}

void warn_about_gaps(const std::string& path, const std::vector<std::string>& names,
                     std::vector<Finding>& findings) {
  const std::vector<std::string> missing = missing_parts(names);
  if (missing.empty()) return;
  Finding finding = warning(
      "ix.gap",
      fmt::format("{}: a set of numbered files is incomplete, so loadstone does not read it: {}",
                  printable(path, 400), name_list(missing, missing.size(), 1)));
  finding.sources = missing;
  findings.push_back(std::move(finding));
}

}  // namespace loadstone

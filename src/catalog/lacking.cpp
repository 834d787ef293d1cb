#include "catalog/lacking.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>

#include "base/pattern.h"
#include "base/text.h"

namespace loadstone {

namespace {

constexpr std::size_t names_shown_max = 4;
constexpr std::size_t experts_shown_max = 8;

// "model.layers.0.mlp.experts.3.up_proj.weight"
struct ExpertName {
  std::string prefix;  // "model.layers.0.mlp.experts."
  std::uint64_t number = 0;
};

std::optional<ExpertName> expert_name(std::string_view name) {
  static const re2::RE2 pattern(R"((.*(?:^|[._])experts?[._])(\d{1,18})(?:[._].*)?)");
  ExpertName found;
  if (!re2::RE2::FullMatch(piece(name), pattern, &found.prefix, &found.number)) return std::nullopt;
  return found;
}

// Returns "layer 3", or the name of the incomplete target.
std::string where(std::string_view prefix, std::string_view target) {
  static const re2::RE2 pattern(R"((?:^|\.)(?:layers?|h|blocks?)\.(\d{1,18})\.)");
  std::string number;
  const bool is_numbered = re2::RE2::PartialMatch(piece(prefix), pattern, &number);
  return is_numbered ? "layer " + number : fmt::format("'{}'", printable(target));
}

// Returns "expert 2", "experts 2 and 3", or "2 tensors" if the series is not of experts.
std::string what(const SeriesGaps& gaps) {
  std::set<std::uint64_t> numbers;
  for (const std::string& name : gaps.absent) {
    if (const auto expert = expert_name(name)) numbers.insert(expert->number);
  }
  if (numbers.empty()) return counted(gaps.absent_count, "tensor");
  std::vector<std::string> texts;
  for (const std::uint64_t number : numbers) {
    if (texts.size() == experts_shown_max) break;
    texts.push_back(std::to_string(number));
  }
  const std::string last = texts.back();
  std::string text = numbers.size() == 1 ? "expert " : "experts ";
  if (numbers.size() > experts_shown_max)
    return text + fmt::format("{} ...", fmt::join(texts, ", "));
  texts.pop_back();
  if (!texts.empty()) text += fmt::format("{} and ", fmt::join(texts, ", "));
  return text + last;
}

std::string sentence(std::string_view place, const SeriesGaps& gaps) {
  std::string text;
  if (gaps.absent_count > 0) {
    text = fmt::format("{} lacks {}: expected {}", place, what(gaps),
                       name_list(gaps.absent, gaps.absent_count, names_shown_max));
  }
  if (!gaps.stray.empty()) {
    const std::string strays = name_list(gaps.stray, gaps.stray.size(), names_shown_max);
    text += text.empty() ? std::string(place) + " has " : "; found ";
    text += fmt::format(
        "{}, whose numbers are outside the series: 0 to n - 1, each once, without leading zeros",
        strays);
  }
  return text + "; check that all shards are present";
}

// Adds names that `all` lacks, up to gap_names_max. Returns how many names `all` already contained.
std::size_t append(std::vector<std::string>& all, const std::vector<std::string>& more) {
  std::size_t known = 0;
  for (const std::string& name : more) {
    if (std::ranges::find(all, name) != all.end()) {
      ++known;
    } else if (all.size() == gap_names_max) {
      break;
    } else {
      all.push_back(name);
    }
  }
  return known;
}

}  // namespace

const char* SeriesGaps::code() const noexcept {
  return absent_count > 0 ? "plan.missing" : "plan.series";
}

void LackingSeries::add(std::string_view target, const SeriesGaps& gaps) {
  if (gaps.absent.empty() && gaps.stray.empty()) return;
  const std::string& first = gaps.absent.empty() ? gaps.stray.front() : gaps.absent.front();
  const auto expert = expert_name(first);
  const std::string key = expert ? expert->prefix : std::string(target);
  const auto [known, is_new] = index_.try_emplace(key, layers_.size());
  if (is_new) layers_.push_back({.prefix = key, .target = std::string(target), .gaps = {}});
  SeriesGaps& all = layers_[known->second].gaps;
  all.absent_count += gaps.absent_count - append(all.absent, gaps.absent);
  append(all.stray, gaps.stray);
}

std::vector<Finding> LackingSeries::findings() const {
  std::vector<Finding> findings;
  for (const Layer& layer : layers_) {
    Finding& finding = findings.emplace_back();
    finding.severity = Severity::error;
    finding.code = layer.gaps.code();
    finding.target = layer.target;
    finding.message = sentence(where(layer.prefix, layer.target), layer.gaps);
    finding.sources = layer.gaps.absent;
    append(finding.sources, layer.gaps.stray);
  }
  return findings;
}

}  // namespace loadstone

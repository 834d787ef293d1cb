// Reports unused sources and missing targets, and suggests fixes.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "base/text.h"
#include "loadstone/name_hash.h"
#include "plan/adapter_names.h"
#include "plan/nearest.h"
#include "plan/planner.h"

namespace loadstone {

namespace {

constexpr std::size_t suggestions_max = 200;  // maximum findings with a suggestion
constexpr std::size_t names_per_suggestion = 3;

}  // namespace

void Planner::report_contests() {
  for (const Contest& contest : production_.contests()) {
    const Produced& winner = production_.items()[contest.winner];
    Finding finding = {.severity = winner.is_claimed ? Severity::error : Severity::warning,
                       .code = "plan.duplicate",
                       .target = winner.is_claimed ? winner.name : std::string(),
                       .sources = production_.source_names(winner)};
    for (const std::uint32_t source : contest.losers) {
      finding.sources.push_back(plan_.catalog->tensors()[source].name);
    }
    finding.message =
        fmt::format("'{}' would get its value from '{}' and also from '{}'", printable(winner.name),
                    printable(finding.sources.front()), printable(finding.sources.back()));
    finding.suggestion = "write a rule that gives one of them a different name";
    add(std::move(finding));
  }
}

void Planner::report_unexpected() {
  unexpected_begin_ = plan_.findings.size();
  if (options_.unexpected == UnexpectedPolicy::ignore) return;
  for (const Produced& item : production_.items()) {
    // If decoded values have a name that is not in the file, the unused components are reported
    // instead.
    const bool is_told = std::ranges::all_of(item.members, [&](const Member& member) {
      return member.is_numbers || accounted_[member.source];
    });
    if (item.is_claimed || (is_told && !item.members.empty())) continue;
    Finding finding;
    finding.severity =
        options_.unexpected == UnexpectedPolicy::error ? Severity::error : Severity::warning;
    finding.code = "plan.unexpected";
    finding.sources = production_.source_names(item);
    const auto known = index_.find(item.name);
    if (known != index_.end()) {
      const TargetKind kind = skeleton_.targets[known->second].kind;
      finding.target = item.name;
      finding.message = fmt::format(
          "the checkpoint contains '{}', but in the model it is a {}, whose value the model "
          "computes itself",
          printable(item.name),
          kind == TargetKind::attribute ? "plain attribute" : "non-persistent buffer");
    } else if (item.rule != Produced::none || item.recipe != Produced::none) {
      finding.message = fmt::format(
          "the model has no '{}', which is made from {} sources ('{}' ...)", printable(item.name),
          item.members.size(), finding.sources.empty() ? "" : printable(finding.sources[0]));
    } else {
      finding.message = fmt::format("the model has no '{}'", printable(item.name));
    }
    unexpected_names_.push_back(item.name);
    add(std::move(finding));
  }
}

// Reports a checkpoint that contains only an adapter, from which the model gets no value, as one
// finding in place of one for each name. Returns false for any other checkpoint.
bool Planner::report_lone_adapter() {
  const Catalog& catalog = *plan_.catalog;
  const auto is_of_adapter = [](const TensorInfo& tensor) {
    return adapter_name(tensor.name).role != AdapterRole::value;
  };
  const auto is_factor = [](const TensorInfo& tensor) { return is_factor_of_adapter(tensor.name); };
  const bool is_adapter = catalog.checkpoints().empty() &&
                          std::ranges::all_of(catalog.tensors(), is_of_adapter) &&
                          std::ranges::any_of(catalog.tensors(), is_factor);
  if (!is_adapter || std::ranges::any_of(production_.items(), &Produced::is_claimed)) {
    return false;
  }
  std::erase_if(plan_.findings,
                [](const Finding& finding) { return finding.code == "plan.missing"; });
  const std::size_t missing = std::exchange(gaps_, {}).size();
  add({.severity = Severity::error,
       .code = "plan.missing",
       .message =
           fmt::format("'{}' is a LoRA adapter, not a model: all its {} are of an adapter, "
                       "and the model lacks {}",
                       printable(catalog.shown_path()), counted(catalog.tensors().size(), "tensor"),
                       counted(missing, "value")),
       .suggestion = "load the base model's checkpoint, with this adapter as lora= of loadstone's "
                     "functions (--lora)"});
  return true;
}

void Planner::report_kept() {
  if (kept_names_.empty()) return;
  const std::size_t count = kept_names_.size();
  add({.code = "plan.kept",
       .target = kept_names_.front(),
       .message = fmt::format("{} that the checkpoint lacks {} the model's {}: {}",
                              count == 1 ? "a tensor" : counted(count, "tensor"),
                              count == 1 ? "keeps" : "keep", count == 1 ? "value" : "values",
                              name_list(kept_names_, count))});
}

// Warns about patterns that match no name, because they may be mistyped.
void Planner::report_patterns() {
  const auto report = [&](const char* option, const std::vector<std::string>& patterns,
                          const std::vector<std::size_t>& counts, const char* names) {
    if (patterns.empty()) return;
    add({.code = "plan.pattern",
         .message = fmt::format("the patterns of {} match {}: {}", option, names,
                                counts_text(patterns, counts))});
  };
  std::vector<std::string> sources;
  for (const Rule& rule : options_.rules) {
    sources.insert(sources.end(), rule.sources.begin(), rule.sources.end());
  }
  report("rules", sources, production_.matches(), "tensors of the checkpoint");
  const std::vector<std::string> patterns = missing_patterns_.texts();
  std::vector<std::size_t> counts(patterns.size());
  for (const Target& target : skeleton_.targets) {
    if (const auto match = missing_patterns_.first_match(target.name)) ++counts[*match];
  }
  report("missing", patterns, counts, "tensors of the model");
}

void Planner::suggest() {
  if (gaps_.empty()) return;
  if (!options_.caller.missing_advice.empty()) {
    for (const auto& gap : gaps_) {
      plan_.findings[gap.finding].suggestion = options_.caller.missing_advice;
    }
    return;
  }
  NearestNames names;
  std::vector<const Produced*> items;
  for (const Produced& item : production_.items()) {
    if (item.is_claimed) continue;
    // The shape is left unknown for the result of a rule, because computing it costs too much.
    const bool is_plain = item.rule == Produced::none && item.recipe == Produced::none &&
                          !item.members.front().is_numbers;
    names.add(item.name,
              is_plain ? &plan_.catalog->tensors()[item.members.front().source].shape : nullptr);
    items.push_back(&item);
  }
  if (items.empty()) return;
  std::vector<Nearest> guesses;
  std::map<std::size_t, std::size_t> uses;  // number of targets for which an item is the best guess
  for (std::size_t i = 0; i < std::min(gaps_.size(), suggestions_max); ++i) {
    const Target& target = skeleton_.targets[gaps_[i].target];
    Nearest guess = names.nearest(target.name, target.shape, names_per_suggestion);
    const bool is_pair = gaps_.size() == 1 && items.size() == 1;
    if (guess.indices.empty() && is_pair) guess = {.indices = {0}, .is_unique = true};
    if (guess.is_unique) ++uses[guess.indices.front()];
    guesses.push_back(std::move(guess));
  }
  std::set<std::string> rules;
  NameMap<std::string> reverse;  // unexpected name -> target
  for (std::size_t i = 0; i < guesses.size(); ++i) {
    const auto& [indices, is_unique] = guesses[i];
    if (indices.empty()) continue;
    const std::string& target = skeleton_.targets[gaps_[i].target].name;
    std::string text = "did you mean ";
    for (std::size_t n = 0; n < indices.size(); ++n) {
      text += fmt::format("{}'{}'", n == 0 ? "" : " or ", printable(items[indices[n]]->name));
      reverse.try_emplace(items[indices[n]]->name, target);
    }
    text += "?";
    if (is_unique && uses.at(indices.front()) == 1) {
      // A rule that applies to several layers is written out only once.
      const auto [rule, is_new] =
          rules.insert(suggested_rule(items[indices.front()]->name, target));
      text += is_new ? " A rule that maps it: [" + *rule + "]" : " The rule above maps it";
    }
    plan_.findings[gaps_[i].finding].suggestion = std::move(text);
  }
  for (std::size_t i = 0; i < unexpected_names_.size(); ++i) {
    const auto found = reverse.find(unexpected_names_[i]);
    if (found == reverse.end()) continue;
    plan_.findings[unexpected_begin_ + i].suggestion = fmt::format(
        "it may be meant for '{}', which the checkpoint lacks", printable(found->second));
  }
}

void Planner::fold_casts() {
  for (auto& [pair, finding] : casts_) {
    finding.code = "plan.cast";
    finding.found = std::string(name(pair.first));
    finding.expected = std::string(name(pair.second));
    const std::size_t count = finding.sources.size();
    finding.message =
        fmt::format("{} {} cast from {} to {} ('{}'{})", count,
                    count == 1 ? "source is" : "sources are", finding.found, finding.expected,
                    printable(finding.sources.front()), count == 1 ? "" : " ...");
    if (finding.severity == Severity::warning) finding.message += "; values may not fit";
    add(std::move(finding));
  }
}

}  // namespace loadstone

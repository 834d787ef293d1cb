// Reads and writes rules as JSON (docs/rules.md).
#include <algorithm>
#include <string>

#include "base/json_fields.h"
#include "base/json_writer.h"
#include "base/only_errors.h"
#include "base/text.h"
#include "loadstone/recipe.h"
#include "plan/prefix.h"
#include "plan/rules.h"

namespace loadstone {

namespace {

constexpr std::size_t rules_bytes_max = 16u << 20;

void visit_names(JsonObject& fields, std::string_view field, std::vector<std::string>& names) {
  const auto value = fields.required(field);
  if (value.is_string()) {  // a single name may be written without a list
    names.emplace_back(fields.reader().string(value, fields.at(field)));
  } else {
    fields.member(field, names);
  }
}
void visit_names(JsonWriter& json, std::string_view field, const std::vector<std::string>& names) {
  json.member(field, names);
}

// Reads or writes one step, which is a rule's own operation or an element of its further steps.
template <typename Visitor>
void visit_step(Visitor& visitor, auto& step) {
  visitor.member("op", step.op);
  if constexpr (Visitor::is_reading) {
    const bool has_dim = visitor.optional("dim").has_value();
    if (has_dim) visitor.member("dim", step.dims.emplace_back());
    if (has_dim && visitor.optional("dims")) {
      visitor.refuse("dims", "write either dim or dims, not both");
    }
    visitor.optional("dims", step.dims);
    visitor.optional("sizes", step.sizes);
  } else {
    if (step.dims.size() == 1) {
      visitor.member("dim", step.dims[0]);
    } else {
      visitor.optional("dims", step.dims);
    }
    if (!step.sizes.empty() || step.op == RuleOp::reshape) visitor.member("sizes", step.sizes);
  }
  visitor.optional("start", step.start);
}

// Reads the short form of rules, which maps literal prefixes: {"old.": "new."}.
Rules read_prefixes(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place) {
  Rules rules;
  const JsonObject checked(reader, value, place);
  for (const auto field : simdjson::dom::object(value)) {
    const JsonPlace at = {&place, field.key, 0};
    if (field.key == "op") reader.refuse(at, "rules must be a list: [{...}]");
    rules.push_back(prefix_rule(field.key, reader.string(field.value, at)));
  }
  const CompiledRules compiled(rules);
  return rules;
}

}  // namespace

void visit_fields(auto& visitor, Like<RuleStep> auto& step) { visit_step(visitor, step); }

void visit_fields(auto& visitor, Like<Rule> auto& rule) {
  visit_step(visitor, rule);
  visit_names(visitor, "sources", rule.sources);
  visit_names(visitor, "targets", rule.targets);
  visitor.optional("then", rule.then);
}

bool is_rules_json(std::string_view text) noexcept {
  constexpr std::string_view blank = " \t\r\n";
  const auto skip = [&](std::size_t at) {
    return std::min(text.find_first_not_of(blank, at), text.size());
  };
  std::size_t at = skip(0);
  if (at == text.size() || text[at] != '{') return true;
  at = skip(at + 1);
  if (at == text.size() || text[at] != '"') return false;
  for (++at; at < text.size() && text[at] != '"'; ++at) {
    if (text[at] == '\\') ++at;
  }
  at = skip(std::min(at + 1, text.size()));
  if (at < text.size() && text[at] == ':') at = skip(at + 1);
  return at == text.size() || text[at] == '"';
}

Rules rules_from_json(std::string_view text) {
  return only_errors([&] {
    const JsonDocument document(text, "plan.rules", rules_bytes_max);
    const JsonReader reader("plan.rules");
    const JsonPlace place = {nullptr, "rules", 0};
    if (document.root().is_object()) return read_prefixes(reader, document.root(), place);
    Rules rules;
    reader.read(document.root(), place, rules);
    const CompiledRules checked(rules);
    return rules;
  });
}

std::string rules_to_json(const Rules& rules) {
  return only_errors([&] { return json_text(rules, 1, 1) + "\n"; });
}

}  // namespace loadstone

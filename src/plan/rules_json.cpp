// Rules as JSON: docs/rules.md.
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

std::vector<std::string> read_strings(const JsonReader& reader, JsonObject& fields,
                                      std::string_view field) {
  const JsonPlace place = fields.at(field);
  std::vector<std::string> strings;
  const auto value = fields.required(field);
  if (value.is_string()) {  // one needs no brackets
    strings.emplace_back(reader.string(value, place));
    return strings;
  }
  for (const auto item : reader.array(value, place)) {
    strings.emplace_back(reader.string(item, {&place, {}, strings.size()}));
  }
  return strings;
}

void read_step(const JsonReader& reader, JsonObject& fields, RuleStep& step) {
  step.op = reader.named<RuleOp>(fields.required("op"), fields.at("op"));
  if (const auto dim = fields.optional("dim")) {
    step.dims.push_back(reader.signed_number(*dim, fields.at("dim")));
  }
  const JsonPlace dims_place = fields.at("dims");
  if (const auto dims = fields.optional("dims")) {
    if (!step.dims.empty()) reader.refuse(dims_place, "either dim or dims, not both");
    for (const auto dim : reader.array(*dims, dims_place)) {
      step.dims.push_back(reader.signed_number(dim, {&dims_place, {}, step.dims.size()}));
    }
  }
  const JsonPlace sizes_place = fields.at("sizes");
  if (const auto sizes = fields.optional("sizes")) {
    for (const auto size : reader.array(*sizes, sizes_place)) {
      step.sizes.push_back(reader.unsigned_number(size, {&sizes_place, {}, step.sizes.size()}));
    }
  }
  if (const auto start = fields.optional("start")) {
    step.start = reader.unsigned_number(*start, fields.at("start"));
  }
}

Rule read_rule(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place) {
  JsonObject fields(reader, value, place);
  RuleStep first;
  read_step(reader, fields, first);
  Rule rule;
  rule.op = first.op;
  rule.dims = std::move(first.dims);
  rule.sizes = std::move(first.sizes);
  rule.start = first.start;
  rule.sources = read_strings(reader, fields, "sources");
  rule.targets = read_strings(reader, fields, "targets");
  const JsonPlace then_place = fields.at("then");
  if (const auto then = fields.optional("then")) {
    for (const auto item : reader.array(*then, then_place)) {
      const JsonPlace step_place = {&then_place, {}, rule.then.size()};
      JsonObject step_fields(reader, item, step_place);
      read_step(reader, step_fields, rule.then.emplace_back());
      step_fields.done();
    }
  }
  fields.done();
  return rule;
}

// {"old.": "new."}: literal prefixes.
Rules read_prefixes(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place) {
  Rules rules;
  const JsonObject checked(reader, value, place);
  for (const auto field : simdjson::dom::object(value)) {
    const JsonPlace at = {&place, field.key, 0};
    if (field.key == "op") reader.refuse(at, "a rule stands in a list: [{...}]");
    rules.push_back(prefix_rule(field.key, reader.string(field.value, at)));
  }
  const CompiledRules compiled(rules);
  return rules;
}

void write_step(JsonWriter& json, const RuleStep& step) {
  json.member("op", name(step.op));
  if (step.dims.size() == 1) {
    json.member("dim", step.dims[0]);
  } else if (!step.dims.empty()) {
    json.member("dims", step.dims);
  }
  if (!step.sizes.empty() || step.op == RuleOp::reshape) json.member("sizes", step.sizes);
  if (step.start != 0) json.member("start", step.start);
}

}  // namespace

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
    for (const auto item : reader.array(document.root(), place)) {
      rules.push_back(read_rule(reader, item, {&place, {}, rules.size()}));
    }
    const CompiledRules checked(rules);
    return rules;
  });
}

static std::string rules_json(const Rules& rules) {
  JsonWriter json(1, 1);
  json.begin_array();
  for (const Rule& rule : rules) {
    json.begin_object();
    write_step(json, {rule.op, rule.dims, rule.sizes, rule.start});
    json.member("sources", rule.sources);
    json.member("targets", rule.targets);
    if (!rule.then.empty()) {
      json.key("then");
      json.begin_array();
      for (const RuleStep& step : rule.then) {
        json.begin_object();
        write_step(json, step);
        json.end_object();
      }
      json.end_array();
    }
    json.end_object();
  }
  json.end_array();
  return json.take() + "\n";
}

std::string rules_to_json(const Rules& rules) {
  return only_errors([&] { return rules_json(rules); });
}

}  // namespace loadstone

#include "plan/tie_checks.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"
#include "loadstone/error.h"
#include "plan/decodings.h"

namespace loadstone {

// Left out of a plan without ties. Sources are tensors of the first checkpoint.
void write_tie_checks(JsonWriter& json, const Plan& plan) {
  if (plan.tie_checks.empty()) return;
  json.key("tie_checks");
  json.begin_array();
  for (const TieCheck& check : plan.tie_checks) {
    json.begin_object();
    json.member("name", check.name);
    json.member("tied_to", check.tied_to);
    json.member("taken", plan.catalog->tensors()[check.taken].name);
    json.member("other", plan.catalog->tensors()[check.other].name);
    json.member("is_error", check.is_error);
    json.end_object();
  }
  json.end_array();
}

void read_tie_checks(const JsonReader& reader, JsonObject& fields, SavedPlan& saved) {
  const auto checks = fields.optional("tie_checks");
  if (!checks) return;
  const JsonPlace place = fields.at("tie_checks");
  for (const auto item : reader.array(*checks, place)) {
    const JsonPlace at{&place, {}, saved.plan.tie_checks.size()};
    JsonObject check(reader, item, at);
    const auto text = [&](const char* name) {
      return std::string(reader.string(check.required(name), check.at(name)));
    };
    TieCheck& read = saved.plan.tie_checks.emplace_back();
    read.name = text("name");
    read.tied_to = text("tied_to");
    saved.tie_sources.push_back(std::array<std::string, 2>{text("taken"), text("other")});
    read.is_error = reader.boolean(check.required("is_error"), check.at("is_error"));
    check.done();
  }
}

void bind_tie_checks(const std::vector<std::array<std::string, 2>>& names, const Catalog& catalog,
                     Plan& plan) {
  for (std::size_t i = 0; i < plan.tie_checks.size(); ++i) {
    TieCheck& check = plan.tie_checks[i];
    const auto fail = [&](const char* message, const std::string& found) {
      throw Error("plan.json", message,
                  {.tensor = check.name,
                   .field = fmt::format("tie_checks[{}]", i),
                   .found = printable(found)});
    };
    for (const std::string& name : {check.name, check.tied_to}) {
      if (std::ranges::find(plan.targets, name, &PlannedTarget::name) == plan.targets.end()) {
        fail("no such target", name);
      }
    }
    const std::array<std::uint32_t*, 2> sources = {&check.taken, &check.other};
    for (std::size_t s = 0; s < sources.size(); ++s) {
      const auto found = catalog.find(names[i][s]);
      if (!found) fail("the checkpoint holds no such tensor", names[i][s]);
      *sources[s] = *found;
    }
    const Shape first = tensor_recipe(catalog, check.taken).shape;
    const Shape second = tensor_recipe(catalog, check.other).shape;
    if (first != second) fail("two shapes, which do not compare", second.text());
  }
}

}  // namespace loadstone

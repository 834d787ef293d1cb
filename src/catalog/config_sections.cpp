#include "catalog/config_sections.h"

#include "catalog/config_claim.h"

namespace loadstone {

// Models of several parts have configs within configs, and some have lists of them.
static void visit_below(simdjson::dom::element value,
                        const std::function<void(simdjson::dom::element)>& visit, unsigned depth) {
  if (depth > config_depth_max) return;
  if (value.is_array()) {
    for (const auto item : value.get_array()) visit_below(item, visit, depth + 1);
  }
  if (!value.is_object()) return;
  for (const std::string_view key : quantization_members) {
    simdjson::dom::element section;
    if (value[key].get(section) == simdjson::SUCCESS && !section.is_null()) visit(section);
  }
  for (const auto field : value.get_object()) visit_below(field.value, visit, depth + 1);
}

void for_each_section(simdjson::dom::element config,
                      const std::function<void(simdjson::dom::element)>& visit) {
  visit_below(config, visit, 0);
}

}  // namespace loadstone

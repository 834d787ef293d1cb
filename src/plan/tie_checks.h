// Tie checks of a plan as JSON, and bound to a catalog.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "base/json_fields.h"
#include "base/json_writer.h"
#include "plan/plan_json.h"

namespace loadstone {

void write_tie_checks(JsonWriter& json, const Plan& plan);
void read_tie_checks(const JsonReader& reader, JsonObject& fields, SavedPlan& saved);
// Finds the tensors of plan.tie_checks by the names that read_tie_checks() kept. Throws Error
// "plan.json" for an unknown name, and for tensors of two shapes.
void bind_tie_checks(const std::vector<std::array<std::string, 2>>& names, const Catalog& catalog,
                     Plan& plan);

}  // namespace loadstone

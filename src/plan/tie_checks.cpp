#include "plan/tie_checks.h"

#include <fmt/format.h>

#include "base/text.h"
#include "boxes/decodings.h"
#include "loadstone/error.h"

namespace loadstone {

void bind_tie_checks(const std::vector<SavedTieCheck>& checks, const NameMap<std::size_t>& targets,
                     Plan& plan) {
  const Catalog& catalog = *plan.catalog;
  for (const SavedTieCheck& saved : checks) {
    TieCheck check = saved.check;
    const auto fail = [&](const char* message, const std::string& found) {
      throw Error("plan.json", message,
                  {.tensor = check.name,
                   .field = fmt::format("tie_checks[{}]", plan.tie_checks.size()),
                   .found = printable(found)});
    };
    for (const std::string& name : {check.name, check.tied_to}) {
      if (!targets.contains(name)) fail("no target has this name", name);
    }
    const auto find = [&](const std::string& name) {
      const auto found = catalog.find(name);
      if (!found) fail("the checkpoint contains no tensor of this name", name);
      return *found;
    };
    check.taken = find(saved.taken);
    check.other = find(saved.other);
    const Shape first = tensor_recipe(catalog, check.taken).shape;
    const Shape second = tensor_recipe(catalog, check.other).shape;
    if (first != second)
      fail("the two tensors have different shapes, so they cannot be compared", second.text());
    plan.tie_checks.push_back(std::move(check));
  }
}

}  // namespace loadstone

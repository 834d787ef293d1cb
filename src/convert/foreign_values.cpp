#include "convert/foreign_values.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "base/digest.h"
#include "base/only_errors.h"
#include "base/text.h"
#include "convert/left_out.h"
#include "convert/state.h"
#include "loadstone/error.h"
#include "loadstone/tensor_reader.h"

namespace loadstone {

namespace {

constexpr std::uint64_t chunk_elements = std::uint64_t{1} << 17;

void add_values(Digest& digest, const std::shared_ptr<const Catalog>& catalog,
                const std::string& name) {
  TensorReader reader(catalog, name);
  add_text(digest, loadstone::name(reader.dtype()));
  add_text(digest, reader.shape().text());
  std::vector<std::byte> bytes;
  for (std::uint64_t begin = 0; begin < reader.elements(); begin += chunk_elements) {
    const std::uint64_t end = std::min(begin + chunk_elements, reader.elements());
    bytes.resize(Encoding(reader.dtype()).byte_count(end - begin).value_or(0));
    reader.read(begin, end, bytes);
    digest.update(bytes);
  }
}

std::string digest_of(const std::shared_ptr<const Catalog>& catalog,
                      std::span<const std::uint32_t> sources) {
  Digest digest;
  add_text(digest, claims_beside(*catalog).config);
  for (const std::uint32_t source : sources) {
    add_values(digest, catalog, catalog->tensors()[source].name);
  }
  return digest.hex();
}

}  // namespace

void note_values(Recipes& recipes, const std::shared_ptr<const Catalog>& catalog,
                 const std::vector<std::string>& computed_from) {
  only_errors([&] {
    std::vector<std::uint32_t> sources;
    for (const std::string& each : computed_from) {
      const auto source = catalog->find(each);
      if (!source) {
        throw Error("plan.missing", "the checkpoint has no such tensor", {.tensor = each});
      }
      sources.push_back(*source);
    }
    recipes.values_digest = digest_of(catalog, sources);
    recipes.computed_from = std::move(sources);
  });
}

std::optional<Finding> foreign_values(const std::shared_ptr<const Catalog>& catalog,
                                      const Recipes& recipes) {
  std::vector<std::string> names;
  for (const TargetRecipe& recipe : recipes.targets) {
    if (recipe.constant != nullptr) names.push_back(recipe.target);
  }
  if (names.empty() || recipes.values_digest.empty()) return std::nullopt;
  if (digest_of(catalog, recipes.computed_from) == recipes.values_digest) return std::nullopt;
  Finding finding = {.severity = Severity::warning, .code = "convert.constants"};
  finding.target = names.front();
  finding.message = fmt::format(
      "the recipes give the values of {}, computed for another checkpoint: its config.json{} not "
      "the source's",
      name_list(names, 3), recipes.computed_from.empty() ? " is" : " or tensors are");
  finding.suggestion = "make the recipes again, of this checkpoint";
  return finding;
}

}  // namespace loadstone

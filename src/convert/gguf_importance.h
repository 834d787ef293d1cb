// Which tensor of a GGUF file takes which entry of an importance matrix: llama.cpp's rules.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "convert/choose.h"
#include "convert/gguf_mix.h"
#include "loadstone/catalog.h"
#include "loadstone/dtype.h"
#include "loadstone/finding.h"
#include "loadstone/importance.h"
#include "loadstone/recipe.h"

namespace loadstone {

// Erases the keys that name the matrix of the source's blocks, except those that are `given`.
void erase_importance(const Metadata& given, Metadata& metadata);

// Not thread-safe. The matrix, which may be null, outlives it.
class Importances {
 public:
  explicit Importances(const ImportanceMatrix* matrix) : matrix_(matrix) {}

  [[nodiscard]] bool are_given() const noexcept { return matrix_ != nullptr; }

  // The entry of a tensor that becomes such blocks; null where there is none, or none that fits.
  [[nodiscard]] std::shared_ptr<const std::vector<float>> take(std::optional<Mix> mix,
                                                               const TargetRecipe& recipe,
                                                               BlockFormat type);
  // Errors for blocks that need an entry and have none, and for entries that fit no tensor; and
  // which entries and tensors are left over.
  void report(const Recipes& recipes, std::vector<Finding>& findings) const;
  // Sets the keys that llama-quantize sets.
  void describe(Metadata& metadata) const;

 private:
  // Numbers of entries, numbers that tensors have.
  using Sizes = std::pair<std::size_t, std::string>;

  void report_unused(const Recipes& recipes, std::vector<Finding>& findings) const;

  const ImportanceMatrix* matrix_;
  std::map<std::string_view, Alike> needing_;  // by their types' names
  std::map<Sizes, Alike> misfits_;
  Alike without_;
};

}  // namespace loadstone

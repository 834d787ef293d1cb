// Adapters as terms of merges.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "boxes/view.h"
#include "loadstone/finding.h"
#include "loadstone/merge.h"
#include "loadstone/merge_options.h"
#include "plan/adapter_names.h"
#include "plan/merge_numbers.h"

namespace loadstone {

// A tensor of the adapter.
struct AdapterPart {
  std::string name;
  MergeSource source;
};

// The tensors of one module.
struct AdapterModule {
  std::optional<AdapterPart> left;
  std::optional<AdapterPart> right;
  std::optional<AdapterPart> alpha;
  std::optional<AdapterPart> magnitude;
  bool is_embedding = false;
  std::vector<std::string> names;
};

// A product as its module has it: [out, rank] times [rank, in].
struct AdapterProduct {
  std::uint64_t out = 0;
  std::uint64_t in = 0;
  std::uint64_t rank = 0;
  View left;
  View right;
};

// A product among a draft's terms, and the tensors of the adapter that it is made of.
struct AddedProduct {
  std::string name;  // in the adapter
  std::size_t term = 0;
  std::uint32_t left = 0;
  std::uint32_t right = 0;
  bool is_transposed = false;
};

// A tensor of the output while terms are added to it.
struct MergeDraft {
  MergeSource source;  // the first model's
  std::vector<Box> boxes;
  Merge merge;
  std::vector<AddedProduct> products;
  bool is_replaced = false;       // by a full tensor of an adapter
  std::uint32_t replacement = 0;  // the adapter's tensor that replaces it
  // Alphas, and tensors of the adapter that were compared with those above.
  std::vector<std::uint32_t> decided_by;
  // A few words with the reason, if the value cannot be changed.
  std::string obstacle{};

  [[nodiscard]] bool is_adapted() const noexcept { return is_replaced || !products.empty(); }
  // Records that `other` was compared and is equal.
  void add_same(const MergeDraft& other);
};

// The drafts of a base. Adapters may also know a tensor by the names of its ties and by that of the
// checkpoint. Not thread-safe.
struct MergeDrafts {
  std::map<std::string, MergeDraft, std::less<>> items;
  std::map<std::string, std::string, std::less<>> other_names;  // and the name among `items`

  [[nodiscard]] bool contains(std::string_view name) const {
    return items.contains(name) || other_names.contains(name);
  }
  // The name among `items`.
  [[nodiscard]] std::string root_of(std::string_view name) const {
    const auto other = other_names.find(name);
    return other == other_names.end() ? std::string(name) : other->second;
  }
  [[nodiscard]] MergeDraft& at(std::string_view name) { return items.find(root_of(name))->second; }
  // All that adapters may use.
  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& [name, draft] : items) names.push_back(name);
    for (const auto& [name, draft] : other_names) names.push_back(name);
    return names;
  }
};

// Adds one adapter, which is this checkpoint of the catalog, to the drafts that it changes. An
// unused tensor of the adapter is an error among the findings.
void add_adapter(const Catalog& catalog, std::uint32_t checkpoint, const MergeAdapter& adapter,
                 const AdapterPlaces& places, MergeNumbers& numbers, MergeDrafts& drafts,
                 std::vector<Finding>& findings);

// Compares two products of the same weight, which may be stored transposed: peft's embeddings and
// heads. Reads their matrices.
[[nodiscard]] bool are_equal_products(const Catalog& catalog, const Term& first,
                                      const AddedProduct& a, const Term& second,
                                      const AddedProduct& b);

// Warns about modules of the adapter for one text encoder of a pipeline, if the base's folder is
// not that encoder's. `modules`: by the number of the encoder.
void report_other_encoders(const Catalog& base, const Catalog& adapter,
                           const std::map<unsigned, std::vector<std::string>>& modules,
                           std::vector<Finding>& findings);

// A warning for each pattern that leaves out no tensor of any adapter. `first`: the checkpoint of
// the catalog that the first adapter is.
void report_idle_patterns(const Catalog& catalog, std::uint32_t first,
                          const std::vector<MergeAdapter>& adapters,
                          std::vector<Finding>& findings);

}  // namespace loadstone

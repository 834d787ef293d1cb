// Declares the drafts of a merge's tensors, and adds the products of adapters to the drafts.
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
#include "plan/adapter_products.h"
#include "plan/merge_numbers.h"

namespace loadstone {

class AdapterConfig;

// A product among the terms of a draft, and the adapter's tensors that are its factors. For a
// difference, both are the tensor that is added.
struct AddedProduct {
  std::string name;  // name of the module in the adapter
  std::size_t term = 0;
  std::uint32_t left = 0;
  std::uint32_t right = 0;
  bool is_transposed = false;
};

// A tensor of the output to which terms are being added.
struct MergeDraft {
  MergeSource source;  // source in the first model
  std::vector<Box> boxes;
  Merge merge;
  std::vector<AddedProduct> products;
  bool is_replaced = false;       // a full tensor of an adapter replaces it
  std::uint32_t replacement = 0;  // index of the adapter's tensor that replaces it
  // Tensors that influence the result without being terms: alphas, and tensors that were compared
  // with a term and are equal.
  std::vector<std::uint32_t> decided_by;
  // The reason why the value cannot be changed; empty if it can be.
  std::string obstacle{};

  [[nodiscard]] bool is_adapted() const noexcept { return is_replaced || !products.empty(); }
  // Adds the adapter tensors of `other`, a draft with an equal value, to `decided_by`.
  void add_same(const MergeDraft& other);
};

// The drafts for the tensors of a base. An adapter may also refer to a tensor by a tied name or by
// its name in the checkpoint. Not thread-safe.
struct MergeDrafts {
  std::map<std::string, MergeDraft, std::less<>> items;
  std::map<std::string, std::string, std::less<>> other_names;  // other name -> name in `items`

  [[nodiscard]] bool contains(std::string_view name) const {
    return items.contains(name) || other_names.contains(name);
  }
  // Returns the name in `items` for any name of the tensor.
  [[nodiscard]] std::string root_of(std::string_view name) const {
    const auto other = other_names.find(name);
    return other == other_names.end() ? std::string(name) : other->second;
  }
  [[nodiscard]] MergeDraft& at(std::string_view name) { return items.find(root_of(name))->second; }
  // Returns all names by which an adapter may refer to a tensor.
  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& [name, draft] : items) names.push_back(name);
    for (const auto& [name, draft] : other_names) names.push_back(name);
    return names;
  }
};

// Adds the adapter, which has the index `checkpoint` among the catalog's checkpoints, to the drafts
// that it changes. Adds an error to the findings for each unused tensor of the adapter.
void add_adapter(const Catalog& catalog, std::uint32_t checkpoint, const MergeAdapter& adapter,
                 const AdapterPlaces& places, MergeNumbers& numbers, MergeDrafts& drafts,
                 std::vector<Finding>& findings);

// Returns true if two products for the same weight are equal. Reads the matrices of both products.
// One product may be stored transposed, as peft does for embeddings and their heads.
[[nodiscard]] bool are_equal_products(const Catalog& catalog, const Term& first,
                                      const AddedProduct& a, const Term& second,
                                      const AddedProduct& b);

// Returns the factor of a module's product. `alpha` and `config` may be null. Throws Error
// "format.adapter" if the two disagree, or if the configuration of peft's modules is missing.
[[nodiscard]] float scale_of_product(const Catalog& adapter, const std::string& module,
                                     std::uint64_t rank, const TensorInfo* alpha,
                                     const AdapterConfig* config);

// Warns about fields that loadstone does not know, and about doubtful scales.
void report_doubts(const AdapterConfig& config, const Catalog& adapter,
                   std::vector<Finding>& findings);

// Warns about the adapter's modules for a text encoder of a pipeline if the base's folder is not
// the folder of that encoder. `modules` maps encoder numbers to module names.
void report_other_encoders(const Catalog& base, const Catalog& adapter,
                           const std::map<unsigned, std::vector<std::string>>& modules,
                           std::vector<Finding>& findings);

// Warns about each ignore pattern that matches no tensor of any adapter. `first` is the index of
// the first adapter among the catalog's checkpoints.
void report_idle_patterns(const Catalog& catalog, std::uint32_t first,
                          const std::vector<MergeAdapter>& adapters,
                          std::vector<Finding>& findings);

}  // namespace loadstone

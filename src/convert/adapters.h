// Adapters as terms of merges.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "convert/adapter_names.h"
#include "convert/merge_numbers.h"
#include "loadstone/finding.h"
#include "loadstone/merge.h"
#include "loadstone/merge_options.h"

namespace loadstone {

// A tensor of the output while terms are added to it.
struct MergeDraft {
  MergeSource source;  // the first model's
  std::vector<Box> boxes;
  Merge merge;
  bool is_replaced = false;  // by an adapter's own tensor
};

using MergeDrafts = std::map<std::string, MergeDraft, std::less<>>;

// Adds one adapter, which is this checkpoint of the catalog, to what it changes. A tensor of the
// adapter that is used by nothing is an error among the findings.
void add_adapter(const Catalog& catalog, std::uint32_t checkpoint, const MergeAdapter& adapter,
                 const AdapterPlaces& places, MergeNumbers& numbers, MergeDrafts& drafts,
                 std::vector<Finding>& findings);

}  // namespace loadstone

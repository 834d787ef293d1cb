// The tensors of an adapter, by the module that they change.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "boxes/view.h"
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

}  // namespace loadstone

// Products of adapters that are compared with each other: those of two names of one tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "loadstone/catalog.h"
#include "loadstone/merge.h"

namespace loadstone {

// A product among a draft's terms, and the tensors of the adapter that it is made of.
struct AddedProduct {
  std::string name;  // by which the adapter knows the weight
  std::size_t term = 0;
  std::uint32_t left = 0;
  std::uint32_t right = 0;
  bool is_transposed = false;
};

// Compares two products of the same weight, which may be stored transposed: peft's embeddings and
// heads. Reads their matrices.
[[nodiscard]] bool are_equal_products(const Catalog& catalog, const Term& first,
                                      const AddedProduct& a, const Term& second,
                                      const AddedProduct& b);

}  // namespace loadstone

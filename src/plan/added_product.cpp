#include "plan/added_product.h"

#include <tuple>

#include "catalog/adapter_config.h"

namespace loadstone {

bool are_equal_products(const Catalog& catalog, const Term& first, const AddedProduct& a,
                        const Term& second, const AddedProduct& b) {
  const LowRank& one = *first.low_rank;
  const LowRank& other = *second.low_rank;
  const auto place = [](const LowRank& each) {
    return std::tuple(each.row_begin, each.column_begin, each.rows, each.columns, each.rank);
  };
  const bool is_plain = one.magnitudes.empty() && other.magnitudes.empty();
  if (first.factor != second.factor || place(one) != place(other) || !is_plain) return false;
  const auto& tensors = catalog.tensors();
  const auto are_same = [&](std::uint32_t left, std::uint32_t right) {
    return a.is_transposed == b.is_transposed
               ? are_equal(catalog, tensors[left], tensors[right])
               : are_transposes(catalog, tensors[left], tensors[right]);
  };
  const bool is_swapped = a.is_transposed != b.is_transposed;
  return are_same(a.left, is_swapped ? b.right : b.left) &&
         are_same(a.right, is_swapped ? b.left : b.right);
}

}  // namespace loadstone

// Places the products of adapters in the tensors of a base.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "boxes/view.h"
#include "loadstone/merge.h"
#include "plan/adapter_names.h"
#include "plan/merge_numbers.h"

namespace loadstone {

// Throws Error "merge.adapter": the adapter does not fit the base.
[[noreturn]] void refuse_unfit(std::string message, std::string found = {},
                               std::string expected = {});
// Throws Error "format.adapter": the adapter is inconsistent.
[[noreturn]] void refuse_malformed(std::string message, std::string found = {},
                                   std::string expected = {});

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
  std::optional<AdapterPart> difference;       // of the weight
  std::optional<AdapterPart> bias_difference;  // of the bias
  bool is_embedding = false;
  std::vector<std::string> names;

  // Returns true if the module has a tensor that belongs to a product.
  [[nodiscard]] bool has_product() const { return left || right || alpha || magnitude; }
};

// A product with its factors in the layout of the module: [out, rank] times [rank, in].
struct AdapterProduct {
  std::uint64_t out = 0;
  std::uint64_t in = 0;
  std::uint64_t rank = 0;
  std::uint64_t kernel = 1;  // elements of a convolution's kernel, which are a part of `in`
  View left;
  View right;
};

// Returns the factors as matrices. A convolution's weight counts as [out, in * height * width].
[[nodiscard]] AdapterProduct product_of(const AdapterModule& module, const MergeNumbers& numbers);

// Returns the number of columns of the base's tensor as a matrix.
[[nodiscard]] std::uint64_t row_elements(const AdapterPlace& place, const Shape& shape);

// Sets the rectangle of the base's tensor to which the product is added. Returns true if the
// product is added as its transpose, which `may_be_transposed` allows.
[[nodiscard]] bool set_rows(const Shape& shape, const AdapterPlace& place,
                            const AdapterProduct& product, bool may_be_transposed,
                            LowRank& low_rank);
// Does the same for one expert of a stack. Returns true for a stack [experts, in, out].
[[nodiscard]] bool set_expert(const Shape& shape, const AdapterPlace& place,
                              const AdapterProduct& product, LowRank& low_rank);

// Sets the magnitudes of DoRA. peft has one for each output. LyCORIS also has one for each input,
// with the shape [1, in].
void set_magnitudes(const AdapterPart& magnitudes, const AdapterProduct& product,
                    bool is_transposed, MergeNumbers& numbers, LowRank& low_rank);

}  // namespace loadstone

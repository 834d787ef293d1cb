// Finds the tie between a language model's embedding and its head, which the config declares.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/finding.h"
#include "loadstone/plan.h"
#include "loadstone/shape.h"

namespace loadstone {

// Reads tie_word_embeddings of a config.json. Files of a tied model have one of the two names,
// usually the embedding's. Immutable.
class TiedHead {
 public:
  // `config`: the text of config.json; an empty text ties nothing.
  explicit TiedHead(std::string_view config);
  // Also finds the tie if `base` is GGUF: llama.cpp uses the embedding as the head of files without
  // a head.
  TiedHead(std::string_view config, const Catalog& base);

  // Returns the name of the head that is tied to this tensor, in the file's style of names; nullopt
  // if the config declares no tie, or if the tensor is not an embedding with a known head. `has`:
  // returns true if the file has a tensor of this name. If the file has the head, only a tie that
  // the config declares explicitly counts.
  [[nodiscard]] std::optional<std::string> head_of(
      std::string_view embedding, const std::function<bool(std::string_view)>& has) const;
  // Returns pairs of an embedding and a head, as indices of tensors: the checkpoint stores both,
  // and the config ties them.
  [[nodiscard]] std::vector<std::array<std::uint32_t, 2>> stored_in(const Catalog& catalog) const;
  // Returns the head among `names` that the config ties to an embedding in `names`, or nullopt.
  [[nodiscard]] std::optional<std::string> stored_in(
      const std::set<std::string, std::less<>>& names) const;
  // Returns true for the shape of a tensor with one row per token.
  [[nodiscard]] bool has_token_rows(const Shape& shape) const noexcept;
  // Returns true if the tensor may be an embedding that is tied to a tensor with an unknown name.
  // `has_twin`: another tensor of the file has the same shape and may be the head.
  [[nodiscard]] bool may_tie(std::string_view name, const Shape& shape,
                             bool has_twin) const noexcept;

 private:
  std::optional<bool> is_tied_;
  bool has_head_ = false;
  bool is_gguf_ = false;         // true for a language model in GGUF
  bool is_always_tied_ = false;  // true if the head cannot be a separate tensor
  // True for masked language models, whose heads have various names and biases.
  bool is_masked_ = false;
  std::vector<std::uint64_t> rows_;  // numbers of rows of embeddings
};

// Returns modules whose weights are tied and therefore missing from the output. These are usually
// heads: the language model's head, and modules without a weight that have a bias with as many
// elements as a plain matrix has rows.
[[nodiscard]] std::vector<std::string> tied_modules(const Plan& plan, std::string_view config);

// Returns errors "plan.shape" for a tied tensor that the checkpoint stores in two different shapes.
[[nodiscard]] std::vector<Finding> check_tied_shapes(const Catalog& catalog,
                                                     std::string_view config);

// Returns the head if it and its embedding are separate targets although the config ties them.
[[nodiscard]] std::optional<std::string> untied_head(const Plan& plan, std::string_view config);

// Returns the config that does not tie weights.
[[nodiscard]] std::string untied_config(std::string_view config);

}  // namespace loadstone

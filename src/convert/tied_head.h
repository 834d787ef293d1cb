// The tie between a language model's embedding and its head, which its config declares.
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
  // `config`: its text; an empty one ties nothing.
  explicit TiedHead(std::string_view config);
  // Also knows the tie of a base in GGUF: for files without a head llama.cpp uses the embedding.
  TiedHead(std::string_view config, const Catalog& base);

  // Returns the name of the head that is tied to this tensor, in the file's style of names. nullopt
  // if the config declares no tie, or the tensor is not an embedding with a known head. `has`:
  // returns true if the file has a name; if it has the head, only an explicit tie counts.
  [[nodiscard]] std::optional<std::string> head_of(
      std::string_view embedding, const std::function<bool(std::string_view)>& has) const;
  // Returns pairs of an embedding and a head that the checkpoint both has and that the config ties,
  // as indices of tensors.
  [[nodiscard]] std::vector<std::array<std::uint32_t, 2>> stored_in(const Catalog& catalog) const;
  // Returns the head among the names that the config ties to another of them, or nullopt.
  [[nodiscard]] std::optional<std::string> stored_in(
      const std::set<std::string, std::less<>>& names) const;
  // Returns true for tensors with one row per token.
  [[nodiscard]] bool has_token_rows(const Shape& shape) const noexcept;
  // Returns true for the shape of an embedding that is tied to unknown names or to none.
  // `has_twin`: another tensor of the file has the same shape and may be the head.
  [[nodiscard]] bool may_tie(std::string_view name, const Shape& shape,
                             bool has_twin) const noexcept;

 private:
  std::optional<bool> is_tied_;
  bool has_head_ = false;
  bool is_gguf_ = false;             // a language model in GGUF
  bool is_always_tied_ = false;      // its head cannot be a separate tensor
  bool is_masked_ = false;           // heads of encoders have various names and biases
  std::vector<std::uint64_t> rows_;  // of embeddings
};

// Returns modules whose weights are tied and so not in the output, usually heads: those that have a
// bias with as many elements as a plain matrix has rows and no weight, and a language model's head.
[[nodiscard]] std::vector<std::string> tied_modules(const Plan& plan, std::string_view config);

// Returns errors "plan.shape" for a tied tensor that the checkpoint has in two shapes.
[[nodiscard]] std::vector<Finding> check_tied_shapes(const Catalog& catalog,
                                                     std::string_view config);

// Returns the head that is a separate target, like its embedding, although the config ties them.
[[nodiscard]] std::optional<std::string> untied_head(const Plan& plan, std::string_view config);

// Returns the config without a tie.
[[nodiscard]] std::string untied_config(std::string_view config);

}  // namespace loadstone

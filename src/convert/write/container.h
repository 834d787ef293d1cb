// The formats of files that conversions write. A further one is one more class, and a line in
// containers().
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "convert/choose/choose.h"
#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/finding.h"

namespace loadstone {

// One format: its names, metadata and places. Immutable, so thread-safe.
class Container {
 public:
  Container(const Container&) = delete;
  Container& operator=(const Container&) = delete;

  [[nodiscard]] virtual FileFormat format() const noexcept = 0;
  // Of file names: ".safetensors".
  [[nodiscard]] virtual std::string_view suffix() const noexcept = 0;
  // Of the name of the file that lists shards; empty: there is none.
  [[nodiscard]] virtual std::string_view index_suffix() const noexcept { return {}; }
  // Whether files hold blocks of numbers as they are.
  [[nodiscard]] virtual bool holds_blocks() const noexcept = 0;

  // For the headers: the part of the sources' metadata that the format can hold, with the
  // options' added or in its place. Adds findings for keys that are left out or missing.
  // Throws Error "plan.options" for options' entries that it does not hold.
  [[nodiscard]] virtual Metadata metadata(const Catalog& catalog, const ConvertOptions& options,
                                          std::vector<Finding>& findings) const = 0;
  // An error for a tensor that files cannot hold: its name, shape or encoding.
  [[nodiscard]] virtual std::optional<Finding> refuse(const OutputTensor& tensor,
                                                      const ConvertOptions& options) const = 0;
  // Whether the lower-case name says what tensors become, although no encoding has it: mixes of
  // encodings, dtypes.
  [[nodiscard]] virtual bool is_format(std::string_view) const { return false; }
  // Chooses which tensors are quantized, where the options ask for it; may change recipes, and says
  // so in the metadata. Throws Error "plan.options" for formats that files do not hold.
  [[nodiscard]] virtual Choices choose(const ConvertOptions& options, const Catalog& catalog,
                                       Metadata& metadata, Recipes& recipes,
                                       std::vector<Finding>& findings) const = 0;
  // Whose names the components of quantized tensors have.
  [[nodiscard]] virtual QuantizeStyle style(const ConvertOptions& options) const noexcept = 0;
  // Puts a file's tensors, whose `end` is their size, in order and to their places.
  virtual void place(const Conversion& conversion, OutputFile& file) const = 0;
  // All bytes before the data of this file, whose tensors have their places.
  [[nodiscard]] virtual std::string header(const Conversion& conversion,
                                           std::size_t file) const = 0;
  // An error for a header that readers do not take.
  [[nodiscard]] virtual std::optional<Finding> refuse_header(const OutputFile&) const { return {}; }
  // The file that lists shards.
  [[nodiscard]] virtual std::string index(const Conversion&) const { return {}; }

  // Whether a file's name is that of a model's shard or index.
  [[nodiscard]] bool is_model_name(std::string_view name) const noexcept;
  // Whether a file is one that a conversion with this stem writes: the file, a shard or the index.
  [[nodiscard]] bool is_output_name(std::string_view name, std::string_view stem) const;
  // "model.safetensors", or "model-00001-of-00003.safetensors".
  [[nodiscard]] std::string shard_name(const std::string& stem, std::size_t index,
                                       std::size_t count) const;

 protected:
  constexpr Container() = default;
  ~Container() = default;
};

extern const Container& safetensors_container;
extern const Container& gguf_container;

// Throws Error "plan.options" for a format that is not written.
[[nodiscard]] const Container& container_of(FileFormat format);
// Those that are written.
[[nodiscard]] std::span<const Container* const> containers() noexcept;

// Text has no types, so safetensors metadata keeps those of numbers and bools under this key:
// "llama.block_count=u32 llama.use_parallel_residual=bool".
inline constexpr const char* types_key = "loadstone.gguf_types";
// Return that text for the entries of `source` in `texts`; empty if all of these are text.
[[nodiscard]] std::string types_text(const Metadata& source, const Metadata& texts);

// Entries of the sources that a header does not hold, as one finding; none for none.
void report_left_out(std::vector<std::string> keys, std::string_view reason,
                     std::vector<Finding>& findings);

}  // namespace loadstone

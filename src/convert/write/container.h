// The formats of files that conversions write. To add one, write one class and add it to
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

// One format: its names, metadata and layout. Immutable, so thread-safe.
class Container {
 public:
  Container(const Container&) = delete;
  Container& operator=(const Container&) = delete;

  [[nodiscard]] virtual FileFormat format() const noexcept = 0;
  // Suffix of file names: ".safetensors".
  [[nodiscard]] virtual std::string_view suffix() const noexcept = 0;
  // Suffix of the file that lists shards; empty: there is no such file.
  [[nodiscard]] virtual std::string_view index_suffix() const noexcept { return {}; }
  // Returns true if files store GGUF blocks unchanged.
  [[nodiscard]] virtual bool holds_blocks() const noexcept = 0;

  // Returns the header's metadata: the part of the sources' metadata that the format supports, with
  // the options' entries added or replaced. Adds findings for keys that are omitted or missing.
  // Throws Error "plan.options" for entries of the options that it does not support.
  [[nodiscard]] virtual Metadata metadata(const Catalog& catalog, const ConvertOptions& options,
                                          std::vector<Finding>& findings) const = 0;
  // Returns an error for a tensor that files cannot store: its name, shape or encoding.
  [[nodiscard]] virtual std::optional<Finding> refuse(const OutputTensor& tensor,
                                                      const ConvertOptions& options) const = 0;
  // Returns true for a lower-case name that selects encodings without being one: a mix, a dtype.
  [[nodiscard]] virtual bool is_format(std::string_view) const { return false; }
  // Chooses the tensors to quantize, if the options request it; may change recipes and add
  // metadata. Throws Error "plan.options" for formats that files cannot store.
  [[nodiscard]] virtual Choices choose(const ConvertOptions& options, const Catalog& catalog,
                                       Metadata& metadata, Recipes& recipes,
                                       std::vector<Finding>& findings) const = 0;
  // Returns the naming style of components.
  [[nodiscard]] virtual QuantizeStyle style(const ConvertOptions& options) const noexcept = 0;
  // Sorts a file's tensors, whose `end` is their size, and assigns offsets.
  virtual void place(const Conversion& conversion, OutputFile& file) const = 0;
  // Returns all bytes before the data of a file whose tensors have offsets.
  [[nodiscard]] virtual std::string header(const Conversion& conversion,
                                           std::size_t file) const = 0;
  // Returns an error for a header that readers reject.
  [[nodiscard]] virtual std::optional<Finding> refuse_header(const OutputFile&) const { return {}; }
  // Returns the text of the file that lists shards.
  [[nodiscard]] virtual std::string index(const Conversion&) const { return {}; }

  // Returns true if the name is that of a model's shard or index.
  [[nodiscard]] bool is_model_name(std::string_view name) const noexcept;
  // Returns true if a conversion with this stem writes the file: the file, a shard or the index.
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

// Throws Error "plan.options" for a format that loadstone does not write.
[[nodiscard]] const Container& container_of(FileFormat format);
// Returns the formats that loadstone writes.
[[nodiscard]] std::span<const Container* const> containers() noexcept;

// Text has no types, so safetensors metadata keep those of numbers and bools under this key:
// "llama.block_count=u32 llama.use_parallel_residual=bool".
inline constexpr const char* types_key = "loadstone.gguf_types";
// Returns that text for the entries of `source` in `texts`; empty if all of these are text.
[[nodiscard]] std::string types_text(const Metadata& source, const Metadata& texts);

// Reports entries of the sources that a header cannot store, as one finding; none if `keys` is
// empty.
void report_left_out(std::vector<std::string> keys, std::string_view reason,
                     std::vector<Finding>& findings);

}  // namespace loadstone

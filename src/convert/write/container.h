// Declares the file formats that conversions write. To add a format, write a class and add it to
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

// A file format: its names, metadata and layout. Immutable, so thread-safe.
class Container {
 public:
  Container(const Container&) = delete;
  Container& operator=(const Container&) = delete;

  [[nodiscard]] virtual FileFormat format() const noexcept = 0;
  // Suffix of file names: ".safetensors".
  [[nodiscard]] virtual std::string_view suffix() const noexcept = 0;
  // Suffix of the file that lists shards; empty if the format has no such file.
  [[nodiscard]] virtual std::string_view index_suffix() const noexcept { return {}; }
  // Returns true if files store GGUF blocks unchanged.
  [[nodiscard]] virtual bool holds_blocks() const noexcept = 0;

  // Returns the header's metadata: the entries of the sources' metadata that the format supports,
  // with the options' entries added or replaced. Adds findings for keys that are omitted or
  // missing. Throws Error "plan.options" for entries of the options that the format does not
  // support.
  [[nodiscard]] virtual Metadata metadata(const Catalog& catalog, const ConvertOptions& options,
                                          std::vector<Finding>& findings) const = 0;
  // Returns a warning if the metadata lacks keys that readers of the output's tensors need.
  [[nodiscard]] virtual std::optional<Finding> check_metadata(const Conversion&) const {
    return {};
  }
  // Returns an error for a tensor whose name, shape or encoding files cannot store.
  [[nodiscard]] virtual std::optional<Finding> refuse(const OutputTensor& tensor,
                                                      const ConvertOptions& options) const = 0;
  // Returns true for a lower-case name that selects several encodings, such as a mix, or a dtype.
  [[nodiscard]] virtual bool is_format(std::string_view) const { return false; }
  // Chooses the tensors to quantize, if the options request it. May change recipes and add
  // metadata. Throws Error "plan.options" for encodings that files of this format cannot store.
  [[nodiscard]] virtual Choices choose(const ConvertOptions& options, const Catalog& catalog,
                                       Metadata& metadata, Recipes& recipes,
                                       std::vector<Finding>& findings) const = 0;
  // Returns the naming style of components.
  [[nodiscard]] virtual QuantizeStyle style(const ConvertOptions& options) const noexcept = 0;
  // Sorts a file's tensors and assigns their offsets. Before the call, `end` of each tensor is its
  // size.
  virtual void place(const Conversion& conversion, OutputFile& file) const = 0;
  // Returns all bytes before the data of a file. The file's tensors must have offsets.
  [[nodiscard]] virtual std::string header(const Conversion& conversion,
                                           std::size_t file) const = 0;
  // Returns an error for a header that readers reject.
  [[nodiscard]] virtual std::optional<Finding> refuse_header(const OutputFile&) const { return {}; }
  // Returns the text of the file that lists shards.
  [[nodiscard]] virtual std::string index(const Conversion&) const { return {}; }

  // Returns true if a shard or an index of any model could have this name.
  [[nodiscard]] bool is_model_name(std::string_view name) const noexcept;
  // Returns true if a conversion with this stem may write a file of this name: the only file, a
  // shard or the index.
  [[nodiscard]] bool is_output_name(std::string_view name, std::string_view stem) const;
  // Returns the name of a shard: "model.safetensors", or "model-00001-of-00003.safetensors".
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

// Key under which safetensors metadata stores the types of numbers and bools, because its values
// are always text: "llama.block_count=u32 llama.use_parallel_residual=bool".
inline constexpr const char* types_key = "loadstone.gguf_types";
// Returns the value for `types_key`: the types of the entries of `source` that are in `texts`.
// Empty if all these entries are text.
[[nodiscard]] std::string types_text(const Metadata& source, const Metadata& texts);

// Adds one finding for entries of the sources that a header cannot store. Adds no finding if `keys`
// is empty.
void report_left_out(std::vector<std::string> keys, std::string_view reason,
                     std::vector<Finding>& findings);

}  // namespace loadstone

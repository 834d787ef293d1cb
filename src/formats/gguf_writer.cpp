// Writes all bytes before the data of a GGUF file.
#include <fmt/format.h>

#include <cstddef>
#include <ranges>
#include <utility>

#include "base/ceil_div.h"
#include "base/text.h"
#include "formats/gguf.h"
#include "formats/metadata.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr std::uint32_t written_version = 3;

// Not thread-safe.
class GgufWriter {
 public:
  void begin(std::uint64_t tensor_count, std::uint64_t entry_count) {
    bytes_ = "GGUF";
    number(written_version);
    number(tensor_count);
    number(entry_count);
  }

  void entry(const std::string& key, const MetadataValue& item) {
    key_ = &key;
    if (!is_metadata_key(key) || key.size() > gguf_key_bytes_max) {
      refuse(
          "this is not a valid GGUF key",
          fmt::format("at most {} printable ASCII characters without spaces", gguf_key_bytes_max));
    }
    string(key);
    number(static_cast<std::uint32_t>(item.type));
    value(item, 0);
  }

  void tensor(const GgufTensor& tensor) {
    const auto type = gguf_type_id(tensor.encoding);
    if (!type) {
      throw Error("internal", "GGUF does not define this type",
                  {.tensor = std::string(tensor.name)});
    }
    string(tensor.name);
    number(static_cast<std::uint32_t>(tensor.shape->rank()));
    // The file stores the fastest-varying dimension first.
    for (const std::uint64_t extent : tensor.shape->extents() | std::views::reverse) number(extent);
    number(*type);
    number(tensor.offset);
  }

  std::string take(std::uint64_t alignment) && {
    bytes_.resize(round_up(bytes_.size(), alignment), '\0');
    return std::move(bytes_);
  }

 private:
  [[noreturn]] void refuse(std::string message, std::string expected) const {
    throw Error("plan.options", std::move(message),
                {.tensor = printable(*key_), .field = "metadata", .expected = std::move(expected)});
  }

  template <typename Number>
  void number(Number number) {
    for (std::size_t i = 0; i < sizeof number; ++i) {
      bytes_ += static_cast<char>(number >> (8 * i) & 0xff);
    }
  }

  void string(std::string_view text) {
    number(std::uint64_t{text.size()});
    bytes_ += text;
  }

  void value(const MetadataValue& item, unsigned level) {
    const auto* const text = std::get_if<std::string>(&item.value);
    const auto* const array = std::get_if<MetadataArray>(&item.value);
    if (item.type == MetadataType::string && text != nullptr) {
      string(*text);
    } else if (item.type == MetadataType::array && array != nullptr) {
      items(*array, level);
    } else if (!append_number(item, bytes_)) {
      refuse("the value does not fit its type", fmt::format("a value of type {}", name(item.type)));
    }
  }

  void items(const MetadataArray& array, unsigned level) {
    if (level > 1) refuse("arrays are nested too deeply", "an array of arrays at most");
    number(static_cast<std::uint32_t>(array.item_type()));
    number(std::uint64_t{array.size()});
    for (const MetadataValue& item : array) value(item, level + 1);
  }

  std::string bytes_;
  const std::string* key_ = nullptr;  // current key
};

}  // namespace

std::string gguf_header(const Metadata& metadata, std::span<const GgufTensor> tensors,
                        std::uint64_t alignment) {
  GgufWriter writer;
  writer.begin(tensors.size(), metadata.size());
  for (const auto& [key, item] : metadata) writer.entry(key, item);
  for (const GgufTensor& tensor : tensors) writer.tensor(tensor);
  return std::move(writer).take(alignment);
}

}  // namespace loadstone

// Writes GGUF files: typed metadata and tensor infos before the data, and aligned tensors.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "base/ceil_div.h"
#include "base/named.h"
#include "base/text.h"
#include "base/words.h"
#include "convert/choose/gguf_choose.h"
#include "convert/choose/gguf_image.h"
#include "convert/choose/gguf_language.h"
#include "convert/choose/gguf_mix.h"
#include "convert/json_text.h"
#include "convert/values.h"
#include "convert/write/container.h"
#include "formats/gguf.h"
#include "formats/gguf_keys.h"
#include "formats/gguf_shapes.h"
#include "formats/metadata.h"
#include "loadstone/defaults.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr const char* alignment_key = "general.alignment";

bool is_gguf(const Catalog& catalog) noexcept {
  return std::ranges::any_of(catalog.shards(),
                             [](const Shard& shard) { return shard.format == FileFormat::gguf; });
}

// Returns the largest number of dims of a tensor in the output.
std::uint64_t rank_of(const Conversion& conversion) {
  std::size_t rank = 0;
  for (const OutputFile& file : conversion.files) {
    for (const OutputTensor& tensor : file.tensors) rank = std::max(rank, tensor.shape.rank());
  }
  return rank;
}

// Returns true for keys that describe the source but not the output.
bool is_of_source(std::string_view key) noexcept {
  return is_gguf_file_key(key) || key == "format" || key == types_key ||
         key.starts_with(gguf_shape_prefix);
}

std::uint64_t alignment_of(const Metadata& metadata) {
  const auto found = metadata.find(alignment_key);
  if (found == metadata.end()) return gguf_alignment_usual;
  const auto* const number = std::get_if<std::uint64_t>(&found->second.value);
  if (found->second.type == MetadataType::u32 && number != nullptr && is_gguf_alignment(*number)) {
    return *number;
  }
  throw Error("plan.options", "the alignment is invalid",
              {.tensor = alignment_key,
               .field = "metadata",
               .found = type_name(found->second),
               .expected = "u32, a power of two"});
}

// ---- Types that were lost in text

// Returns the type of a key; nullopt if the format does not fix the type, or if the values are
// arrays.
std::optional<MetadataType> fixed_type(std::string_view key) {
  const GgufKey* const row = find_gguf_key(key);
  if (row == nullptr || !row->is_fixed() || row->type == MetadataType::array) return std::nullopt;
  return row->type;
}

std::map<std::string_view, MetadataType> types_of(std::string_view entries) {
  std::map<std::string_view, MetadataType> types;
  for_each_word(entries, [&](std::string_view entry) {
    const std::size_t equals = entry.rfind('=');
    if (equals == std::string_view::npos) return;
    const auto type = from_name<MetadataType>(entry.substr(equals + 1));
    if (type) types.emplace(entry.substr(0, equals), *type);
  });
  return types;
}

template <typename Number>
bool parse(std::string_view digits, MetadataValue& item) {
  Number number = 0;
  const char* const end = digits.data() + digits.size();
  const auto [stop, problem] = std::from_chars(digits.data(), end, number);
  item.value = number;
  return problem == std::errc() && stop == end;
}

// Parses text that text_of() wrote; nullopt if it is not a value of the type.
std::optional<MetadataValue> parsed(MetadataType type, std::string_view digits) {
  MetadataValue item = {.value = digits == "true", .type = type};
  const std::string_view kind = name(type);  // "u8", "i64"
  const bool is_value = type == MetadataType::boolean ? digits == "true" || digits == "false"
                        : type == MetadataType::f32   ? parse<float>(digits, item)
                        : type == MetadataType::f64   ? parse<double>(digits, item)
                        : kind.starts_with('u')
                            ? parse<std::uint64_t>(digits, item)
                            : kind.starts_with('i') && parse<std::int64_t>(digits, item);
  std::string bytes;
  if (!is_value || !append_number(item, bytes)) return std::nullopt;
  return number_value(type, reinterpret_cast<const std::byte*>(bytes.data()));
}

// Converts strings from a safetensors file back to their types, which `types_key` or GGUF
// specifies. Values that do not fit their type stay strings. Returns the keys of these values.
std::vector<std::string> restore_types(std::string_view types, Metadata& metadata) {
  const auto kept = types_of(types);
  std::vector<std::string> failed;
  for (auto& [key, item] : metadata) {
    const auto* const digits = std::get_if<std::string>(&item.value);
    const auto found = kept.find(key);
    const auto type = found != kept.end() ? std::optional(found->second) : fixed_type(key);
    if (digits == nullptr || !type || *type == MetadataType::string) continue;
    if (auto value = parsed(*type, *digits)) {
      item = *std::move(value);
    } else {
      failed.push_back(key);
    }
  }
  return failed;
}

// Throws Error "plan.options" if the caller gave an entry with the wrong type for its key: ggml
// would reject the file, or treat the key as missing.
void check_key_types(const Metadata& given) {
  for (const auto& [key, item] : given) {
    const GgufKey* const row = find_gguf_key(key);
    if (row == nullptr || !row->is_fixed() || row->fits(item)) continue;
    throw Error("plan.options", "the key has a different type in GGUF",
                {.tensor = key,
                 .field = "metadata",
                 .found = type_name(item),
                 .expected = row->type_text()});
  }
}

class GgufContainer final : public Container {
 public:
  [[nodiscard]] FileFormat format() const noexcept override { return FileFormat::gguf; }
  [[nodiscard]] std::string_view suffix() const noexcept override { return ".gguf"; }
  [[nodiscard]] bool holds_blocks() const noexcept override { return true; }

  [[nodiscard]] Metadata metadata(const Catalog& catalog, const ConvertOptions& options,
                                  std::vector<Finding>& findings) const override {
    const Metadata& given = options.metadata;
    const auto of_file =
        std::ranges::find_if(given, is_gguf_file_key, &Metadata::value_type::first);
    if (of_file != given.end()) {
      throw Error("plan.options", "loadstone sets this key itself; remove it from the metadata",
                  {.tensor = of_file->first, .field = "metadata"});
    }
    check_key_types(given);
    Metadata metadata;
    std::vector<std::string> left_out;
    for (const auto& [key, item] : catalog.metadata()) {
      if (is_of_source(key) || given.contains(key)) continue;
      if (!is_metadata_key(key) || key.size() > gguf_key_bytes_max) {
        left_out.push_back(key);
        continue;
      }
      metadata.emplace(key, item);
    }
    report_left_out(left_out, "GGUF does not allow such keys", findings);
    add_types(catalog, metadata, findings);
    metadata.insert(given.begin(), given.end());
    if (names_are_given(options) || is_gguf(catalog) ||
        check_names(catalog, metadata, options.folder.config, findings)) {
      settle_architecture(catalog, metadata, findings);
    }
    static_cast<void>(alignment_of(metadata));
    return metadata;
  }

  [[nodiscard]] std::optional<Finding> check_metadata(const Conversion& conversion) const override {
    // A GGUF source without these keys was made so by its own converter.
    if (is_gguf(*conversion.plan.catalog) || image_model(conversion.metadata) != nullptr) return {};
    const bool has_tokens = std::ranges::any_of(conversion.plan.targets, [](const auto& target) {
      return is_token_embedding(target.name);
    });
    const std::vector<std::string> missing = missing_tokenizer_keys(conversion.metadata);
    if (!has_tokens || missing.empty()) return std::nullopt;
    return Finding{
        .severity = Severity::warning,
        .code = "convert.metadata",
        .sources = missing,
        .message = fmt::format("llama.cpp cannot load the output, which lacks the tokenizer: {}",
                               fmt::join(missing, ", ")),
        .suggestion = fmt::format("{}; or add these keys with --metadata FILE (metadata= in "
                                  "Python)",
                                  own_converter)};
  }

  [[nodiscard]] std::optional<Finding> refuse(const OutputTensor& tensor,
                                              const ConvertOptions& options) const override {
    if (auto finding = refuse_name(tensor, options.beyond_ggml)) return finding;
    if (!gguf_type_id(tensor.encoding)) {
      return Finding{
          .severity = Severity::error,
          .code = "plan.dtype",
          .target = tensor.name,
          .message = fmt::format("'{}' is {}, which GGUF does not support", printable(tensor.name),
                                 tensor.encoding.name()),
          .suggestion =
              options.dequantize
                  ? "drop it with a rule"
                  : "if it is quantized, decode it (--dequantize); if not, drop it with a rule",
          .found = std::string(tensor.encoding.name())};
    }
    const std::size_t rank_max = options.beyond_ggml ? defaults::gguf_rank_most : ggml_rank_max;
    if (tensor.shape.rank() <= rank_max) return std::nullopt;
    return Finding{
        .severity = Severity::error,
        .code = "convert.dims",
        .target = tensor.name,
        .message =
            fmt::format("'{}' has {} dimensions, but {} supports {}", printable(tensor.name),
                        tensor.shape.rank(), options.beyond_ggml ? "loadstone" : "ggml", rank_max),
        .suggestion = options.beyond_ggml
                          ? "reshape it with a rule"
                          : "for programs that support more, such as ComfyUI and diffusers, pass "
                            "--beyond-ggml "
                            "(beyond_ggml=True in Python); for others, reshape it with a rule",
        .found = tensor.shape.text(),
        .expected = fmt::format("at most {} dimensions", rank_max)};
  }

  [[nodiscard]] bool is_format(std::string_view name) const override {
    return find_mix(name) != nullptr;
  }
  [[nodiscard]] Choices choose(const ConvertOptions& options, const Catalog& catalog,
                               Metadata& metadata, Recipes& recipes,
                               std::vector<Finding>& findings) const override {
    return choose_blocks(options, catalog, metadata, recipes, findings);
  }
  [[nodiscard]] QuantizeStyle style(const ConvertOptions&) const noexcept override {
    return QuantizeStyle::gguf;
  }

  // Places tensors in the conversion's order, each aligned.
  void place(const Conversion& conversion, OutputFile& file) const override {
    const std::uint64_t alignment = alignment_of(conversion.metadata);
    std::uint64_t at = 0;
    for (OutputTensor& tensor : file.tensors) {
      const std::uint64_t bytes = tensor.byte_count();
      tensor.begin = at;
      tensor.end = at + bytes;
      at = round_up(tensor.end, alignment);
    }
    file.data_bytes = at;
  }

  // Splits like llama.cpp: the first file has all metadata, and each file has its own index.
  [[nodiscard]] std::string header(const Conversion& conversion, std::size_t file) const override {
    const std::size_t count = conversion.files.size();
    std::vector<GgufTensor> tensors;
    for (const OutputTensor& tensor : conversion.files[file].tensors) {
      if (!gguf_type_id(tensor.encoding)) continue;  // an error is already reported
      tensors.push_back({tensor.name, tensor.encoding, &tensor.shape, tensor.begin});
    }
    const std::uint64_t alignment = alignment_of(conversion.metadata);
    Metadata metadata;
    // Each part has the same limit, because each part is opened before the parts are joined.
    if (const std::uint64_t rank = rank_of(conversion); rank > ggml_rank_max) {
      metadata.emplace(gguf_rank_key, MetadataValue{.value = rank, .type = MetadataType::u32});
    }
    if (count == 1) {
      metadata.insert(conversion.metadata.begin(), conversion.metadata.end());
      return gguf_header(metadata, tensors, alignment);
    }
    if (file == 0) {
      metadata.insert(conversion.metadata.begin(), conversion.metadata.end());
    } else if (const auto own = conversion.metadata.find(alignment_key);
               own != conversion.metadata.end()) {
      metadata.insert(*own);
    }
    std::size_t all = 0;
    for (const OutputFile& each : conversion.files) all += each.tensors.size();
    const auto add = [&](const char* key, auto number, MetadataType type) {
      metadata.insert_or_assign(key, MetadataValue{.value = number, .type = type});
    };
    add("split.no", std::uint64_t{file}, MetadataType::u16);
    add("split.count", std::uint64_t{count}, MetadataType::u16);
    add("split.tensors.count", static_cast<std::int64_t>(all), MetadataType::i32);
    return gguf_header(metadata, tensors, alignment);
  }

 private:
  // Adds types to text metadata. Metadata of GGUF sources already has types.
  static void add_types(const Catalog& catalog, Metadata& metadata,
                        std::vector<Finding>& findings) {
    if (is_gguf(catalog)) return;
    const std::string* const text = find_text(catalog.metadata(), types_key);
    const auto failed = restore_types(text == nullptr ? std::string_view() : *text, metadata);
    for (const std::string& key : failed) metadata.erase(key);
    report_left_out(failed, "the values do not fit in their GGUF types", findings);
  }

  // Sets the architecture of image and video models by their tensors, if the metadata does not
  // contain it.
  static void settle_architecture(const Catalog& catalog, Metadata& metadata,
                                  std::vector<Finding>& findings) {
    const auto found = metadata.find(gguf_architecture_key);
    const ImageModel* const image = recognised_image_model(catalog);
    Finding finding = {.code = "convert.architecture"};
    if (const std::string* const given = find_text(metadata, gguf_architecture_key)) {
      if (image == nullptr || image->architecture == *given) return;
      finding.severity = Severity::warning;
      finding.message = fmt::format(
          "general.architecture is '{}', but the names of the tensors are those of '{}', for which "
          "ComfyUI needs this architecture",
          printable(*given), image->architecture);
      finding.found = printable(*given);
      finding.expected = std::string(image->architecture);
    } else if (image != nullptr && found == metadata.end()) {
      const std::string name(image->architecture);
      metadata.emplace(gguf_architecture_key,
                       MetadataValue{.value = name, .type = MetadataType::string});
      finding.severity = Severity::info;
      finding.message = fmt::format(
          "loadstone sets general.architecture to '{}', because of the names of the tensors", name);
    } else {
      finding.severity = Severity::error;
      finding.message = "a GGUF file needs general.architecture, which the source does not specify";
      finding.suggestion = fmt::format(
          "{}; for other programs, set it (--arch NAME; metadata= in Python)", own_converter);
    }
    findings.push_back(std::move(finding));
  }

  // Checks that readers of GGUF files know the tensors' names, if no rule changes them. Returns
  // false if the file cannot be written.
  static bool check_names(const Catalog& catalog, const Metadata& metadata, std::string_view config,
                          std::vector<Finding>& findings) {
    if (recognised_image_model(catalog) != nullptr) return true;
    if (has_unfused_names(catalog)) {
      findings.push_back(
          {.severity = Severity::error,
           .code = "convert.architecture",
           .message =
               "the tensors have diffusers' names, which ComfyUI does not support in GGUF files",
           .suggestion = "convert the model's original checkpoint, or rename the tensors with "
                         "rules (--rules; rules= in Python)"});
      return false;
    }
    if (!string_member(config, "_class_name").empty()) {
      findings.push_back(
          {.severity = Severity::warning,
           .code = "convert.architecture",
           .message =
               "the output keeps diffusers' names, which ComfyUI does not read for this model",
           .suggestion =
               "for ComfyUI, convert the model's original checkpoint; to open this output, "
               "call loadstone.diffusers.from_single_file()"});
      return true;
    }
    // If the metadata lacks the architecture, settle_architecture() has reported an error.
    const bool is_named = metadata.contains(gguf_architecture_key);
    if (!is_named || image_model(metadata) != nullptr || has_llama_cpp_names(catalog)) return true;
    findings.push_back(
        {.severity = Severity::warning,
         .code = "convert.architecture",
         .message =
             "the output keeps the source's names and layouts, which llama.cpp does not read",
         .suggestion = own_converter});
    return true;
  }

  [[nodiscard]] static std::optional<Finding> refuse_name(const OutputTensor& tensor,
                                                          bool beyond_ggml) {
    const std::string& name = tensor.name;
    Finding finding = {.severity = Severity::error, .code = "convert.name", .target = name};
    if (name.empty() || !is_utf8(name) || name.find('\0') != std::string::npos) {
      finding.message = fmt::format("a GGUF file cannot have a tensor named '{}'", printable(name));
      finding.suggestion = "rename it with a rule";
      return finding;
    }
    if (name.size() <= ggml_name_bytes_max || beyond_ggml) return std::nullopt;
    finding.message = fmt::format("the name '{}' is longer than ggml allows", printable(name));
    finding.suggestion =
        "rename it with a rule, or pass --beyond-ggml for programs that allow longer names";
    finding.found = counted(name.size(), "byte");
    finding.expected = fmt::format("at most {}", ggml_name_bytes_max);
    return finding;
  }
};

constexpr GgufContainer the_gguf_container;

}  // namespace

const Container& gguf_container = the_gguf_container;

std::string types_text(const Metadata& source, const Metadata& texts) {
  std::string types;
  for (const auto& [key, item] : source) {
    const bool is_text = item.type == MetadataType::string || item.type == MetadataType::array;
    if (is_text || !is_metadata_key(key) || fixed_type(key) == item.type || !texts.contains(key)) {
      continue;
    }
    types += fmt::format("{}{}={}", types.empty() ? "" : " ", key, name(item.type));
  }
  return types;
}

}  // namespace loadstone

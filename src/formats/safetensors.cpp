#include "formats/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <set>
#include <span>
#include <tuple>

#include "base/checked.h"
#include "base/digest.h"
#include "base/text.h"
#include "formats/sniff.h"
#include "formats/strict_json.h"

namespace loadstone {

namespace {

constexpr std::string_view metadata_name = "__metadata__";
constexpr std::size_t name_bytes_max = 1024;  // longer names get a warning
constexpr std::size_t rank_warned_max = 64;   // higher ranks get a warning
constexpr std::uint64_t length_bytes = 8;

// Fields of an entry that the reader has found. Views point into the parsed header.
struct HeaderEntry {
  std::string_view name;
  std::optional<std::string_view> dtype;
  std::optional<Shape> shape;
  std::optional<std::array<std::uint64_t, 2>> offsets;
  std::set<std::string_view> others;
  std::uint64_t position = 0;  // byte offset in the header
};

// Not thread-safe.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(ByteSource& source) : source_(source), warnings_(source.path()) {}

  FileHeader read() {
    header_.shard.path = source_.path();
    header_.shard.format = FileFormat::safetensors;
    header_.shard.identity = source_.identity();
    file_bytes_ = header_.shard.identity.bytes;
    const std::uint64_t header_bytes = read_length();
    header_.shard.data_begin = length_bytes + header_bytes;
    PaddedText text(header_bytes);
    source_.read(length_bytes, std::as_writable_bytes(std::span(text.data(), header_bytes)));
    digest_.update(std::as_bytes(std::span(text.view())));
    header_.shard.header_digest = digest_.hex();
    check_text(text.view());
    parse(text);
    require_unique_names();
    check_layout();
    header_.findings = warnings_.take();
    return std::move(header_);
  }

 private:
  [[noreturn]] void refuse(HeaderProblem problem, std::string_view culprit = {}) const {
    loadstone::refuse(source_.path(), std::move(problem), culprit);
  }

  // ---- the bytes around the header

  std::uint64_t read_length() {
    if (file_bytes_ < length_bytes) {
      refuse({"st.file_too_small", "the file is too small to contain the length of a header",
              "header_len", "a file of " + bytes_text(file_bytes_), "at least 8 bytes", 0});
    }
    const FileKind kind = sniff(source_);
    if (kind != FileKind::safetensors && kind != FileKind::unknown) {
      refuse({"st.not_safetensors", "the file is not in the safetensors format", "file",
              std::string(describe(kind)), "a safetensors file", 0});
    }
    std::array<std::byte, length_bytes> raw;
    source_.read(0, raw);
    digest_.update(raw);
    std::uint64_t length = 0;
    std::memcpy(&length, raw.data(), sizeof length);
    const auto require = [&](bool fits, const char* code, const char* message,
                             std::string expected) {
      if (fits) return;
      refuse({code, message, "header_len", bytes_text(length), std::move(expected), 0});
    };
    require(length <= safetensors_header_bytes_max, "st.header_too_large",
            "the header is larger than the format allows",
            fmt::format("at most {} bytes", safetensors_header_bytes_max));
    const std::uint64_t rest = file_bytes_ - length_bytes;
    require(length <= rest, "st.header_len", "the header is longer than the file",
            fmt::format("at most {}, the rest of the file", bytes_text(rest)));
    require(length > 0, "st.header_json", "the header is empty", "a JSON object");
    return length;
  }

  void check_text(std::string_view text) const {
    if (!simdjson::validate_utf8(text.data(), text.size())) {
      refuse({"st.header_utf8", "the header is not UTF-8", "header", "invalid UTF-8", "UTF-8",
              length_bytes});
    }
    // Any other JSON value is reported as invalid JSON, and other bytes as a wrong start.
    const bool other_json =
        std::string_view("[\"-0123456789tfn").find(text.front()) != std::string_view::npos;
    if (text.front() != '{' && !other_json) {
      refuse({"st.header_start", "the header does not begin with '{'", "header",
              fmt::format("byte 0x{:02x}", static_cast<unsigned char>(text.front())),
              "'{' as its first byte", length_bytes});
    }
    // Only spaces may pad the header, but a JSON parser would also accept other white space.
    const std::size_t end = text.find_last_not_of(' ');
    if (text[end] != '}') {
      refuse({"st.header_json", "the header is not a JSON object followed by spaces", "header",
              fmt::format("byte 0x{:02x} at its end", static_cast<unsigned char>(text[end])), "'}'",
              length_bytes + end});
    }
  }

  // ---- the JSON

  void parse(const PaddedText& text) {
    HeaderEntry entry;  // declared here, so that the catch block can name the entry
    std::string_view field;
    std::optional<StrictJson> json;
    try {
      json.emplace(text);
      json->visit_root([&](std::string_view name, StrictJson::Value& value) {
        entry = HeaderEntry{};
        entry.name = name;
        field = {};
        if (name == metadata_name) {
          field = metadata_name;
          if (has_metadata_) refuse_twice(name, metadata_name, json->position());
          has_metadata_ = true;
          read_metadata(*json, value);
        } else {
          read_entry(*json, value, entry, field);
          finish_entry(entry);
        }
      });
    } catch (const JsonProblem& problem) {
      refuse({"st.header_json", "the header is not valid JSON: " + problem.message,
              field.empty() ? "header" : field, "", "", length_bytes + problem.offset},
             entry.name);
    }
  }

  void read_metadata(StrictJson& json, StrictJson::Value& value) {
    const auto bad = [&](std::string_view key, std::string found) {
      refuse({"st.metadata",
              key.empty() ? "the value is not an object of strings"
                          : fmt::format("the value of '{}' is not a string", key),
              metadata_name, std::move(found), key.empty() ? "an object" : "a string",
              length_bytes + json.position()},
             metadata_name);
    };
    if (json.kind(value) == JsonKind::null) {
      warnings_.add("st.metadata", metadata_name, metadata_name, "the value is not an object",
                    json.check(value), "an object");
      return;
    }
    if (json.kind(value) != JsonKind::object) bad({}, json.check(value));
    json.visit_members(value, [&](std::string_view key, StrictJson::Value& item) {
      if (json.kind(item) != JsonKind::string) bad(key, json.check(item));
      const MetadataValue text{.value = std::string(json.text(item))};
      if (header_.metadata.emplace(key, text).second) return;
      refuse({"st.duplicate", fmt::format("the key '{}' occurs twice", printable(key)),
              metadata_name, "a second value", "one value", length_bytes + json.position()},
             metadata_name);
    });
  }

  void read_entry(StrictJson& json, StrictJson::Value& value, HeaderEntry& entry,
                  std::string_view& field) {
    if (json.kind(value) != JsonKind::object) {
      std::string found = json.check(value);
      refuse({"st.entry", "the tensor's entry in the header is not an object", "header",
              std::move(found), "an object with dtype, shape and data_offsets",
              length_bytes + json.position()},
             entry.name);
    }
    entry.position = json.position();
    json.visit_members(value, [&](std::string_view key, StrictJson::Value& item) {
      field = key;
      const bool twice = (key == "dtype" && entry.dtype) || (key == "shape" && entry.shape) ||
                         (key == "data_offsets" && entry.offsets) || entry.others.contains(key);
      if (twice) {
        refuse({"st.duplicate", "the field occurs twice in the tensor's entry", key,
                "a second value", "one value", length_bytes + json.position()},
               entry.name);
      }
      if (key == "dtype") {
        entry.dtype = read_dtype(json, item, entry.name);
      } else if (key == "shape") {
        entry.shape = read_shape(json, item, entry.name);
      } else if (key == "data_offsets") {
        entry.offsets = read_offsets(json, item, entry.name);
      } else {
        entry.others.insert(key);
        std::string found = json.check(item);
        warnings_.add(
            "st.extra_field", entry.name, "header",
            fmt::format("the tensor's entry has a field '{}' that the format does not define",
                        printable(key)),
            std::move(found));
      }
    });
    field = {};
  }

  std::string_view read_dtype(StrictJson& json, StrictJson::Value& value, std::string_view name) {
    if (json.kind(value) == JsonKind::string) return json.text(value);
    std::string found = json.check(value);
    refuse({"st.dtype", "the value is not a string", "dtype", std::move(found),
            "the name of a dtype", length_bytes + json.position()},
           name);
  }

  // Reads an array of 64-bit integers. Parses their text, because simdjson would report 2^64 as a
  // parse error.
  void read_numbers(StrictJson& json, StrictJson::Value& value, std::string_view name,
                    std::string_view field, const char* code, std::vector<std::uint64_t>& numbers) {
    const auto bad = [&](std::string found) {
      refuse({code, "the value is not an array of integers from 0 to 2^64 - 1", field,
              std::move(found), "unsigned integers", length_bytes + json.position()},
             name);
    };
    if (json.kind(value) != JsonKind::array) bad(json.check(value));
    json.visit_items(value, [&](StrictJson::Value& item) {
      if (json.kind(item) != JsonKind::number) bad(json.check(item));
      const std::string_view token = json.token(item);
      const auto number = parse_u64(token);
      if (!number) bad(std::string(token));
      numbers.push_back(*number);
    });
  }

  Shape read_shape(StrictJson& json, StrictJson::Value& value, std::string_view name) {
    std::vector<std::uint64_t> extents;
    read_numbers(json, value, name, "shape", "st.shape", extents);
    return Shape(std::move(extents));
  }

  std::array<std::uint64_t, 2> read_offsets(StrictJson& json, StrictJson::Value& value,
                                            std::string_view name) {
    offsets_.clear();
    read_numbers(json, value, name, "data_offsets", "st.offsets", offsets_);
    if (offsets_.size() == 2 && offsets_[0] <= offsets_[1]) return {offsets_[0], offsets_[1]};
    refuse({"st.offsets",
            offsets_.size() == 2 ? "the end is before the beginning"
                                 : "the value is not a pair of integers [begin, end]",
            "data_offsets", Shape(offsets_).text(), "[begin, end] with begin <= end",
            length_bytes + json.position()},
           name);
  }

  [[noreturn]] void refuse_twice(std::string_view name, std::string_view field,
                                 std::uint64_t position) const {
    refuse({"st.duplicate", "the header lists the tensor twice", field, "a second entry",
            "one entry", length_bytes + position},
           name);
  }

  void require_unique_names() const {
    const auto second = second_of_a_name(header_.tensors);
    if (second) refuse_twice(header_.tensors[*second].name, "header", positions_[*second]);
  }

  // ---- one tensor

  void finish_entry(HeaderEntry& entry) {
    const std::uint64_t position = length_bytes + entry.position;
    const std::string_view missing = !entry.dtype     ? "dtype"
                                     : !entry.shape   ? "shape"
                                     : !entry.offsets ? "data_offsets"
                                                      : "";
    if (!missing.empty()) {
      refuse({"st.field_missing", "the tensor's entry in the header lacks this field", missing,
              "nothing", "dtype, shape and data_offsets", position},
             entry.name);
    }
    const auto dtype = parse_dtype_name(*entry.dtype);
    if (!dtype || !is_in_safetensors(*dtype)) {
      refuse({"st.dtype",
              parse_dtype(*entry.dtype) ? "the format spells this dtype differently"
                                        : "the dtype is unknown",
              "dtype", "'" + std::string(*entry.dtype) + "'",
              "a dtype of the format, such as F32 or BF16", position},
             entry.name);
    }
    check_size(entry, *dtype, position);
    warn_about(entry);
    TensorInfo tensor;
    tensor.name = entry.name;
    tensor.encoding = *dtype;
    tensor.shape = *std::move(entry.shape);
    // Offsets are relative to the data until check_layout(), because the sums could overflow.
    tensor.offset_begin = (*entry.offsets)[0];
    tensor.offset_end = (*entry.offsets)[1];
    header_.tensors.push_back(std::move(tensor));
    positions_.push_back(entry.position);
  }

  void check_size(const HeaderEntry& entry, Dtype dtype, std::uint64_t position) const {
    const auto numel = entry.shape->numel();
    const auto bytes = numel ? Encoding(dtype).byte_count(*numel) : std::nullopt;
    const std::uint64_t declared = (*entry.offsets)[1] - (*entry.offsets)[0];
    if (bytes && *bytes == declared) return;
    const auto bad = [&](const char* code, std::string message, std::string expected) {
      refuse(
          {code, std::move(message), "shape",
           fmt::format("{} {}", *entry.dtype, entry.shape->text()), std::move(expected), position},
          entry.name);
    };
    const unsigned together = bits(dtype) == 4 ? 2 : 4;
    if (numel && bits(dtype) < 8 && *numel % together != 0) {
      bad("st.subbyte", "the tensor's elements do not fill whole bytes",
          fmt::format("a multiple of {} elements", together));
    }
    if (!bytes)
      bad("st.overflow", "the tensor's size does not fit in 64 bits", bytes_text(declared));
    bad("st.size_mismatch",
        fmt::format("the shape needs {}, but data_offsets span {}", bytes_text(*bytes),
                    bytes_text(declared)),
        bytes_text(declared));
  }

  void warn_about(const HeaderEntry& entry) {
    const std::string_view name = entry.name;
    const auto is_control = [](unsigned char byte) { return byte < 0x20 || byte == 0x7f; };
    if (name.empty()) warnings_.add("st.name", name, "name", "the name is empty");
    if (std::ranges::any_of(name, is_control)) {
      warnings_.add("st.name", name, "name", "the name contains control characters");
    }
    if (name.size() > name_bytes_max) {
      warnings_.add("st.name", name, "name", "the name is very long", bytes_text(name.size()),
                    fmt::format("at most {} bytes", name_bytes_max));
    }
    if (name.starts_with('/') || name.find("../") != std::string_view::npos) {
      warnings_.add("st.name", name, "name",
                    "the name resembles a path that leads out of a folder");
    }
    if (entry.shape->rank() > rank_warned_max) {
      warnings_.add("st.shape", name, "shape", "the tensor has an unusual number of dimensions",
                    std::to_string(entry.shape->rank()),
                    fmt::format("at most {}", rank_warned_max));
    }
  }

  // ---- all tensors together

  // Requires that the tensors cover the data without a gap, so that no bytes are hidden in between.
  void check_layout() {
    auto& tensors = header_.tensors;
    const auto in_file_order = [](const TensorInfo& a, const TensorInfo& b) {
      return std::tie(a.offset_begin, a.offset_end) < std::tie(b.offset_begin, b.offset_end);
    };
    // The headers of most writers are in file order already, and a sort would move every tensor.
    if (!std::ranges::is_sorted(tensors, in_file_order)) {
      std::ranges::stable_sort(tensors, in_file_order);
    }
    const std::uint64_t data_begin = header_.shard.data_begin;
    const std::uint64_t data_bytes = file_bytes_ - data_begin;
    std::uint64_t expected = 0;
    const TensorInfo* before = nullptr;
    for (TensorInfo& tensor : tensors) {
      if (tensor.offset_end > data_bytes) refuse_truncated(tensor, data_bytes);
      if (tensor.offset_begin != expected) refuse_gap(tensor, before, expected);
      expected = tensor.offset_end;
      tensor.offset_begin += data_begin;
      tensor.offset_end += data_begin;
      before = &tensor;
    }
    if (expected == data_bytes) return;
    refuse({"st.trailing",
            fmt::format("{} follow the last tensor", bytes_text(data_bytes - expected)), "file",
            "a file of " + bytes_text(file_bytes_), bytes_text(data_begin + expected),
            data_begin + expected});
  }

  [[noreturn]] void refuse_truncated(const TensorInfo& tensor, std::uint64_t data_bytes) const {
    const auto needed = checked_add(header_.shard.data_begin, tensor.offset_end);
    refuse({"st.truncated",
            fmt::format("the file ends {} before the end of the tensor",
                        bytes_text(tensor.offset_end - data_bytes)),
            "data_offsets", "a file of " + bytes_text(file_bytes_),
            needed ? "at least " + bytes_text(*needed) : "more than 2^64 bytes", file_bytes_},
           tensor.name);
  }

  [[noreturn]] void refuse_gap(const TensorInfo& tensor, const TensorInfo* before,
                               std::uint64_t expected) const {
    const bool hole = tensor.offset_begin > expected;
    const std::string neighbour =
        before == nullptr ? "the start of the data" : "'" + printable(before->name) + "'";
    refuse({hole ? "st.hole" : "st.overlap",
            hole ? fmt::format("{} between {} and this tensor belong to no tensor",
                               bytes_text(tensor.offset_begin - expected), neighbour)
                 : fmt::format("the tensor shares bytes with {}", neighbour),
            "data_offsets", fmt::format("[{}, {}]", tensor.offset_begin, tensor.offset_end),
            fmt::format("a beginning at {}", expected),
            header_.shard.data_begin + tensor.offset_begin},
           tensor.name);
  }

  ByteSource& source_;
  Warnings warnings_;
  FileHeader header_;
  Digest digest_;
  std::vector<std::uint64_t> positions_;  // positions of the entries, in the header's order
  std::vector<std::uint64_t> offsets_;    // reused for all entries to avoid allocations
  bool has_metadata_ = false;
  std::uint64_t file_bytes_ = 0;
};

}  // namespace

FileHeader read_safetensors(ByteSource& source) { return SafetensorsReader(source).read(); }

}  // namespace loadstone

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
constexpr std::size_t name_bytes_max = 1024;  // longer ones are told about
constexpr std::size_t rank_warned_max = 64;   // the same
constexpr std::uint64_t length_bytes = 8;

// The fields of an entry, as far as they have been met. Views point into the parsed header.
struct HeaderEntry {
  std::string_view name;
  std::optional<std::string_view> dtype;
  std::optional<Shape> shape;
  std::optional<std::array<std::uint64_t, 2>> offsets;
  std::set<std::string_view> others;
  std::uint64_t position = 0;  // in the header
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
  [[noreturn]] void refuse(HeaderProblem problem) const {
    loadstone::refuse(source_.path(), std::move(problem));
  }

  // ---- the bytes around the header

  std::uint64_t read_length() {
    if (file_bytes_ < length_bytes) {
      refuse({.code = "st.file_too_small",
              .message = "the file is too small to hold a header_len",
              .field = "header_len",
              .found = "a file of " + bytes_text(file_bytes_),
              .expected = "at least 8 bytes",
              .byte_offset = 0});
    }
    const FileKind kind = sniff(source_);
    if (kind != FileKind::safetensors && kind != FileKind::unknown) {
      refuse({.code = "st.not_safetensors",
              .message = "this file is not in the safetensors format",
              .field = "file",
              .found = std::string(describe(kind)),
              .expected = "a safetensors file",
              .byte_offset = 0});
    }
    std::array<std::byte, length_bytes> raw;
    source_.read(0, raw);
    digest_.update(raw);
    std::uint64_t length = 0;
    std::memcpy(&length, raw.data(), sizeof length);
    HeaderProblem problem{.field = "header_len", .found = bytes_text(length), .byte_offset = 0};
    if (length > safetensors_header_bytes_max) {
      problem.code = "st.header_too_large";
      problem.message = "the header is larger than the format allows";
      problem.expected = fmt::format("at most {} bytes", safetensors_header_bytes_max);
      refuse(std::move(problem));
    }
    if (length > file_bytes_ - length_bytes) {
      problem.code = "st.header_len";
      problem.message = "the header is longer than the file";
      problem.expected = fmt::format("at most {}, all that follows in the file",
                                     bytes_text(file_bytes_ - length_bytes));
      refuse(std::move(problem));
    }
    if (length == 0) {
      problem.code = "st.header_json";
      problem.message = "the header is empty";
      problem.expected = "a JSON object";
      refuse(std::move(problem));
    }
    return length;
  }

  void check_text(std::string_view text) const {
    if (!simdjson::validate_utf8(text.data(), text.size())) {
      refuse({.code = "st.header_utf8",
              .message = "the header is not UTF-8",
              .field = "header",
              .found = "bytes that are no UTF-8",
              .expected = "UTF-8",
              .byte_offset = length_bytes});
    }
    // An array or a number is told as wrong JSON; what stands before a '{' as a wrong start.
    const bool other_json =
        std::string_view("[\"-0123456789tfn").find(text.front()) != std::string_view::npos;
    if (text.front() != '{' && !other_json) {
      refuse({.code = "st.header_start",
              .message = "the header does not begin with '{'",
              .field = "header",
              .found = fmt::format("byte 0x{:02x}", static_cast<unsigned char>(text.front())),
              .expected = "'{' as its first byte",
              .byte_offset = length_bytes});
    }
    // Only spaces may pad the header; JSON's other white space would be taken by a JSON reader.
    const std::size_t end = text.find_last_not_of(' ');
    if (text[end] != '}') {
      refuse(
          {.code = "st.header_json",
           .message = "the header is not a JSON object followed by spaces",
           .field = "header",
           .found = fmt::format("byte 0x{:02x} at its end", static_cast<unsigned char>(text[end])),
           .expected = "'}'",
           .byte_offset = length_bytes + end});
    }
  }

  // ---- the JSON

  void parse(const PaddedText& text) {
    HeaderEntry entry;  // outside, so that an error in the JSON names its place
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
      refuse({.code = "st.header_json",
              .message = "the header is not valid JSON: " + problem.message,
              .culprit = entry.name,
              .field = field.empty() ? "header" : field,
              .found = {},
              .expected = {},
              .byte_offset = length_bytes + problem.offset});
    }
  }

  void read_metadata(StrictJson& json, StrictJson::Value& value) {
    const auto bad = [&](std::string_view key, std::string found) {
      refuse({.code = "st.metadata",
              .message = key.empty() ? "not an object of strings"
                                     : fmt::format("the value of '{}' is not a string", key),
              .culprit = metadata_name,
              .field = metadata_name,
              .found = std::move(found),
              .expected = key.empty() ? "an object" : "a string",
              .byte_offset = length_bytes + json.position()});
    };
    if (json.kind(value) == JsonKind::null) {
      warnings_.add("st.metadata", metadata_name, metadata_name, "not an object", json.check(value),
                    "an object");
      return;
    }
    if (json.kind(value) != JsonKind::object) bad({}, json.check(value));
    json.visit_members(value, [&](std::string_view key, StrictJson::Value& item) {
      if (json.kind(item) != JsonKind::string) bad(key, json.check(item));
      const MetadataValue text{.value = std::string(json.text(item))};
      if (header_.metadata.emplace(key, text).second) return;
      refuse({.code = "st.duplicate",
              .message = fmt::format("the key '{}' is given twice", printable(key)),
              .culprit = metadata_name,
              .field = metadata_name,
              .found = "a second value",
              .expected = "one value",
              .byte_offset = length_bytes + json.position()});
    });
  }

  void read_entry(StrictJson& json, StrictJson::Value& value, HeaderEntry& entry,
                  std::string_view& field) {
    if (json.kind(value) != JsonKind::object) {
      std::string found = json.check(value);
      refuse({.code = "st.entry",
              .message = "the header's entry is not an object",
              .culprit = entry.name,
              .field = "header",
              .found = std::move(found),
              .expected = "an object with dtype, shape and data_offsets",
              .byte_offset = length_bytes + json.position()});
    }
    entry.position = json.position();
    json.visit_members(value, [&](std::string_view key, StrictJson::Value& item) {
      field = key;
      const bool twice = (key == "dtype" && entry.dtype) || (key == "shape" && entry.shape) ||
                         (key == "data_offsets" && entry.offsets) || entry.others.contains(key);
      if (twice) {
        refuse({.code = "st.duplicate",
                .message = "the header gives this field twice",
                .culprit = entry.name,
                .field = key,
                .found = "a second value",
                .expected = "one value",
                .byte_offset = length_bytes + json.position()});
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
            fmt::format("the entry has a field '{}' that the format does not know", printable(key)),
            std::move(found));
      }
    });
    field = {};
  }

  std::string_view read_dtype(StrictJson& json, StrictJson::Value& value, std::string_view name) {
    if (json.kind(value) == JsonKind::string) return json.text(value);
    std::string found = json.check(value);
    refuse({.code = "st.dtype",
            .message = "not a string",
            .culprit = name,
            .field = "dtype",
            .found = std::move(found),
            .expected = "the name of a dtype",
            .byte_offset = length_bytes + json.position()});
  }

  // An array of integers that fit 64 bits. simdjson's own numbers would make 2^64 a parse error.
  void read_numbers(StrictJson& json, StrictJson::Value& value, std::string_view name,
                    std::string_view field, const char* code, std::vector<std::uint64_t>& numbers) {
    const auto bad = [&](std::string found) {
      refuse({.code = code,
              .message = "not an array of integers from 0 to 2^64 - 1",
              .culprit = name,
              .field = field,
              .found = std::move(found),
              .expected = "integers without sign",
              .byte_offset = length_bytes + json.position()});
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
    refuse({.code = "st.offsets",
            .message = offsets_.size() == 2 ? "the end lies before the begin"
                                            : "not a pair of begin and end",
            .culprit = name,
            .field = "data_offsets",
            .found = Shape(offsets_).text(),
            .expected = "[begin, end] with begin <= end",
            .byte_offset = length_bytes + json.position()});
  }

  [[noreturn]] void refuse_twice(std::string_view name, std::string_view field,
                                 std::uint64_t position) const {
    refuse({.code = "st.duplicate",
            .message = "the header names it twice",
            .culprit = name,
            .field = field,
            .found = "a second entry",
            .expected = "one entry",
            .byte_offset = length_bytes + position});
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
      refuse({.code = "st.field_missing",
              .message = "the header's entry lacks this field",
              .culprit = entry.name,
              .field = missing,
              .found = "nothing",
              .expected = "dtype, shape and data_offsets",
              .byte_offset = position});
    }
    const auto dtype = dtype_from_name(*entry.dtype);
    if (!dtype || !is_in_safetensors(*dtype)) {
      refuse({.code = "st.dtype",
              .message = dtype_from_user(*entry.dtype) ? "the format spells dtypes otherwise"
                                                       : "unknown dtype",
              .culprit = entry.name,
              .field = "dtype",
              .found = "'" + std::string(*entry.dtype) + "'",
              .expected = "a dtype of the format, such as F32 or BF16",
              .byte_offset = position});
    }
    check_size(entry, *dtype, position);
    warn_about(entry);
    TensorInfo tensor;
    tensor.name = entry.name;
    tensor.encoding = *dtype;
    tensor.shape = *std::move(entry.shape);
    // Relative to the data for now: the sum is safe only after check_layout().
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
    HeaderProblem problem{.culprit = entry.name,
                          .field = "shape",
                          .found = fmt::format("{} {}", *entry.dtype, entry.shape->text()),
                          .expected = bytes_text(declared),
                          .byte_offset = position};
    if (numel && bits(dtype) < 8 && *numel % (bits(dtype) == 4 ? 2 : 4) != 0) {
      problem.code = "st.subbyte";
      problem.message = "the elements do not fill whole bytes";
      problem.expected = fmt::format("a multiple of {} elements", bits(dtype) == 4 ? 2 : 4);
    } else if (!bytes) {
      problem.code = "st.overflow";
      problem.message = "the tensor's size does not fit 64 bits";
    } else {
      problem.code = "st.size_mismatch";
      problem.message = fmt::format("the shape takes {} but data_offsets hold {}",
                                    bytes_text(*bytes), bytes_text(declared));
    }
    refuse(std::move(problem));
  }

  void warn_about(const HeaderEntry& entry) {
    const std::string_view name = entry.name;
    const auto is_control = [](unsigned char byte) { return byte < 0x20 || byte == 0x7f; };
    if (name.empty()) warnings_.add("st.name", name, "name", "the name is empty");
    if (std::ranges::any_of(name, is_control)) {
      warnings_.add("st.name", name, "name", "the name holds control characters");
    }
    if (name.size() > name_bytes_max) {
      warnings_.add("st.name", name, "name", "the name is very long", bytes_text(name.size()),
                    fmt::format("at most {} bytes", name_bytes_max));
    }
    if (name.starts_with('/') || name.find("../") != std::string_view::npos) {
      warnings_.add("st.name", name, "name", "the name looks like a path out of a folder");
    }
    if (entry.shape->rank() > rank_warned_max) {
      warnings_.add("st.shape", name, "shape", "the rank is unusual",
                    std::to_string(entry.shape->rank()),
                    fmt::format("at most {}", rank_warned_max));
    }
  }

  // ---- all tensors together

  // Without a gap from the first data byte to the last of the file: nothing hides between tensors.
  void check_layout() {
    auto& tensors = header_.tensors;
    const auto in_file_order = [](const TensorInfo& a, const TensorInfo& b) {
      return std::tie(a.offset_begin, a.offset_end) < std::tie(b.offset_begin, b.offset_end);
    };
    // Most writers keep the header in order, and a sort moves every tensor.
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
    refuse({.code = "st.trailing",
            .message = fmt::format("{} follow the last tensor", bytes_text(data_bytes - expected)),
            .field = "file",
            .found = "a file of " + bytes_text(file_bytes_),
            .expected = bytes_text(data_begin + expected),
            .byte_offset = data_begin + expected});
  }

  [[noreturn]] void refuse_truncated(const TensorInfo& tensor, std::uint64_t data_bytes) const {
    const auto needed = checked_add(header_.shard.data_begin, tensor.offset_end);
    refuse({.code = "st.truncated",
            .message = fmt::format("the file ends {} before the tensor does",
                                   bytes_text(tensor.offset_end - data_bytes)),
            .culprit = tensor.name,
            .field = "data_offsets",
            .found = "a file of " + bytes_text(file_bytes_),
            .expected = needed ? "at least " + bytes_text(*needed) : "more than 2^64 bytes",
            .byte_offset = file_bytes_});
  }

  [[noreturn]] void refuse_gap(const TensorInfo& tensor, const TensorInfo* before,
                               std::uint64_t expected) const {
    const bool hole = tensor.offset_begin > expected;
    const std::string neighbour =
        before == nullptr ? "the begin of the data" : "'" + printable(before->name) + "'";
    refuse({.code = hole ? "st.hole" : "st.overlap",
            .message = hole ? fmt::format("{} between {} and this tensor belong to none",
                                          bytes_text(tensor.offset_begin - expected), neighbour)
                            : fmt::format("it shares bytes with {}", neighbour),
            .culprit = tensor.name,
            .field = "data_offsets",
            .found = fmt::format("[{}, {}]", tensor.offset_begin, tensor.offset_end),
            .expected = fmt::format("a begin of {}", expected),
            .byte_offset = header_.shard.data_begin + tensor.offset_begin});
  }

  ByteSource& source_;
  Warnings warnings_;
  FileHeader header_;
  Digest digest_;
  std::vector<std::uint64_t> positions_;  // of the tensors' entries, until they are sorted
  std::vector<std::uint64_t> offsets_;    // kept, so that a tensor needs no memory for them
  bool has_metadata_ = false;
  std::uint64_t file_bytes_ = 0;
};

}  // namespace

FileHeader read_safetensors(ByteSource& source) { return SafetensorsReader(source).read(); }

}  // namespace loadstone

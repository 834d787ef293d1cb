#include "formats/sharded_index.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"
#include "formats/strict_json.h"
#include "loadstone/name_hash.h"

namespace loadstone {

namespace {

constexpr std::uint64_t index_bytes_max = std::uint64_t{256} << 20;
constexpr std::string_view weight_map_name = "weight_map";

// Not thread-safe.
class IndexReader {
 public:
  explicit IndexReader(ByteSource& source) : source_(source) {}

  ShardedIndex read() {
    const std::uint64_t file_bytes = source_.identity().bytes;
    if (file_bytes > index_bytes_max) {
      refuse({"ix.json", "the index is too large", "index", bytes_text(file_bytes),
              fmt::format("at most {} bytes", index_bytes_max)});
    }
    PaddedText text(file_bytes);
    source_.read(0, std::as_writable_bytes(std::span(text.data(), file_bytes)));
    if (!simdjson::validate_utf8(text.view().data(), text.view().size())) {
      refuse({"ix.json", "the index is not UTF-8", "index"});
    }
    parse(text);
    if (!has_weight_map_ || index_.entries.empty()) {
      refuse({"ix.weight_map", has_weight_map_ ? "weight_map is empty" : "weight_map is missing",
              weight_map_name, has_weight_map_ ? "an empty object" : "nothing",
              "an object of tensor names and shard names"});
    }
    return std::move(index_);
  }

 private:
  [[noreturn]] void refuse(HeaderProblem problem, std::string_view culprit = {}) const {
    loadstone::refuse(source_.path(), std::move(problem), culprit);
  }

  void parse(const PaddedText& text) {
    std::optional<StrictJson> json;
    NameSet fields;
    try {
      json.emplace(text);
      json->visit_root([&](std::string_view field, StrictJson::Value& value) {
        require_new(fields, field, {}, *json);
        if (field == weight_map_name) {
          read_weight_map(*json, value);
        } else if (field == "metadata" && json->kind(value) == JsonKind::object) {
          read_metadata(*json, value);
        } else {
          json->check(value);
        }
      });
    } catch (const JsonProblem& problem) {
      refuse({"ix.json", "the index is not valid JSON: " + problem.message, "index", "", "",
              problem.offset});
    }
  }

  void require_new(NameSet& seen, std::string_view name, std::string_view culprit,
                   const StrictJson& json) const {
    if (seen.insert(name).second) return;
    refuse(
        {"ix.duplicate", fmt::format("the index lists '{}' twice", printable(name)),
         culprit.empty() ? name : weight_map_name, "a second value", "one value", json.position()},
        culprit);
  }

  void read_metadata(StrictJson& json, StrictJson::Value& value) {
    json.visit_members(value, [&](std::string_view key, StrictJson::Value& item) {
      if (key != "total_size") {
        json.check(item);
        return;
      }
      if (index_.total_size) {
        refuse({"ix.duplicate", "the index contains 'total_size' twice", "metadata.total_size", "",
                "", json.position()});
      }
      index_.total_size = json.check(item);
    });
  }

  void read_weight_map(StrictJson& json, StrictJson::Value& value) {
    has_weight_map_ = true;
    const auto bad = [&](std::string_view tensor, const char* message, std::string found) {
      refuse({"ix.weight_map", message, weight_map_name, std::move(found),
              tensor.empty() ? "an object" : "the name of a shard", json.position()},
             tensor);
    };
    if (json.kind(value) != JsonKind::object) {
      bad({}, "weight_map is not an object", json.check(value));
    }
    NameSet names;
    std::string_view checked;  // previous entry's shard; consecutive entries often share one
    json.visit_members(value, [&](std::string_view tensor, StrictJson::Value& item) {
      require_new(names, tensor, tensor, json);
      if (json.kind(item) != JsonKind::string) {
        bad(tensor, "the shard's name is not a string", json.check(item));
      }
      const std::string_view shard = json.text(item);
      if (shard != checked) {
        check_shard_name(source_.path(), shard, weight_map_name, tensor, json.position());
      }
      checked = shard;
      index_.entries.push_back({std::string(tensor), std::string(shard)});
    });
  }

  ByteSource& source_;
  ShardedIndex index_;
  bool has_weight_map_ = false;
};

bool climbs(std::string_view path) noexcept {
  while (true) {
    const std::size_t slash = path.find('/');
    if (path.substr(0, slash) == "..") return true;
    if (slash == std::string_view::npos) return false;
    path.remove_prefix(slash + 1);
  }
}

}  // namespace

bool is_index_name(std::string_view file_name) noexcept {
  return file_name.ends_with(".json") &&
         file_name.find(".safetensors.index.") != std::string_view::npos;
}

bool is_torch_index_name(std::string_view file_name) noexcept {
  return file_name.ends_with(".json") && file_name.find(".bin.index.") != std::string_view::npos;
}

void check_shard_name(const std::string& path, std::string_view shard, std::string_view field,
                      std::string_view culprit, std::optional<std::uint64_t> byte_offset) {
  const auto bad = [&](const char* code, const char* message, const char* expected) {
    refuse(path, {code, message, field, "'" + std::string(shard) + "'", expected, byte_offset},
           culprit);
  };
  const auto is_control = [](unsigned char byte) { return byte < 0x20 || byte == 0x7f; };
  if (std::ranges::any_of(shard, is_control) || plain_relative_path(shard).empty()) {
    bad("ix.path", "the shard's name is not a valid file name",
        "a name without control characters");
  }
  const bool drive = shard.size() >= 2 && shard[1] == ':';
  if (shard.starts_with('/') || drive || shard.find('\\') != std::string_view::npos ||
      climbs(shard)) {
    bad("ix.path_escape", "the shard's name leads out of the checkpoint's folder",
        "a relative path without '..'");
  }
}

ShardedIndex read_sharded_index(ByteSource& source) { return IndexReader(source).read(); }

std::string plain_relative_path(std::string_view path) {
  std::string plain;
  while (!path.empty()) {
    const std::size_t slash = std::min(path.find('/'), path.size());
    const std::string_view part = path.substr(0, slash);
    path.remove_prefix(std::min(slash + 1, path.size()));
    if (part.empty() || part == ".") continue;
    if (!plain.empty()) plain += '/';
    plain += part;
  }
  return plain;
}

std::optional<PartName> parse_part_name(std::string_view name) {
  constexpr std::string_view between = "-of-";
  constexpr std::size_t digits_max = 6;
  const auto trailing_digits = [](std::string_view text) {
    const std::size_t last = text.find_last_not_of("0123456789");
    return text.substr(last == std::string_view::npos ? 0 : last + 1);
  };
  const std::string_view count = trailing_digits(name);
  name.remove_suffix(count.size());
  if (!name.ends_with(between)) return std::nullopt;
  name.remove_suffix(between.size());
  const std::string_view number = trailing_digits(name);
  name.remove_suffix(number.size());
  const bool plausible = !count.empty() && !number.empty() && count.size() <= digits_max &&
                         number.size() <= digits_max && name.ends_with('-');
  if (!plausible) return std::nullopt;
  name.remove_suffix(1);
  PartName part{.stem = std::string(name), .digits = static_cast<int>(number.size())};
  part.number = parse_u64(number).value_or(0);
  part.count = parse_u64(count).value_or(0);
  return part;
}

}  // namespace loadstone

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "base/json_fields.h"
#include "base/json_writer.h"
#include "base/only_errors.h"
#include "loadstone/receipt.h"
#include "receipt/block_hash.h"
#include "receipt/receipt_file.h"

namespace loadstone {

namespace {

constexpr std::string_view format_name = "loadstone-receipt";
constexpr std::uint64_t format_version = 1;
constexpr const char* json_code = "receipt.json";

void write_ranges(JsonWriter& json, std::string_view field, const std::vector<ByteRange>& ranges) {
  json.key(field);
  json.begin_array();
  for (const ByteRange& range : ranges) json.value(std::vector{range.begin, range.end});
  json.end_array();
}

void write_tensor(JsonWriter& json, const ReceiptTensor& tensor) {
  json.begin_object();
  json.member("name", tensor.name);
  if (!tensor.component.empty()) json.member("component", tensor.component);
  json.member("encoding", tensor.encoding);
  json.member("shape", tensor.shape);
  json.member("begin", tensor.begin);
  json.member("end", tensor.end);
  if (!tensor.ranges.empty()) write_ranges(json, "ranges", tensor.ranges);
  json.member("digest", tensor.digest);
  if (!tensor.recipe.empty()) json.member("recipe", tensor.recipe);
  if (!tensor.codec.empty()) json.member("codec", tensor.codec);
  if (!tensor.sources.empty()) json.member("sources", tensor.sources);
  json.end_object();
}

void write_tensors(JsonWriter& json, std::string_view field,
                   const std::vector<ReceiptTensor>& tensors) {
  json.key(field);
  json.begin_array();
  for (const ReceiptTensor& tensor : tensors) write_tensor(json, tensor);
  json.end_array();
}

void write_files(JsonWriter& json, std::string_view field, const std::vector<ReceiptFile>& files) {
  json.key(field);
  json.begin_array();
  for (const ReceiptFile& file : files) {
    json.begin_object();
    json.member("path", file.path);
    if (file.checkpoint != 0) json.member("checkpoint", file.checkpoint);
    json.member("bytes", file.bytes);
    write_ranges(json, "header_ranges", file.header_ranges);
    json.member("header_digest", file.header_digest);
    write_tensors(json, "tensors", file.tensors);
    json.end_object();
  }
  json.end_array();
}

class Parser {
 public:
  explicit Parser(std::string_view text) : document_(text, json_code, receipt_json_bytes_max) {}

  Receipt run() {
    JsonObject fields(reader_, document_.root(), {});
    const auto text_of = [&](std::string_view field) {
      return reader_.string(fields.required(field), fields.at(field));
    };
    if (text_of("format") != format_name) reader_.refuse(fields.at("format"), "no receipt");
    const auto number_of = [&](std::string_view field) {
      return reader_.unsigned_number(fields.required(field), fields.at(field));
    };
    if (number_of("version") != format_version) {
      reader_.refuse(fields.at("version"), "unsupported version",
                     fmt::format("{}", number_of("version")), "1");
    }
    Receipt receipt;
    const std::string_view kind = text_of("digest");
    if (kind != name(DigestKind::xxh3_128) && kind != name(DigestKind::sha256_tree)) {
      reader_.refuse(fields.at("digest"), "unknown digest", printable(kind),
                     "xxh3-128 or sha256-tree");
    }
    receipt.kind = digest_kind(kind);
    digits_ = receipt.kind == DigestKind::sha256_tree ? 64 : 32;
    if (number_of("block_bytes") != receipt_block_bytes) {
      reader_.refuse(fields.at("block_bytes"), "unsupported size of blocks", {},
                     fmt::format("{}", receipt_block_bytes));
    }
    receipt.program = text_of("program");
    receipt.sources = files(fields, "sources");
    receipt.outputs = files(fields, "outputs");
    require_whole(receipt.outputs, fields.at("outputs"));
    receipt.targets = tensors(fields, "targets", UINT64_MAX);
    require_sources(receipt, fields.at("sources"));
    fields.done();
    return receipt;
  }

 private:
  using Element = JsonReader::Element;

  std::string digest(JsonObject& fields, std::string_view field) const {
    const std::string_view text = reader_.string(fields.required(field), fields.at(field));
    const bool is_hex = text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
    if (text.size() != digits_ || !is_hex) {
      reader_.refuse(fields.at(field), "no digest of this kind", printable(text),
                     fmt::format("{} hexadecimal digits", digits_));
    }
    return std::string(text);
  }

  // Ascending, apart from each other, inside of `bytes`.
  std::vector<ByteRange> ranges(JsonObject& fields, std::string_view field,
                                std::uint64_t bytes) const {
    std::vector<ByteRange> ranges;
    const JsonPlace place = fields.at(field);
    std::size_t index = 0;
    for (const auto item : reader_.array(fields.required(field), place)) {
      const JsonPlace at = {&place, {}, index++};
      std::vector<std::uint64_t> numbers;
      for (const auto number : reader_.array(item, at)) {
        numbers.push_back(reader_.unsigned_number(number, at));
        if (numbers.size() > 2) break;
      }
      if (numbers.size() != 2 || numbers[0] >= numbers[1] || numbers[1] > bytes ||
          (!ranges.empty() && numbers[0] <= ranges.back().end)) {
        reader_.refuse(at, "no range: ranges ascend, do not touch, and lie in the bytes");
      }
      ranges.push_back({numbers[0], numbers[1]});
    }
    return ranges;
  }

  ReceiptTensor tensor(Element value, const JsonPlace& place, std::uint64_t bytes) const {
    JsonObject fields(reader_, value, place);
    const auto optional_text = [&](std::string_view field) {
      const auto found = fields.optional(field);
      return found ? std::string(reader_.string(*found, fields.at(field))) : std::string();
    };
    ReceiptTensor tensor;
    tensor.name = reader_.string(fields.required("name"), fields.at("name"));
    tensor.component = optional_text("component");
    tensor.encoding = reader_.string(fields.required("encoding"), fields.at("encoding"));
    const JsonPlace shape = fields.at("shape");
    for (const auto extent : reader_.array(fields.required("shape"), shape)) {
      tensor.shape.push_back(reader_.unsigned_number(extent, shape));
    }
    tensor.begin = reader_.unsigned_number(fields.required("begin"), fields.at("begin"));
    tensor.end = reader_.unsigned_number(fields.required("end"), fields.at("end"));
    if (tensor.begin > tensor.end || tensor.end > bytes) {
      reader_.refuse(fields.at("end"), "the tensor leaves its file");
    }
    if (fields.optional("ranges")) {
      tensor.ranges = ranges(fields, "ranges", tensor.byte_count());
      if (tensor.ranges.empty()) reader_.refuse(fields.at("ranges"), "an empty list of ranges");
    }
    tensor.digest = digest(fields, "digest");
    tensor.recipe = optional_text("recipe");
    tensor.codec = optional_text("codec");
    if (const auto sources = fields.optional("sources")) {
      const JsonPlace at = fields.at("sources");
      for (const auto source : reader_.array(*sources, at)) {
        tensor.sources.emplace_back(reader_.string(source, at));
      }
    }
    fields.done();
    return tensor;
  }

  std::vector<ReceiptTensor> tensors(JsonObject& fields, std::string_view field,
                                     std::uint64_t bytes) const {
    std::vector<ReceiptTensor> tensors;
    const JsonPlace place = fields.at(field);
    std::size_t index = 0;
    for (const auto item : reader_.array(fields.required(field), place)) {
      tensors.push_back(tensor(item, {&place, {}, index++}, bytes));
    }
    return tensors;
  }

  std::vector<ReceiptFile> files(JsonObject& fields, std::string_view field) const {
    std::vector<ReceiptFile> files;
    const JsonPlace place = fields.at(field);
    std::size_t index = 0;
    for (const auto item : reader_.array(fields.required(field), place)) {
      files.push_back(file(item, {&place, {}, index++}));
    }
    return files;
  }

  ReceiptFile file(Element value, const JsonPlace& place) const {
    JsonObject fields(reader_, value, place);
    ReceiptFile file;
    file.path = reader_.string(fields.required("path"), fields.at("path"));
    if (!is_inside(file.path)) {
      reader_.refuse(fields.at("path"), "the path leaves its folder", printable(file.path));
    }
    if (const auto checkpoint = fields.optional("checkpoint")) {
      const std::uint64_t number = reader_.unsigned_number(*checkpoint, fields.at("checkpoint"));
      if (number > UINT32_MAX) reader_.refuse(fields.at("checkpoint"), "too large");
      file.checkpoint = static_cast<std::uint32_t>(number);
    }
    file.bytes = reader_.unsigned_number(fields.required("bytes"), fields.at("bytes"));
    file.header_ranges = ranges(fields, "header_ranges", file.bytes);
    file.header_digest = digest(fields, "header_digest");
    file.tensors = tensors(fields, "tensors", file.bytes);
    fields.done();
    return file;
  }

  // A changed byte of an output must change a digest, so header and tensors cover each byte exactly
  // once.
  void require_whole(const std::vector<ReceiptFile>& outputs, const JsonPlace& place) const {
    std::set<std::string_view> paths;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const ReceiptFile& file = outputs[i];
      const JsonPlace at = {&place, {}, i};
      if (!paths.insert(file.path).second) {
        reader_.refuse({&at, "path"}, "two outputs have this path", printable(file.path));
      }
      std::vector<ByteRange> covered = file.header_ranges;
      for (std::size_t t = 0; t < file.tensors.size(); ++t) {
        const ReceiptTensor& tensor = file.tensors[t];
        const JsonPlace list = {&at, "tensors"};
        const JsonPlace one = {&list, {}, t};
        if (!tensor.ranges.empty()) {
          reader_.refuse({&one, "ranges"}, "a tensor of an output has one digest of all its bytes",
                         printable(tensor.name));
        }
        if (tensor.begin != tensor.end) covered.push_back({tensor.begin, tensor.end});
      }
      std::ranges::sort(covered, {}, &ByteRange::begin);
      std::uint64_t end = 0;
      for (const ByteRange& range : covered) {
        if (range.begin != end) refuse_cover(at, file, end, range.begin);
        end = range.end;
      }
      if (end != file.bytes) refuse_cover(at, file, end, file.bytes);
    }
  }

  // What a tensor was made of is listed with its digest, once.
  void require_sources(const Receipt& receipt, const JsonPlace& place) const {
    std::set<std::pair<std::uint32_t, std::string_view>> paths;
    std::set<std::string_view> known;
    for (std::size_t i = 0; i < receipt.sources.size(); ++i) {
      const ReceiptFile& file = receipt.sources[i];
      const JsonPlace at = {&place, {}, i};
      if (!paths.insert({file.checkpoint, file.path}).second) {
        reader_.refuse({&at, "path"}, "two sources have this path", printable(file.path));
      }
      std::set<std::string_view> own;
      for (const ReceiptTensor& tensor : file.tensors) {
        if (!own.insert(tensor.name).second) {
          reader_.refuse({&at, "tensors"}, "two tensors have this name", printable(tensor.name));
        }
      }
      known.merge(own);
    }
    const auto require = [&](const std::vector<ReceiptTensor>& made) {
      for (const ReceiptTensor& tensor : made) {
        if (tensor.byte_count() == 0) continue;  // nothing was read
        for (const std::string& source : tensor.sources) {
          if (known.contains(source)) continue;
          reader_.refuse(place, "no source lists a tensor that another was made of",
                         printable(source), "each with its digest");
        }
      }
    };
    require(receipt.targets);
    for (const ReceiptFile& file : receipt.outputs) require(file.tensors);
  }

  [[noreturn]] void refuse_cover(const JsonPlace& place, const ReceiptFile& file, std::uint64_t end,
                                 std::uint64_t next) const {
    reader_.refuse(place,
                   next < end ? "two digests cover the same bytes" : "no digest covers some bytes",
                   fmt::format("bytes {} to {} of '{}'", std::min(end, next), std::max(end, next),
                               printable(file.path)),
                   "one digest for each byte of an output");
  }

  // A receipt may be anybody's, and its paths are opened.
  static bool is_inside(std::string_view path) {
    if (path.empty() || path.front() == '/' || path.find('\0') != path.npos) return false;
    while (!path.empty()) {
      const std::string_view name = path.substr(0, path.find('/'));
      if (name == "..") return false;
      path.remove_prefix(std::min(path.size(), name.size() + 1));
    }
    return true;
  }

  JsonDocument document_;
  JsonReader reader_{json_code};
  std::size_t digits_ = 32;
};

}  // namespace

std::string to_json(const Receipt& receipt) {
  return only_errors([&] {
    JsonWriter json(1, 4);
    json.begin_object();
    json.member("format", format_name);
    json.member("version", format_version);
    json.member("digest", name(receipt.kind));
    json.member("block_bytes", receipt_block_bytes);
    json.member("program", receipt.program);
    write_files(json, "sources", receipt.sources);
    write_files(json, "outputs", receipt.outputs);
    write_tensors(json, "targets", receipt.targets);
    json.end_object();
    return json.take() + "\n";
  });
}

Receipt receipt_from_json(std::string_view text) {
  return only_errors([&] { return Parser(text).run(); });
}

}  // namespace loadstone

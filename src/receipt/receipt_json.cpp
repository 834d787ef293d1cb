#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "base/json_fields.h"
#include "base/named.h"
#include "base/only_errors.h"
#include "loadstone/receipt.h"
#include "receipt/block_hash.h"
#include "receipt/receipt_file.h"

namespace loadstone {

namespace {

constexpr std::string_view format_name = "loadstone-receipt";
constexpr std::uint64_t format_version = 1;
constexpr const char* json_code = "receipt.json";

// Limits that the reader of a receipt checks.
struct Limits {
  std::size_t digits = 0;   // length of a digest
  std::uint64_t bytes = 0;  // size of the file
};

template <typename Visitor>
void visit_digest(Visitor& visitor, std::string_view field, auto& digest, const Limits& limits) {
  visitor.member(field, digest);
  if constexpr (Visitor::is_reading) {
    const bool is_hex = digest.find_first_not_of("0123456789abcdef") == std::string::npos;
    if (digest.size() == limits.digits && is_hex) return;
    visitor.refuse(field, "the text is not a digest of this kind", printable(digest),
                   fmt::format("{} hexadecimal digits", limits.digits));
  }
}

constexpr const char* no_range =
    "a range is invalid: ranges must be in ascending order, must not touch, and must be inside the "
    "bytes";

// Visits ranges, which must be ascending, disjoint and inside of `bytes`.
template <typename Visitor>
void visit_ranges(Visitor& visitor, std::string_view field, auto& ranges, std::uint64_t bytes) {
  visitor.member(field, ranges);
  if constexpr (Visitor::is_reading) {
    const JsonPlace place = visitor.at(field);
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      const auto [begin, end] = ranges[i];
      if (begin < end && end <= bytes && (i == 0 || ranges[i - 1].end < begin)) continue;
      visitor.reader().refuse({&place, {}, i}, no_range);
    }
  }
}

}  // namespace

bool is_inside(std::string_view path) {
  if (path.empty() || path.front() == '/' || path.find('\0') != path.npos) return false;
  while (!path.empty()) {
    const std::string_view name = path.substr(0, path.find('/'));
    if (name == "..") return false;
    path.remove_prefix(std::min(path.size(), name.size() + 1));
  }
  return true;
}

static void write_json(JsonWriter& json, const ByteRange& range) {
  json.array(range.begin, range.end);
}

static void read_json(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place,
                      ByteRange& range) {
  std::vector<std::uint64_t> numbers;
  reader.read(value, place, JsonFlat(numbers));
  if (numbers.size() != 2) reader.refuse(place, no_range);
  range = {numbers[0], numbers[1]};
}

void visit_fields(auto& visitor, Like<EncodingLoss> auto& loss) {
  visitor.member("blocks", loss.blocks);
  visitor.member("exact_blocks", loss.exact_blocks);
  visitor.member("largest_error", loss.largest_error);
  visitor.optional("zeroed_blocks", loss.zeroed_blocks);
}

template <typename Visitor>
void visit_fields(Visitor& visitor, Like<ReceiptTensor> auto& tensor, const Limits& limits) {
  visitor.member("name", tensor.name);
  visitor.optional("component", tensor.component);
  visitor.member("encoding", tensor.encoding);
  visitor.member("shape", JsonFlat(tensor.shape));
  visitor.member("begin", tensor.begin);
  visitor.member("end", tensor.end);
  if constexpr (Visitor::is_reading) {
    if (tensor.begin > tensor.end || tensor.end > limits.bytes) {
      visitor.refuse("end", "the tensor exceeds its file");
    }
    if (visitor.optional("ranges")) {
      visit_ranges(visitor, "ranges", tensor.ranges, tensor.byte_count());
      if (tensor.ranges.empty()) visitor.refuse("ranges", "the list of ranges is empty");
    }
  } else {
    visitor.optional("ranges", tensor.ranges);
  }
  visit_digest(visitor, "digest", tensor.digest, limits);
  visitor.optional("recipe", tensor.recipe);
  visitor.optional("codec", tensor.codec);
  visitor.optional("sources", JsonFlat(tensor.sources));
  visitor.optional("loss", tensor.loss);
}

template <typename Visitor>
void visit_fields(Visitor& visitor, Like<ReceiptFile> auto& file, const Limits& limits) {
  visitor.member("path", file.path);
  if constexpr (Visitor::is_reading) {
    if (!is_inside(file.path)) {
      visitor.refuse("path", "the path leads out of its folder", printable(file.path));
    }
  }
  visitor.optional("checkpoint", file.checkpoint);
  visitor.member("bytes", file.bytes);
  visit_ranges(visitor, "header_ranges", file.header_ranges, file.bytes);
  visit_digest(visitor, "header_digest", file.header_digest, limits);
  visitor.member("tensors", file.tensors, Limits{limits.digits, file.bytes});
}

[[noreturn]] static void refuse_cover(const JsonReader& reader, const JsonPlace& place,
                                      const ReceiptFile& file, std::uint64_t end,
                                      std::uint64_t next) {
  reader.refuse(
      place,
      next < end ? "two digests cover the same bytes" : "some bytes are covered by no digest",
      fmt::format("bytes {} to {} of '{}'", std::min(end, next), std::max(end, next),
                  printable(file.path)),
      "one digest for each byte of an output");
}

// Requires that the header and the tensors of each output cover each byte exactly once. Otherwise a
// changed byte might change no digest.
static void require_whole(const JsonReader& reader, const std::vector<ReceiptFile>& outputs,
                          const JsonPlace& place) {
  std::set<std::string_view> paths;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const ReceiptFile& file = outputs[i];
    const JsonPlace at = {&place, {}, i};
    if (!paths.insert(file.path).second) {
      reader.refuse({&at, "path"}, "two outputs have the same path", printable(file.path));
    }
    std::vector<ByteRange> covered = file.header_ranges;
    for (std::size_t t = 0; t < file.tensors.size(); ++t) {
      const ReceiptTensor& tensor = file.tensors[t];
      const JsonPlace list = {&at, "tensors"};
      const JsonPlace one = {&list, {}, t};
      if (!tensor.ranges.empty()) {
        reader.refuse({&one, "ranges"},
                      "a tensor of an output must have one digest of all its bytes",
                      printable(tensor.name));
      }
      if (tensor.begin != tensor.end) covered.push_back({tensor.begin, tensor.end});
    }
    std::ranges::sort(covered, {}, &ByteRange::begin);
    std::uint64_t end = 0;
    for (const ByteRange& range : covered) {
      if (range.begin != end) refuse_cover(reader, at, file, end, range.begin);
      end = range.end;
    }
    if (end != file.bytes) refuse_cover(reader, at, file, end, file.bytes);
  }
}

// Requires that the receipt lists the digest of each source of an output, once per set of ranges.
static void require_sources(const JsonReader& reader, const Receipt& receipt,
                            const JsonPlace& place) {
  std::set<std::pair<std::uint32_t, std::string_view>> paths;
  std::set<std::string_view> known;
  for (std::size_t i = 0; i < receipt.sources.size(); ++i) {
    const ReceiptFile& file = receipt.sources[i];
    const JsonPlace at = {&place, {}, i};
    if (!paths.insert({file.checkpoint, file.path}).second) {
      reader.refuse({&at, "path"}, "two sources have the same path", printable(file.path));
    }
    // If outputs read different ranges of a tensor, each output lists the tensor with its own
    // digest.
    std::map<std::string_view, ByteRange> places;
    std::set<std::tuple<std::string_view, const std::vector<ByteRange>&>> own;
    for (const ReceiptTensor& tensor : file.tensors) {
      const ByteRange place_in_file = {tensor.begin, tensor.end};
      const bool is_same =
          places.try_emplace(tensor.name, place_in_file).first->second == place_in_file;
      if (!is_same || !own.emplace(tensor.name, tensor.ranges).second) {
        reader.refuse({&at, "tensors"}, "two tensors have the same name", printable(tensor.name));
      }
      known.insert(tensor.name);
    }
  }
  const auto require = [&](const std::vector<ReceiptTensor>& made) {
    for (const ReceiptTensor& tensor : made) {
      if (tensor.byte_count() == 0) continue;  // such a tensor needs no bytes of its sources
      for (const std::string& source : tensor.sources) {
        if (known.contains(source)) continue;
        reader.refuse(place, "no source lists a tensor from which another tensor was made",
                      printable(source), "each with its digest");
      }
    }
  };
  require(receipt.targets);
  for (const ReceiptFile& file : receipt.outputs) require(file.tensors);
}

template <typename Visitor>
void visit_fields(Visitor& visitor, Like<Receipt> auto& receipt) {
  const auto require = [&](bool holds, auto... refusal) {
    if constexpr (Visitor::is_reading) {
      if (!holds) visitor.refuse(refusal...);
    }
  };
  std::string format(format_name);
  visitor.member("format", format);
  require(format == format_name, "format", "this is not a receipt");
  std::uint64_t number = format_version;
  visitor.member("version", number);
  require(number == format_version, "version", "this version is not supported",
          std::to_string(number), "1");
  std::string digest(name(receipt.kind));
  visitor.member("digest", digest);
  require(from_name<DigestKind>(digest).has_value(), "digest", "the digest is unknown",
          printable(digest), either(names_of<DigestKind>()));
  number = receipt_block_bytes;
  visitor.member("block_bytes", number);
  require(number == receipt_block_bytes, "block_bytes",
          "the size of a hashed block is not supported", std::to_string(number),
          std::to_string(receipt_block_bytes));
  if constexpr (Visitor::is_reading) receipt.kind = digest_kind(digest);
  const Limits limits = {receipt.kind == DigestKind::sha256_tree ? 64u : 32u, UINT64_MAX};
  visitor.member("program", receipt.program);
  visitor.member("sources", receipt.sources, limits);
  visitor.member("outputs", receipt.outputs, limits);
  visitor.member("targets", receipt.targets, limits);
  if constexpr (Visitor::is_reading) {
    require_whole(visitor.reader(), receipt.outputs, visitor.at("outputs"));
    require_sources(visitor.reader(), receipt, visitor.at("sources"));
  }
}

std::string to_json(const Receipt& receipt) {
  return only_errors([&] { return json_text(receipt, 1, 4) + "\n"; });
}

Receipt receipt_from_json(std::string_view text) {
  return only_errors([&] {
    const JsonDocument document(text, json_code, receipt_json_bytes_max);
    Receipt receipt;
    JsonReader(json_code).read(document.root(), {}, receipt);
    return receipt;
  });
}

}  // namespace loadstone

#include "formats/gguf.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <unordered_set>

#include "base/checked.h"
#include "base/text.h"
#include "formats/gguf_cursor.h"
#include "formats/gguf_metadata.h"
#include "formats/sniff.h"
#include "loadstone/defaults.h"
#include "loadstone/name_hash.h"

namespace loadstone {

namespace {

// Minimum size of a tensor info in a file, which limits the tensor count that a file can have.
constexpr std::uint64_t info_bytes_min = 8 + 4 + 4 + 8;  // empty name, rank 0, type, offset
constexpr std::uint64_t alignment_max = std::uint64_t{1} << 20;
constexpr std::uint64_t signed_max = std::numeric_limits<std::int64_t>::max();

std::optional<std::uint64_t> align_up(std::uint64_t number, std::uint64_t alignment) noexcept {
  const std::uint64_t rest = number % alignment;
  return rest == 0 ? number : checked_add(number, alignment - rest);
}

// Not thread-safe.
class GgufReader {
 public:
  GgufReader(ByteSource& source, std::uint32_t rank_max) : cursor_(source), rank_max_(rank_max) {}

  FileHeader read() {
    header_.shard.path = cursor_.source.path();
    header_.shard.format = FileFormat::gguf;
    header_.shard.identity = cursor_.source.identity();
    read_counts();
    header_.metadata = read_gguf_metadata(cursor_, entry_count_, tensor_count_ * info_bytes_min);
    read_alignment();
    read_rank_max();
    read_infos();
    place_data();
    check_layout();
    reader_.skip_to(header_.shard.data_begin);
    header_.shard.header_digest = reader_.digest().hex();
    header_.findings = cursor_.warnings.take();
    return std::move(header_);
  }

 private:
  // ---- magic, version, counts

  void read_counts() {
    const std::uint64_t file_bytes = reader_.file_bytes();
    if (file_bytes == 0) {
      cursor_.refuse({"gg.file_too_small", "the file is empty", "file", "a file of 0 bytes",
                      "at least 24 bytes"});
    }
    cursor_.reading = "the magic and the counts";
    reader_.set_ahead(4 + 8 + 8);
    check_magic(reader_.text(std::min<std::uint64_t>(file_bytes, 4)));
    if (file_bytes < 4) cursor_.file_ends(4);
    const auto version = cursor_.number<std::uint32_t>();
    if (version != 0 && version % 65536 == 0) {
      cursor_.refuse({"gg.endian", "a big-endian file; loadstone reads little-endian ones",
                      "version", fmt::format("0x{:08x}", version), "2 or 3"});
    }
    if (version != 2 && version != 3) {
      cursor_.refuse(
          {"gg.version", "unsupported version", "version", std::to_string(version), "2 or 3"});
    }
    tensor_count_ = read_count("n_tensors", info_bytes_min);
    entry_count_ = read_count("n_kv", gguf_entry_bytes_min);
  }

  void check_magic(std::string_view magic) {
    if (magic == std::string_view("GGUF").substr(0, magic.size())) return;
    const FileKind kind = sniff(cursor_.source);
    const bool legacy = kind == FileKind::legacy_ggml;
    if (magic == "FUGG") {
      cursor_.refuse({"gg.endian", "the bytes of the magic are in reverse order", "magic", "'FUGG'",
                      "'GGUF'"});
    }
    cursor_.refuse(
        {legacy                              ? "gg.legacy"
         : kind == FileKind::git_lfs_pointer ? "gg.lfs_pointer"
                                             : "gg.magic",
         legacy ? "a file from before GGUF; convert it with a llama.cpp of 2023, or download a "
                  "GGUF file"
                : "the file is not in the GGUF format",
         kind == FileKind::git_lfs_pointer ? "file" : "magic",
         kind == FileKind::unknown ? "'" + printable(magic) + "'" : std::string(describe(kind)),
         "'GGUF'"});
  }

  std::uint64_t read_count(std::string_view field, std::uint64_t each_bytes_min) {
    cursor_.field = "file";
    const auto count = cursor_.number<std::uint64_t>();
    // Neither count leads to an allocation. If a small count does not fit, the file was cut off,
    // which later reads report.
    constexpr std::uint64_t small = 64;
    if (count <= std::max(reader_.file_bytes() / each_bytes_min, small)) return count;
    cursor_.refuse({"gg.count", "the count is too large for a file of this size", field,
                    std::to_string(count),
                    fmt::format("at most {}", reader_.file_bytes() / each_bytes_min)});
  }

  // ---- alignment

  void read_alignment() {
    const auto found = header_.metadata.find("general.alignment");
    if (found == header_.metadata.end()) return;
    cursor_.culprit = "general.alignment";
    const MetadataValue& value = found->second;
    if (value.type != MetadataType::u32) {
      cursor_.refuse({"gg.kv_type", "the alignment is not a 32-bit unsigned integer",
                      "general.alignment", type_name(value), "u32"});
    }
    alignment_ = std::get<std::uint64_t>(value.value);
    if (!is_gguf_alignment(alignment_)) {
      cursor_.refuse({"gg.alignment", "the alignment is invalid", "general.alignment",
                      std::to_string(alignment_),
                      fmt::format("a power of two up to {}", alignment_max)});
    }
    if (alignment_ < 8) {
      cursor_.warnings.add("gg.alignment", cursor_.culprit, "general.alignment",
                           "the format requires a multiple of 8, but ggml accepts this alignment",
                           std::to_string(alignment_));
    }
    cursor_.culprit.clear();
  }

  // ---- number of dims

  void read_rank_max() {
    const auto found = header_.metadata.find(gguf_rank_key);
    if (found == header_.metadata.end()) return;
    cursor_.culprit = gguf_rank_key;
    const MetadataValue& value = found->second;
    if (value.type != MetadataType::u32) {
      cursor_.refuse({"gg.kv_type", "the maximum number of dimensions is not a u32", gguf_rank_key,
                      type_name(value), "u32"});
    }
    const auto declared = std::get<std::uint64_t>(value.value);
    if (declared == 0 || declared > defaults::gguf_rank_most) {
      cursor_.refuse({"gg.n_dims", "the file declares an unsupported number of dimensions",
                      gguf_rank_key, std::to_string(declared),
                      fmt::format("1 to {}", defaults::gguf_rank_most)});
    }
    rank_max_ = std::max(rank_max_, static_cast<std::uint32_t>(declared));
    cursor_.culprit.clear();
  }

  // ---- tensor infos

  void read_infos() {
    cursor_.field = "file";
    std::unordered_set<std::string, NameHash, std::equal_to<>> names;
    for (std::uint64_t i = 0; i < tensor_count_; ++i) {
      cursor_.culprit.clear();
      cursor_.reading = fmt::format("tensor info {} of {} (n_tensors)", i + 1, tensor_count_);
      const std::uint64_t ahead = (tensor_count_ - i - 1) * info_bytes_min;
      reader_.set_ahead(ahead + info_bytes_min - 8);
      const std::uint64_t length = cursor_.length("tensor name", "gg.string_len");
      cursor_.at = reader_.offset();
      reader_.set_ahead(ahead + info_bytes_min - 8);
      cursor_.culprit = reader_.text(length);
      check_name();
      if (!names.insert(cursor_.culprit).second) {
        cursor_.refuse({"gg.duplicate", "two tensors have the same name", "tensor name",
                        "a second one", "one tensor"});
      }
      header_.tensors.push_back(read_info(ahead));
    }
    cursor_.culprit.clear();
  }

  void check_name() {
    const std::string& name = cursor_.culprit;
    if (!is_utf8(name)) {
      const std::string found = printable_bytes(name);
      cursor_.culprit.clear();
      cursor_.refuse({"gg.utf8", "the tensor name is not UTF-8", "tensor name", found, "UTF-8"});
    }
    if (name.find('\0') != std::string::npos) {
      cursor_.refuse({"gg.name", "the name contains a NUL character, at which C programs end it",
                      "tensor name", "'" + printable(name) + "'", "a name without NUL"});
    }
    const auto is_control = [](unsigned char byte) { return byte < 0x20 || byte == 0x7f; };
    if (name.empty()) cursor_.warnings.add("gg.name", name, "tensor name", "the name is empty");
    if (std::ranges::any_of(name, is_control)) {
      cursor_.warnings.add("gg.name", name, "tensor name", "the name contains control characters");
    }
    if (name.size() > ggml_name_bytes_max) {
      cursor_.warnings.add("gg.name", name, "tensor name", "the name is longer than ggml allows",
                           bytes_text(name.size()),
                           fmt::format("at most {} bytes", ggml_name_bytes_max));
    }
  }

  // `ahead`: minimum number of bytes that follow this info.
  TensorInfo read_info(std::uint64_t ahead) {
    reader_.set_ahead(ahead + info_bytes_min - 8 - 4);
    const auto rank = cursor_.number<std::uint32_t>();
    if (rank > rank_max_) {
      const auto hint = rank > defaults::gguf_rank_most
                            ? std::string()
                            : fmt::format(
                                  "; to accept it, pass --gguf-rank-max {0} "
                                  "(gguf_rank_max={0} in Python)",
                                  rank);
      cursor_.refuse({"gg.n_dims", "the tensor has too many dimensions" + hint, "n_dims",
                      std::to_string(rank), fmt::format("at most {}", rank_max_)});
    }
    if (rank == 0)
      cursor_.warnings.add("gg.n_dims", cursor_.culprit, "n_dims",
                           "the tensor has no dimensions: it is a single value");
    std::vector<std::uint64_t> dims(rank);
    const std::uint64_t dims_at = reader_.offset();
    for (std::uint64_t& dim : dims) {
      reader_.set_ahead(ahead + 4 + 8);
      dim = cursor_.number<std::uint64_t>();
      if (dim > signed_max) {
        cursor_.refuse({"gg.dims", "a dimension is negative", "dims",
                        std::to_string(static_cast<std::int64_t>(dim)), "0 to 2^63 - 1"});
      }
      if (dim == 0)
        cursor_.warnings.add("gg.dims", cursor_.culprit, "dims",
                             "a dimension is 0, so the tensor has no elements");
    }
    reader_.set_ahead(ahead + 8);
    const Encoding encoding = read_encoding();
    reader_.set_ahead(ahead);
    cursor_.at = dims_at;
    const std::uint64_t bytes = check_dims(dims, encoding);
    const auto offset = cursor_.number<std::uint64_t>();
    if (offset % alignment_ != 0) {
      cursor_.refuse({"gg.offset", "the offset is not a multiple of the alignment", "offset",
                      std::to_string(offset), fmt::format("a multiple of {}", alignment_)});
    }
    TensorInfo tensor;
    tensor.name = cursor_.culprit;
    tensor.encoding = encoding;
    std::ranges::reverse(dims);  // the file stores the fastest-varying dimension first
    tensor.shape = Shape(std::move(dims));
    // Contain the offset in the data, and the size, until check_layout(): their sum may overflow.
    tensor.offset_begin = offset;
    tensor.offset_end = bytes;
    return tensor;
  }

  Encoding read_encoding() {
    const auto id = cursor_.number<std::uint32_t>();
    const auto type = gguf_type(id);
    if (!type || !type->encoding) {
      cursor_.refuse(
          {"gg.type",
           type ? "this type was removed from the format" : "the tensor's type is unknown",
           "ggml type", type ? fmt::format("{} ({})", id, type->name) : std::to_string(id),
           "a type of ggml"});
    }
    if (is_for_activations(*type->encoding)) {
      cursor_.refuse({"gg.no_dequant", "this type is for activations and cannot be dequantized",
                      "ggml type", fmt::format("{} ({})", id, type->name), "a type for weights"});
    }
    return *type->encoding;
  }

  // Returns the tensor's size in bytes.
  std::uint64_t check_dims(const std::vector<std::uint64_t>& dims, Encoding encoding) const {
    const Shape shape(dims);
    const auto numel = shape.numel();
    const std::uint64_t row = dims.empty() ? 1 : dims.front();
    const std::uint64_t block = encoding.is_dtype() ? 1 : layout(encoding.block_format()).elements;
    const std::string found = fmt::format("{} {}", encoding.name(), shape.text());
    if (!numel) {
      cursor_.refuse({"gg.overflow", "the number of elements does not fit in 63 bits", "dims",
                      found, "a product below 2^63"});
    }
    if (row % block != 0) {
      cursor_.refuse({"gg.block", "the first dimension is not a multiple of the block size", "dims",
                      found, fmt::format("a multiple of {}", block)});
    }
    const auto bytes = encoding.byte_count(*numel);
    if (*numel > signed_max || !bytes || *bytes > signed_max) {
      cursor_.refuse({"gg.overflow", "the tensor's size does not fit in 63 bits", "dims", found,
                      "less than 2^63 bytes"});
    }
    return *bytes;
  }

  // ---- the data

  void place_data() {
    // A file without data may end before the padding, so its data begins at the end of the file.
    const auto padded = align_up(reader_.offset(), alignment_);
    header_.shard.data_begin = std::min(padded.value_or(UINT64_MAX), reader_.file_bytes());
  }

  void check_layout() {
    auto& tensors = header_.tensors;
    std::ranges::stable_sort(tensors, [](const TensorInfo& a, const TensorInfo& b) {
      return std::pair(a.offset_begin, a.offset_end) < std::pair(b.offset_begin, b.offset_end);
    });
    const std::uint64_t data_begin = header_.shard.data_begin;
    const std::uint64_t file_bytes = reader_.file_bytes();
    const std::uint64_t data_bytes = file_bytes - data_begin;
    std::uint64_t end = 0;  // largest end of the tensors visited before; at most data_bytes
    const TensorInfo* before = nullptr;
    for (TensorInfo& tensor : tensors) {
      const std::uint64_t bytes = tensor.offset_end;
      cursor_.culprit = tensor.name;
      cursor_.at = data_begin;
      if (bytes == 0) tensor.offset_begin = std::min(tensor.offset_begin, data_bytes);
      if (tensor.offset_begin > data_bytes || bytes > data_bytes - tensor.offset_begin) {
        refuse_truncated(tensor, data_bytes);
      }
      cursor_.at = data_begin + tensor.offset_begin;
      check_gap(tensor, before, end);
      tensor.offset_end = tensor.offset_begin + bytes;
      end = std::max(end, tensor.offset_end);
      tensor.offset_begin += data_begin;
      tensor.offset_end += data_begin;
      if (bytes > 0) before = &tensor;
    }
    cursor_.culprit.clear();
    const auto end_padded = align_up(data_begin + end, alignment_);
    if (end_padded && file_bytes > *end_padded) {
      cursor_.warnings.add(
          "gg.trailing", {}, "file",
          fmt::format("{} follow the last tensor", bytes_text(file_bytes - *end_padded)),
          "a file of " + bytes_text(file_bytes), bytes_text(*end_padded));
    }
  }

  // `end`: where the preceding tensors end. `tensor.offset_end` still contains the tensor's size.
  void check_gap(const TensorInfo& tensor, const TensorInfo* before, std::uint64_t end) {
    const std::string neighbour =
        before == nullptr ? "the start of the data" : "'" + printable(before->name) + "'";
    if (tensor.offset_begin < end && tensor.offset_end > 0) {
      cursor_.refuse({"gg.overlap", fmt::format("the tensor shares bytes with {}", neighbour),
                      "offset", std::to_string(tensor.offset_begin),
                      fmt::format("at least {}", end)});
    }
    const auto next = align_up(end, alignment_);
    if (next && tensor.offset_begin > *next) {
      cursor_.warnings.add("gg.hole", tensor.name, "offset",
                           fmt::format("{} between {} and this tensor belong to no tensor",
                                       bytes_text(tensor.offset_begin - *next), neighbour),
                           std::to_string(tensor.offset_begin), std::to_string(*next));
    }
  }

  [[noreturn]] void refuse_truncated(const TensorInfo& tensor, std::uint64_t data_bytes) const {
    const bool outside = tensor.offset_begin > data_bytes;
    const auto end = checked_add(tensor.offset_begin, tensor.offset_end);
    const auto begin = align_up(reader_.offset(), alignment_);  // data_begin of a complete file
    const auto needed = end && begin ? checked_add(*end, *begin) : std::nullopt;
    cursor_.refuse(
        {"gg.truncated",
         outside ? "the file ends before the tensor begins" : "the file ends inside the tensor",
         outside ? "offset" : "dims", "a file of " + bytes_text(reader_.file_bytes()),
         needed ? fmt::format("at least {} for {} {}", bytes_text(*needed), tensor.encoding.name(),
                              tensor.shape.text())
                : "more than 2^64 bytes"});
  }

  GgufCursor cursor_;
  std::uint32_t rank_max_;
  HeaderReader& reader_ = cursor_.reader;
  FileHeader header_;
  std::uint64_t tensor_count_ = 0;
  std::uint64_t entry_count_ = 0;
  std::uint64_t alignment_ = gguf_alignment_usual;
};

std::optional<std::uint64_t> split_number(const FileHeader& header, const char* key) {
  const auto found = header.metadata.find(key);
  if (found == header.metadata.end()) return std::nullopt;
  const auto& value = found->second.value;
  if (const auto* number = std::get_if<std::uint64_t>(&value)) return *number;
  const auto* number = std::get_if<std::int64_t>(&value);
  if (number != nullptr && *number >= 0) return static_cast<std::uint64_t>(*number);
  throw Error(number != nullptr ? "gg.split" : "gg.kv_type", "the value is not a count",
              {.path = header.shard.path,
               .tensor = key,
               .field = key,
               .found = number != nullptr ? std::to_string(*number) : type_name(found->second),
               .expected = "an integer of 0 or more"});
}

}  // namespace

bool is_gguf_alignment(std::uint64_t alignment) noexcept {
  return std::has_single_bit(alignment) && alignment <= alignment_max;
}

FileHeader read_gguf(ByteSource& source, std::uint32_t rank_max) {
  return GgufReader(source, rank_max).read();
}

std::optional<GgufSplit> gguf_split(const FileHeader& header) {
  const auto number = split_number(header, "split.no");
  const auto count = split_number(header, "split.count");
  const auto tensors = split_number(header, "split.tensors.count");
  // In a file that was merged from a split, the count is 0.
  if (count.value_or(0) == 0) return std::nullopt;
  return GgufSplit{.number = number.value_or(0), .count = *count, .tensors = tensors};
}

}  // namespace loadstone

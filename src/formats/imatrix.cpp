#include "formats/imatrix.h"

#include <fmt/format.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <utility>
#include <variant>

#include "base/only_errors.h"
#include "base/text.h"
#include "formats/file_header.h"
#include "formats/gguf.h"
#include "formats/gguf_cursor.h"

namespace loadstone {

namespace {

constexpr std::string_view gguf_magic = "GGUF";
// Both formats store the number of chunks in 32 bits, and one of them as a signed integer.
constexpr std::uint64_t chunks_max = std::numeric_limits<std::int32_t>::max();

std::string number_text(float number) { return fmt::format("{}", number); }

bool is_importance(float number) noexcept { return std::isfinite(number) && number >= 0; }

std::vector<float> read_floats(ByteSource& source, std::uint64_t offset, std::uint64_t count) {
  std::vector<float> floats(count);
  source.read(offset, std::as_writable_bytes(std::span(floats)));
  return floats;
}

// Checks that sums of squares, or counts, are finite and not negative.
void require_importances(const ByteSource& source, std::string_view culprit, const char* field,
                         std::span<const float> numbers, std::uint64_t begin) {
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (is_importance(numbers[i])) continue;
    refuse(source.path(),
           {"im.value", fmt::format("value {} is not a valid sum", i), field,
            number_text(numbers[i]), "a finite number of 0 or more", begin + i * sizeof(float)},
           culprit);
  }
}

void add_entry(const ByteSource& source, ImportanceMatrix& matrix, std::string name,
               std::vector<float> numbers, std::uint64_t offset) {
  auto shared = std::make_shared<const std::vector<float>>(std::move(numbers));
  const auto [place, is_new] = matrix.entries.try_emplace(std::move(name), std::move(shared));
  if (is_new) return;
  refuse(source.path(),
         {"im.duplicate", "two entries have the same name", "name", "a second one", "one entry",
          offset},
         place->first);
}

// Cuts a dataset's name at the first NUL, as llama-quantize does.
std::string until_nul(const std::string& text) { return text.c_str(); }

// ---- the format before GGUF: the number of entries, the entries, and optionally the number of
// chunks and the dataset. Not thread-safe.

class BinaryReader {
 public:
  explicit BinaryReader(ByteSource& source) : source_(source), end_(source.identity().bytes) {}

  ImportanceMatrix read() {
    ImportanceMatrix matrix;
    reading_ = "the count of entries";
    const std::uint64_t count = size("entries", 1, entry_bytes_min);
    for (std::uint64_t i = 0; i < count; ++i) {
      culprit_.clear();
      reading_ = fmt::format("entry {} of {}", i + 1, count);
      read_entry(matrix);
    }
    culprit_.clear();
    if (offset_ < end_) read_end(matrix);
    return matrix;
  }

 private:
  // Name length, a name of one byte, calls, number of values, and one value.
  static constexpr std::uint64_t entry_bytes_min = 4 + 1 + 4 + 4 + 4;

  [[noreturn]] void fail(const char* code, std::string message, const char* field,
                         std::string found, std::string expected, std::uint64_t at) const {
    refuse(source_.path(),
           {code, std::move(message), field, std::move(found), std::move(expected), at}, culprit_);
  }

  void require(std::uint64_t bytes, const char* field) const {
    if (bytes <= end_ - offset_) return;
    fail("im.truncated", fmt::format("the file ends inside {}", reading_), field,
         "a file of " + bytes_text(end_),
         fmt::format("{} more at byte {}", bytes_text(bytes), offset_), offset_);
  }

  std::int32_t number(const char* field) {
    require(sizeof(std::int32_t), field);
    std::int32_t number = 0;
    source_.read(offset_, std::as_writable_bytes(std::span(&number, 1)));
    offset_ += sizeof number;
    return number;
  }

  // Reads a count of items that take at least `each_bytes` each. Throws Error "im.count" if the
  // count is below `least` or the items exceed the rest of the file.
  std::uint64_t size(const char* field, std::int32_t least, std::uint64_t each_bytes) {
    const std::uint64_t at = offset_;
    const std::int32_t size = number(field);
    const std::uint64_t most = (end_ - offset_) / each_bytes;
    if (size >= least && static_cast<std::uint64_t>(size) <= most) {
      return static_cast<std::uint64_t>(size);
    }
    fail("im.count",
         fmt::format("{} declare more than the file can contain, or it is not an importance matrix",
                     reading_),
         field, std::to_string(size), fmt::format("{} to {}", least, most), at);
  }

  std::string text(std::uint64_t length) {
    std::string text(length, '\0');
    source_.read(offset_, std::as_writable_bytes(std::span(text)));
    offset_ += length;
    return text;
  }

  void read_entry(ImportanceMatrix& matrix) {
    const std::uint64_t length = size("name length", 1, 1);
    const std::uint64_t name_at = offset_;
    culprit_ = text(length);
    if (!is_utf8(culprit_) || culprit_.find('\0') != std::string::npos) {
      const std::string found = printable_bytes(std::exchange(culprit_, {}));
      fail("im.name", fmt::format("the name of {} is not a valid tensor name", reading_), "name",
           found, "UTF-8 without NUL", name_at);
    }
    const std::uint64_t calls_at = offset_;
    const std::int32_t calls = number("calls");
    if (calls < 0) {
      fail("im.count", "the number of calls is negative", "calls", std::to_string(calls),
           "a number of 0 or more", calls_at);
    }
    const std::uint64_t count = size("numbers", 1, sizeof(float));
    std::vector<float> numbers = read_floats(source_, offset_, count);
    require_importances(source_, culprit_, "numbers", numbers, offset_);
    offset_ += count * sizeof(float);
    // Without calls, loadstone uses the values unchanged.
    if (calls > 0) {
      for (float& each : numbers) each /= static_cast<float>(calls);
    }
    add_entry(source_, matrix, culprit_, std::move(numbers), name_at);
  }

  void read_end(ImportanceMatrix& matrix) {
    reading_ = "the data after the entries";
    const std::uint64_t at = offset_;
    const std::int32_t chunks = number("chunks");
    if (chunks < 0) {
      fail("im.count", "a count of chunks", "chunks", std::to_string(chunks),
           "a number of 0 or more", at);
    }
    matrix.chunks = static_cast<std::uint32_t>(chunks);
    if (offset_ == end_) return;
    const std::uint64_t length = size("dataset length", 0, 1);
    if (length > 0) matrix.dataset = until_nul(text(length));
    if (offset_ == end_) return;
    fail("im.trailing", fmt::format("{} follow the dataset", bytes_text(end_ - offset_)), "file",
         "a file of " + bytes_text(end_), bytes_text(offset_), offset_);
  }

  ByteSource& source_;
  std::uint64_t end_;
  std::uint64_t offset_ = 0;
  std::string culprit_;  // name of the current entry
  std::string reading_;  // current item, for messages
};

// ---- the GGUF format: two tensors per entry

class GgufMatrixReader {
 public:
  explicit GgufMatrixReader(ByteSource& source) : source_(source), header_(read_gguf(source)) {}

  ImportanceMatrix read() {
    ImportanceMatrix matrix;
    matrix.dataset = first_dataset();
    matrix.chunks = static_cast<std::uint32_t>(whole_number("imatrix.chunk_count"));
    static_cast<void>(whole_number("imatrix.chunk_size"));
    for (const auto& [name, entry] : entries()) read_entry(std::string(name), entry, matrix);
    if (!matrix.entries.empty()) return matrix;
    refuse(source_.path(),
           {"im.empty", "the file has no entry for any tensor", "tensors",
            counted(header_.tensors.size(), "tensor"), "NAME.in_sum2 and NAME.counts"});
  }

 private:
  struct Entry {
    const TensorInfo* sums = nullptr;
    const TensorInfo* counts = nullptr;
  };

  // Pairs the tensors NAME.in_sum2 and NAME.counts. Ignores other tensors, as llama.cpp does.
  [[nodiscard]] std::map<std::string_view, Entry> entries() const {
    std::map<std::string_view, Entry> entries;
    for (const TensorInfo& tensor : header_.tensors) {
      std::string_view name = tensor.name;
      const auto has_end = [&](std::string_view end) {
        if (!name.ends_with(end)) return false;
        name.remove_suffix(end.size());
        return true;
      };
      if (has_end(".in_sum2")) {
        entries[name].sums = &tensor;
      } else if (has_end(".counts")) {
        entries[name].counts = &tensor;
      }
    }
    return entries;
  }

  [[nodiscard]] const MetadataValue& value(const char* key) const {
    const auto found = header_.metadata.find(key);
    if (found != header_.metadata.end()) return found->second;
    fail_key(key, "a required key is missing, so the file is not an importance matrix",
             "no such key", "the key");
  }

  [[noreturn]] void fail_key(const char* key, std::string message, std::string found,
                             std::string expected) const {
    refuse(source_.path(),
           {"im.metadata", std::move(message), key, std::move(found), std::move(expected)}, key);
  }

  [[nodiscard]] std::uint64_t whole_number(const char* key) const {
    const MetadataValue& item = value(key);
    const auto* const number = std::get_if<std::uint64_t>(&item.value);
    if (item.type == MetadataType::u32 && number != nullptr && *number <= chunks_max) {
      return *number;
    }
    const bool is_large = item.type == MetadataType::u32 && number != nullptr;
    fail_key(key, "the value is not a count", is_large ? std::to_string(*number) : type_name(item),
             fmt::format("u32 up to {}", chunks_max));
  }

  // Returns nullopt if the array is empty or its items are not strings.
  [[nodiscard]] std::optional<std::string> first_dataset() const {
    const MetadataValue& item = value("imatrix.datasets");
    const auto* const array = std::get_if<MetadataArray>(&item.value);
    if (array == nullptr || array->empty()) return std::nullopt;
    const MetadataValue first = (*array)[0];
    const auto* const text = std::get_if<std::string>(&first.value);
    return text == nullptr ? std::nullopt : std::optional(until_nul(*text));
  }

  [[noreturn]] void fail_tensor(const char* code, const std::string& name, std::string message,
                                const TensorInfo& tensor, std::string expected) const {
    refuse(source_.path(),
           {code, std::move(message), tensor.name,
            fmt::format("{} {}", tensor.encoding.name(), tensor.shape.text()), std::move(expected),
            tensor.offset_begin},
           name);
  }

  [[nodiscard]] std::vector<float> floats(const std::string& name, const TensorInfo& tensor) const {
    const std::uint64_t count = tensor.shape.numel().value_or(0);
    if (tensor.encoding != Encoding(Dtype::f32)) {
      fail_tensor("im.dtype", name, "sums and counts must be F32", tensor, "F32");
    }
    if (count == 0)
      fail_tensor("im.shape", name, "the tensor is empty", tensor, "one value or more");
    std::vector<float> floats = read_floats(source_, tensor.offset_begin, count);
    require_importances(source_, name, "numbers", floats, tensor.offset_begin);
    return floats;
  }

  void read_entry(std::string name, const Entry& entry, ImportanceMatrix& matrix) const {
    if (entry.sums == nullptr || entry.counts == nullptr) {
      const TensorInfo& only = entry.sums != nullptr ? *entry.sums : *entry.counts;
      fail_tensor("im.pair", name, "an entry needs both sums and counts", only,
                  entry.sums != nullptr ? "a .counts tensor for it" : "an .in_sum2 tensor for it");
    }
    if (name.empty())
      fail_tensor("im.name", name, "an entry has an empty tensor name", *entry.sums, "a name");
    const std::vector<float> counts = floats(name, *entry.counts);
    std::vector<float> sums = floats(name, *entry.sums);
    if (sums.size() % counts.size() != 0) {
      fail_tensor("im.shape", name,
                  fmt::format("{} counts for {} sums", counts.size(), sums.size()), *entry.sums,
                  "the same number of sums for each count");
    }
    const std::size_t columns = sums.size() / counts.size();
    for (std::size_t i = 0; i < counts.size(); ++i) {
      const float count = std::round(counts[i]);
      for (float& each : std::span(sums).subspan(i * columns, columns)) {
        // An expert that saw no token gets equal weights for all columns.
        each = count > 0 ? each / count : 1;
      }
    }
    add_entry(source_, matrix, std::move(name), std::move(sums), entry.sums->offset_begin);
  }

  ByteSource& source_;
  FileHeader header_;
};

}  // namespace

ImportanceMatrix read_imatrix(ByteSource& source) {
  std::string magic(gguf_magic.size(), '\0');
  const bool has_magic = source.identity().bytes >= magic.size();
  if (has_magic) source.read(0, std::as_writable_bytes(std::span(magic)));
  const bool is_gguf = has_magic && magic == gguf_magic;
  ImportanceMatrix matrix = is_gguf ? GgufMatrixReader(source).read() : BinaryReader(source).read();
  matrix.path = source.path();
  return matrix;
}

ImportanceMatrix open_importance_matrix(const std::string& path, Storage* storage) {
  return only_errors([&] {
    Storage& from = storage == nullptr ? local_storage() : *storage;
    ImportanceMatrix matrix = read_imatrix(*from.open(path));
    matrix.path = path;
    return matrix;
  });
}

}  // namespace loadstone

#include "formats/zip_directory.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/checked.h"
#include "base/text.h"
#include "loadstone/name_hash.h"

namespace loadstone {

namespace {

constexpr std::uint32_t local_magic = 0x04034b50;
constexpr std::uint32_t entry_magic = 0x02014b50;
constexpr std::uint32_t end_magic = 0x06054b50;
constexpr std::uint32_t end64_magic = 0x06064b50;
constexpr std::uint32_t locator64_magic = 0x07064b50;
constexpr std::uint64_t local_bytes = 30;
constexpr std::uint64_t entry_bytes = 46;
constexpr std::uint64_t end_bytes = 22;
constexpr std::uint64_t end64_bytes = 56;
constexpr std::uint64_t locator64_bytes = 20;
constexpr std::uint64_t comment_bytes_max = 65535;
// For comparison, the directory of a checkpoint with 100,000 tensors takes 12 MB.
constexpr std::uint64_t directory_bytes_max = 64u << 20;
constexpr std::uint32_t in_zip64 = UINT32_MAX;
constexpr unsigned encrypted_flags = 0x0001 | 0x0040 | 0x2000;
constexpr unsigned sizes_follow_flag = 0x0008;

// Precondition: at least sizeof(Number) bytes follow `at`.
template <typename Number>
Number number_at(std::span<const std::byte> bytes, std::uint64_t at) {
  static_assert(std::is_unsigned_v<Number>);
  Number number = 0;
  std::memcpy(&number, bytes.data() + at, sizeof number);
  return number;
}

// The contents of the end record, which locates the directory.
struct End {
  std::uint64_t directory_begin = 0;
  std::uint64_t directory_bytes = 0;
  std::uint64_t entries = 0;
  std::uint64_t end_begin = 0;  // offset of the end record, where the directory must end
};

// Fields of a record that the directory or its zip64 part contains.
struct ZipEntry {
  std::string_view name;
  unsigned flags = 0;
  unsigned method = 0;
  std::uint64_t stored_bytes = 0;
  std::uint64_t bytes = 0;
  std::uint64_t header_begin = 0;
};

// Not thread-safe; used once.
class ZipReader {
 public:
  explicit ZipReader(ByteSource& source) : source_(source), file_bytes_(source.identity().bytes) {}

  ZipDirectory read() {
    const End end = find_end();
    std::vector<std::byte> bytes(end.directory_bytes);
    source_.read(end.directory_begin, bytes);
    directory_.directory_begin = end.directory_begin;
    read_entries(bytes, end);
    require_apart();
    return std::move(directory_);
  }

 private:
  [[noreturn]] void refuse(std::string message, std::string found, std::string expected,
                           std::string_view record = {},
                           std::optional<std::uint64_t> offset = {}) const {
    loadstone::refuse(
        source_.path(),
        {"pt.zip", std::move(message), "zip", std::move(found), std::move(expected), offset},
        record);
  }

  // ---- the end of the file

  End find_end() const {
    const std::uint64_t tail_bytes = std::min(file_bytes_, end_bytes + comment_bytes_max);
    std::vector<std::byte> tail(tail_bytes);
    source_.read(file_bytes_ - tail_bytes, tail);
    for (std::uint64_t back = end_bytes; back <= tail_bytes; ++back) {
      const auto end = std::span(tail).last(back);
      if (number_at<std::uint32_t>(end, 0) != end_magic) continue;
      if (number_at<std::uint16_t>(end, 20) != back - end_bytes) continue;
      return read_end(end, file_bytes_ - back);
    }
    refuse("the archive has no end record: it was not downloaded completely",
           "a file of " + bytes_text(file_bytes_), "the record that ends a zip archive");
  }

  End read_end(std::span<const std::byte> bytes, std::uint64_t begin) const {
    End end = {.directory_begin = number_at<std::uint32_t>(bytes, 16),
               .directory_bytes = number_at<std::uint32_t>(bytes, 12),
               .entries = number_at<std::uint16_t>(bytes, 10),
               .end_begin = begin};
    if (number_at<std::uint16_t>(bytes, 4) != 0 || number_at<std::uint16_t>(bytes, 6) != 0 ||
        number_at<std::uint16_t>(bytes, 8) != end.entries) {
      refuse("the file is one part of a split archive", "more than one disk", "one", {}, begin);
    }
    read_end64(end);
    const auto directory_end = checked_add(end.directory_begin, end.directory_bytes);
    if (!directory_end || *directory_end != end.end_begin) {
      refuse("the directory does not end where the end record begins",
             fmt::format("{} at {}", bytes_text(end.directory_bytes), end.directory_begin),
             fmt::format("its end record at {}", end.end_begin), {}, begin);
    }
    if (end.directory_bytes > directory_bytes_max ||
        end.entries > end.directory_bytes / entry_bytes) {
      refuse("the directory is too large, or too small for the number of its entries",
             fmt::format("{} entries in {}", end.entries, bytes_text(end.directory_bytes)),
             fmt::format("at most {}", bytes_text(directory_bytes_max)), {}, begin);
    }
    return end;
  }

  // Reads the 64-bit end record if the archive has one. torch always writes it; other writers only
  // for large archives.
  void read_end64(End& end) const {
    if (end.end_begin < locator64_bytes + end64_bytes) return;
    std::array<std::byte, locator64_bytes> locator;
    const std::uint64_t locator_begin = end.end_begin - locator64_bytes;
    source_.read(locator_begin, locator);
    if (number_at<std::uint32_t>(locator, 0) != locator64_magic) return;
    const auto begin = number_at<std::uint64_t>(locator, 8);
    if (begin > locator_begin - end64_bytes) {
      refuse("the end record is at a different offset than declared", std::to_string(begin),
             "a smaller offset", {}, locator_begin);
    }
    std::array<std::byte, end64_bytes> bytes;
    source_.read(begin, bytes);
    const auto size = number_at<std::uint64_t>(bytes, 4);
    if (number_at<std::uint32_t>(bytes, 0) != end64_magic || size != locator_begin - begin - 12) {
      refuse("the 64-bit end record is invalid", "other bytes", "its record", {}, begin);
    }
    const End in64 = {.directory_begin = number_at<std::uint64_t>(bytes, 48),
                      .directory_bytes = number_at<std::uint64_t>(bytes, 40),
                      .entries = number_at<std::uint64_t>(bytes, 32),
                      .end_begin = begin};
    const auto agrees = [](std::uint64_t small, std::uint64_t large, std::uint64_t none) {
      return small == none || small == large;
    };
    if (!agrees(end.directory_begin, in64.directory_begin, in_zip64) ||
        !agrees(end.directory_bytes, in64.directory_bytes, in_zip64) ||
        !agrees(end.entries, in64.entries, UINT16_MAX)) {
      refuse("the two end records contradict each other", fmt::format("{} entries", end.entries),
             fmt::format("{} entries", in64.entries), {}, begin);
    }
    end = in64;
  }

  // ---- the directory

  void read_entries(std::span<const std::byte> bytes, const End& end) {
    directory_.records.reserve(end.entries);
    NameSet names;
    std::uint64_t at = 0;
    for (std::uint64_t i = 0; i < end.entries; ++i) {
      const std::uint64_t offset = end.directory_begin + at;
      if (bytes.size() - at < entry_bytes || number_at<std::uint32_t>(bytes, at) != entry_magic) {
        refuse("the directory contains bytes that are not an entry", "other bytes",
               fmt::format("entry {} of {}", i, end.entries), {}, offset);
      }
      const auto fixed = bytes.subspan(at, entry_bytes);
      const std::uint64_t name_bytes = number_at<std::uint16_t>(fixed, 28);
      const std::uint64_t extra_bytes = number_at<std::uint16_t>(fixed, 30);
      const std::uint64_t comment_bytes = number_at<std::uint16_t>(fixed, 32);
      const std::uint64_t rest = name_bytes + extra_bytes + comment_bytes;
      if (rest > bytes.size() - at - entry_bytes) {
        refuse("an entry exceeds the directory", bytes_text(rest),
               bytes_text(bytes.size() - at - entry_bytes), {}, offset);
      }
      ZipEntry entry = {.name = as_text(bytes.subspan(at + entry_bytes, name_bytes)),
                        .flags = number_at<std::uint16_t>(fixed, 8),
                        .method = number_at<std::uint16_t>(fixed, 10),
                        .stored_bytes = number_at<std::uint32_t>(fixed, 20),
                        .bytes = number_at<std::uint32_t>(fixed, 24),
                        .header_begin = number_at<std::uint32_t>(fixed, 42)};
      read_extra(entry, bytes.subspan(at + entry_bytes + name_bytes, extra_bytes), offset);
      if (!names.insert(entry.name).second) refuse_twice(entry, offset);
      add_record(entry, offset);
      at += entry_bytes + rest;
    }
    if (at != bytes.size()) {
      refuse("the directory has bytes after its last entry", bytes_text(bytes.size() - at), "none",
             {}, end.directory_begin + at);
    }
  }

  [[noreturn]] void refuse_twice(const ZipEntry& entry, std::uint64_t offset) const {
    loadstone::refuse(source_.path(),
                      {"pt.duplicate", "the archive contains two records with the same name", "zip",
                       "a second record", "one", offset},
                      entry.name);
  }

  // Reads the 64-bit fields. Only fields whose 32-bit value is the placeholder are present.
  void read_extra(ZipEntry& entry, std::span<const std::byte> extra, std::uint64_t offset) const {
    while (extra.size() >= 4) {
      const auto id = number_at<std::uint16_t>(extra, 0);
      const std::uint64_t size = number_at<std::uint16_t>(extra, 2);
      if (size > extra.size() - 4) break;
      auto field = extra.subspan(4, size);
      extra = extra.subspan(4 + size);
      if (id != 1) continue;
      for (std::uint64_t* number : {&entry.bytes, &entry.stored_bytes, &entry.header_begin}) {
        if (*number != in_zip64) continue;
        if (field.size() < 8) {
          refuse("the 64-bit part of the entry is truncated", bytes_text(size),
                 "8 bytes for each number", entry.name, offset);
        }
        *number = number_at<std::uint64_t>(field, 0);
        field = field.subspan(8);
      }
      return;
    }
  }

  void add_record(const ZipEntry& entry, std::uint64_t offset) {
    if ((entry.flags & encrypted_flags) != 0) {
      refuse("the record is encrypted", fmt::format("flags 0x{:04x}", entry.flags),
             "a record without encryption", entry.name, offset);
    }
    ZipRecord record = {.name = std::string(entry.name),
                        .header_begin = entry.header_begin,
                        .data_begin = 0,
                        .bytes = entry.bytes,
                        .is_compressed = entry.method != 0};
    if (!record.is_compressed && entry.stored_bytes != entry.bytes) {
      refuse("the record's stored size differs from its real size", bytes_text(entry.stored_bytes),
             bytes_text(entry.bytes), entry.name, offset);
    }
    record.data_begin = check_local(entry, record);
    const std::uint64_t room = directory_.directory_begin - record.data_begin;
    if (entry.stored_bytes > room) {
      refuse("the record extends into the directory", bytes_text(entry.stored_bytes),
             "at most " + bytes_text(room), entry.name, offset);
    }
    record_ends_.push_back(record.data_begin + entry.stored_bytes);
    directory_.records.push_back(std::move(record));
  }

  // Checks the local header against the directory's entry, because readers of a stream use the
  // local header. Returns the offset of the data.
  std::uint64_t check_local(const ZipEntry& entry, const ZipRecord& record) const {
    const std::uint64_t begin = record.header_begin;
    const std::uint64_t room_end = directory_.directory_begin;
    if (begin > room_end || room_end - begin < local_bytes + entry.name.size()) {
      refuse("the record begins after the end of all records", std::to_string(begin),
             fmt::format("an offset before {}", room_end), entry.name, begin);
    }
    std::vector<std::byte> bytes(local_bytes + entry.name.size());
    source_.read(begin, bytes);
    const std::span<const std::byte> local(bytes);
    const std::uint64_t name_bytes = number_at<std::uint16_t>(local, 26);
    if (number_at<std::uint32_t>(local, 0) != local_magic || name_bytes != entry.name.size() ||
        as_text(local.subspan(local_bytes)) != entry.name) {
      refuse("the header before the data belongs to a different record",
             "'" + printable(as_text(local.subspan(local_bytes))) + "'",
             "the name in the directory", entry.name, begin);
    }
    const unsigned flags = number_at<std::uint16_t>(local, 6);
    const auto stored = number_at<std::uint32_t>(local, 18);
    const auto size = number_at<std::uint32_t>(local, 22);
    const bool later = (flags & sizes_follow_flag) != 0;
    const auto agrees = [&](std::uint32_t here, std::uint64_t there) {
      return here == there || here == in_zip64 || (later && here == 0);
    };
    if ((flags & encrypted_flags) != 0 || number_at<std::uint16_t>(local, 8) != entry.method ||
        !agrees(stored, entry.stored_bytes) || !agrees(size, entry.bytes)) {
      refuse("the header before the data contradicts the directory",
             fmt::format("method {}, {}", number_at<std::uint16_t>(local, 8), bytes_text(size)),
             fmt::format("method {}, {}", entry.method, bytes_text(entry.bytes)), entry.name,
             begin);
    }
    const std::uint64_t data_begin =
        begin + local_bytes + name_bytes + number_at<std::uint16_t>(local, 28);
    if (data_begin > room_end) {
      refuse("the record's data begins after the end of all records", std::to_string(data_begin),
             fmt::format("an offset before {}", room_end), entry.name, begin);
    }
    return data_begin;
  }

  // Requires that no records overlap and that the first begins at offset 0, so that all readers
  // find the same records.
  void require_apart() const {
    std::vector<std::size_t> order(directory_.records.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    const auto begin_of = [&](std::size_t i) { return directory_.records[i].header_begin; };
    std::ranges::sort(order, {}, begin_of);
    std::uint64_t end = 0;
    for (const std::size_t i : order) {
      const ZipRecord& record = directory_.records[i];
      if (record.header_begin < end || (end == 0 && record.header_begin != 0)) {
        refuse(end == 0 ? "the archive does not begin with a record" : "two records overlap",
               fmt::format("a record at {}", record.header_begin), fmt::format("one at {}", end),
               record.name, record.header_begin);
      }
      end = record_ends_[i];
    }
  }

  ByteSource& source_;
  std::uint64_t file_bytes_;
  ZipDirectory directory_;
  std::vector<std::uint64_t> record_ends_;
};

}  // namespace

ZipDirectory read_zip_directory(ByteSource& source) { return ZipReader(source).read(); }

}  // namespace loadstone

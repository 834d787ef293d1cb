#include "formats/sniff.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "base/named.h"
#include "base/text.h"
#include "base/words.h"

namespace loadstone {

namespace {

bool starts_with_any(std::string_view text, std::span<const std::string_view> beginnings) noexcept {
  return std::ranges::any_of(
      beginnings, [&](std::string_view each) { return text.substr(0, each.size()) == each; });
}

bool is_html(std::string_view text) noexcept {
  text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
  if (text.empty() || text.front() != '<') return false;
  constexpr std::array<std::string_view, 6> tags = {"!doctype", "html", "head",
                                                    "body",     "?xml", "!--"};
  return starts_with_any(lowered(text.substr(1, 16)), tags);
}

// If bytes 6 and 7 are zero, the magic may be the length of a safetensors header, which is below
// 2^48.
bool is_archive(std::string_view text) noexcept {
  constexpr std::array<std::string_view, 4> magics = {
      "\xfd"
      "7zXZ",
      "7z\xbc\xaf\x27\x1c", "\x28\xb5\x2f\xfd", "BZh"};
  if (text.size() < 8 || text.substr(6, 2) == std::string_view("\0\0", 2)) return false;
  return starts_with_any(text, magics) || text.starts_with("\x1f\x8b\x08");
}

bool is_printable(std::string_view text) noexcept {
  return std::ranges::all_of(text, [](unsigned char byte) {
    return (byte >= 0x20 && byte < 0x7f) || byte == '\n' || byte == '\r' || byte == '\t';
  });
}

bool all_zero(std::span<const std::byte> bytes) noexcept {
  return std::ranges::all_of(bytes, [](std::byte each) { return each == std::byte{0}; });
}

}  // namespace

std::string_view describe(FileKind kind) noexcept {
  return name_among(
      {"bytes of an unknown format", "a safetensors file", "a GGUF file",
       "a ggml file from before GGUF", "a zip archive (torch.save writes those)",
       "a Python pickle (old torch.save wrote those)", "a compressed archive", "an HDF5 file",
       "a git-lfs pointer: a placeholder for a file that was not downloaded", "an HTML page",
       "a text file", "only zero bytes, as left by a download that was never written"},
      kind);
}

FileKind sniff(std::span<const std::byte> beginning, std::uint64_t file_bytes) noexcept {
  const std::string_view text = as_text(beginning);
  constexpr std::array<std::string_view, 4> legacy = {"tjgg", "lmgg", "fmgg", "algg"};
  constexpr std::array<std::string_view, 3> zip = {"PK\x03\x04", "PK\x05\x06", "PK\x07\x08"};
  if (text.substr(0, 4) == "GGUF") return FileKind::gguf;
  // Checked before the other magics, because the length of a safetensors header can equal them.
  if (text.size() >= 9 && text[8] == '{' && text.substr(6, 2) == std::string_view("\0\0", 2)) {
    return FileKind::safetensors;
  }
  if (starts_with_any(text, legacy)) return FileKind::legacy_ggml;
  if (starts_with_any(text, zip)) return FileKind::torch_zip;
  // The length of a safetensors header may also begin with 0x80 0x02 (640 bytes), but its upper
  // four bytes are zero. In a pickle they are not.
  if (text.size() >= 8 && text[0] == '\x80' && text[1] >= 1 && text[1] <= 5 &&
      text.substr(4, 4) != std::string_view("\0\0\0\0", 4)) {
    return FileKind::torch_pickle;
  }
  if (is_archive(text)) return FileKind::archive;
  if (text.starts_with("\x89HDF\r\n\x1a\n")) return FileKind::hdf5;
  if (text.starts_with("version https://git-lfs")) return FileKind::git_lfs_pointer;
  if (is_html(text)) return FileKind::html;
  if (file_bytes > 8 && !text.empty() && all_zero(beginning)) return FileKind::zeros;
  if (text.size() >= 8 && is_printable(text.substr(0, 8))) return FileKind::text;
  return FileKind::unknown;
}

FileKind sniff(ByteSource& source) {
  const std::uint64_t file_bytes = source.identity().bytes;
  std::vector<std::byte> bytes;
  const auto read = [&](std::uint64_t count) {
    bytes.resize(std::min(file_bytes, count));
    source.read(0, bytes);
  };
  // Nine bytes identify a safetensors or GGUF file, so that no data of a valid file is read.
  read(9);
  FileKind kind = sniff(bytes, file_bytes);
  if (kind == FileKind::safetensors || kind == FileKind::gguf) return kind;
  read(512);
  kind = sniff(bytes, file_bytes);
  if (kind != FileKind::zeros) return kind;
  // Reads more, so that a file that merely begins with zeros is not reported as all zeros.
  read(65536);
  return all_zero(bytes) ? FileKind::zeros : FileKind::unknown;
}

}  // namespace loadstone

#include "formats/torch.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "formats/sniff.h"
#include "formats/torch_pickle.h"
#include "formats/torch_state.h"
#include "formats/torch_storages.h"
#include "formats/zip_directory.h"
#include "loadstone/name_hash.h"

namespace loadstone {

namespace {

constexpr std::string_view pickle_name = "data.pkl";
constexpr std::uint64_t byteorder_bytes_max = 16;
constexpr std::uint64_t numel_bytes = 8;
// Maximum length of the archive's folder, which is part of the name of each storage's record.
constexpr std::size_t root_bytes_max = 1024;
// The magic number of files from torch before 1.6, lowest byte first.
constexpr std::string_view legacy_magic = "\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";
constexpr std::int64_t legacy_protocol = 1001;

// Base of the readers of both layouts. Not thread-safe.
class TorchReader {
 public:
  explicit TorchReader(ByteSource& source)
      : source_(source), path_(source.path()), warnings_(source.path()) {
    header_.shard.path = path_;
    header_.shard.format = FileFormat::torch;
    header_.shard.identity = source.identity();
  }

 protected:
  [[noreturn]] void refuse(HeaderProblem problem, std::string_view culprit = {}) const {
    loadstone::refuse(path_, std::move(problem), culprit);
  }

  [[noreturn]] void refuse_byteorder(std::string_view field, std::string found) const {
    refuse({"pt.byteorder", "the file was written on a big-endian machine", field, std::move(found),
            "little-endian values (load the file with torch on that machine and save it as "
            "safetensors)"});
  }

  FileHeader finish(const Pickle& pickle, const TorchStorages& storages) {
    header_.tensors = read_state({path_, header_.shard.identity.bytes, pickle, storages}, warnings_,
                                 header_.findings);
    std::ranges::stable_sort(header_.tensors, {}, &TensorInfo::offset_begin);
    header_.shard.header_digest = header_digest(source_, header_.shard);
    for (Finding& finding : warnings_.take()) header_.findings.push_back(std::move(finding));
    return std::move(header_);
  }

  ByteSource& source_;
  std::string path_;
  Warnings warnings_;
  FileHeader header_;
};

// ---- a zip archive

class TorchZipReader : TorchReader {
 public:
  using TorchReader::TorchReader;

  FileHeader read() {
    directory_ = read_zip_directory(source_);
    const std::string root = find_root();
    require_state_dict(root);
    warn_about_others(root);
    for (const ZipRecord& record : directory_.records) records_.emplace(record.name, &record);
    check_byteorder(root);
    const ZipRecord& record = *records_.at(root + std::string(pickle_name));
    require_readable(record);
    const Pickle pickle = read_pickle(source_, record.data_begin, record.data_end(), warnings_);
    if (pickle.offset_end != record.data_end()) {
      warnings_.add("pt.trailing", pickle_name, "STOP",
                    "the file has bytes after the end of the pickle",
                    bytes_text(record.data_end() - pickle.offset_end), "none");
    }
    TorchStorages storages = collect_storages(path_, pickle);
    find_storages(root, storages);
    find_data();
    return finish(pickle, storages);
  }

 private:
  [[noreturn]] void refuse_record(const char* code, std::string message, std::string_view record,
                                  std::string found, std::string expected) const {
    refuse({code, std::move(message), "zip", std::move(found), std::move(expected)}, record);
  }

  // Returns the folder of the first data.pkl, with a trailing slash.
  [[nodiscard]] std::string find_root() const {
    for (const ZipRecord& record : directory_.records) {
      const std::size_t slash = record.name.find('/');
      if (slash == std::string::npos || slash == 0 || slash > root_bytes_max) continue;
      if (record.name.substr(slash + 1) == pickle_name) return record.name.substr(0, slash + 1);
    }
    refuse_record("pt.no_pickle", "the archive was not written by torch", pickle_name,
                  fmt::format("{} records, none of this name", directory_.records.size()),
                  "FOLDER/data.pkl");
  }

  void require_state_dict(const std::string& root) const {
    for (const ZipRecord& record : directory_.records) {
      const bool is_script =
          record.name == root + "constants.pkl" || record.name.starts_with(root + "code/");
      if (!is_script) continue;
      refuse_record("pt.torchscript", "the file is a TorchScript program, not a state dict",
                    record.name, "TorchScript", "a state dict saved by torch.save");
    }
  }

  void warn_about_others(const std::string& root) {
    for (const ZipRecord& record : directory_.records) {
      const std::string_view name = record.name;
      const bool leaves = name.starts_with('/') || name.starts_with("../") ||
                          name.find("/../") != std::string_view::npos || name.ends_with("/..") ||
                          name.find('\\') != std::string_view::npos;
      if (leaves) {
        warnings_.add("pt.zip", name, "zip", "a record's name leads out of the archive", "a path",
                      "a name below " + root);
      } else if (!name.starts_with(root)) {
        warnings_.add("pt.duplicate", name, "zip", "the archive contains a second folder",
                      "a record", "records below " + root);
      }
    }
  }

  // Files from before torch 2.1 lack this record, and are little-endian.
  void check_byteorder(const std::string& root) {
    const auto found = records_.find(root + "byteorder");
    if (found == records_.end()) return;
    const ZipRecord& record = *found->second;
    require_stored(record);
    std::string text;
    if (record.bytes <= byteorder_bytes_max) {
      text.resize(record.bytes);
      source_.read(record.data_begin, std::as_writable_bytes(std::span(text)));
    }
    if (text != "little") refuse_byteorder("byteorder", "'" + printable(text) + "'");
  }

  void require_readable(const ZipRecord& record) const {
    if (record.bytes > pickle_bytes_max) {
      refuse_record("pt.pickle_too_large", "the pickle is larger than that of any checkpoint",
                    record.name, bytes_text(record.bytes),
                    "at most " + bytes_text(pickle_bytes_max));
    }
    require_stored(record);
  }
  void require_stored(const ZipRecord& record) const {
    if (!record.is_compressed) return;
    refuse_record("pt.compressed", "the record is compressed, so loadstone cannot read parts of it",
                  record.name, "a compressed record", "a stored one, as torch.save writes it");
  }

  void find_storages(const std::string& root, TorchStorages& storages) const {
    for (auto& [key, storage] : storages) {
      const auto found = records_.find(fmt::format("{}data/{}", root, key));
      if (found == records_.end()) continue;  // an error only if a tensor needs the storage
      const ZipRecord& record = *found->second;
      require_stored(record);
      if (record.bytes != storage.bytes) {
        refuse_record("pt.storage_size",
                      fmt::format("storage '{}' has a different size than declared", key),
                      record.name, bytes_text(record.bytes),
                      fmt::format("{}, {} elements", bytes_text(storage.bytes), storage.elements));
      }
      storage.file_begin = record.data_begin;
      storage.is_found = true;
    }
  }

  // All bytes from the first to the last storage count as data, even if no tensor uses them.
  void find_data() {
    std::uint64_t begin = directory_.directory_begin;
    std::uint64_t end = 0;
    for (const ZipRecord& record : directory_.records) {
      if (record.name.find("/data/") == std::string::npos || record.is_compressed) continue;
      begin = std::min(begin, record.data_begin);
      end = std::max(end, record.data_end());
    }
    header_.shard.data_begin = begin;
    header_.shard.tail_begin = std::max(begin, end);
  }

  ZipDirectory directory_;
  NameMap<const ZipRecord*> records_;
};

// ---- the layout before torch 1.6: pickles one after the other, then the storages

class TorchLegacyReader : TorchReader {
 public:
  using TorchReader::TorchReader;

  FileHeader read() {
    file_bytes_ = header_.shard.identity.bytes;
    const Pickle magic = next_pickle();
    if (magic.kind(magic.root) != PickleKind::big_integer ||
        magic.text(magic.root) != legacy_magic) {
      refuse({"pt.not_torch", "the pickle was not written by torch", "magic",
              magic.describe(magic.root), "torch's magic number"});
    }
    const Pickle protocol = next_pickle();
    if (protocol.kind(protocol.root) != PickleKind::integer ||
        protocol.node(protocol.root).number != legacy_protocol) {
      refuse({"pt.protocol", "loadstone does not support this protocol of torch's files",
              "protocol", protocol.describe(protocol.root), std::to_string(legacy_protocol)});
    }
    check_machine(next_pickle());
    const Pickle pickle = next_pickle();
    TorchStorages storages = collect_storages(path_, pickle);
    const Pickle keys = next_pickle();
    header_.shard.data_begin = at_;
    find_storages(keys, storages);
    header_.shard.tail_begin = at_;
    if (at_ != file_bytes_) {
      warnings_.add("pt.trailing", "file", "file", "the file has bytes after the last storage",
                    bytes_text(file_bytes_ - at_), "none");
    }
    return finish(pickle, storages);
  }

 private:
  Pickle next_pickle() {
    Pickle pickle = read_pickle(source_, at_, file_bytes_, warnings_);
    at_ = pickle.offset_end;
    return pickle;
  }

  void check_machine(const Pickle& machine) const {
    if (machine.kind(machine.root) != PickleKind::dict) refuse_machine(machine, machine.root);
    const auto& items = machine.items(machine.root);
    for (std::size_t i = 0; i + 1 < items.size(); i += 2) {
      const bool is_endian =
          machine.kind(items[i]) == PickleKind::text && machine.text(items[i]) == "little_endian";
      if (!is_endian) continue;
      if (machine.kind(items[i + 1]) != PickleKind::boolean) refuse_machine(machine, items[i + 1]);
      if (machine.node(items[i + 1]).number == 0) {
        refuse_byteorder("sys_info", "little_endian False");
      }
    }
  }

  [[noreturn]] void refuse_machine(const Pickle& machine, std::uint32_t node) const {
    refuse({"pt.byteorder", "the file does not specify its byte order", "sys_info",
            machine.describe(node), "{'little_endian': True, ...}"});
  }

  // The storages are in the order of the list. Each begins with its number of elements.
  void find_storages(const Pickle& keys, TorchStorages& storages) {
    const bool is_list = keys.kind(keys.root) == PickleKind::list;
    if (!is_list) refuse_key(keys, keys.root, "a list of keys");
    for (const std::uint32_t item : keys.items(keys.root)) {
      if (keys.kind(item) != PickleKind::text) refuse_key(keys, item, "a key");
      const auto found = storages.find(keys.text(item));
      if (found == storages.end() || found->second.is_found) {
        refuse_key(keys, item, "each storage of the pickle once");
      }
      find_storage(found->first, found->second);
    }
  }

  void find_storage(const std::string& key, TorchStorage& storage) {
    const auto bad = [&](std::string_view field, std::string found, std::string expected) {
      refuse({"pt.storage_size",
              fmt::format("storage '{}' has a different size than declared", key), field,
              std::move(found), std::move(expected), at_});
    };
    if (file_bytes_ - at_ < numel_bytes) {
      bad("file", bytes_text(file_bytes_ - at_), "8 bytes and the storage");
    }
    std::array<std::byte, numel_bytes> raw;
    source_.read(at_, raw);
    std::uint64_t numel = 0;
    std::memcpy(&numel, raw.data(), sizeof numel);
    if (numel != storage.elements) {
      bad("numel", counted(numel, "element"), fmt::format("{}", storage.elements));
    }
    const std::uint64_t room = file_bytes_ - at_ - numel_bytes;
    if (storage.bytes > room) bad("file", bytes_text(room), bytes_text(storage.bytes));
    storage.file_begin = at_ + numel_bytes;
    storage.is_found = true;
    at_ = storage.file_begin + storage.bytes;
  }

  [[noreturn]] void refuse_key(const Pickle& keys, std::uint32_t node, std::string expected) const {
    refuse({"pt.storage_missing", "the list of storages differs from the storages in the pickle",
            "storage", keys.describe(node), std::move(expected)});
  }

  std::uint64_t file_bytes_ = 0;
  std::uint64_t at_ = 0;
};

// Returns true if the first name in the archive is one that torch 0.1 wrote.
bool is_legacy_tar(ByteSource& source) {
  constexpr std::array<std::string_view, 4> names = {"sys_info", "storages", "tensors", "pickle"};
  constexpr std::size_t header_bytes = 257;
  if (source.identity().bytes < header_bytes) return false;
  std::string text(header_bytes, '\0');
  source.read(0, std::as_writable_bytes(std::span(text)));
  const std::string_view name = std::string_view(text).substr(0, text.find('\0'));
  return std::ranges::find(names, name) != names.end();
}

}  // namespace

bool is_torch_name(std::string_view file_name) noexcept {
  constexpr std::array<std::string_view, 4> endings = {".bin", ".pt", ".pth", ".ckpt"};
  return std::ranges::any_of(endings,
                             [&](std::string_view each) { return file_name.ends_with(each); });
}

bool is_extra_state(std::string_view name) noexcept {
  constexpr std::string_view word = "_extra_state";
  const std::size_t at = name.find(word);
  if (at == std::string_view::npos || (at > 0 && name[at - 1] != '.')) return false;
  const std::string_view rest = name.substr(at + word.size());
  return rest.empty() || rest.front() == '.' || rest.front() == '/';
}

FileHeader read_torch(ByteSource& source) {
  const std::uint64_t file_bytes = source.identity().bytes;
  if (file_bytes < 4) {
    refuse(source.path(), {"pt.file_too_small", "the file is too small to be a checkpoint", "file",
                           "a file of " + bytes_text(file_bytes), "a checkpoint", 0});
  }
  const FileKind kind = sniff(source);
  if (kind == FileKind::torch_zip) return TorchZipReader(source).read();
  if (kind == FileKind::torch_pickle) return TorchLegacyReader(source).read();
  const bool is_tar = is_legacy_tar(source);
  refuse(source.path(), {is_tar ? "pt.legacy_tar" : "pt.not_torch",
                         is_tar ? "a tar archive of torch 0.1, which loadstone does not read; "
                                  "convert it with torch.load and torch.save"
                                : "the file is not in one of torch's formats",
                         "file", is_tar ? "a tar archive" : std::string(describe(kind)),
                         "a zip archive, or torch's pickles", 0});
}

}  // namespace loadstone

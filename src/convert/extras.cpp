#include "convert/extras.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "base/text.h"
#include "convert/container.h"
#include "convert/output.h"
#include "convert/state.h"
#include "convert/sub_folders.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

// The largest tokenizers have some hundred megabytes; what is larger holds weights.
constexpr std::uint64_t extra_bytes_max = 1u << 30;
constexpr std::uint64_t copy_bytes = 1 << 20;

[[noreturn]] void refuse_extra(std::string path, std::string message, std::string found = {}) {
  throw Error("convert.extra", std::move(message),
              {.path = std::move(path), .found = std::move(found)});
}

// The file with the content, unless that is text. A link is not followed.
std::shared_ptr<ByteSource> source_of(const ExtraFile& extra, WritableStorage& storage) {
  if (extra.copy_of.empty() || extra.source) return extra.source;
  std::shared_ptr<ByteSource> file;
  const int problem = storage.open(extra.copy_of, file);
  if (problem == ELOOP) refuse_extra(extra.copy_of, "a link is not copied");
  if (problem == ENXIO || problem == EISDIR) {
    refuse_extra(extra.copy_of, "only regular files are copied");
  }
  if (problem == 0) return file;
  const char* const code = problem == ENOENT   ? "io.not_found"
                           : problem == EACCES ? "io.denied"
                                               : "io.open";
  throw Error(code, "cannot open the file that is to be copied",
              {.path = extra.copy_of, .system_error = problem});
}

std::uint64_t bytes_of(const ExtraFile& extra, WritableStorage& storage) {
  const auto source = source_of(extra, storage);
  const std::uint64_t bytes = source ? source->identity().bytes : extra.text.size();
  if (source && bytes > extra_bytes_max) {
    refuse_extra(extra.copy_of, "too large for a companion file", human_bytes(bytes));
  }
  return bytes;
}

// Brings all bytes of the file that is copied. Returns how many there are.
template <typename Take>
std::uint64_t read_all(const ExtraFile& extra, WritableStorage& storage, const Take& take) {
  const auto source = source_of(extra, storage);
  const FileIdentity before = source->identity();
  std::vector<std::byte> buffer(std::min<std::uint64_t>(before.bytes, copy_bytes));
  try {
    for (std::uint64_t done = 0; done < before.bytes;) {
      const auto some = std::span(buffer).first(std::min(before.bytes - done, copy_bytes));
      source->read(done, some);
      take(done, std::span<const std::byte>(some));
      done += some.size();
    }
    const FileIdentity after = source->identity();
    if (after.bytes == before.bytes && after.modified_ns == before.modified_ns) return after.bytes;
  } catch (const Error& error) {
    if (error.code() != "io.short_read") throw;
  }
  throw Error("io.changed", "the file changed while it was copied", {.path = extra.copy_of});
}

void add_content(const ExtraFile& extra, WritableStorage& storage, Digest& digest) {
  add_text(digest, extra.text);
  if (extra.copy_of.empty()) return;
  const auto add = [&](std::uint64_t /*at*/, std::span<const std::byte> piece) {
    digest.update(piece);
  };
  add_number(digest, read_all(extra, storage, add));
}

}  // namespace

void check_extras(const Conversion& conversion, WritableStorage& storage) {
  std::set<std::string_view> names;
  const auto is_model = [&](const std::string& name) {
    return name.find('/') == std::string::npos &&
           container_of(conversion.format).is_model_name(name);
  };
  if (conversion.one_file && !conversion.extras.empty()) {
    refuse_extra({}, "a single file has no companion files: name a folder");
  }
  for (const ExtraFile& extra : conversion.extras) {
    if (!is_path_below(extra.name)) {
      refuse_extra({}, "not a name for a file in the target", printable(extra.name));
    }
    if (is_model(extra.name)) {
      refuse_extra({}, "a companion file has the name of a file of the model",
                   printable(extra.name));
    }
    if (!names.insert(extra.name).second) {
      refuse_extra({}, "two companion files have the same name", printable(extra.name));
    }
    static_cast<void>(bytes_of(extra, storage));
  }
  for (const ExtraFile& extra : conversion.extras) {
    for_each_folder(extra.name, [&](const std::string& folder) {
      const bool is_taken = names.contains(folder) || is_model(folder);
      if (is_taken) refuse_extra({}, "a file and a folder have one name", printable(folder));
    });
  }
}

std::uint64_t extra_bytes(const Conversion& conversion, WritableStorage& storage) {
  std::uint64_t bytes = 0;
  for (const ExtraFile& extra : conversion.extras) bytes += bytes_of(extra, storage);
  return bytes;
}

bool is_extra_name(const Conversion& conversion, const std::string& name) noexcept {
  return std::ranges::find(conversion.extras, name, &ExtraFile::name) != conversion.extras.end();
}

bool has_folder(const Conversion& conversion, const std::string& name) noexcept {
  return std::ranges::any_of(conversion.extras, [&](const ExtraFile& extra) {
    return extra.name.size() > name.size() && extra.name.starts_with(name) &&
           extra.name[name.size()] == '/';
  });
}

bool is_extra_folder(const Conversion& conversion, WritableStorage& storage,
                     const std::string& path, const std::string& name) {
  const std::vector<std::string> below = paths_below(storage, path + "/" + name);
  return !below.empty() && std::ranges::all_of(below, [&](const std::string& each) {
    return is_extra_name(conversion, name + "/" + each);
  });
}

void add_extras(const Conversion& conversion, WritableStorage& storage, Digest& digest) {
  for (const ExtraFile& extra : conversion.extras) {
    add_text(digest, extra.name);
    add_content(extra, storage, digest);
  }
}

bool have_same_bytes(const ExtraFile& a, const ExtraFile& b) {
  WritableStorage& storage = local_storage().writable();
  if (bytes_of(a, storage) != bytes_of(b, storage)) return false;
  Digest first;
  Digest second;
  add_content(a, storage, first);
  add_content(b, storage, second);
  return first.hex() == second.hex();
}

std::string text_of(const ExtraFile& extra) {
  std::string text = extra.text;
  if (extra.copy_of.empty()) return text;
  const auto add = [&](std::uint64_t /*at*/, std::span<const std::byte> piece) {
    text += as_text(piece);
  };
  read_all(extra, local_storage().writable(), add);
  return text;
}

std::uint64_t write_extra(WritableStorage& storage, const ExtraFile& extra,
                          const std::string& path) {
  const auto file = storage.create(path);
  std::uint64_t bytes = extra.text.size();
  if (extra.copy_of.empty()) {
    file->write(0, std::as_bytes(std::span(extra.text)));
  } else {
    bytes = read_all(extra, storage, [&](std::uint64_t at, std::span<const std::byte> piece) {
      file->write(at, piece);
    });
  }
  file->sync();
  return bytes;
}

}  // namespace loadstone

#include "convert/extras.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <span>
#include <vector>

#include "base/text.h"
#include "convert/container.h"
#include "convert/files.h"
#include "convert/output.h"
#include "convert/state.h"
#include "convert/sub_folders.h"
#include "loadstone/error.h"
#include "storage/new_file.h"

namespace loadstone {

namespace {

// The largest tokenizers have some hundred megabytes; what is larger holds weights.
constexpr std::uint64_t extra_bytes_max = 1u << 30;
constexpr std::size_t copy_bytes = 1 << 20;

[[noreturn]] void refuse_extra(std::string path, std::string message, std::string found = {}) {
  throw Error("convert.extra", std::move(message),
              {.path = std::move(path), .found = std::move(found)});
}

// The file itself: never what a link leads to, and never waiting for a pipe.
Descriptor open_extra(const std::string& path, struct stat& status) {
  Descriptor file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (file.get() < 0) {
    if (errno == ELOOP) refuse_extra(path, "a link is not copied");
    if (errno == ENXIO) refuse_extra(path, "only regular files are copied");
    Where where;
    where.path = path;
    where.system_error = errno;
    const char* const code = errno == ENOENT   ? "io.not_found"
                             : errno == EACCES ? "io.denied"
                                               : "io.open";
    throw Error(code, "cannot open the file that is to be copied", where);
  }
  if (::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    refuse_extra(path, "only regular files are copied");
  }
  if (static_cast<std::uint64_t>(status.st_size) > extra_bytes_max) {
    refuse_extra(path, "too large for a companion file",
                 human_bytes(static_cast<std::uint64_t>(status.st_size)));
  }
  return file;
}

std::uint64_t bytes_of(const ExtraFile& extra) {
  if (extra.source) {
    const std::uint64_t bytes = extra.source->identity().bytes;
    if (bytes > extra_bytes_max) {
      refuse_extra(extra.copy_of, "too large for a companion file", human_bytes(bytes));
    }
    return bytes;
  }
  if (extra.copy_of.empty()) return extra.text.size();
  struct stat status {};
  const Descriptor file = open_extra(extra.copy_of, status);
  return static_cast<std::uint64_t>(status.st_size);
}

// A source tells by itself that it has changed.
template <typename Take>
std::uint64_t read_byte_source(ByteSource& source, const Take& take) {
  const std::uint64_t bytes = source.identity().bytes;
  std::vector<std::byte> buffer(std::min<std::uint64_t>(bytes, copy_bytes));
  for (std::uint64_t done = 0; done < bytes;) {
    const auto some = std::span(buffer).first(std::min<std::uint64_t>(bytes - done, copy_bytes));
    source.read(done, some);
    take(done, std::span<const std::byte>(some));
    done += some.size();
  }
  return bytes;
}

// Brings all bytes of the file that is copied. Returns how many there are.
template <typename Take>
std::uint64_t read_all(const ExtraFile& extra, const Take& take) {
  if (extra.source) return read_byte_source(*extra.source, take);
  struct stat before {};
  const Descriptor source = open_extra(extra.copy_of, before);
  std::vector<std::byte> buffer(copy_bytes);
  std::uint64_t done = 0;
  while (true) {
    const ssize_t count =
        ::pread(source.get(), buffer.data(), buffer.size(), static_cast<off_t>(done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      Where where;
      where.path = extra.copy_of;
      where.system_error = errno;
      throw Error("io.read", "cannot read the file that is to be copied", where);
    }
    if (count == 0) break;
    take(done, std::span<const std::byte>(buffer).first(static_cast<std::size_t>(count)));
    done += static_cast<std::uint64_t>(count);
    if (done > extra_bytes_max) break;
  }
  struct stat after {};
  const bool is_same = ::fstat(source.get(), &after) == 0 && after.st_size == before.st_size &&
                       after.st_mtim.tv_sec == before.st_mtim.tv_sec &&
                       after.st_mtim.tv_nsec == before.st_mtim.tv_nsec;
  if (!is_same || done != static_cast<std::uint64_t>(before.st_size)) {
    throw Error("io.changed", "the file changed while it was copied", {.path = extra.copy_of});
  }
  return done;
}

void add_content(const ExtraFile& extra, Digest& digest) {
  add_text(digest, extra.text);
  if (extra.copy_of.empty()) return;
  const auto add = [&](std::uint64_t /*at*/, std::span<const std::byte> piece) {
    digest.update(piece);
  };
  add_number(digest, read_all(extra, add));
}

}  // namespace

void check_extras(const Conversion& conversion) {
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
    static_cast<void>(bytes_of(extra));
  }
  for (const ExtraFile& extra : conversion.extras) {
    for_each_folder(extra.name, [&](const std::string& folder) {
      const bool is_taken = names.contains(folder) || is_model(folder);
      if (is_taken) refuse_extra({}, "a file and a folder have one name", printable(folder));
    });
  }
}

std::uint64_t extra_bytes(const Conversion& conversion) {
  std::uint64_t bytes = 0;
  for (const ExtraFile& extra : conversion.extras) bytes += bytes_of(extra);
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

bool is_extra_folder(const Conversion& conversion, const std::string& path,
                     const std::string& name) {
  const std::vector<std::string> below = paths_below(path + "/" + name);
  return !below.empty() && std::ranges::all_of(below, [&](const std::string& each) {
    return is_extra_name(conversion, name + "/" + each);
  });
}

void add_extras(const Conversion& conversion, Digest& digest) {
  for (const ExtraFile& extra : conversion.extras) {
    add_text(digest, extra.name);
    add_content(extra, digest);
  }
}

bool have_same_bytes(const ExtraFile& a, const ExtraFile& b) {
  if (bytes_of(a) != bytes_of(b)) return false;
  Digest first;
  Digest second;
  add_content(a, first);
  add_content(b, second);
  return first.hex() == second.hex();
}

std::string text_of(const ExtraFile& extra) {
  std::string text = extra.text;
  if (extra.copy_of.empty()) return text;
  read_all(extra,
           [&](std::uint64_t /*at*/, std::span<const std::byte> piece) { text += as_text(piece); });
  return text;
}

std::uint64_t write_extra(WritableStorage& storage, const ExtraFile& extra,
                          const std::string& path) {
  const auto file = storage.create(path);
  std::uint64_t bytes = extra.text.size();
  if (extra.copy_of.empty()) {
    file->write(0, std::as_bytes(std::span(extra.text)));
  } else {
    bytes = read_all(
        extra, [&](std::uint64_t at, std::span<const std::byte> piece) { file->write(at, piece); });
  }
  file->sync();
  return bytes;
}

}  // namespace loadstone

// Determines the paths of a target and of the files next to it, from its name.
#include <fmt/format.h>

#include <filesystem>
#include <span>
#include <string_view>
#include <utility>

#include "base/digest.h"
#include "base/text.h"
#include "convert/write/files.h"
#include "convert/write/target.h"
#include "loadstone/error.h"
#include "storage/remote_path.h"

namespace loadstone {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view work_suffix = ".part";

// Returns the path without slashes and "." at its end. A path that ends in a name such as ".." is
// resolved, because the files next to the target contain the target's name.
std::string named_path(std::string path, WritableStorage& storage) {
  while (path.size() > 1 && (path.ends_with('/') || path.ends_with("/."))) path.pop_back();
  const std::string name = fs::path(path).filename().string();
  return name.empty() || name == "." || name == ".." ? storage.real_path(path) : path;
}

// Returns the name of a hidden file or folder next to the target. It depends only on the target's
// name, so that every run finds it.
std::string hidden_name(const std::string& path, std::string_view suffix) {
  constexpr std::size_t name_bytes_max = 255 - 16;
  std::string name = fs::path(path).filename().string();
  if (name.empty()) name = "folder";  // the root
  if (name.size() > name_bytes_max) {
    Digest digest;
    digest.update(std::as_bytes(std::span(name)));
    name = digest.hex();
  }
  return fmt::format(".loadstone-{}{}", name, suffix);
}

}  // namespace

std::string record_path(const std::string& target, WritableStorage& storage) {
  const std::string path = named_path(target, storage);
  const std::string parent = fs::path(path).parent_path().string();
  return (parent.empty() ? "." : parent) + "/" + hidden_name(path, ".done");
}

std::string work_inside(const TargetPlace& place) {
  return place.path + "/" + hidden_name(place.path, work_suffix);
}

[[noreturn]] static void refuse_parent(const std::string& parent) {
  std::string quoted;
  for (const char character : printable(parent, 400)) {
    quoted += character == '\'' ? std::string("'\\''") : std::string(1, character);
  }
  throw Error("io.not_found",
              fmt::format("the target's folder does not exist; create it: mkdir -p '{}'", quoted),
              {.path = parent});
}

TargetPlace place_of(const Conversion& conversion, const std::string& target,
                     WritableStorage& storage) {
  require_local(target);
  TargetPlace place;
  if (target.empty() || target.find('\0') != std::string::npos) {
    throw Error("convert.target", "the target has no name", {.path = target});
  }
  place.path = named_path(target, storage);
  place.parent = fs::path(place.path).parent_path().string();
  if (place.parent.empty()) place.parent = ".";
  const auto parent = storage.status(place.parent, true);
  if (!parent) refuse_parent(place.parent);
  if (parent->kind != EntryKind::folder) {
    throw Error("io.not_found", "the target's folder is not a folder", {.path = place.parent});
  }
  place.shown = place.path;
  place.record = record_path(place.path, storage);
  place.work = place.parent + "/" + hidden_name(place.path, work_suffix);
  if (conversion.is_split) {
    place.path = place.parent;
  } else if (!conversion.one_file && is_plain_folder(storage, work_inside(place))) {
    place.work = work_inside(place);
  }
  return place;
}

}  // namespace loadstone

#include "catalog/locate_remote.h"

#include "catalog/paths.h"
#include "loadstone/error.h"
#include "storage/remote_path.h"

namespace loadstone {

RemotePlace find_remote(Storage& storage, const std::string& path) {
  std::string place = storage.resolve(path);
  if (storage.kind(place) == EntryKind::file) {
    const std::string folder = parent_path(place);
    return {folder, name_below(folder, file_name(place))};
  }
  while (place.ends_with('/')) place.pop_back();
  return {std::move(place), {}};
}

std::optional<std::vector<std::string>> list_remote(Storage& storage, const std::string& folder) {
  if (is_http(folder)) return std::nullopt;
  try {
    return storage.list(folder);
  } catch (const Error& error) {
    const std::string& code = error.code();
    if (code != "io.denied" && code != "io.not_found" && code != "io.remote") throw;
    return std::nullopt;
  }
}

bool has_remote(Storage& storage, const std::string& path) {
  try {
    return storage.kind(path) == EntryKind::file;
  } catch (const Error& error) {
    if (error.code() != "io.not_found") throw;
    return false;
  }
}

}  // namespace loadstone

// Parses paths of other machines; contacts no host.
#pragma once

#include <string>
#include <string_view>

#include "loadstone/remote.h"

namespace loadstone {

[[nodiscard]] bool is_http(std::string_view path) noexcept;  // or https
[[nodiscard]] bool is_https(std::string_view path) noexcept;
[[nodiscard]] bool is_hub(std::string_view path) noexcept;
[[nodiscard]] bool is_s3(std::string_view path) noexcept;

// Returns a URL for messages and plans: without query, fragment, user and password. Other paths are
// unchanged: a file's name may contain such characters.
[[nodiscard]] std::string public_url(std::string_view url);
// Rejects a path to write to that is a URL and would become folders: Error "io.remote".
void require_local(const std::string& path);

// Encodes a file's name as part of a URL; keeps slashes.
[[nodiscard]] std::string encoded_path(std::string_view name);
// Also encodes slashes: for one name of a path, or a value of a query.
[[nodiscard]] std::string encoded_name(std::string_view name);
// The part of a path below the folder as the name of a file.
[[nodiscard]] std::string name_below(std::string_view folder, std::string_view path);

// hf://ORG/NAME[@REVISION][/FILE]
struct HubPath {
  std::string repository;         // "ORG/NAME"
  std::string revision = "main";  // a branch, a tag or a commit
  std::string file = {};          // empty, or ends in a slash: a folder

  [[nodiscard]] std::string text() const;
  // A commit is immutable.
  [[nodiscard]] bool is_pinned() const noexcept;
};
// Throws Error "io.remote" if the path does not have this form.
[[nodiscard]] HubPath parse_hub_path(std::string_view path);

}  // namespace loadstone

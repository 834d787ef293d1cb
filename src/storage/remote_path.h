// Parses paths of remote files, without any request.
#pragma once

#include <string>
#include <string_view>

#include "loadstone/remote.h"

namespace loadstone {

[[nodiscard]] bool is_http(std::string_view path) noexcept;  // or https
[[nodiscard]] bool is_https(std::string_view path) noexcept;
[[nodiscard]] bool is_hub(std::string_view path) noexcept;
[[nodiscard]] bool is_s3(std::string_view path) noexcept;

// Returns a URL for messages and plans, without query, fragment, user and password. Returns other
// paths unchanged, because a file's name may contain the same characters.
[[nodiscard]] std::string public_url(std::string_view url);
// Throws Error "io.remote" if a path to write to is a URL, which would be created as folders.
void require_local(const std::string& path);

// Encodes the name of a file as a part of a URL, and keeps slashes.
[[nodiscard]] std::string encoded_path(std::string_view name);
// Encodes slashes too, for a single component of a path or a value in a query.
[[nodiscard]] std::string encoded_name(std::string_view name);
// Converts a part of a path below the folder to a file name. Decodes it if the folder is a URL.
[[nodiscard]] std::string name_below(std::string_view folder, std::string_view path);

// hf://ORG/NAME[@REVISION][/FILE]
struct HubPath {
  std::string repository;         // "ORG/NAME"
  std::string revision = "main";  // a branch, a tag or a commit
  std::string file = {};          // empty or with a final slash if the path is a folder

  [[nodiscard]] std::string text() const;
  // Returns true if the revision is a commit, which is immutable.
  [[nodiscard]] bool is_pinned() const noexcept;
};
// Throws Error "io.remote" if the path does not have this form.
[[nodiscard]] HubPath parse_hub_path(std::string_view path);

}  // namespace loadstone

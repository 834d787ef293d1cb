#include "storage/remote_path.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <string>
#include <utility>

#include "base/text.h"
#include "base/words.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr std::string_view hub_scheme = "hf://";
constexpr std::string_view s3_scheme = "s3://";
constexpr std::string_view digits = "0123456789ABCDEF";
constexpr std::size_t commit_digits = 40;

bool has_scheme(std::string_view path, std::string_view scheme) noexcept {
  return path.size() >= scheme.size() &&
         std::ranges::equal(path.substr(0, scheme.size()), scheme, [](unsigned char a, char b) {
           return std::tolower(a) == static_cast<unsigned char>(b);
         });
}

bool is_unreserved(unsigned char byte) noexcept {
  constexpr std::string_view marks = "-._~/";
  return (byte < 0x80 && std::isalnum(byte) != 0) ||
         marks.find(static_cast<char>(byte)) != marks.npos;
}

int value_of(unsigned char digit) noexcept {
  const std::size_t at = digits.find(static_cast<char>(std::toupper(digit)));
  return at == std::string_view::npos ? -1 : static_cast<int>(at);
}

std::string decoded_path(std::string_view text) {
  std::string name;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool is_escape = text[i] == '%' && i + 2 < text.size();
    const int high = is_escape ? value_of(static_cast<unsigned char>(text[i + 1])) : -1;
    const int low = is_escape ? value_of(static_cast<unsigned char>(text[i + 2])) : -1;
    if (high < 0 || low < 0) {
      name += text[i];
      continue;
    }
    name += static_cast<char>(high * 16 + low);
    i += 2;
  }
  return name;
}

[[noreturn]] void refuse_hub_path(
    std::string_view path, std::string message = "this is not the path of a file on the hub") {
  throw Error("io.remote", std::move(message),
              {.path = printable(path, 400), .expected = "hf://ORG/NAME[@REVISION][/FILE]"});
}

}  // namespace

bool is_https(std::string_view path) noexcept { return has_scheme(path, "https://"); }
bool is_http(std::string_view path) noexcept {
  return is_https(path) || has_scheme(path, "http://");
}
bool is_hub(std::string_view path) noexcept { return has_scheme(path, hub_scheme); }
bool is_s3(std::string_view path) noexcept { return has_scheme(path, s3_scheme); }
bool is_remote(std::string_view path) noexcept {
  return is_http(path) || is_hub(path) || is_s3(path);
}

std::string public_url(std::string_view url) {
  return is_http(url) ? public_location(url) : std::string(url);
}

void require_local(const std::string& path) {
  if (!is_remote(path)) return;
  throw Error("io.remote", "loadstone can write only to this machine",
              {.path = path, .expected = "a path without a scheme"});
}

std::string encoded_path(std::string_view name) {
  std::string text;
  for (const char each : name) {
    const auto byte = static_cast<unsigned char>(each);
    if (is_unreserved(byte)) {
      text += each;
    } else {
      text += {'%', digits[byte >> 4], digits[byte & 15]};
    }
  }
  return text;
}

std::string encoded_name(std::string_view name) {
  std::string text = encoded_path(name);
  for (std::size_t at = text.find('/'); at != std::string::npos; at = text.find('/', at)) {
    text.replace(at, 1, "%2F");
  }
  return text;
}

std::string name_below(std::string_view folder, std::string_view path) {
  return is_http(folder) ? decoded_path(path) : std::string(path);
}

std::string HubPath::text() const {
  std::string path = std::string(hub_scheme) + repository + "@" + revision;
  return file.empty() ? path : path + "/" + file;
}

bool HubPath::is_pinned() const noexcept {
  return revision.size() == commit_digits &&
         std::ranges::all_of(revision, [](unsigned char byte) { return value_of(byte) >= 0; });
}

HubPath parse_hub_path(std::string_view path) {
  std::string_view rest = path.substr(hub_scheme.size());
  const std::size_t first = rest.find('/');
  if (first == 0 || first == std::string_view::npos) refuse_hub_path(path);
  const std::string owner = lowered(rest.substr(0, first));
  if (is_word(owner, "huggingface.co www.huggingface.co hf.co models datasets spaces")) {
    refuse_hub_path(
        path,
        fmt::format("hf:// is followed by the name of a model repository, not by '{}'", owner));
  }
  const std::size_t end = std::min(rest.find('/', first + 1), rest.size());
  const std::string_view name = rest.substr(0, end);
  const std::size_t at = std::min(name.find('@', first), name.size());
  HubPath found{.repository = std::string(name.substr(0, at))};
  if (at < name.size()) found.revision = decoded_path(name.substr(at + 1));
  if (end < rest.size()) found.file = rest.substr(end + 1);
  const bool is_name =
      first + 1 < at && !found.revision.empty() && found.repository.find("..") == std::string::npos;
  if (!is_name) refuse_hub_path(path);
  return found;
}

}  // namespace loadstone

#include "storage/remote/listing.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <utility>

#include "base/json_fields.h"
#include "base/text.h"
#include "loadstone/error.h"
#include "storage/remote/refusal.h"
#include "storage/remote_path.h"

namespace loadstone {

namespace {

// Limits of a list. Larger lists are rejected.
constexpr std::size_t page_bytes_max = 16 << 20;
constexpr std::size_t pages_max = 200;
constexpr std::size_t names_max = 200'000;

[[noreturn]] void fail(const char* code, const std::string& path, std::string message,
                       std::string found = {}, std::string expected = {}) {
  throw Error(code, std::move(message),
              {.path = path, .found = std::move(found), .expected = std::move(expected)});
}

// Stores a body in memory.
class TextSink final : public BodySink {
 public:
  explicit TextSink(const Address& address) : address_(address) {}

  void begin(const HttpResponse& response) override {
    text.clear();
    if (response.status != 200 || !is_plain(response)) {
      fail("io.remote", address_.path, "the host's response is not a list of files",
           fmt::format("status {} {}", response.status, printable(response.content_encoding)),
           "status 200");
    }
  }
  void take(std::span<const std::byte> bytes) override {
    if (bytes.size() > page_bytes_max - text.size()) {
      fail("io.remote", address_.path, "the list of the folder is too long", {},
           human_bytes(page_bytes_max));
    }
    text += as_text(bytes);
  }

  std::string text;

 private:
  const Address& address_;
};

[[noreturn]] void refuse_answer(const Address& address, const RemoteOptions& options,
                                const HttpResult& result) {
  const long status = result.response.status;
  std::string found = fmt::format("status {}", status);
  if (result.code != CURLE_OK) {
    if (is_certificate_problem(result.code)) {
      fail("io.tls", address.path, "the host's certificate is not trusted", result.problem);
    }
    fail("io.remote", address.path, "the connection failed", result.problem);
  }
  refuse_status(address, options, status, "folder");
  fail("io.remote", address.path, "the host refuses to list the folder", std::move(found));
}

struct Page {
  std::string text;
  HttpResponse response;
};

// Fetches one page. Follows redirects only on the same host, because a signature or token is meant
// for that host.
Page fetch(HttpClient& client, const Address& address, std::string url) {
  Backoff backoff = client.backoff();
  const std::string origin = origin_of(address.url);
  for (int hop = 0; hop <= redirects_max;) {
    TextSink sink(address);
    HttpResult result = client.get(
        {.url = url, .range = {}, .signing = address.signing, .path = address.path}, sink);
    const long status = result.response.status;
    if (result.code == CURLE_OK && status == 200) {
      return {std::move(sink.text), std::move(result.response)};
    }
    if (result.code == CURLE_OK && is_redirect(status)) {
      std::string to = redirected_url(url, result.response.location);
      if (origin_of(to) != origin) {
        fail("io.redirect", address.path,
             "the host redirects the request for the folder's list to a different host",
             printable(public_location(to), shown_bytes_max));
      }
      url = std::move(to);
      ++hop;
      continue;
    }
    if (!client.waits(backoff, result, address.path, false))
      refuse_answer(address, client.options(), result);
  }
  fail("io.redirect", address.path, "the host redirects the request too many times", {},
       fmt::format("at most {} redirects", redirects_max));
}

bool is_entry_name(std::string_view name) noexcept {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\0", 2)) == std::string_view::npos;
}

void add(std::vector<std::string>& names, std::string name, const std::string& path) {
  if (!is_entry_name(name)) return;
  if (names.size() >= names_max) {
    fail("io.remote", path, "the folder contains too many files", {},
         fmt::format("at most {}", names_max));
  }
  names.push_back(std::move(name));
}

std::vector<std::string> sorted(std::vector<std::string> names) {
  std::ranges::sort(names);
  names.erase(std::ranges::unique(names).begin(), names.end());
  return names;
}

// Returns the content of the next element after `at`, such as "<Key>a &amp; b</Key>", and moves
// `at` to the element's end. Returns nullopt if there is no such element.
std::optional<std::string_view> element(std::string_view text, std::string_view tag,
                                        std::size_t& at) {
  const std::string open = fmt::format("<{}>", tag);
  const std::string close = fmt::format("</{}>", tag);
  const std::size_t begin = text.find(open, at);
  if (begin == std::string_view::npos) return std::nullopt;
  const std::size_t end = text.find(close, begin + open.size());
  if (end == std::string_view::npos) return std::nullopt;
  at = end + close.size();
  return text.substr(begin + open.size(), end - begin - open.size());
}

void append_utf8(std::string& text, std::uint32_t code) {
  constexpr std::array<std::uint32_t, 4> leads = {0, 0xc0, 0xe0, 0xf0};  // by trailing byte count
  std::size_t rest = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  text += static_cast<char>(leads[rest] | (code >> (6 * rest)));
  while (rest-- > 0) text += static_cast<char>(0x80 | ((code >> (6 * rest)) & 0x3f));
}

// Replaces the entities of XML. Returns nullopt for unknown entities.
std::optional<std::string> unescaped(std::string_view text) {
  constexpr std::pair<std::string_view, char> entities[] = {
      {"amp", '&'}, {"lt", '<'}, {"gt", '>'}, {"quot", '"'}, {"apos", '\''}};
  std::string plain;
  while (!text.empty()) {
    if (text.front() != '&') {
      plain += text.front();
      text.remove_prefix(1);
      continue;
    }
    const std::size_t end = text.find(';');
    if (end == std::string_view::npos) return std::nullopt;
    const std::string_view word = text.substr(1, end - 1);
    text.remove_prefix(end + 1);
    if (word.starts_with('#')) {
      const bool is_hex = word.size() > 1 && (word[1] == 'x' || word[1] == 'X');
      const std::string_view number = word.substr(is_hex ? 2 : 1);
      std::uint32_t code = 0;
      const auto [last, problem] =
          std::from_chars(number.data(), number.data() + number.size(), code, is_hex ? 16 : 10);
      const bool is_all = problem == std::errc() && last == number.data() + number.size();
      if (!is_all || code == 0 || code > 0x10ffff) return std::nullopt;
      append_utf8(plain, code);
      continue;
    }
    const auto known = std::ranges::find(entities, word, &std::pair<std::string_view, char>::first);
    if (known == std::end(entities)) return std::nullopt;
    plain += known->second;
  }
  return plain;
}

}  // namespace

std::string next_link(std::string_view header) {
  while (!header.empty()) {
    const std::size_t begin = header.find('<');
    const std::size_t end = header.find('>', begin);
    if (begin == std::string_view::npos || end == std::string_view::npos) return {};
    const std::string_view rest = header.substr(end + 1);
    const std::string_view words = rest.substr(0, rest.find('<'));
    if (words.find("rel=\"next\"") != std::string_view::npos ||
        words.find("rel=next") != std::string_view::npos) {
      return std::string(header.substr(begin + 1, end - begin - 1));
    }
    header = rest;
  }
  return {};
}

std::vector<std::string> list_hub(HttpClient& client, const Address& address) {
  const JsonReader reader("io.remote");
  std::vector<std::string> names;
  std::string url = address.full_url();
  for (std::size_t page = 0; page < pages_max; ++page) {
    const Page found = fetch(client, address, url);
    try {
      const JsonDocument document(found.text, "io.remote", page_bytes_max);
      std::size_t index = 0;
      for (const auto item : reader.array(document.root(), {})) {
        const JsonPlace place{nullptr, {}, index++};
        std::string_view type;
        std::string_view path;
        if (item["type"].get(type) != simdjson::SUCCESS ||
            item["path"].get(path) != simdjson::SUCCESS) {
          reader.refuse(place, "an entry without the type and path of a file");
        }
        if (type != "file") continue;
        // The hub returns paths below the repository, but only for the requested folder.
        add(names, std::string(path.substr(path.rfind('/') + 1)), address.path);
      }
    } catch (const Error& error) {
      fail("io.remote", address.path, "the host's response is not a list of files", error.what());
    }
    const std::string next = next_link(found.response.link);
    if (next.empty()) return sorted(std::move(names));
    url = redirected_url(url, next);
    if (origin_of(url) != origin_of(address.url)) {
      fail("io.redirect", address.path, "the next page of the folder's list is on a different host",
           printable(public_location(url), shown_bytes_max));
    }
  }
  fail("io.remote", address.path, "the folder's list has too many pages");
}

std::string take_s3_page(std::string_view text, std::string_view prefix, const std::string& path,
                         std::vector<std::string>& names) {
  if (text.find("<ListBucketResult") == std::string_view::npos) {
    fail("io.remote", path, "the host's response is not a list of objects");
  }
  std::size_t at = 0;
  while (const auto object = element(text, "Contents", at)) {
    std::size_t inner = 0;
    const auto escaped = element(*object, "Key", inner);
    const auto key = escaped ? unescaped(*escaped) : std::nullopt;
    if (!key) fail("io.remote", path, "an object in the list has no key");
    if (key->starts_with(prefix)) add(names, key->substr(prefix.size()), path);
  }
  at = 0;
  const auto is_cut = element(text, "IsTruncated", at);
  if (!is_cut || *is_cut != "true") return {};
  at = 0;
  const auto token = element(text, "NextContinuationToken", at);
  const auto plain = token ? unescaped(*token) : std::nullopt;
  if (!plain || plain->empty()) {
    fail("io.remote", path, "a page of the list of objects does not specify the next page");
  }
  return *plain;
}

std::vector<std::string> list_s3(HttpClient& client, const Address& address,
                                 const std::string& prefix) {
  std::vector<std::string> names;
  std::string token;
  for (std::size_t page = 0; page < pages_max; ++page) {
    // The parameters are sorted by name, as the signature requires.
    std::string query = "?";
    if (!token.empty()) query += "continuation-token=" + encoded_name(token) + "&";
    query += "delimiter=%2F&list-type=2&prefix=" + encoded_name(prefix);
    const Page found = fetch(client, address, address.url + query);
    token = take_s3_page(found.text, prefix, address.path, names);
    if (token.empty()) return sorted(std::move(names));
  }
  fail("io.remote", address.path, "the folder's list has too many pages");
}

}  // namespace loadstone

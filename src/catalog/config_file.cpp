#include "catalog/config_file.h"

#include <fmt/format.h>

#include <cstdint>
#include <span>

#include "base/json_dom.h"
#include "base/python_json.h"
#include "base/repeated_field.h"
#include "base/text.h"
#include "catalog/paths.h"
#include "loadstone/error.h"
#include "loadstone/remote.h"

namespace loadstone {

namespace {

// The largest configs list tens of thousands of modules.
constexpr std::uint64_t config_bytes_max = 64u << 20;

}  // namespace

void check_config(std::string_view text, const std::string& path) {
  const bool is_list = path.ends_with("modules.json");
  const char* const expected = is_list ? "a JSON array" : "a JSON object";
  const auto refuse = [&](std::string message, std::optional<std::uint64_t> offset) {
    throw Error("format.config", std::move(message),
                {.path = path, .expected = expected, .byte_offset = offset});
  };
  if (text.empty()) refuse("the config is empty", 0);
  const PythonJson json = python_json(text);
  if (json.fault)
    refuse(fmt::format("the config is not valid JSON: {}", json.fault->message),
           json.fault->offset);
  dom::parser parser;
  const auto root = parsed_json(parser, json.text);
  if (root.error() != simdjson::SUCCESS) {
    refuse(fmt::format("the config is not valid JSON ({})", simdjson::error_message(root.error())),
           std::nullopt);
  }
  if (is_list ? !root.is_array() : !root.is_object()) refuse("the config is not a JSON object", 0);
  if (auto field = repeated_field(root.value_unsafe())) {
    throw Error("q.config", "a field occurs twice, and programs differ in which one they read",
                {.path = path, .field = *std::move(field), .expected = "one of the two"});
  }
}

std::string read_config(ByteSource& file) {
  const std::uint64_t bytes = file.identity().bytes;
  if (bytes > config_bytes_max) {
    throw Error("format.config", "the file is too large to be a config",
                {.path = file.path(),
                 .found = human_bytes(bytes),
                 .expected = "at most " + human_bytes(config_bytes_max)});
  }
  std::string text(bytes, '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  check_config(text, file.path());
  return text;
}

std::optional<std::string> find_config(const FileOpener& opener, const std::string& folder,
                                       std::string_view name) {
  try {
    return read_config(*opener.open(join_path(folder, name), folder));
  } catch (const Error& error) {
    if (error.code() == "io.not_found") return std::nullopt;
    // Some hosts deny access to missing files if they do not allow listing.
    const bool is_denied = error.code() == "io.denied" && is_remote(folder);
    if (!is_denied && error.code() != "ix.path_escape") throw;
    return std::string();
  }
}

}  // namespace loadstone

#include "catalog/config_claim.h"

#include <simdjson.h>

#include <array>
#include <cstddef>
#include <span>
#include <string_view>

#include "catalog/paths.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

// The largest configs list some ten thousand modules; what is larger is none.
constexpr std::uint64_t config_bytes_max = 16u << 20;

constexpr std::array<std::string_view, 3> claims = {"quantization_config", "compression_config",
                                                    "quantization"};

using Object = simdjson::dom::object;

bool has_claim(const Object& object) {
  for (const std::string_view key : claims) {
    simdjson::dom::element value;
    if (object[key].get(value) == simdjson::SUCCESS && !value.is_null()) return true;
  }
  return false;
}

// A model of several parts has a config for each, one level below.
bool claims_in(std::string_view text) {
  simdjson::dom::parser parser;
  Object config;
  if (parser.parse(simdjson::padded_string(text)).get(config) != simdjson::SUCCESS) return true;
  if (has_claim(config)) return true;
  for (const auto field : config) {
    Object part;
    if (field.value.get(part) == simdjson::SUCCESS && has_claim(part)) return true;
  }
  return false;
}

bool claims_in_file(const FileOpener& opener, const std::string& folder, const char* name) {
  try {
    const auto source = opener.open(join_path(folder, name), folder);
    const std::uint64_t bytes = source->identity().bytes;
    if (bytes > config_bytes_max) return true;
    std::string text(bytes, '\0');
    source->read(0, std::as_writable_bytes(std::span(text)));
    return claims_in(text);
  } catch (const Error& error) {
    return error.code() != "io.not_found";
  }
}

}  // namespace

bool claims_quantization(const FileOpener& opener, const std::string& folder) {
  return claims_in_file(opener, folder, "config.json") ||
         claims_in_file(opener, folder, "hf_quant_config.json");
}

}  // namespace loadstone

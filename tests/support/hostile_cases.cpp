#include "support/hostile_cases.h"

#include <simdjson.h>

#include <algorithm>
#include <initializer_list>
#include <stdexcept>
#include <string_view>

namespace loadstone::test {

namespace {

std::string text(const simdjson::dom::element& item, const char* key) {
  return std::string(item[key].get_string().value());
}

std::vector<HostileCase> read_cases(std::initializer_list<std::string_view> formats) {
  const std::string folder = LOADSTONE_HOSTILE_DIR;
  simdjson::dom::parser parser;
  const simdjson::dom::element root = parser.load(folder + "/manifest.json");
  std::vector<HostileCase> cases;
  for (const simdjson::dom::element item : root["cases"].get_array()) {
    HostileCase one;
    one.format = text(item, "format");
    if (std::ranges::find(formats, one.format) == formats.end()) continue;
    one.name = text(item, "name");
    one.path = folder + "/" + text(item, "file");
    bool accept = false;
    one.accept = item["accept"].get_bool().get(accept) != simdjson::SUCCESS ? "warn"
                 : accept                                                   ? "yes"
                                                                            : "no";
    one.field = text(item, "field");
    one.culprit = text(item, "culprit");
    one.expect = text(item, "expect");
    cases.push_back(std::move(one));
  }
  if (cases.empty()) throw std::runtime_error("the manifest holds no cases");
  return cases;
}

}  // namespace

const std::vector<HostileCase>& hostile_cases() {
  static const auto cases = read_cases({"safetensors", "sharded", "gguf", "torch"});
  return cases;
}

const std::vector<HostileCase>& quantized_cases() {
  static const auto cases = read_cases({"quant"});
  return cases;
}

const std::vector<HostileCase>& unread_cases() {
  static const auto cases = read_cases({"quant-unread"});
  return cases;
}

bool needs_values(std::string_view code) {
  return code == "st.bool_value" || code == "gg.scale_nan" || code == "digest" || code == "pt.crc";
}

bool is_not_looked_at(std::string_view code) { return code == "pt.crc"; }

bool is_never_read(std::string_view code) {
  return code == "pt.byteorder" || code == "pt.compressed";
}

bool needs_model(std::string_view code) { return code.starts_with("plan."); }

}  // namespace loadstone::test

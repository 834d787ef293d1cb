// The section of config.json for encodings of bitsandbytes.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_writer.h"
#include "codec/encode.h"
#include "convert/module_patterns.h"
#include "convert/quantize_config.h"

namespace loadstone {

namespace {

// Finds the outermost module around a plain one in which none is quantized: the library may rename
// its submodules. Mimi's "decoder_transformer" becomes a part of its "decoder". Readers look for
// such a name anywhere in that of a module, so no quantized one may have it in its own.
// Not thread-safe.
class PlainModules {
 public:
  explicit PlainModules(const QuantizedModules& modules) : quantized_(modules.quantized_names()) {}

  // Returns nothing if there is no such module.
  std::string around(std::string_view plain) {
    for (auto dot = plain.find('.'); dot != plain.npos; dot = plain.find('.', dot + 1)) {
      std::string outer(plain.substr(0, dot));
      if (is_plain(outer)) return outer;
    }
    return {};
  }

 private:
  bool is_plain(const std::string& outer) {
    const auto [known, is_new] = known_.try_emplace(outer);
    if (is_new) {
      known->second = std::ranges::none_of(quantized_, [&](const std::string& each) {
        return each.find(outer) != std::string::npos;
      });
    }
    return known->second;
  }

  std::vector<std::string> quantized_;
  std::map<std::string, bool> known_;
};

// The plain modules as transformers looks for them: at the end of a module's name, or as a pattern
// at its beginning, up to a dot. Names that a quantized module has there become whole patterns.
// More patterns find the names that the library gives the modules.
std::vector<std::string> skipped_modules(const QuantizedModules& modules) {
  PlainModules plain_modules(modules);
  std::set<std::string> around;
  std::vector<std::string> skipped = modules.plain;
  for (std::string& plain : skipped) {
    around.insert(plain_modules.around(plain));
    const bool is_too_wide = std::ranges::any_of(modules.quantized, [&](const auto& each) {
      return each.first.ends_with(plain) || each.first.starts_with(plain + ".");
    });
    if (is_too_wide) plain = fmt::format("^{}$", plain);
  }
  around.erase("");
  skipped.insert(skipped.end(), around.begin(), around.end());
  const auto patterns = patterns_of_plain(modules.plain, modules.quantized_names());
  skipped.insert(skipped.end(), patterns.begin(), patterns.end());
  return skipped;
}

}  // namespace

std::string section_of_bitsandbytes(const QuantizedModules& modules, Dtype dtype) {
  const WrittenEncoding& encoding = written_encoding(*modules.quantized.front().second);
  const bool is_eight = encoding.bits == 8;
  JsonWriter json(2, 8);
  json.begin_object();
  json.member("_load_in_4bit", !is_eight);
  json.member("_load_in_8bit", is_eight);
  json.member("bnb_4bit_compute_dtype", dtype_info(dtype).torch_name);
  json.member("bnb_4bit_quant_storage", "uint8");
  json.member("bnb_4bit_quant_type", is_eight ? std::string_view("fp4") : encoding.name);
  json.member("bnb_4bit_use_double_quant", false);
  json.member("llm_int8_enable_fp32_cpu_offload", false);
  json.member("llm_int8_has_fp16_weight", false);
  json.member("llm_int8_skip_modules", skipped_modules(modules));
  json.key("llm_int8_threshold");
  json.raw("6.0");  // transformers wants to see that it is no integer
  json.member("load_in_4bit", !is_eight);
  json.member("load_in_8bit", is_eight);
  json.member("quant_method", "bitsandbytes");
  json.end_object();
  return json.take();
}

}  // namespace loadstone

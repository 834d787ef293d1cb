#include "codec/families.h"

#include <algorithm>
#include <array>

namespace loadstone {

// Each family is defined in the folder of its name.
extern const Family unknown_family, gptq_family, awq_family, packed_family, bnb_family,
    deepseek_v4_family, comfyui_family, mlx_family, fp8_family, int8_family, int4_family,
    fp4_family, gguf_family;

namespace {

// Families in the order in which recognition tries them.
constexpr std::array all = {&unknown_family, &gptq_family,        &awq_family,     &packed_family,
                            &bnb_family,     &deepseek_v4_family, &comfyui_family, &mlx_family,
                            &fp8_family,     &int8_family,        &int4_family,    &fp4_family,
                            &gguf_family};

constexpr std::array<std::string_view, 5> shared = {"compressed-tensors", "fbgemm_fp8", "fp8",
                                                    "modelopt", "mxfp4"};

// Methods whose layouts the families read too: other names of the methods above, and methods that
// store codes in the same way.
constexpr std::array<std::string_view, 14> borrowed = {
    "auto-round", "auto_round",   "intel/auto-round", "awq_marlin", "gptq_marlin",
    "gptqmodel",  "modelopt_fp4", "modelopt_mixed",   "nvfp4",      "petit_nvfp4",
    "quark",      "sparseml",     "w8a8_fp8",         "w8a8_int8"};

}  // namespace

std::span<const Family* const> families() noexcept { return all; }

bool is_listed(std::string_view encoding) noexcept {
  return std::ranges::any_of(all, [&](const Family* family) {
    return std::ranges::count(family->encodings, encoding) > 0;
  });
}

std::span<const std::string_view> shared_methods() noexcept { return shared; }

bool is_own_method(std::string_view method) noexcept {
  const auto is_method = [&](const Family* family) {
    return !family->method.empty() && family->method == method;
  };
  return std::ranges::count(shared, method) > 0 || std::ranges::any_of(all, is_method);
}

bool is_compressed_format(std::string_view format) noexcept {
  return std::ranges::any_of(all, [&](const Family* family) {
    return std::ranges::any_of(family->written, [&](const WrittenEncoding& each) {
      return !format.empty() && each.compressed.format == format;
    });
  });
}

bool has_known_layouts(std::string_view method) noexcept {
  return is_own_method(method) || std::ranges::count(borrowed, method) > 0;
}

}  // namespace loadstone

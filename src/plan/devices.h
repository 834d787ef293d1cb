// Device names.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

// Returns "cuda:0" for "0", and other texts unchanged.
[[nodiscard]] std::string device_name(std::string_view text);

// Kinds of which a machine may have several, as torch calls them.
inline constexpr std::array<std::string_view, 9> counted_devices = {
    "cuda", "mps", "xpu", "npu", "hpu", "mlu", "mtia", "xla", "privateuseone"};

// "cpu", "disk", "meta", and the counted kinds with or without ":N".
[[nodiscard]] bool is_device_name(std::string_view text) noexcept;

// "unknown device 'tpu'; did you mean 'cpu'?" `others`: further accepted words.
[[nodiscard]] std::string unknown_device(std::string_view text,
                                         std::vector<std::string> others = {});

// Examples of device names, for messages.
inline constexpr const char* device_examples = "cpu, disk, meta, cuda:0 ...";

// Returns true for devices, other than the processor, that can compute.
[[nodiscard]] constexpr bool is_accelerator(std::string_view device) noexcept {
  return device != "cpu" && device != "disk" && device != "meta";
}

// Returns true if a tensor of this name can be a file in an offload folder (NAME.dat): no '/', no
// control character, not too long, and neither "." nor "..".
[[nodiscard]] bool is_offload_name(std::string_view name) noexcept;

}  // namespace loadstone

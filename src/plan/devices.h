// Device names.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

// Returns "cuda:0" for "0", and any other string unchanged.
[[nodiscard]] std::string device_name(std::string_view text);

// Device types of which a machine may have several devices, with torch's names.
inline constexpr std::array<std::string_view, 9> counted_devices = {
    "cuda", "mps", "xpu", "npu", "hpu", "mlu", "mtia", "xla", "privateuseone"};

// Returns true for "cpu", "disk", "meta", and the types in counted_devices with or without ":N".
[[nodiscard]] bool is_device_name(std::string_view text) noexcept;

// Returns a message such as "unknown device 'tpu'; did you mean 'cpu'?". `others` lists further
// accepted words.
[[nodiscard]] std::string unknown_device(std::string_view text,
                                         std::vector<std::string> others = {});

// Examples of device names, for messages.
inline constexpr const char* device_examples = "cpu, disk, meta, cuda:0 ...";

// Returns true for computing devices other than the CPU.
[[nodiscard]] constexpr bool is_accelerator(std::string_view device) noexcept {
  return device != "cpu" && device != "disk" && device != "meta";
}

// Returns true if the tensor's name can be a file name (NAME.dat) in an offload folder: it has no
// '/' and no control character, is not too long, and is neither "." nor "..".
[[nodiscard]] bool is_offload_name(std::string_view name) noexcept;

}  // namespace loadstone

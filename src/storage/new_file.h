// What writing files takes: descriptors, space, names for what is not whole yet, and what failed.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace loadstone {

// Throws Error "io.no_space", "io.denied" or "io.write" for the system's error number.
[[noreturn]] void fail_write(int problem, std::string message, std::string path,
                             std::string tensor = {});

// Closes what it holds. Not thread-safe.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int descriptor) : descriptor_(descriptor) {}
  Descriptor(Descriptor&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~Descriptor();
  [[nodiscard]] int get() const noexcept { return descriptor_; }

 private:
  int descriptor_ = -1;
};

// Throws where this process may not write files so large: passing that limit would raise a signal
// instead of an error.
void check_file_limit(std::uint64_t byte_count, const std::string& path);

// All blocks now: a write into mapped memory that finds the disk full would end the process.
void reserve(int descriptor, std::uint64_t byte_count, const std::string& path);

// Makes a file as large as it will be, with all blocks where the file system can do that at once.
void reserve_if_cheap(int descriptor, std::uint64_t byte_count, const std::string& path);

// ".loadstone-PID-N.part", which nobody else has.
[[nodiscard]] std::string unique_part_name();

}  // namespace loadstone

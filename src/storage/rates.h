// The rates that `loadstone bench` measured on this machine: of reads and writes for each file
// system, and of each encoding. They are saved in a file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace loadstone {

// The rate of reads from one file system, of writes to it, or of encoding.
struct Rate {
  std::string mount;  // where the file system is mounted; empty for encoding
  bool is_write = false;
  bool is_disk = false;  // true: read from the disk, else from the page cache
  std::string date;      // "2026-11-30"
  std::uint64_t bytes_per_second = 0;
  std::string encoding = {};  // that values are encoded to, from BF16
};

// The rates of a machine, as the file has them.
struct Rates {
  std::string host;
  std::string processor;
  std::vector<Rate> rates;

  // Returns null if the rate of this file system is unknown.
  [[nodiscard]] const Rate* find(const std::string& mount, bool is_write) const;
  [[nodiscard]] const Rate* find_encoding(const std::string& encoding) const;
};

// Returns the folder at which the file system of a path is mounted. The path need not exist.
[[nodiscard]] std::string mount_of(const std::string& path);
// Returns a rate of the file system of `path`, measured today.
[[nodiscard]] Rate rate_of_today(const std::string& path, bool is_write, bool is_disk,
                                 std::uint64_t bytes_per_second);

[[nodiscard]] Rate encoding_rate_of_today(const std::string& encoding,
                                          std::uint64_t bytes_per_second);

// Returns the rates of this machine; none if the file is missing, damaged or of another machine.
[[nodiscard]] Rates saved_rates(const std::string& file);
// Writes the rates to `file`, whose folder must exist. Keeps the file's rates of this machine that
// were not measured again. Throws Error "io.*".
void save_rates(const std::vector<Rate>& rates, const std::string& file);

}  // namespace loadstone

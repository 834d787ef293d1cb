// Declares the header of one file, and functions that the readers of all formats share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/error.h"

namespace loadstone {

struct FileHeader {
  Shard shard;                      // the caller sets relative_path
  std::vector<TensorInfo> tensors;  // in file order
  Metadata metadata;
  std::vector<Finding> findings;
};

// Copies reads_at_once() and is_on_network() of the file to its shard.
void note_reads(const ByteSource& source, Shard& shard);

// A rule that a file breaks. `code` must point to a string literal.
struct HeaderProblem {
  const char* code = "internal";
  std::string message = {};
  std::string_view field = {};
  std::string found = {};
  std::string expected = {};
  std::optional<std::uint64_t> byte_offset = {};
};
// Throws an Error for the problem. `culprit`: name of the tensor or metadata key.
[[noreturn]] void refuse(const std::string& path, HeaderProblem problem,
                         std::string_view culprit = {});

// Returns the digest of all bytes before and after the data of a file.
[[nodiscard]] std::string header_digest(ByteSource& source, const Shard& shard);

// Returns a string such as "16 bytes" or "1 byte".
[[nodiscard]] std::string bytes_text(std::uint64_t bytes);

// Returns the index of a tensor whose name an earlier tensor has; nullopt if all names differ.
[[nodiscard]] std::optional<std::size_t> second_of_a_name(const std::vector<TensorInfo>& tensors);

// Collects the warnings about one file. Every tensor of a file may break the same rule, so each
// code is reported at most `per_code_max` times; take() adds the count of the others. Not
// thread-safe.
class Warnings {
 public:
  explicit Warnings(const std::string& path) : path_(path) {}

  // `culprit`: name of the tensor or metadata key, or empty for the whole file.
  void add(std::string code, std::string_view culprit, std::string_view field,
           std::string_view message, std::string found = {}, std::string expected = {});
  [[nodiscard]] std::vector<Finding> take();

  static constexpr std::size_t per_code_max = 100;

 private:
  std::string path_;
  std::vector<Finding> findings_;
  std::unordered_map<std::string, std::size_t> counts_;
};

}  // namespace loadstone

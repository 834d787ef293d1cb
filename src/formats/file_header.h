// The header of one file, and tools that the readers of all formats share.
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
  Shard shard;                      // relative_path is the caller's business
  std::vector<TensorInfo> tensors;  // in file order
  Metadata metadata;
  std::vector<Finding> findings;
};

// Copies to a shard how its file is read: how many reads at once, and whether over a network.
void note_reads(const ByteSource& source, Shard& shard);

// A rule that a file breaks. `code` is text that lives for ever.
struct HeaderProblem {
  const char* code = "internal";
  std::string message = {};
  std::string_view field = {};
  std::string found = {};
  std::string expected = {};
  std::optional<std::uint64_t> byte_offset = {};
};
// `culprit`: tensor or metadata key.
[[noreturn]] void refuse(const std::string& path, HeaderProblem problem,
                         std::string_view culprit = {});

// The digest of all bytes before and after the data of a file.
[[nodiscard]] std::string header_digest(ByteSource& source, const Shard& shard);

// "16 bytes", "1 byte"
[[nodiscard]] std::string bytes_text(std::uint64_t bytes);

// A tensor whose name an earlier one has already.
[[nodiscard]] std::optional<std::size_t> second_of_a_name(const std::vector<TensorInfo>& tensors);

// Warnings of one file. A file can break a rule once a tensor, so each code is reported at most
// `per_code_max` times and then counted. Not thread-safe.
class Warnings {
 public:
  explicit Warnings(const std::string& path) : path_(path) {}

  // `culprit`: a tensor or a metadata key; empty: the whole file.
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

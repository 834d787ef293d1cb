// Tests tensors that are stored in several pieces: each range is requested, released and read in
// the files that contain the pieces.
#include "catalog/assembled_file.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "loadstone/byte_range.h"
#include "storage/forwarding.h"
#include "support/files.h"
#include "support/memory_storage.h"

namespace loadstone::test {
namespace {

// A file in memory that records the byte ranges that were requested and released.
class Noted final : public ForwardingSource {
 public:
  Noted(std::string path, std::string bytes)
      : ForwardingSource(memory_source(std::move(bytes), std::move(path))) {}

  std::uint64_t prefetch(std::uint64_t offset, std::uint64_t bytes) noexcept override {
    asked.push_back({offset, offset + bytes});
    return bytes;
  }
  void release(std::uint64_t offset, std::uint64_t bytes) noexcept override {
    released.push_back({offset, offset + bytes});
  }

  std::vector<ByteRange> asked;
  std::vector<ByteRange> released;
};

class NotedStorage final : public Storage {
 public:
  std::shared_ptr<ByteSource> open(const std::string& path) override { return files.at(path); }
  EntryKind kind(const std::string&) override { return EntryKind::file; }
  std::vector<std::string> list(const std::string&) override { return {}; }
  std::string resolve(const std::string& path) override { return path; }

  std::map<std::string, std::shared_ptr<Noted>> files;
};

// A byte matrix that is stored in tiles, each at an offset in its own file.
class Tiles : public testing::Test {
 protected:
  void make(std::mt19937& random) {
    const auto up_to = [&](std::size_t most) { return 1 + random() % most; };
    rows_ = up_to(6);
    columns_ = up_to(7);
    const std::size_t tile_rows = up_to(rows_);
    const std::size_t tile_columns = up_to(columns_);
    tensor_ = some_bytes(rows_ * columns_);
    auto assembly = std::make_shared<Assembly>();
    place_.assign(tensor_.size(), {});
    for (std::size_t row = 0; row < rows_; row += tile_rows) {
      for (std::size_t column = 0; column < columns_; column += tile_columns) {
        add_tile(*assembly, row, std::min(row + tile_rows, rows_), column,
                 std::min(column + tile_columns, columns_), random() % 5);
      }
    }
    assembly->tensors.push_back({head_.size(), head_.size() + tensor_.size(), 0,
                                 static_cast<std::uint32_t>(assembly->chunks.size())});
    storage_.files["/head"] = std::make_shared<Noted>("/head", head_);
    Shard shard;
    shard.path = "/head";
    shard.data_begin = head_.size();
    const Catalog catalog("/", {shard}, {}, {}, {}, nullptr, {}, {assembly});
    file_ = open_shard(storage_, catalog, 0);
  }

  void add_tile(Assembly& assembly, std::size_t row_begin, std::size_t row_end,
                std::size_t column_begin, std::size_t column_end, std::size_t before) {
    const std::string path = "/tile" + std::to_string(assembly.files.size());
    std::string bytes(before, '?');
    for (std::size_t row = row_begin; row < row_end; ++row) {
      for (std::size_t column = column_begin; column < column_end; ++column) {
        place_[row * columns_ + column] = {path, bytes.size()};
        bytes += tensor_[row * columns_ + column];
      }
    }
    storage_.files[path] = std::make_shared<Noted>(path, bytes);
    assembly.chunks.push_back({.file = static_cast<std::uint32_t>(assembly.files.size()),
                               .file_begin = before,
                               .first = row_begin * columns_ + column_begin,
                               .run_bytes = column_end - column_begin,
                               .dims = {{row_end - row_begin, columns_}}});
    assembly.files.push_back({path, {.bytes = bytes.size()}});
  }

  using Places = std::set<std::pair<std::string, std::uint64_t>>;

  // Returns where the tensor's bytes are stored, including the unrelated bytes between two ranges
  // of one file.
  [[nodiscard]] Places places(std::size_t begin, std::size_t end) const {
    std::map<std::string, ByteRange> ranges;
    for (std::size_t i = begin; i < end; ++i) {
      const auto& [path, at] = place_[i];
      const auto [range, is_new] = ranges.try_emplace(path, ByteRange{at, at + 1});
      range->second = {std::min(range->second.begin, at), std::max(range->second.end, at + 1)};
    }
    Places found;
    for (const auto& [path, range] : ranges) {
      for (std::uint64_t at = range.begin; at < range.end; ++at) found.emplace(path, at);
    }
    return found;
  }

  // Returns the recorded places. The test fails if a byte was recorded twice.
  [[nodiscard]] Places noted(std::vector<ByteRange> Noted::*member) {
    Places found;
    for (auto& [path, file] : storage_.files) {
      for (const ByteRange range : (*file).*member) {
        for (std::uint64_t at = range.begin; at < range.end; ++at) {
          EXPECT_TRUE(found.emplace(path, at).second);
        }
      }
      ((*file).*member).clear();
    }
    return found;
  }

  const std::string head_ = "head";
  std::size_t rows_ = 0;
  std::size_t columns_ = 0;
  std::string tensor_;
  std::vector<std::pair<std::string, std::uint64_t>> place_;  // file and offset per byte
  NotedStorage storage_;
  std::shared_ptr<ByteSource> file_;
};

TEST_F(Tiles, AnyRangeIsAskedForReleasedAndReadWhereItLies) {
  std::mt19937 random(7);  // NOLINT(cert-msc51-cpp)
  for (unsigned round = 0; round < 200; ++round) {
    make(random);
    for (std::size_t begin = 0; begin < tensor_.size(); ++begin) {
      for (std::size_t end = begin + 1; end <= tensor_.size(); ++end) {
        const Places expected = places(begin, end);
        EXPECT_EQ(file_->prefetch(head_.size() + begin, end - begin), expected.size());
        ASSERT_EQ(noted(&Noted::asked), expected);
        file_->release(head_.size() + begin, end - begin);
        ASSERT_EQ(noted(&Noted::released), expected);
        std::string bytes(end - begin, '\0');
        file_->read(head_.size() + begin, std::as_writable_bytes(std::span(bytes)));
        ASSERT_EQ(bytes, tensor_.substr(begin, end - begin));
      }
    }
  }
}

TEST_F(Tiles, WhatIsNoTensorIsNotAskedFor) {
  std::mt19937 random(8);  // NOLINT(cert-msc51-cpp)
  make(random);
  EXPECT_EQ(file_->prefetch(0, head_.size()), 0u);
  EXPECT_EQ(file_->prefetch(head_.size() + tensor_.size(), 100), 0u);
  EXPECT_EQ(file_->prefetch(0, 1'000'000), tensor_.size());
}

}  // namespace
}  // namespace loadstone::test

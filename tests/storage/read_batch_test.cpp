// Tests that reads write their bytes only to their destination, for any alignment in file and
// memory.
#include "storage/read_batch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "loadstone/storage.h"
#include "support/errors.h"
#include "support/files.h"

namespace loadstone::test {

namespace {

constexpr std::size_t guard_bytes = 128;

// Memory that is aligned to a cache line and has guard bytes around it.
class Guarded {
 public:
  explicit Guarded(std::size_t bytes) : memory_(bytes + 3 * guard_bytes, '#') {}

  std::span<std::byte> piece(std::size_t begin, std::size_t bytes) {
    return std::as_writable_bytes(std::span(memory_)).subspan(line() + begin, bytes);
  }
  // Expects these bytes at `begin`, and unchanged guard bytes.
  void expect(const std::string& bytes, std::size_t begin) {
    std::string wanted(memory_.size(), '#');
    wanted.replace(line() + begin, bytes.size(), bytes);
    EXPECT_TRUE(memory_ == wanted);
  }

 private:
  std::size_t line() const {
    const auto at = reinterpret_cast<std::uintptr_t>(memory_.data()) + guard_bytes;
    return guard_bytes + (64 - at % 64) % 64;
  }

  std::string memory_;
};

class ReadBatchTest : public ::testing::Test {
 protected:
  static constexpr std::size_t file_bytes = 700'000;

  TemporaryFolder folder;
  const std::string bytes = some_bytes(file_bytes);
  const std::shared_ptr<ByteSource> source = local_storage().open(folder.write("f", bytes));
};

TEST_F(ReadBatchTest, AnyOffsetGoesToAnyAddress) {
  for (const std::size_t count : {4095, 4096, 5000, 262'144, 300'000}) {
    for (std::size_t offset = 0; offset<64; offset += count> 10'000 ? 7 : 1) {
      Guarded memory(count + 64);
      const std::size_t begin = (offset * 5 + count) % 64;
      source->read(offset, memory.piece(begin, count));
      SCOPED_TRACE(std::to_string(count) + " bytes at " + std::to_string(offset));
      memory.expect(bytes.substr(offset, count), begin);
    }
  }
}

TEST_F(ReadBatchTest, PiecesOfAllSizesGoWhereTheyAreWanted) {
  std::mt19937_64 random(7);
  const auto below = [&](std::size_t end) { return static_cast<std::size_t>(random() % end); };
  for (int round = 0; round < 60; ++round) {
    SCOPED_TRACE(round);
    const std::size_t offset = below(1000);
    const std::size_t most = std::size_t{1} << (4 + below(15));
    std::vector<Guarded> memories;
    std::vector<std::size_t> begins;
    std::vector<std::size_t> counts;
    for (std::size_t total = 0; memories.size() < 600;) {
      const std::size_t count = below(most);
      total += count;
      if (total > file_bytes - 1000) break;
      counts.push_back(count);
      begins.push_back(below(64));
      memories.emplace_back(count + 64);
    }
    std::vector<std::span<std::byte>> pieces;
    for (std::size_t i = 0; i < memories.size(); ++i) {
      pieces.push_back(memories[i].piece(begins[i], counts[i]));
    }
    source->read(offset, pieces);
    std::size_t at = offset;
    for (std::size_t i = 0; i < memories.size(); ++i) {
      memories[i].expect(bytes.substr(at, counts[i]), begins[i]);
      at += counts[i];
    }
  }
}

// Bytes before the end of the file are written, and the error reports the file's size.
TEST_F(ReadBatchTest, TheEndOfTheFileIsWhereItIs) {
  for (const std::size_t before : {1, 4096, 10'001, 270'000}) {
    Guarded memory(before + 6000);
    const std::size_t offset = file_bytes - before;
    const auto error = error_of([&] { source->read(offset, memory.piece(3, before + 5000)); });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), "io.short_read");
    EXPECT_EQ(error->where().byte_offset, file_bytes);
    const auto got = memory.piece(3, before);
    EXPECT_TRUE(std::ranges::equal(got, std::as_bytes(std::span(bytes).subspan(offset)))) << before;
  }
}

// Long reads go to addresses with the same alignment as their file offsets, which is fast, in
// batches that fit the CPU's cache.
TEST_F(ReadBatchTest, LongPiecesAreReadToALineOfTheirOwn) {
  Guarded memory(600'000);
  const auto piece = memory.piece(0, 600'000);
  ReadBatch batch;
  batch.gather({&piece, 1}, {}, 8, true);
  ASSERT_EQ(batch.parts().size(), 2U);
  EXPECT_EQ(batch.parts()[0].iov_base, piece.data() + 8);
  EXPECT_EQ(batch.parts()[1].iov_len, 8U);
  EXPECT_EQ(batch.bytes(), 262'144U);
  batch.gather({&piece, 1}, {.piece = 0, .done = 262'144}, 262'152, true);
  EXPECT_EQ(batch.parts()[0].iov_base, piece.data() + 262'152);

  batch.gather({&piece, 1}, {}, 64, true);  // already aligned
  EXPECT_EQ(batch.parts().size(), 1U);
  EXPECT_EQ(batch.bytes(), 600'000U);
  EXPECT_FALSE(batch.moves());
  batch.gather({&piece, 1}, {}, 8, false);
  EXPECT_EQ(batch.parts().size(), 1U);
  EXPECT_FALSE(batch.moves());
}

}  // namespace

}  // namespace loadstone::test

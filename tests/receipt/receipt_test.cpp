#include "loadstone/receipt.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "loadstone/error.h"
#include "receipt/digest_table.h"

namespace loadstone {
namespace {

std::vector<std::byte> noise(std::size_t count) {
  std::mt19937 random(1);
  std::vector<std::byte> bytes(count);
  for (auto& each : bytes) each = static_cast<std::byte>(random());
  return bytes;
}

// Several threads add pieces of any size, in any order, some of them twice.
TEST(DigestTableTest, OrderDoesNotMatter) {
  const auto bytes = noise((5u << 20) + 12345);
  for (const DigestKind kind : {DigestKind::xxh3_128, DigestKind::sha256_tree}) {
    if (!can_digest(kind)) continue;
    const std::string expected = digest_of(kind, bytes);
    for (unsigned seed = 0; seed < 12; ++seed) {
      std::mt19937 random(seed);
      const std::size_t size_max = std::size_t{1} << (9 + seed);
      std::vector<ByteRange> pieces;
      for (std::uint64_t at = 0; at < bytes.size();) {
        const std::uint64_t end =
            std::min<std::uint64_t>(bytes.size(), at + 1 + random() % size_max);
        pieces.push_back({at, end});
        if (random() % 8 == 0) pieces.push_back({at - at / 3, end});
        at = end;
      }
      if (seed % 3 != 0) std::shuffle(pieces.begin(), pieces.end(), random);
      DigestTable table(kind);
      const std::uint32_t item = table.add({{0, bytes.size()}});
      std::atomic<std::size_t> next = 0;
      const auto work = [&] {
        for (std::size_t i = next++; i < pieces.size(); i = next++) {
          table.update(item, pieces[i].begin,
                       std::span(bytes).subspan(pieces[i].begin, pieces[i].size()));
        }
      };
      std::vector<std::thread> threads;
      // A thread that waits for a core delays the pieces of other threads, so the case that expects
      // order uses one thread.
      const unsigned count = seed % 3 == 0 ? 1 : 1 + seed % 4;
      for (unsigned t = 0; t < count; ++t) threads.emplace_back(work);
      for (auto& thread : threads) thread.join();
      table.complete(item, [&](std::uint64_t begin, std::span<std::byte> to) {
        std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(begin), to.size(), to.begin());
      });
      EXPECT_EQ(table.digest(item), expected) << seed;
      if (seed % 3 == 0) {
        EXPECT_EQ(table.bytes_read_again(), 0u) << seed;
      }
    }
  }
}

// If early pieces cannot be buffered for lack of memory, complete() must read their blocks again.
TEST(DigestTableTest, WithoutRoom) {
  const auto bytes = noise(2u << 20);
  DigestTable table(DigestKind::xxh3_128, 1000);
  const std::uint32_t item = table.add({{0, bytes.size()}});
  const auto whole = std::span(bytes);
  table.update(item, 500, whole.subspan(500, 900));
  table.update(item, 0, whole.first(500));  // in order, so nothing is buffered
  table.update(item, 1400, whole.subspan(1400, (1u << 20) - 1400));
  table.update(item, (1u << 20) + 1, whole.subspan((1u << 20) + 1));  // too large to buffer
  table.update(item, 1u << 20, whole.subspan(1u << 20, 1));
  table.complete(item, [&](std::uint64_t begin, std::span<std::byte> to) {
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(begin), to.size(), to.begin());
  });
  EXPECT_EQ(table.digest(item), digest_of(DigestKind::xxh3_128, bytes));
  EXPECT_EQ(table.bytes_read_again(), 1u << 20);
}

// Blocks are counted from the first byte of each range, and gaps between ranges are left out.
TEST(DigestTableTest, Ranges) {
  auto bytes = noise(3u << 20);
  const std::vector<ByteRange> ranges = {{100, 1'500'000}, {1'700'000, 1'700'001}};
  std::vector<std::string> digests;
  for (const std::byte hole : {std::byte{1}, std::byte{2}}) {
    bytes[1'600'000] = hole;
    DigestTable table(DigestKind::xxh3_128);
    const std::uint32_t item = table.add(ranges);
    table.update(item, 0, bytes);
    digests.push_back(table.digest(item));
  }
  EXPECT_EQ(digests[0], digests[1]);
}

TEST(ReceiptTest, KnownDigests) {
  if (!can_digest(DigestKind::sha256_tree)) GTEST_SKIP() << "built without OpenSSL";
  // hashlib.sha256(b"\1loadstone sha256-tree 1\n" + struct.pack("<QQQQ", 1 << 20, 1, 0, 3) +
  //                hashlib.sha256(b"\0abc").digest())
  EXPECT_EQ(digest_of(DigestKind::sha256_tree, std::as_bytes(std::span("abc", 3))),
            "ce029b80653413e4134881d8841fa489d7927de0e41eed8d30ad50984695e12c");
}

Receipt some_receipt() {
  const std::string digest(32, 'a');
  Receipt receipt = {.program = "0.1.0"};
  ReceiptTensor tensor = {.name = "w",
                          .encoding = "BF16",
                          .shape = {2, 8},
                          .begin = 16,
                          .end = 48,
                          .ranges = {{0, 8}, {16, 32}},
                          .digest = digest};
  receipt.sources.push_back({.path = "a/b.safetensors",
                             .checkpoint = 1,
                             .bytes = 48,
                             .header_ranges = {{0, 16}},
                             .header_digest = digest,
                             .tensors = {tensor}});
  tensor.component = "absmax";
  tensor.recipe = "encode";
  tensor.codec = "nf4";
  tensor.sources = {"w"};
  receipt.targets.push_back(tensor);
  return receipt;
}

TEST(ReceiptTest, JsonRoundTrip) {
  EXPECT_EQ(receipt_from_json(to_json(some_receipt())), some_receipt());
}

// The output has 64 bytes: a header of 16 bytes, tensors of 8, 0 and 32 bytes, and a trailer of 8
// bytes.
Receipt receipt_of_output() {
  const std::string digest(32, 'a');
  const auto tensor = [&](const char* name, std::uint64_t begin, std::uint64_t end) {
    return ReceiptTensor{.name = name,
                         .encoding = "U8",
                         .shape = {end - begin},
                         .begin = begin,
                         .end = end,
                         .digest = digest};
  };
  Receipt receipt;
  receipt.outputs.push_back(
      {.path = "b.safetensors",
       .bytes = 64,
       .header_ranges = {{0, 16}, {56, 64}},
       .header_digest = digest,
       .tensors = {tensor("v", 24, 56), tensor("empty", 24, 24), tensor("w", 16, 24)}});
  return receipt;
}

TEST(ReceiptTest, EachByteOfAnOutputIsCoveredOnceAndEachSourceIsListed) {
  const auto refusal = [](const auto& change) -> std::string {
    Receipt receipt = receipt_of_output();
    change(receipt.outputs.front(), receipt);
    try {
      EXPECT_EQ(receipt_from_json(to_json(receipt)), receipt);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), "receipt.json");
      return error.message();
    }
    return {};
  };
  constexpr const char* gap = "some bytes are covered by no digest";
  constexpr const char* twice = "two digests cover the same bytes";
  EXPECT_EQ(refusal([](ReceiptFile&, Receipt&) {}), "");
  EXPECT_EQ(refusal([](ReceiptFile& file, Receipt&) { file.tensors.clear(); }), gap);
  EXPECT_EQ(refusal([](ReceiptFile& file, Receipt&) { file.tensors.erase(file.tensors.begin()); }),
            gap);
  EXPECT_EQ(refusal([](ReceiptFile& file, Receipt&) { file.header_ranges.pop_back(); }), gap);
  EXPECT_EQ(refusal([](ReceiptFile& file, Receipt&) { file.header_ranges[0].begin = 1; }), gap);
  EXPECT_EQ(refusal([](ReceiptFile& file, Receipt&) { file.bytes = 65; }), gap);
  EXPECT_EQ(refusal([](ReceiptFile& file, Receipt&) { file.header_ranges[0].end = 17; }), twice);
  EXPECT_EQ(refusal([](ReceiptFile& file, Receipt&) { file.tensors[2].end = 25; }), twice);
  EXPECT_EQ(refusal([](ReceiptFile& file, Receipt&) { file.tensors[0] = file.tensors[2]; }), twice);
  EXPECT_EQ(refusal([](ReceiptFile& file, Receipt&) {
              file.tensors[0].ranges = {{0, 32}};
            }),
            "a tensor of an output must have one digest of all its bytes");
  EXPECT_EQ(refusal([](ReceiptFile& file, Receipt& receipt) {
              receipt.outputs.push_back(ReceiptFile(file));
            }),
            "two outputs have the same path");
  const auto made_of = [](const char* listed, const char* used, int files = 1) {
    return [=](ReceiptFile& file, Receipt& receipt) {
      file.tensors[0].sources = {used};
      ReceiptFile source = {.path = "a", .header_digest = file.header_digest};
      source.tensors.push_back({.name = listed, .digest = file.header_digest});
      for (int i = 0; i < files; ++i) receipt.sources.push_back(source);
    };
  };
  EXPECT_EQ(refusal(made_of("a", "a")), "");
  EXPECT_EQ(refusal(made_of("a", "b")),
            "no source lists a tensor from which another tensor was made");
  EXPECT_EQ(refusal(made_of("a", "a", 2)), "two sources have the same path");
  EXPECT_EQ(refusal([](ReceiptFile& file, Receipt& receipt) {
              receipt.sources = {file};
              receipt.sources[0].tensors.push_back(file.tensors[0]);
            }),
            "two tensors have the same name");
  // A receipt need not cover all tensors of a source.
  EXPECT_EQ(refusal([](ReceiptFile& file, Receipt& receipt) {
              file.tensors.pop_back();
              receipt.sources.swap(receipt.outputs);
            }),
            "");
}

// Damaged text must give a valid receipt or the Error "receipt.json".
TEST(ReceiptTest, JsonTrustsNothing) {
  const std::string good = to_json(some_receipt());
  const auto expect_refused = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const auto at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    try {
      static_cast<void>(receipt_from_json(text));
      ADD_FAILURE() << from << " -> " << to;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), "receipt.json") << from << " -> " << to;
    }
  };
  expect_refused("a/b.safetensors", "../b");
  expect_refused("a/b.safetensors", "/b");
  expect_refused("a/b.safetensors", "a/../b");
  expect_refused("\"version\"", "\"verzion\"");
  expect_refused("xxh3-128", "md5");
  expect_refused("aaaaaaaa", "AAAAAAAA");
  expect_refused("aaaaaaaa", "aaaaaaa");
  expect_refused("loadstone-receipt", "receipt");
  expect_refused("1048576", "1");
  expect_refused("48", "47");
  std::mt19937 random(3);
  for (int i = 0; i < 3000; ++i) {
    std::string text = good;
    text[random() % text.size()] = static_cast<char>(random());
    if (i % 3 == 0) text.resize(random() % text.size());
    try {
      static_cast<void>(receipt_from_json(text));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), "receipt.json");
    }
  }
}

}  // namespace
}  // namespace loadstone

// Tests importance matrices in both formats, including files that break one rule each.
#include "formats/imatrix.h"

#include <gmock/gmock.h>

#include <limits>
#include <random>

#include "loadstone/importance.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/imatrix_file.h"
#include "support/memory_storage.h"

namespace loadstone::test {

namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Numbers = std::vector<float>;

constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr float infinite = std::numeric_limits<float>::infinity();

ImportanceMatrix read(const std::string& bytes) {
  return read_imatrix(*memory_source(bytes, "/m/x.imatrix"));
}

const Numbers& entry(const ImportanceMatrix& matrix, const std::string& name) {
  return *matrix.entries.at(name);
}

std::string binary(std::int32_t count, const std::string& entries, const std::string& end = {}) {
  return raw(count) + entries + end;
}

std::string binary_control() {
  return binary(2,
                imatrix_entry("blk.0.attn_q.weight", 4, {1, 2, 3, 10}) +
                    imatrix_entry("blk.0.ffn_up.weight", 0, {5, 0.5f}),
                imatrix_end(7, "wiki.txt"));
}

std::string gguf_control() {
  GgufWriter writer = imatrix_keys(7, "wiki.txt");
  add_imatrix_entry(writer, "blk.0.attn_q.weight", {1, 2, 3, 10}, {4});
  add_imatrix_entry(writer, "blk.0.ffn_up_exps.weight", {2, 4, 9, 9, 1, 3}, {2, 0, 1});
  return writer.bytes();
}

TEST(Imatrix, SumsOfTheOldFormatAreDividedByCalls) {
  const ImportanceMatrix matrix = read(binary_control());
  EXPECT_EQ(matrix.entries.size(), 2u);
  EXPECT_THAT(entry(matrix, "blk.0.attn_q.weight"), ElementsAre(0.25f, 0.5f, 0.75f, 2.5f));
  // The entry is unchanged, because its count is 0.
  EXPECT_THAT(entry(matrix, "blk.0.ffn_up.weight"), ElementsAre(5, 0.5f));
  EXPECT_EQ(matrix.dataset, "wiki.txt");
  EXPECT_EQ(matrix.chunks, 7u);
  EXPECT_EQ(matrix.path, "/m/x.imatrix");
}

TEST(Imatrix, SumsOfGgufAreDividedByTheCountsOfEachExpert) {
  const ImportanceMatrix matrix = read(gguf_control());
  EXPECT_EQ(matrix.entries.size(), 2u);
  EXPECT_THAT(entry(matrix, "blk.0.attn_q.weight"), ElementsAre(0.25f, 0.5f, 0.75f, 2.5f));
  // The second expert saw no token.
  EXPECT_THAT(entry(matrix, "blk.0.ffn_up_exps.weight"), ElementsAre(1, 2, 1, 1, 1, 3));
  EXPECT_EQ(matrix.dataset, "wiki.txt");
  EXPECT_EQ(matrix.chunks, 7u);
}

TEST(Imatrix, OldFilesEndEarly) {
  const std::string one = imatrix_entry("a", 1, {1});
  EXPECT_FALSE(read(binary(1, one)).dataset);
  EXPECT_EQ(read(binary(1, one)).chunks, 0u);
  EXPECT_EQ(read(binary(1, one, raw(std::int32_t{3}))).chunks, 3u);
  EXPECT_FALSE(read(binary(1, one, imatrix_end(3, ""))).dataset);
}

TEST(Imatrix, TensorsOfOtherNamesAndDatasetsOfNoneAreLeftOut) {
  GgufWriter writer;
  writer.entry("imatrix.datasets", GgufWriter::array,
               raw(GgufWriter::string) + raw(std::uint64_t{0}));
  writer.entry_number("imatrix.chunk_count", GgufWriter::u32, std::uint32_t{0});
  writer.entry_number("imatrix.chunk_size", GgufWriter::u32, std::uint32_t{0});
  writer.tensor("other", {1}, 0, raw(1.0f));
  add_imatrix_entry(writer, "a", {6}, {2.4f});  // counts are integers, stored as F32
  const ImportanceMatrix matrix = read(writer.bytes());
  EXPECT_FALSE(matrix.dataset);
  EXPECT_EQ(matrix.entries.size(), 1u);
  EXPECT_THAT(entry(matrix, "a"), ElementsAre(3));
}

struct Bad {
  std::string what;
  std::string bytes;
  std::string code;
  std::string expected;  // entry and field, or offset, after the path
};

void PrintTo(const Bad& each, std::ostream* out) { *out << each.what; }

Bad old_file(std::string what, std::int32_t count, const std::string& entries, std::string code,
             std::string expected, const std::string& end = {}) {
  return {std::move(what), binary(count, entries, end), std::move(code), std::move(expected)};
}

template <typename Add>
Bad gguf_file(std::string what, const Add& add, std::string code, std::string expected) {
  GgufWriter writer = imatrix_keys(1, "d");
  add(writer);
  return {std::move(what), writer.bytes(), std::move(code), std::move(expected)};
}

std::vector<Bad> bad_old_files() {
  const std::string good = imatrix_entry("blk.0", 1, {1, 2});
  const std::string cut = good.substr(0, good.size() - 4);
  const std::string length_only = raw(std::int32_t{5});
  const std::string head = length_only + "blk.0" + raw(std::int32_t{1});
  return {
      {"empty", "", "im.truncated", "entries"},
      {"three_bytes", "abc", "im.truncated", "entries"},
      old_file("no_entries", 0, "", "im.count", "entries"),
      old_file("negative_entries", -1, good, "im.count", "entries"),
      old_file("more_entries_than_bytes", 1 << 30, good, "im.count", "entries"),
      old_file("one_entry_more", 2, good, "im.count", "entries"),

      old_file("name_of_no_bytes", 1, raw(std::int32_t{0}) + good, "im.count", "name length"),
      old_file("negative_name", 1, raw(std::int32_t{-5}) + good, "im.count", "name length"),
      old_file("name_past_the_end", 1, raw(std::int32_t{1000}) + good, "im.count", "name length"),
      old_file("name_with_nul", 1, imatrix_entry(std::string("a\0b", 3), 1, {1}), "im.name",
               "entry 1 of 1"),
      old_file("name_not_utf8", 1, imatrix_entry("a\xff", 1, {1}), "im.name", "\\xff"),
      old_file("negative_calls", 1, imatrix_entry("blk.0", -1, {1}), "im.count", "blk.0"),
      old_file("no_numbers", 1, imatrix_entry("blk.0", 1, {}) + good, "im.count", "blk.0"),
      old_file("negative_numbers", 1, head + raw(std::int32_t{-1}) + good, "im.count", "numbers"),
      old_file("numbers_past_the_end", 1, cut, "im.count", "numbers"),
      old_file("most_numbers", 1, head + raw(INT32_MAX) + good, "im.count", "numbers"),
      old_file("nan", 1, imatrix_entry("blk.0", 1, {1, nan}), "im.value", "value 1"),
      old_file("infinite", 1, imatrix_entry("blk.0", 0, {infinite}), "im.value", "blk.0"),
      old_file("negative", 1, imatrix_entry("blk.0", 2, {-1}), "im.value", "blk.0"),
      old_file("duplicate", 2, good + good, "im.duplicate", "blk.0"),
      old_file("chunks_cut", 1, good, "im.truncated", "chunks", "ab"),
      old_file("negative_chunks", 1, good, "im.count", "chunks", imatrix_end(-1, "d")),
      old_file("dataset_length_cut", 1, good, "im.truncated", "dataset length",
               raw(std::int32_t{1}) + "ab"),
      old_file("dataset_past_the_end", 1, good, "im.count", "dataset length",
               raw(std::int32_t{1}) + raw(std::int32_t{9}) + "wiki"),
      old_file("trailing", 1, good, "im.trailing", "1 byte", imatrix_end(1, "d") + "x"),
  };
}

// Returns the keys of an importance matrix, one of them replaced.
GgufWriter other_key(std::string_view other, std::uint32_t type, const std::string& value) {
  GgufWriter writer;
  const auto add = [&](std::string_view key, std::uint32_t its_type, const std::string& its_value) {
    if (key != other) {
      writer.entry(key, its_type, its_value);
    } else if (!value.empty()) {
      writer.entry(key, type, value);
    }
  };
  add("imatrix.datasets", GgufWriter::array, raw(GgufWriter::string) + raw(std::uint64_t{0}));
  add("imatrix.chunk_count", GgufWriter::u32, raw(std::uint32_t{1}));
  add("imatrix.chunk_size", GgufWriter::u32, raw(std::uint32_t{1}));
  add_imatrix_entry(writer, "a", {1}, {1});
  return writer;
}

Bad bad_key(std::string what, std::string_view key, std::uint32_t type, const std::string& value) {
  return {std::move(what), other_key(key, type, value).bytes(), "im.metadata", std::string(key)};
}

std::vector<Bad> bad_gguf_files() {
  using Writer = GgufWriter;
  const std::string one = raw(1.0f);
  return {
      {"gguf_of_nothing", "GGUF", "gg.truncated", "file"},
      bad_key("no_datasets", "imatrix.datasets", 0, ""),
      bad_key("no_chunk_count", "imatrix.chunk_count", 0, ""),
      bad_key("no_chunk_size", "imatrix.chunk_size", 0, ""),
      bad_key("count_is_text", "imatrix.chunk_count", Writer::string, Writer::text("1")),
      bad_key("count_is_i32", "imatrix.chunk_count", Writer::i32, raw(std::int32_t{1})),
      bad_key("count_is_large", "imatrix.chunk_count", Writer::u32, raw(UINT32_MAX)),
      gguf_file(
          "no_entries", [](Writer&) {}, "im.empty", "0 tensors"),
      gguf_file(
          "of_a_model", [&](Writer& to) { to.tensor("a.weight", {1}, 0, one); }, "im.empty",
          "1 tensor"),
      gguf_file(
          "sums_alone", [&](Writer& to) { to.tensor("a.in_sum2", {1}, 0, one); }, "im.pair",
          "a.in_sum2"),
      gguf_file(
          "counts_alone", [&](Writer& to) { to.tensor("a.counts", {1}, 0, one); }, "im.pair",
          "a.counts"),
      gguf_file(
          "no_name", [](Writer& to) { add_imatrix_entry(to, "", {1}, {1}); }, "im.name", "in_sum2"),
      gguf_file(
          "sums_of_halves",
          [&](Writer& to) {
            to.tensor("a.in_sum2", {2}, 1, one);
            to.tensor("a.counts", {1}, 0, one);
          },
          "im.dtype", "a.in_sum2"),
      gguf_file(
          "counts_of_i32",
          [&](Writer& to) {
            to.tensor("a.in_sum2", {1}, 0, one);
            to.tensor("a.counts", {1}, 26, one);
          },
          "im.dtype", "a.counts"),
      gguf_file(
          "no_counts", [](Writer& to) { add_imatrix_entry(to, "a", {1}, {}); }, "im.shape",
          "a.counts"),
      gguf_file(
          "no_sums", [](Writer& to) { add_imatrix_entry(to, "a", {}, {1}); }, "im.shape",
          "a.in_sum2"),
      gguf_file(
          "a_sum_too_many",
          [](Writer& to) {
            to.tensor("a.in_sum2", {3}, 0, raw_all(Numbers{1, 2, 3}));
            to.tensor("a.counts", {2}, 0, raw_all(Numbers{1, 1}));
          },
          "im.shape", "2 counts for 3 sums"),
      gguf_file(
          "nan",
          [](Writer& to) {
            add_imatrix_entry(to, "a", {1, nan}, {1});
          },
          "im.value", "value 1"),
      gguf_file(
          "negative_count", [](Writer& to) { add_imatrix_entry(to, "a", {1}, {-1}); }, "im.value",
          "a"),
      gguf_file(
          "infinite_count", [](Writer& to) { add_imatrix_entry(to, "a", {1}, {infinite}); },
          "im.value", "a"),
  };
}

class BadImatrix : public ::testing::TestWithParam<Bad> {};

TEST_P(BadImatrix, IsRefusedByName) {
  const auto error = error_of([] { (void)read(GetParam().bytes); });
  ASSERT_TRUE(error) << "accepted";
  EXPECT_EQ(error->code(), GetParam().code) << error->what();
  EXPECT_THAT(error->what(), HasSubstr(GetParam().expected));
  EXPECT_THAT(error->what(), HasSubstr("/m/x.imatrix"));
}

INSTANTIATE_TEST_SUITE_P(Old, BadImatrix, ::testing::ValuesIn(bad_old_files()),
                         [](const auto& each) { return each.param.what; });
INSTANTIATE_TEST_SUITE_P(Gguf, BadImatrix, ::testing::ValuesIn(bad_gguf_files()),
                         [](const auto& each) { return each.param.what; });

// Expects a file format Error or a matrix that encoders accept. Returns the error code.
std::string outcome(const std::string& bytes) {
  const auto error = error_of([&] {
    for (const auto& [name, numbers] : read(bytes).entries) {
      EXPECT_FALSE(numbers->empty());
      for (const float each : *numbers) EXPECT_TRUE(each >= 0 && each < infinite) << name;
    }
  });
  return error ? error->code() : "";
}

TEST(Imatrix, CutOrChangedFilesAreRefusedOrRead) {
  for (const std::string& bytes : {binary_control(), gguf_control()}) {
    EXPECT_EQ(outcome(bytes), "");
    std::size_t cut = 0;
    for (std::size_t length = 0; length < bytes.size(); ++length) {
      cut += outcome(bytes.substr(0, length)).empty() ? 0 : 1;
    }
    // Two cuts leave a valid file: before the optional end of the old format, and in the padding
    // after the last tensor.
    EXPECT_GE(cut + 32, bytes.size());
    std::mt19937 random(7);
    for (int i = 0; i < 4000; ++i) {
      std::string changed = bytes;
      changed[random() % changed.size()] = static_cast<char>(random());
      (void)outcome(changed);
    }
    for (std::size_t at = 0; at + 4 <= bytes.size(); ++at) {
      for (const std::int32_t number : {INT32_MAX, INT32_MIN, -1, 0, 1 << 20}) {
        std::string changed = bytes;
        changed.replace(at, 4, raw(number));
        (void)outcome(changed);
      }
    }
  }
}

TEST(Imatrix, OpensByPathAndSaysTheFile) {
  const TemporaryFolder folder;
  const std::string path = folder.write("x.dat", binary_control());
  EXPECT_EQ(open_importance_matrix(path).path, path);
  EXPECT_EQ(code_of([&] { (void)open_importance_matrix(folder / "none.dat"); }), "io.not_found");
  EXPECT_EQ(code_of([&] { (void)open_importance_matrix(folder.path()); }), "io.not_regular");
  MemoryStorage storage;
  storage.add_file("/m/x.gguf", gguf_control());
  EXPECT_EQ(open_importance_matrix("/m/x.gguf", &storage).entries.size(), 2u);
}

}  // namespace

}  // namespace loadstone::test

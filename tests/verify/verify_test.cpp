#include "loadstone/verify.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <random>
#include <stdexcept>
#include <thread>

#include "support/errors.h"
#include "support/files.h"
#include "support/hostile_cases.h"
#include "support/memory_storage.h"
#include "support/torch_file.h"
#include "support/watched_storage.h"
#include "verify/values.h"

namespace loadstone::test {

namespace {

using namespace ::testing;

struct Opened {
  std::unique_ptr<MemoryStorage> storage = std::make_unique<MemoryStorage>();
  std::shared_ptr<const Catalog> catalog;

  [[nodiscard]] VerifyOptions options() const { return {.storage = storage.get()}; }
};

Opened opened(const std::string& bytes, const std::string& name = "model.safetensors") {
  Opened file;
  file.storage->add_file("/m/" + name, bytes);
  file.catalog = open_checkpoint("/m/" + name, {.storage = file.storage.get()});
  return file;
}

VerifyReport verified(const std::vector<FileTensor>& tensors) {
  const Opened file = opened(safetensors_bytes(tensors));
  return verify_values(*file.catalog, file.options());
}

TEST(VerifyValues, FiniteNumbersAreFine) {
  const VerifyReport report = verified({{"a", "F32", {2}, raw_all<float>({1.0f, -0.0f})},
                                        {"b", "BOOL", {3}, std::string("\0\1\0", 3)},
                                        {"c", "I8", {2}, "\x7f\xff"}});
  EXPECT_TRUE(report.ok());
  EXPECT_THAT(report.not_finite, IsEmpty());
  EXPECT_EQ(report.bytes_read, 8u + 3u + 2u);
}

TEST(VerifyValues, CountsNanAndInfinityWithoutFailing) {
  const float inf = std::numeric_limits<float>::infinity();
  const VerifyReport report =
      verified({{"a", "F32", {4}, raw_all<float>({std::nanf(""), inf, -inf, 1})},
                {"b", "F16", {3}, raw_all<std::uint16_t>({0x7c00, 0xfe00, 0x3c00})},
                {"c", "BF16", {2}, raw_all<std::uint16_t>({0xff80, 0x7fc0})},
                {"d", "F64", {2}, raw_all<double>({double{inf}, std::nan("")})},
                {"e", "F8_E4M3", {4}, "\x7f\xff\x7e\x80"},
                {"f", "F8_E5M2", {4}, "\x7c\x7d\xfc\x7b"},
                {"g", "F8_E8M0", {2}, "\xff\xfe"},
                {"h", "F8_E5M2FNUZ", {2}, std::string("\x80\x00", 2)}});
  EXPECT_TRUE(report.ok());
  EXPECT_THAT(report.not_finite,
              ElementsAre(NotFinite{"a", 1, 2}, NotFinite{"b", 1, 1}, NotFinite{"c", 1, 1},
                          NotFinite{"d", 1, 1}, NotFinite{"e", 2, 0}, NotFinite{"f", 1, 2},
                          NotFinite{"g", 1, 0}, NotFinite{"h", 1, 0}));
}

TEST(VerifyValues, BoolsOtherThanZeroAndOneAreFound) {
  const VerifyReport report = verified({{"mask.w", "BOOL", {4}, std::string("\0\1\2\xff", 4)}});
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.findings[0].code, "st.bool_value");
  EXPECT_THAT(report.findings[0].message, HasSubstr("mask.w"));
  EXPECT_THAT(report.findings[0].found, HasSubstr("2 bytes"));
  EXPECT_THAT(to_json(report), HasSubstr("\"suggestion\""));
}

// Views that torch saved may overlap. verify reads each byte once, and checks it for each tensor.
TEST(VerifyValues, OverlappingViewsAreReadOnce) {
  constexpr std::int32_t count = 1000;
  std::mt19937_64 random(3);
  std::vector<float> values(count);
  for (float& value : values) value = random() % 5 == 0 ? std::nanf("") : 1.0f;
  std::vector<std::string> items;
  std::vector<NotFinite> expected;
  for (int i = 0; i < 200; ++i) {
    const auto begin = static_cast<std::int32_t>(random() % (count - 20));
    const auto size = static_cast<std::int32_t>(1 + random() % 20) * (i % 3 == 0 ? 1 : 0) +
                      static_cast<std::int32_t>(random() % static_cast<unsigned>(count - begin));
    const std::int32_t extent = std::min(size, count - begin);
    const std::string name = fmt::format("t{:03}", i);
    items.push_back(pickle::text(name));
    items.push_back(
        pickle::tensor({.numel = count, .offset = begin, .size = {extent}, .stride = {1}}));
    const auto first = values.begin() + begin;
    const auto nans = std::count_if(first, first + extent, [](float v) { return std::isnan(v); });
    if (nans > 0) expected.push_back({name, static_cast<std::uint64_t>(nans), 0});
  }
  items.push_back(pickle::text("all"));
  items.push_back(pickle::tensor({.numel = count, .size = {count}, .stride = {1}}));
  const auto nans = std::ranges::count_if(values, [](float v) { return std::isnan(v); });
  expected.push_back({"all", static_cast<std::uint64_t>(nans), 0});
  const std::string data(reinterpret_cast<const char*>(values.data()), 4 * values.size());
  const Opened file =
      opened(zip_bytes({{.name = "archive/data.pkl", .bytes = pickle::whole(pickle::dict(items))},
                        {.name = "archive/data/0", .bytes = data}}),
             "model.pt");
  const VerifyReport report = verify_values(*file.catalog, file.options());
  EXPECT_EQ(report.bytes_read, data.size());
  EXPECT_THAT(report.not_finite, UnorderedElementsAreArray(expected));
}

// The tensor is larger than a chunk and has bad values at several offsets. verify must count each
// bad value once.
TEST(VerifyValues, LargeTensorsAreReadInChunks) {
  std::vector<float> values((std::size_t{9} << 20) / sizeof(float), 1.0f);
  for (const std::size_t at : {std::size_t{0}, values.size() / 2, values.size() - 1}) {
    values[at] = std::nanf("");
  }
  const VerifyReport report = verified({{"a", "F32", {values.size()}, raw_all(values)}});
  EXPECT_THAT(report.not_finite, ElementsAre(NotFinite{"a", 3, 0}));
}

struct ScalePlace {
  BlockFormat format;
  std::size_t offset;
  std::size_t bytes;
};

class BlockScales : public ::testing::TestWithParam<ScalePlace> {};

// Only the second of three blocks is invalid: all bits of its scale are set.
TEST_P(BlockScales, AScaleThatIsNotFiniteIsCounted) {
  const auto& [format, offset, bytes] = GetParam();
  const std::size_t block = layout(format).bytes;
  std::vector<std::byte> blocks(3 * block);
  EXPECT_EQ(count_values(format, blocks).bad_scales, 0u);
  for (std::size_t i = 0; i < bytes; ++i) blocks[block + offset + i] = std::byte{0xff};
  if (format == BlockFormat::nvfp4) blocks[block + offset] = std::byte{0x7f};
  EXPECT_EQ(count_values(format, blocks).bad_scales, 1u);
}

INSTANTIATE_TEST_SUITE_P(
    All, BlockScales,
    ::testing::Values(ScalePlace{BlockFormat::q4_0, 0, 2}, ScalePlace{BlockFormat::q4_1, 2, 2},
                      ScalePlace{BlockFormat::q5_0, 0, 2}, ScalePlace{BlockFormat::q5_1, 2, 2},
                      ScalePlace{BlockFormat::q8_0, 0, 2}, ScalePlace{BlockFormat::q2_k, 80, 2},
                      ScalePlace{BlockFormat::q2_k, 82, 2}, ScalePlace{BlockFormat::q3_k, 108, 2},
                      ScalePlace{BlockFormat::q4_k, 0, 2}, ScalePlace{BlockFormat::q4_k, 2, 2},
                      ScalePlace{BlockFormat::q5_k, 2, 2}, ScalePlace{BlockFormat::q6_k, 208, 2},
                      ScalePlace{BlockFormat::iq2_xxs, 0, 2}, ScalePlace{BlockFormat::iq1_m, 48, 8},
                      ScalePlace{BlockFormat::tq1_0, 52, 2}, ScalePlace{BlockFormat::tq2_0, 64, 2},
                      ScalePlace{BlockFormat::mxfp4, 0, 1}, ScalePlace{BlockFormat::nvfp4, 3, 1},
                      ScalePlace{BlockFormat::q1_0, 0, 2}, ScalePlace{BlockFormat::q2_0, 0, 2}));

// Checks the manifest's files whose damage is not detected on opening.
TEST(VerifyValues, FindsWhatTheManifestSays) {
  int seen = 0;
  for (const HostileCase& test : hostile_cases()) {
    if (!needs_values(test.expect) || test.expect == "digest") continue;
    if (is_not_looked_at(test.expect)) continue;
    ++seen;
    const VerifyReport report = verify_values(*open_checkpoint(test.path));
    ASSERT_EQ(report.findings.size(), 1u) << test.name;
    EXPECT_EQ(report.findings[0].code, test.expect) << test.name;
    EXPECT_THAT(report.findings[0].message, HasSubstr(test.culprit)) << test.name;
    EXPECT_THAT(report.findings[0].message, HasSubstr(test.field)) << test.name;
  }
  EXPECT_EQ(seen, 4);
}

TEST(VerifyValues, AChangedFileIsRefused) {
  Opened file = opened(safetensors_bytes({{"a", "U8", {2}, "ab"}}));
  file.storage->set_modified_ns("/m/model.safetensors", 77);
  EXPECT_EQ(code_of([&] { (void)verify_values(*file.catalog, file.options()); }), "io.changed");
}

// A storage may lack inodes, and programs can set a file's time, so verify also compares headers.
TEST(VerifyValues, AnotherHeaderIsRefused) {
  Opened file = opened(safetensors_bytes({{"a", "U8", {2}, "ab"}}));
  file.storage->add_file("/m/model.safetensors", safetensors_bytes({{"b", "U8", {2}, "ab"}}));
  EXPECT_EQ(code_of([&] { (void)verify_values(*file.catalog, file.options()); }), "io.changed");
}

TEST(VerifyValues, AReadErrorNamesTheFile) {
  Opened file = opened(safetensors_bytes({{"a", "U8", {2}, "ab"}}));
  FaultyStorage faulty(*file.storage, {.path_end = "model.safetensors"});
  const auto error = error_of([&] { (void)verify_values(*file.catalog, {.storage = &faulty}); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), "io.read");
  EXPECT_EQ(error->where().path, "/m/model.safetensors");
}

class StopAtOnce final : public Observer {
 public:
  bool on_progress(const Progress&) override { return false; }
};

TEST(VerifyValues, CanBeCancelled) {
  Opened file =
      opened(safetensors_bytes({{"a", "U8", {std::size_t{16} << 20}, some_bytes(16 << 20)}}));
  LoggingStorage slow(*file.storage);
  slow.watch().before_read = [&](const Access&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  };
  StopAtOnce observer;
  EXPECT_EQ(code_of([&] {
              (void)verify_values(*file.catalog,
                                  {.storage = &slow, .threads = 1, .observer = &observer});
            }),
            "cancelled");
}

class ThrowAtOnce final : public Observer {
 public:
  bool on_progress(const Progress&) override { throw std::runtime_error("seen enough"); }
};

// The exception stops the reads that have not started.
TEST(VerifyValues, AnObserverThatThrowsEndsIt) {
  constexpr std::size_t tensors = 200;
  std::vector<FileTensor> many;
  for (std::size_t i = 0; i < tensors; ++i) many.push_back({std::to_string(i), "U8", {2}, "ab"});
  Opened file = opened(safetensors_bytes(many));
  LoggingStorage slow(*file.storage);
  slow.watch().before_read = [&](const Access&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  };
  ThrowAtOnce observer;
  EXPECT_THROW(
      (void)verify_values(*file.catalog, {.storage = &slow, .threads = 2, .observer = &observer}),
      std::runtime_error);
  EXPECT_LT(slow.accesses().size(), tensors);
  EXPECT_GT(slow.accesses().size(), 0u);
}

// ---- after the values: scales, ties and samples

class StopLate final : public Observer {
 public:
  bool on_progress(const Progress&) override { return !is_late; }

  std::atomic<bool> is_late = false;
};

// Returns the code of a run whose observer cancels during its last read.
std::string code_of_late_stop(Storage& files,
                              const std::function<void(const VerifyOptions&)>& work) {
  LoggingStorage slow(files);
  const VerifyOptions alone = {.storage = &slow, .threads = 1};
  work(alone);  // reads the header, once per catalog
  slow.watch().clear();
  work(alone);
  const std::size_t reads = slow.accesses().size();
  slow.watch().clear();
  StopLate observer;
  slow.watch().before_read = [&](const Access&) {
    if (slow.accesses().size() < reads) return;
    observer.is_late = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  };
  return code_of([&] { work({.storage = &slow, .threads = 1, .observer = &observer}); });
}

std::string int8_file() {
  return safetensors_bytes({{"a.weight", "I8", {2, 2}, "abcd"},
                            {"a.weight_scale", "F32", {2, 1}, raw_all<float>({1.0f, 2.0f})}});
}

TEST(VerifyValues, CanBeCancelledAmongScales) {
  const Opened file = opened(int8_file());
  EXPECT_EQ(code_of_late_stop(
                *file.storage,
                [&](const VerifyOptions& options) { (void)verify_values(*file.catalog, options); }),
            "cancelled");
}

TEST(VerifyValues, CanBeCancelledAmongTies) {
  Opened file;
  file.storage->add_file("/m/config.json",
                         R"({"model_type": "llama", "tie_word_embeddings": true})");
  file.storage->add_file(
      "/m/model.safetensors",
      safetensors_bytes({{"model.embed_tokens.weight", "F32", {2, 2}, some_bytes(16)},
                         {"lm_head.weight", "F32", {2, 2}, std::string(16, '\0')}}));
  file.catalog = open_checkpoint("/m", {.storage = file.storage.get()});
  EXPECT_EQ(verify_values(*file.catalog, file.options()).findings.at(0).code, "plan.tie");
  EXPECT_EQ(code_of_late_stop(
                *file.storage,
                [&](const VerifyOptions& options) { (void)verify_values(*file.catalog, options); }),
            "cancelled");
}

TEST(Compare, CanBeCancelledAmongSamples) {
  Opened file = opened(int8_file());
  file.storage->add_file("/n/model.safetensors",
                         safetensors_bytes({{"a.weight", "F32", {2, 2}, some_bytes(16)}}));
  const auto other = open_checkpoint("/n/model.safetensors", {.storage = file.storage.get()});
  EXPECT_EQ(code_of_late_stop(*file.storage,
                              [&](const VerifyOptions& options) {
                                (void)compare(*other, *file.catalog, options);
                              }),
            "cancelled");
}

// ---- files that change meanwhile

class WrittenTo : public ::testing::Test {
 protected:
  // Opens the file through a storage that changes one byte before the data is read.
  std::shared_ptr<const Catalog> open(const std::string& name, bool is_written) {
    const std::string path = folder_.write(
        name, safetensors_bytes({{"a", "U8", {2}, "ab"}, {"b", "F32", {64}, some_bytes(256)}}));
    auto catalog = open_checkpoint(path);
    const std::uint64_t data_begin = catalog->shards()[0].data_begin;
    if (!is_written) return catalog;
    storage_.watch().before_read = [path, data_begin](const Access& access) {
      if (access.path != path || access.offset < data_begin) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // longer than a clock tick
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(static_cast<std::streamoff>(data_begin));
      file.put('x');
    };
    return catalog;
  }

  TemporaryFolder folder_;
  LoggingStorage storage_{local_storage()};
};

TEST_F(WrittenTo, ValuesOfAFileThatIsWrittenToAreNotTold) {
  EXPECT_EQ(
      code_of([&] { (void)verify_values(*open("a.safetensors", false), {.storage = &storage_}); }),
      "");
  EXPECT_EQ(
      code_of([&] { (void)verify_values(*open("b.safetensors", true), {.storage = &storage_}); }),
      "io.changed");
}

TEST_F(WrittenTo, NeitherAreDifferences) {
  const auto first = open("a.safetensors", false);
  EXPECT_EQ(code_of([&] {
              (void)compare(*first, *open("b.safetensors", false), {.storage = &storage_});
            }),
            "");
  const auto written = open("c.safetensors", true);
  EXPECT_EQ(code_of([&] { (void)compare(*first, *written, {.storage = &storage_}); }),
            "io.changed");
  const auto also_written = open("d.safetensors", true);
  EXPECT_EQ(code_of([&] { (void)compare(*also_written, *first, {.storage = &storage_}); }),
            "io.changed");
}

VerifyReport compared(const std::vector<FileTensor>& first, const std::vector<FileTensor>& second) {
  MemoryStorage storage;
  storage.add_file("/a.safetensors", safetensors_bytes(first));
  storage.add_file("/b.safetensors", safetensors_bytes(second));
  const OpenOptions options{.storage = &storage};
  return compare(*open_checkpoint("/a.safetensors", options),
                 *open_checkpoint("/b.safetensors", options), {.storage = &storage});
}

TEST(Compare, OrderInTheFileDoesNotMatter) {
  const FileTensor a{"a", "U8", {2}, "ab"};
  const FileTensor b{"b", "F32", {1}, "cdef"};
  EXPECT_TRUE(compared({a, b}, {b, a}).ok());
}

TEST(Compare, NamesEachDifference) {
  const VerifyReport report = compared({{"bytes", "U8", {3}, "abc"},
                                        {"dtype", "I16", {2}, "wxyz"},
                                        {"gone", "U8", {1}, "1"},
                                        {"same", "U8", {0}, ""},
                                        {"shape", "U8", {2, 3}, "123456"}},
                                       {{"bytes", "U8", {3}, "abX"},
                                        {"dtype", "BF16", {2}, "wxyz"},
                                        {"new", "U8", {1}, "1"},
                                        {"same", "U8", {0}, ""},
                                        {"shape", "U8", {3, 2}, "123456"}});
  EXPECT_FALSE(report.ok());
  EXPECT_THAT(
      report.differences,
      ElementsAre(Difference{"bytes", DifferenceKind::bytes,
                             "different bytes, first at byte 2 of the tensor", "equal bytes"},
                  Difference{"dtype", DifferenceKind::encoding, "BF16", "I16"},
                  Difference{"gone", DifferenceKind::missing, "nothing", "U8 [1]"},
                  Difference{"shape", DifferenceKind::shape, "[3, 2]", "[2, 3]"},
                  Difference{"new", DifferenceKind::unexpected, "U8 [1]", "nothing"}));
  EXPECT_THAT(to_json(report), HasSubstr(R"("ok": false)"));
  EXPECT_THAT(to_table(report), HasSubstr("'gone'"));
}

// Names that differ only by a prefix are one finding, with the rules that map them.
TEST(Compare, LosslessRequiresEqualRealNumbers) {
  const auto with = [](float last) {
    return opened(safetensors_bytes({{"a", "F32", {2}, raw_all<float>({1.5f, last})},
                                     {"b", "F32", {1}, raw_all<float>({-0.0f})}}));
  };
  const Opened second =
      opened(safetensors_bytes({{"a", "BF16", {2}, raw_all<std::uint16_t>({0x3fc0, 0x3f80})},
                                {"b", "F32", {1}, raw_all<float>({0.0f})}}));
  const auto compared = [&](float last) {
    const Opened first = with(last);
    return compare(*first.catalog, *second.catalog, {.require_lossless = true});
  };
  const VerifyReport equal = compared(1.0f);
  EXPECT_TRUE(equal.ok()) << to_table(equal);
  EXPECT_THAT(to_table(equal), HasSubstr("equal as real numbers"));
  const VerifyReport rounded = compared(1.001f);
  ASSERT_THAT(rounded.findings, SizeIs(1));
  EXPECT_FALSE(rounded.ok());
  EXPECT_EQ(rounded.findings[0].code, "verify.lossy");
  EXPECT_EQ(rounded.findings[0].target, "a");
  EXPECT_THAT(rounded.findings[0].message,
              HasSubstr("1 tensor changed from F32 to BF16: largest error 0.001,"));
}

TEST(Compare, APrefixIsNamed) {
  const auto tensors = [](const std::string& prefix) {
    return std::vector<FileTensor>{{prefix + "layers.0.w", "U8", {2}, "ab"},
                                   {prefix + "layers.1.w", "U8", {2}, "cd"},
                                   {"head", "U8", {1}, "e"}};
  };
  const std::tuple<const char*, const char*, const char*> cases[] = {
      {"model.", "", R"({"model.":""})"},
      {"", "diffusion_model.", R"({"":"diffusion_model."})"},
      {"model.", "diffusion_model.", R"({"model.":"diffusion_model."})"}};
  for (const auto& [first, second, rules] : cases) {
    const VerifyReport report = compared(tensors(first), tensors(second));
    EXPECT_FALSE(report.ok());
    EXPECT_THAT(report.differences, IsEmpty());
    ASSERT_THAT(report.findings, SizeIs(1));
    EXPECT_EQ(report.findings[0].code, "verify.names");
    EXPECT_THAT(report.findings[0].suggestion, HasSubstr(rules));
  }
  // Control: one more tensor is missing, so the names differ by more than a prefix.
  auto more = tensors("model.");
  more.push_back({"model.layers.2.w", "U8", {2}, "ef"});
  const VerifyReport report = compared(more, tensors(""));
  EXPECT_THAT(report.differences, SizeIs(5));
  EXPECT_THAT(report.findings[0].suggestion, IsEmpty());
}

TEST(Compare, SeesTheLastByteOfALargeTensor) {
  const std::string data = some_bytes((9u << 20) + 5);
  std::string other = data;
  other.back() = static_cast<char>(other.back() + 1);
  EXPECT_TRUE(
      compared({{"a", "U8", {data.size()}, data}}, {{"a", "U8", {data.size()}, data}}).ok());
  const auto report =
      compared({{"a", "U8", {data.size()}, data}}, {{"a", "U8", {data.size()}, other}});
  ASSERT_EQ(report.differences.size(), 1u);
  EXPECT_THAT(report.differences[0].found, HasSubstr(std::to_string(data.size() - 1)));
}

}  // namespace

}  // namespace loadstone::test

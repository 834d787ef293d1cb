// Tests files that are cut at every byte, and files with one changed byte. loadstone must reject
// them with an Error or open them, with memory of at most the file size plus a constant.
#include <gmock/gmock.h>
#include <simdjson.h>

#include <cstring>
#include <random>

#include "hostile/allocations.h"
#include "loadstone/catalog.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/hostile_cases.h"
#include "support/memory_storage.h"

namespace loadstone::test {

namespace {

// Memory for a small header: buffers, the catalog, and the message of an error.
constexpr std::size_t constant_bytes = 1 << 20;
constexpr std::size_t per_file_byte = 16;
constexpr unsigned mutations_per_format = 7'000;

// A file system in memory, and the path to open.
struct Checkpoint {
  std::string path;
  std::string victim;  // the file to change
  MemoryStorage storage;
};

// Returns the error's code, or "" if the file was opened.
std::string open_mutated(Checkpoint& checkpoint, const std::string& bytes) {
  checkpoint.storage.add_file(checkpoint.victim, bytes);
  AllocationPeak::reset();
  std::string code;
  try {
    const auto catalog = open_checkpoint(checkpoint.path, {.storage = &checkpoint.storage});
    for (const TensorInfo& tensor : catalog->tensors()) {
      const Shard& shard = catalog->shards()[tensor.shard];
      EXPECT_LE(tensor.offset_begin, tensor.offset_end);
      EXPECT_LE(tensor.offset_end, shard.identity.bytes);
      EXPECT_GE(tensor.offset_begin, shard.data_begin);
      if (!tensor.strides.empty()) continue;
      EXPECT_EQ(tensor.byte_count(), tensor.encoding.byte_count(tensor.shape.numel().value()));
    }
  } catch (const Error& error) {
    code = error.code();
    EXPECT_NE(find_code(code), nullptr) << error.what();
  }
  EXPECT_LE(AllocationPeak::bytes(), per_file_byte * bytes.size() + constant_bytes) << code;
  return code;
}

std::string safetensors_control() {
  return safetensors_bytes({{"model.embed.weight", "BF16", {3, 2}, some_bytes(12)},
                            {"norm", "F32", {1}, some_bytes(4)},
                            {"empty", "F64", {0, 4}, ""},
                            {"codes", "F4", {2, 4}, some_bytes(4)}},
                           {{"format", "pt"}, {"note", "a \"quoted\" word"}});
}

std::string gguf_control() {
  GgufWriter writer;
  writer.entry_text("general.architecture", "llama");
  writer.entry_number("general.alignment", GgufWriter::u32, std::uint32_t{64});
  writer.entry_number("x.bool", GgufWriter::boolean, std::uint8_t{1});
  writer.entry_number("x.scale", GgufWriter::f64, 0.5);
  writer.entry("x.tokens", GgufWriter::array,
               raw(GgufWriter::string) + raw(std::uint64_t{3}) + GgufWriter::text("a") +
                   GgufWriter::text("bb") + GgufWriter::text(""));
  writer.entry("x.ids", GgufWriter::array,
               raw(GgufWriter::i32) + raw(std::uint64_t{3}) + some_bytes(12));
  writer.entry("x.nested", GgufWriter::array,
               raw(GgufWriter::array) + raw(std::uint64_t{1}) + raw(GgufWriter::u8) +
                   raw(std::uint64_t{2}) + "xy");
  writer.alignment = 64;
  writer.tensor("blk.0.w", {32, 2}, 2, some_bytes(36));
  writer.tensor("blk.0.b", {4}, 0, some_bytes(16));
  return writer.bytes();
}

std::string index_control() {
  return index_json({{"a", "model-00001-of-00002.safetensors"},
                     {"b\xc3\xa9", "sub/model-00002-of-00002.safetensors"}},
                    4);
}

Checkpoint checkpoint(const std::string& kind) {
  Checkpoint made;
  made.path = "/m";
  if (kind == "index") {
    made.victim = "/m/model.safetensors.index.json";
    made.storage.add_file("/m/model-00001-of-00002.safetensors",
                          safetensors_bytes({{"a", "U8", {2}, "ab"}}));
    made.storage.add_file("/m/sub/model-00002-of-00002.safetensors",
                          safetensors_bytes({{"b\xc3\xa9", "U8", {2}, "ab"}}));
  } else {
    made.victim = "/m/model." + (kind == "torch" ? "pt" : kind);
  }
  return made;
}

std::string control(const std::string& kind) {
  if (kind == "index") return index_control();
  if (kind == "torch") return read_file(LOADSTONE_HOSTILE_DIR "/torch/pt_ok_shared_storage.pt");
  return kind == "gguf" ? gguf_control() : safetensors_control();
}

class Mutated : public ::testing::TestWithParam<const char*> {};

TEST_P(Mutated, TheControlOpens) {
  Checkpoint made = checkpoint(GetParam());
  EXPECT_EQ(open_mutated(made, control(GetParam())), "");
}

TEST_P(Mutated, CutAtEveryByte) {
  Checkpoint made = checkpoint(GetParam());
  const std::string bytes = control(GetParam());
  std::size_t refused = 0;
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    refused += open_mutated(made, bytes.substr(0, length)).empty() ? 0 : 1;
  }
  // A cut GGUF file may open only if the cut is in the padding after the last tensor.
  EXPECT_GE(refused + 64, bytes.size());
  if (std::string(GetParam()) != "gguf") {
    EXPECT_EQ(refused, bytes.size());
  }
}

TEST_P(Mutated, OneByteChanged) {
  Checkpoint made = checkpoint(GetParam());
  const std::string bytes = control(GetParam());
  std::mt19937 random(20260);
  unsigned refused = 0;
  for (unsigned i = 0; i < mutations_per_format; ++i) {
    std::string changed = bytes;
    changed[random() % changed.size()] = static_cast<char>(random());
    refused += open_mutated(made, changed).empty() ? 0 : 1;
  }
  EXPECT_GT(refused, mutations_per_format / 20);
  EXPECT_LT(refused, mutations_per_format);
}

// Sizes and counts are 8-byte integers, so the test writes extreme values at every offset.
TEST_P(Mutated, LargeNumbersEverywhere) {
  Checkpoint made = checkpoint(GetParam());
  const std::string bytes = control(GetParam());
  for (std::size_t at = 0; at + 8 <= bytes.size(); ++at) {
    for (const std::uint64_t number :
         {UINT64_MAX, std::uint64_t{1} << 63, std::uint64_t{1} << 62, std::uint64_t{1} << 40,
          std::uint64_t{1} << 32, std::uint64_t{0x7fffffff}, std::uint64_t{0}}) {
      std::string changed = bytes;
      changed.replace(at, 8, raw(number));
      (void)open_mutated(made, changed);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, Mutated,
                         ::testing::Values("safetensors", "gguf", "torch", "index"),
                         [](const auto& each) { return std::string(each.param); });

// Small files of the manifest, cut at every byte.
TEST(MutatedManifest, ControlsCutAtEveryByte) {
  int seen = 0;
  for (const HostileCase& test : hostile_cases()) {
    if (test.accept == "no" || test.format == "sharded") continue;
    const std::string bytes = read_file(test.path);
    if (bytes.size() > 4096) continue;
    ++seen;
    Checkpoint made = checkpoint(test.format);
    for (std::size_t length = 0; length < bytes.size(); ++length) {
      (void)open_mutated(made, bytes.substr(0, length));
    }
  }
  EXPECT_GT(seen, 20);
}

// Control for the measurement of memory.
TEST(AllocationPeakControl, CountsWhatIsInUseAtOnce) {
  AllocationPeak::reset();
  std::vector<char>(1 << 20).swap(*std::make_unique<std::vector<char>>());
  EXPECT_GE(AllocationPeak::bytes(), std::size_t{1} << 20);
  EXPECT_LT(AllocationPeak::bytes(), std::size_t{2} << 20);
}

// Every header that loadstone accepts must also be valid for a second JSON parser.
TEST(SafetensorsHeader, IsNeverTakenWhereAStrictParserRefuses) {
  const std::string bytes = safetensors_control();
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  Checkpoint made = checkpoint("safetensors");
  std::mt19937 random(7);
  simdjson::dom::parser parser;
  const std::string_view pool = "{}[]\",: \\u0123456789-+.eEtfnull\t\nxyz";
  unsigned accepted = 0;
  for (unsigned i = 0; i < 3 * mutations_per_format; ++i) {
    std::string changed = bytes;
    const auto places = 1 + random() % 3;
    for (std::size_t k = 0; k < places; ++k)
      changed[8 + random() % length] = pool[random() % pool.size()];
    if (!open_mutated(made, changed).empty()) continue;
    ++accepted;
    EXPECT_EQ(parser.parse(changed.substr(8, length)).error(), simdjson::SUCCESS)
        << changed.substr(8, length);
  }
  EXPECT_GT(accepted, 100u);
}

}  // namespace

}  // namespace loadstone::test

// Tests conversions that fail or are cancelled and are then resumed.
#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "catalog/open_shards.h"
#include "convert/write/receipts.h"
#include "loadstone/convert.h"
#include "plan/values.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/samples.h"
#include "support/watched_storage.h"

namespace loadstone::test {

namespace {

using namespace ::testing;

constexpr ConvertRun resume = {.resume = true};
constexpr ConvertRun finish = {.finish = true};

constexpr ConvertRun part(std::uint32_t index, std::uint32_t count) {
  return {.part = ConvertPart{.index = index, .count = count}};
}

// Returns the error codes of several runs of one conversion. The last value in one of two shards is
// `wrong`, which is invalid after a cast or quantization.
std::vector<std::string> codes_of(float wrong, const std::string& to,
                                  const std::vector<ConvertRun>& runs) {
  const TemporaryFolder folder;
  std::vector<FileTensor> tensors;
  for (const std::string layer : {"0", "1"}) {
    std::vector<float> values(64UL * 64, 1.0F);
    if (layer == "1") values.back() = wrong;
    std::string bytes(values.size() * sizeof(float), '\0');
    std::memcpy(bytes.data(), values.data(), bytes.size());
    tensors.push_back({"model.layers." + layer + ".mlp.up_proj.weight", "F32", {64, 64}, bytes});
  }
  const std::string source = folder.write("in/source.safetensors", safetensors_bytes(tensors, {}));
  ConvertOptions options = {.one_file = false, .shard_bytes_max = 3000, .threads = 1};
  if (to == "f16") {
    options.dtype = Dtype::f16;
  } else {
    options.quantize.formats = {{.quantization = parse_quantization(to)}};
  }
  const Conversion plan = make_conversion(open_checkpoint(source), options);
  EXPECT_EQ(plan.files.size(), 2u);
  std::vector<std::string> codes;
  for (const ConvertRun& run : runs) {
    codes.push_back(code_of([&] { convert(plan, folder / "out", run); }));
  }
  return codes;
}

TEST(ResumeAfterAFailure, AFileWithAWrongValueIsNeverFinished) {
  for (const std::string to : {"f16", "fp8", "nf4", "int8"}) {
    SCOPED_TRACE(to);
    const float wrong = to == "f16" ? 1e6F : std::numeric_limits<float>::infinity();
    const std::string code = to == "f16" ? "convert.overflow" : "q.nan";
    EXPECT_THAT(codes_of(wrong, to, {resume, resume}), ElementsAre(code, code));
    EXPECT_THAT(codes_of(wrong, to, {part(1, 2), part(2, 2), finish}),
                ElementsAre("", code, "convert.incomplete"));
    // Control: all values are valid.
    EXPECT_THAT(codes_of(1, to, {part(1, 2), part(2, 2), finish}), ElementsAre("", "", ""));
  }
}

// Cancels the run after `reads` reads of a shard that an earlier run finished.
class KeptObserver final : public Observer {
 public:
  bool on_progress(const Progress& progress) override {
    EXPECT_LE(progress.bytes_done, progress.bytes_total);
    return reads == 0;
  }

  std::atomic<int> reads = 0;
};

// Three shards, each with four blocks and a header.
TEST(ResumeCancelled, WhileFinishedShardsAreRead) {
  const TemporaryFolder folder;
  std::vector<FileTensor> tensors;
  for (const char* name : {"a", "b", "c"}) {
    tensors.push_back({name, "U8", {4 << 20}, some_bytes(4 << 20)});
  }
  const std::string source = folder.write("in/source.safetensors", safetensors_bytes(tensors, {}));
  const Conversion plan = make_conversion(
      open_checkpoint(source), {.one_file = false, .shard_bytes_max = 4 << 20, .threads = 1});
  ASSERT_EQ(plan.files.size(), 3u);
  const std::string target = folder / "out";
  convert(plan, target, part(1, 1));
  for (ConvertRun run : {resume, part(1, 1), finish}) {
    KeptObserver observer;
    LoggingStorage watched(local_storage());
    watched.watch().before_read = [&](const Access& access) {
      if (access.path.find("/files/") == std::string::npos) return;
      ++observer.reads;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    };
    run.observer = &observer;
    run.storage = &watched;
    EXPECT_EQ(code_of([&] { convert(plan, target, run); }), "cancelled");
    EXPECT_GT(observer.reads, 0);
    EXPECT_LT(observer.reads, 15);
  }
  EXPECT_EQ(convert(plan, target, finish).outputs.size(), 4u);
}

// The thread that finishes a file reads the blocks again that were not hashed when they were
// written.
TEST(ResumeCancelled, WhileAReceiptReadsAgain) {
  const TemporaryFolder folder;
  const std::vector<FileTensor> tensors = {{"a", "U8", {4 << 20}, some_bytes(4 << 20)}};
  const std::string source = folder.write("source.safetensors", safetensors_bytes(tensors, {}));
  const auto catalog = open_checkpoint(source);
  const Conversion plan = make_conversion(catalog, {.threads = 1});
  const std::string target = convert(plan, folder / "out.safetensors").outputs.front();
  const ValueSet values = values_of(plan.plan, SinkKind::files);
  LoggingStorage watched(local_storage());
  const OpenShards shards(*catalog, &watched);
  for (const bool stops : {false, true}) {
    FileReceipts receipts(plan, values, shards, {true}, DigestKind::xxh3_128);
    int reads = 0;
    watched.watch().before_read = [&](const Access&) {
      ++reads;
      receipts.stop() = stops;
    };
    const auto written = local_storage().open(target);
    EXPECT_EQ(code_of([&] { (void)receipts.finish(0, *written); }), stops ? "cancelled" : "");
    EXPECT_EQ(reads == 1, stops);
  }
}

}  // namespace

}  // namespace loadstone::test

// Opens, plans, verifies and converts every file of the manifest. Memory and reads must stay within
// bounds relative to the file size, and only an Error with a known code may be thrown.
#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "hostile/allocations.h"
#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/execute.h"
#include "loadstone/plan.h"
#include "loadstone/verify.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/hostile_cases.h"
#include "support/watched_storage.h"

namespace loadstone::test {

namespace {

namespace fs = std::filesystem;

// Memory bounds per byte of the file, as documented in SECURITY.md. A plan or a conversion also
// needs a few strings per tensor.
constexpr std::size_t open_per_byte = 128;
constexpr std::size_t plan_per_byte = 512;
constexpr std::size_t constant_bytes = 1 << 20;
// Buffers of one thread of verify_values() and of a conversion.
constexpr std::size_t verify_bytes = 8 << 20;
constexpr std::size_t convert_bytes = 4 << 20;
// Tensors with stride 0 can expand to a huge output. This test does not write outputs larger than
// this bound.
constexpr std::uint64_t written_bytes_max = 64 << 20;
// Opening reads the header, and conversions read values twice if they compute the scale first. Each
// read takes at least one page.
constexpr std::uint64_t reads_per_byte = 4;
constexpr std::uint64_t reads_constant = 64 << 10;

std::uint64_t bytes_below(const std::string& path) {
  if (!fs::is_directory(path)) return fs::file_size(path);
  std::uint64_t bytes = 0;
  for (const auto& entry : fs::recursive_directory_iterator(path)) {
    if (entry.is_regular_file()) bytes += entry.file_size();
  }
  return bytes;
}

std::vector<HostileCase> all_cases() {
  std::vector<HostileCase> cases = hostile_cases();
  cases.insert(cases.end(), quantized_cases().begin(), quantized_cases().end());
  cases.insert(cases.end(), unread_cases().begin(), unread_cases().end());
  return cases;
}

class HostileBounds : public ::testing::TestWithParam<HostileCase> {
 protected:
  // Runs the action. Expects success or a known code, and at most this much memory.
  template <typename Action>
  void within(std::size_t memory_bytes_max, const char* what, Action action) {
    SCOPED_TRACE(what);
    storage_.watch().clear();
    AllocationPeak::reset();
    const auto error = error_of(action);
    EXPECT_LE(AllocationPeak::bytes(), memory_bytes_max);
    if (error) {
      EXPECT_NE(find_code(error->code()), nullptr) << error->what();
      EXPECT_NE(error->code(), "internal") << error->what();
    }
    std::uint64_t read = 0;
    for (const Access& access : storage_.accesses()) read += access.bytes;
    // Tensors of a torch file may overlap, and loadstone reads each separately (SECURITY.md).
    const std::uint64_t listed = catalog_ == nullptr ? 0 : catalog_->total_bytes();
    EXPECT_LE(read, reads_per_byte * std::max(file_bytes_, listed) + reads_constant);
  }

  void convert_within(const ConvertOptions& options, const char* what) {
    const TemporaryFolder folder;
    within(plan_per_byte * file_bytes_ + convert_bytes, what, [&] {
      const Conversion conversion = make_conversion(catalog_, options);
      if (conversion.bytes_to_write > written_bytes_max) return;
      convert(conversion, folder / "target.safetensors", {.storage = &storage_});
    });
    std::vector<std::string> files;
    for (const auto& entry : fs::directory_iterator(folder.path())) {
      files.push_back(entry.path().filename());
    }
    const auto converted =
        testing::UnorderedElementsAre("target.safetensors", ".loadstone-target.safetensors.done");
    EXPECT_THAT(files, testing::AnyOf(testing::IsEmpty(), converted));
  }

  std::uint64_t file_bytes_ = bytes_below(GetParam().path);
  LoggingStorage storage_{local_storage()};
  std::shared_ptr<const Catalog> catalog_;
};

TEST_P(HostileBounds, HoldForAllThatTheLibraryDoes) {
  within(open_per_byte * file_bytes_ + constant_bytes, "open",
         [&] { catalog_ = open_checkpoint(GetParam().path, {.storage = &storage_}); });
  if (catalog_ == nullptr) return;
  within(plan_per_byte * file_bytes_ + constant_bytes, "plan", [&] {
    const Plan plan = make_plan(catalog_, Skeleton::from_catalog(*catalog_), {});
    (void)plan_from_json(to_json(plan), {.storage = &storage_}, {.root = GetParam().path});
  });
  within(plan_per_byte * file_bytes_ + verify_bytes + constant_bytes, "verify",
         [&] { (void)to_json(verify_values(*catalog_, {.storage = &storage_, .threads = 1})); });
  ConvertOptions options;
  options.staging_bytes_max = 1 << 20;
  options.threads = 1;
  convert_within(options, "convert");
  options.dequantize = true;
  convert_within(options, "dequantize");
  options.dequantize = false;
  options.experts = ExpertLayout::fused;
  convert_within(options, "fuse");
  options.experts = ExpertLayout::separate;
  options.quantize.formats = {{.quantization = parse_quantization("nvfp4")}};
  convert_within(options, "quantize");
}

INSTANTIATE_TEST_SUITE_P(Manifest, HostileBounds, ::testing::ValuesIn(all_cases()),
                         [](const auto& each) { return each.param.name; });

// Control: the test detects a reader that allocates a gigabyte for a small file.
TEST(HostileBoundsControl, MemoryOfOtherThreadsIsCounted) {
  AllocationPeak::reset();
  std::thread([] {
    std::vector<char>(32 << 20).swap(*std::make_unique<std::vector<char>>());
  }).join();
  EXPECT_GE(AllocationPeak::bytes(), plan_per_byte * 10'000 + verify_bytes + constant_bytes);
}

}  // namespace

}  // namespace loadstone::test

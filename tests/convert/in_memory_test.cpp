// Tests that a conversion to memory gives the same bytes as a conversion to files.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "loadstone/convert.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/samples.h"

namespace loadstone::test {

namespace {

class InMemory : public ::testing::TestWithParam<std::optional<Dtype>> {
 protected:
  [[nodiscard]] Conversion conversion() const {
    ConvertOptions options;
    options.dtype = GetParam();
    options.one_file = false;
    options.shard_bytes_max = 150000;
    options.quantize.allow_non_finite = true;  // random values may exceed F16's range
    return make_conversion(open_checkpoint(source), options);
  }

  TemporaryFolder folder;
  std::string source = folder.write("source.safetensors", mixed_file());
};

std::span<std::byte> bytes_of(std::string& memory) {
  return std::as_writable_bytes(std::span(memory));
}

TEST_P(InMemory, EachFileHasTheBytesThatConvertWritesAfterItsHeader) {
  const Conversion wanted = conversion();
  convert(wanted, folder / "written/");
  ASSERT_GT(wanted.files.size(), 1U);
  for (std::uint32_t file = 0; file < wanted.files.size(); ++file) {
    std::string memory(wanted.files[file].data_bytes, '\x55');
    const std::uint64_t bytes_read = convert_in_memory(wanted, file, bytes_of(memory));
    EXPECT_GT(bytes_read, 0U);
    const std::string written = read_file((folder / "written/") + wanted.files[file].name);
    EXPECT_TRUE(memory == written.substr(wanted.files[file].header_bytes)) << file;
  }
}

TEST_P(InMemory, OtherMemoryIsRefused) {
  const Conversion wanted = conversion();
  std::string memory(wanted.files[0].data_bytes, '\0');
  const auto outcome = [&](std::uint32_t file, std::span<std::byte> data) {
    return code_of([&] { convert_in_memory(wanted, file, data); });
  };
  EXPECT_EQ(outcome(0, bytes_of(memory)), "");
  EXPECT_EQ(outcome(0, bytes_of(memory).first(memory.size() - 1)), "usage");
  EXPECT_EQ(outcome(static_cast<std::uint32_t>(wanted.files.size()), bytes_of(memory)), "usage");
}

TEST_P(InMemory, ASourceThatIsDamagedMeanwhileIsNamed) {
  const Conversion wanted = conversion();
  std::string memory(wanted.files[0].data_bytes, '\0');
  folder.write("source.safetensors", mixed_file().substr(0, 1000));
  EXPECT_NE(code_of([&] { convert_in_memory(wanted, 0, bytes_of(memory)); }), "");
}

TEST_P(InMemory, AnObserverStopsIt) {
  const Conversion wanted = conversion();
  std::string memory(wanted.files[0].data_bytes, '\0');
  struct Stopper final : Observer {
    bool on_progress(const Progress&) override { return false; }
  } stopper;
  EXPECT_EQ(code_of([&] { convert_in_memory(wanted, 0, bytes_of(memory), &stopper); }),
            "cancelled");
}

INSTANTIATE_TEST_SUITE_P(Dtypes, InMemory, ::testing::Values(std::nullopt, Dtype::f16, Dtype::f32));

}  // namespace

}  // namespace loadstone::test

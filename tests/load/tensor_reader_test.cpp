#include "loadstone/tensor_reader.h"

#include <gmock/gmock.h>

#include <algorithm>

#include "loadstone/execute.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/plan_builder.h"

namespace loadstone::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

// A checkpoint with a plain tensor, an FP8 tensor with its scale, an FP8 tensor without a scale,
// and MXFP4 blocks in the layout of GPT-OSS.
class TensorReaderTest : public ::testing::Test {
 protected:
  TensorReaderTest()
      : catalog_(open_checkpoint(folder_.write(
            "model.safetensors",
            safetensors_bytes(
                {{"plain", "F32", {2, 3}, raw_all<float>({0, 1, 2, 3, 4, 5})},
                 {"layers.0.weight", "F8_E4M3", {2, 2}, std::string("\x38\x40\xb8\x08", 4)},
                 {"layers.0.weight_scale", "F32", {}, raw_all<float>({0.5F})},
                 {"e.up_blocks", "U8", {1, 2, 1, 16}, std::string(32, '\x21')},
                 {"e.up_scales", "U8", {1, 2, 1}, std::string("\x7f\x80", 2)},
                 {"bad_blocks", "U8", {1, 2, 1, 16}, std::string(32, '\x21')},
                 {"ids", "I64", {1}, raw_all<std::int64_t>({7})}})))) {}

  [[nodiscard]] std::string code(std::string_view name, std::optional<Dtype> dtype = {}) const {
    return code_of([&] { (void)TensorReader(catalog_, name, dtype).read(); });
  }

  TemporaryFolder folder_;
  std::shared_ptr<const Catalog> catalog_;
};

TEST_F(TensorReaderTest, NumbersWhateverTheFileHolds) {
  EXPECT_THAT(read_numbers(catalog_, "plain"), ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(read_numbers(catalog_, "layers.0.weight"),
              ElementsAre(0.5F, 1.0F, -0.5F, 0.0078125F));
  TensorReader experts(catalog_, "e.up");  // [experts, rows, columns], transposed for the model
  EXPECT_EQ(experts.shape(), Shape({1, 32, 2}));
  EXPECT_EQ(experts.dtype(), Dtype::f32);
  const std::vector<float> numbers = read_numbers(catalog_, "e.up");
  EXPECT_THAT(std::vector(numbers.begin(), numbers.begin() + 4), ElementsAre(0.5F, 1.0F, 1, 2));
}

TEST_F(TensorReaderTest, IntegersThatFloatsRepresent) {
  const std::int64_t most = 1 << 24;
  const auto catalog = open_checkpoint(folder_.write(
      "integers.safetensors",
      safetensors_bytes({{"bool", "BOOL", {2}, std::string("\x00\x01", 2)},
                         {"i64", "I64", {2}, raw_all<std::int64_t>({-most, most})},
                         {"i64 large", "I64", {1}, raw_all<std::int64_t>({most + 1})},
                         {"i8", "I8", {1}, std::string("\xff")},
                         {"u64 large", "U64", {1}, raw_all<std::uint64_t>({UINT64_MAX})},
                         {"u8", "U8", {1}, std::string("\xff")}})));
  EXPECT_THAT(read_numbers(catalog, "bool"), ElementsAre(0, 1));
  EXPECT_THAT(read_numbers(catalog, "i64"), ElementsAre(-16777216, 16777216));
  EXPECT_THAT(read_numbers(catalog, "i8"), ElementsAre(-1));
  EXPECT_THAT(read_numbers(catalog, "u8"), ElementsAre(255));
  for (const char* name : {"i64 large", "u64 large"}) {
    const Error error = error_of([&] { (void)read_numbers(catalog, name); }).value();
    EXPECT_EQ(error.code(), "plan.dtype");
    EXPECT_THAT(error.what(), HasSubstr("TensorReader reads integers"));
  }
}

TEST_F(TensorReaderTest, AnyRangeInAnyDtype) {
  TensorReader reader(catalog_, "layers.0.weight", Dtype::f64);
  double two[2] = {};
  reader.read(1, 3, std::as_writable_bytes(std::span(two)));
  EXPECT_THAT(two, ElementsAre(1.0, -0.5));
  EXPECT_THAT(TensorReader(catalog_, "plain", Dtype::bf16).read(), SizeIs(12));
  EXPECT_THAT(TensorReader(catalog_, "plain").read(), SizeIs(24));
}

// Returns how often the header is read if 20 readers per catalog each read the tensor.
std::size_t header_reads(std::size_t catalogs) {
  testing::PlanBuilder builder;
  builder.add_tensor("w", Dtype::f32, {64}, testing::pattern(256, 1));
  const auto first = builder.build().catalog;
  const Shard shard = first->shards().front();
  for (std::size_t i = 0; i < catalogs; ++i) {
    const auto catalog = std::make_shared<Catalog>("", first->shards(), first->tensors(),
                                                   Metadata(), std::vector<Finding>());
    for (int read = 0; read < 20; ++read) {
      TensorReader reader(catalog, "w", std::nullopt, &builder.storage);
      EXPECT_TRUE(reader.read() == builder.bytes_of(0));
    }
  }
  const auto reads = builder.storage.reads();
  return static_cast<std::size_t>(std::ranges::count_if(
      reads, [&](const testing::ReadEvent& read) { return read.offset < shard.data_begin; }));
}

TEST(TensorReaderHeaderTest, TheHeaderIsReadOnceACatalog) {
  EXPECT_EQ(header_reads(1), 1u);
  EXPECT_EQ(header_reads(3), 3u);  // control: the count detects a read per catalog
}

// The header is compared only once, but the file's identity is compared for each reader.
TEST(TensorReaderHeaderTest, AChangedFileIsRefusedLater) {
  testing::PlanBuilder builder;
  builder.add_tensor("w", Dtype::f32, {64}, testing::pattern(256, 1));
  const auto catalog = builder.build().catalog;
  const auto read = [&] {
    return code_of(
        [&] { (void)TensorReader(catalog, "w", std::nullopt, &builder.storage).read(); });
  };
  EXPECT_EQ(read(), "");
  auto& file = builder.storage.add(catalog->shards().front().path,
                                   testing::Bytes(catalog->shards().front().identity.bytes));
  file.modified_ns = 2;
  EXPECT_EQ(read(), "io.changed");
}

TEST_F(TensorReaderTest, WhatCannotBeReadIsNamed) {
  EXPECT_EQ(code("nothing"), "plan.missing");
  EXPECT_EQ(code("bad"), "q.scale_missing");
  EXPECT_EQ(code("ids", Dtype::f32), "plan.dtype");
  EXPECT_EQ(code("ids", Dtype::i64), "");  // control
  EXPECT_EQ(code_of([&] {
              std::byte one = {};
              TensorReader(catalog_, "plain").read(5, 7, {&one, 1});
            }),
            "plan.box");
  EXPECT_EQ(code_of([] { (void)TensorReader(nullptr, "plain"); }), "plan.options");
}

TEST_F(TensorReaderTest, ErrorsNameFileNearestNameAndRange) {
  const std::string path = catalog_->shown_path();
  const auto unknown = error_of([&] { (void)TensorReader(catalog_, "plane"); });
  ASSERT_TRUE(unknown);
  EXPECT_EQ(unknown->where().path, path);
  EXPECT_THAT(unknown->message(), HasSubstr("; did you mean 'plain'?"));
  const auto weight = error_of([&] { (void)TensorReader(catalog_, "e.upp"); });
  EXPECT_THAT(weight->message(), HasSubstr("; did you mean 'e.up'?"));  // a quantized tensor
  TensorReader reader(catalog_, "plain");
  std::vector<std::byte> bytes(8);
  const auto range = error_of([&] { reader.read(5, 7, bytes); });
  ASSERT_TRUE(range);
  EXPECT_EQ(range->where().path, path);
  EXPECT_EQ(range->where().tensor, "plain");
  EXPECT_EQ(range->where().found, "5 to 7");
  EXPECT_EQ(range->where().expected, "a range within 0 to 6");
  const auto buffer = error_of([&] { reader.read(0, 3, bytes); });
  EXPECT_EQ(buffer->where().found, "8 bytes");
  EXPECT_EQ(buffer->where().expected, "12 bytes");
  EXPECT_THAT(find_code("plan.box")->advice, HasSubstr("Read a range within the tensor"));
  EXPECT_THAT(find_code("plan.missing")->advice, HasSubstr("pass a name that inspect lists"));
}

// Plans that map targets from the file also work in C++.
TEST_F(TensorReaderTest, ViewsOfTheFile) {
  Skeleton skeleton;
  skeleton.targets = {{.name = "plain", .shape = {2, 3}, .dtype = Dtype::f32},
                      {.name = "ids", .shape = {1}, .dtype = Dtype::i64},
                      {.name = "tied", .shape = {2, 3}, .dtype = Dtype::f32, .tie_of = "plain"}};
  const Plan plan =
      make_plan(catalog_, skeleton, {.unexpected = UnexpectedPolicy::ignore, .mmap = true});
  ASSERT_EQ(plan.targets[0].delivery, Delivery::file_view);
  const FileViews views(plan);
  ASSERT_THAT(views.targets()[0], SizeIs(24));
  EXPECT_EQ(views.targets()[2].data(), views.targets()[0].data());
  const auto* const numbers = reinterpret_cast<const float*>(views.targets()[0].data());
  EXPECT_THAT(std::vector(numbers, numbers + 6), ElementsAre(0, 1, 2, 3, 4, 5));
}

TEST_F(TensorReaderTest, MemoryOfADeviceIsRefused) {
  Skeleton skeleton;
  skeleton.targets = {{.name = "ids", .shape = {1}, .dtype = Dtype::i64}};
  const Plan plan = make_plan(catalog_, skeleton, {.unexpected = UnexpectedPolicy::ignore});
  const HostMemory memory(plan);
  std::vector<Destination> destinations = memory.destinations();
  EXPECT_EQ(code_of([&] { execute(plan, destinations); }), "");
  destinations[0].kind = MemoryKind::device;
  EXPECT_EQ(code_of([&] { execute(plan, destinations); }), "plan.destination");
}

}  // namespace
}  // namespace loadstone::test

// Tests saving tensors from memory, and the inputs that loadstone rejects.
#include "loadstone/save.h"

#include <gmock/gmock.h>

#include <filesystem>

#include "loadstone/catalog.h"
#include "loadstone/tensor_reader.h"
#include "support/errors.h"
#include "support/faulty_files.h"
#include "support/files.h"

namespace loadstone::test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

const std::vector<float> weight = {1, 2, 3, 4, 5, 6};
const std::string flags("\1\0\1", 3);

std::vector<TensorBytes> tensors() {
  return {{"flags", Dtype::boolean, {3}, std::as_bytes(std::span(flags).first(3))},
          {"weight", Dtype::f32, {2, 3}, std::as_bytes(std::span(weight))},
          {"bias", Dtype::f32, {}, std::as_bytes(std::span(weight).first(1))},
          {"none", Dtype::f32, {0, 7}, {}}};
}

class Save : public ::testing::Test {
 protected:
  [[nodiscard]] std::vector<std::string> files() const {
    return local_storage().list(folder_.path().string());
  }

  TemporaryFolder folder_;
  std::string path_ = folder_.write("saved.safetensors", "an older file");
};

TEST_F(Save, TheFileHoldsTheTensors) {
  save_safetensors(path_, tensors(), {{"made by", "a test"}});
  EXPECT_THAT(files(), ElementsAre("saved.safetensors"));
  const auto catalog = open_checkpoint(path_);
  std::vector<std::string> names;
  for (const TensorInfo& tensor : catalog->tensors()) names.push_back(tensor.name);
  EXPECT_THAT(names, ElementsAre("bias", "none", "weight", "flags"));
  EXPECT_THAT(read_numbers(catalog, "weight"), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_THAT(TensorReader(catalog, "flags").read(),
              ElementsAre(std::byte{1}, std::byte{0}, std::byte{1}));
  EXPECT_THAT(read_numbers(catalog, "none"), IsEmpty());
  const Shape& shape = catalog->tensors()[2].shape;
  EXPECT_THAT(std::vector(shape.begin(), shape.end()), ElementsAre(2, 3));
  const auto text = [&](const char* key) {
    return std::get<std::string>(catalog->metadata().at(key).value);
  };
  EXPECT_EQ(text("made by"), "a test");
  EXPECT_EQ(text("format"), "pt");
}

TEST_F(Save, NoTensorsAreAFileToo) {
  save_safetensors(path_, {}, {{"format", "np"}});
  EXPECT_THAT(open_checkpoint(path_)->tensors(), IsEmpty());
}

TEST_F(Save, WhatCannotBeAFileIsRefused) {
  const auto code = [&](TensorBytes wrong) {
    auto all = tensors();
    all.push_back(std::move(wrong));
    return code_of([&] { save_safetensors(path_, all); });
  };
  const auto bytes = std::as_bytes(std::span(weight));
  EXPECT_EQ(code({"good", Dtype::f32, {6}, bytes}), "");
  EXPECT_EQ(code({"__metadata__", Dtype::f32, {6}, bytes}), "convert.name");
  EXPECT_EQ(code({"\xff", Dtype::f32, {6}, bytes}), "convert.name");
  EXPECT_EQ(code({"weight", Dtype::f32, {6}, bytes}), "st.duplicate");
  EXPECT_EQ(code({"flags", Dtype::f32, {6}, bytes}), "st.duplicate");
  EXPECT_EQ(code({"complex", Dtype::c128, {1}, bytes.first(16)}), "plan.dtype");
  EXPECT_EQ(code({"short", Dtype::f32, {7}, bytes}), "usage");
  EXPECT_EQ(code({"bits", Dtype::f4, {3}, bytes.first(1)}), "usage");
  EXPECT_EQ(code({"huge", Dtype::f32, {UINT64_MAX, UINT64_MAX}, bytes}), "usage");
}

TEST_F(Save, AFailureLeavesTheOlderFile) {
  FaultyFiles counted(no_fault);
  save_safetensors((folder_.path() / "other").string(), tensors(), {}, &counted.writable());
  std::filesystem::remove(folder_.path() / "other");
  for (std::uint64_t call = 1; call <= counted.calls(); ++call) {
    FaultyFiles faulty(fail_call(call, {.problem = ENOSPC}));
    const auto code = code_of([&] { save_safetensors(path_, tensors(), {}, &faulty.writable()); });
    EXPECT_THAT(files(), ElementsAre("saved.safetensors")) << call;
    if (code.empty()) continue;  // this call may fail
    EXPECT_EQ(code, "io.no_space") << call;
  }
  EXPECT_GE(counted.calls(), 6u);
}

}  // namespace
}  // namespace loadstone::test

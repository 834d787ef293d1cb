// Conversions that failed, and are taken up again.
#include <gmock/gmock.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "loadstone/convert.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/samples.h"

namespace loadstone::test {

namespace {

using namespace ::testing;

constexpr ConvertRun resume = {.resume = true};
constexpr ConvertRun finish = {.finish = true};

constexpr ConvertRun part(std::uint32_t index, std::uint32_t count) {
  return {.part = ConvertPart{.index = index, .count = count}};
}

// Codes of runs of one conversion, where the last value of one of two shards is wrong once it is
// cast or quantized.
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
    // The control: values that fit.
    EXPECT_THAT(codes_of(1, to, {part(1, 2), part(2, 2), finish}), ElementsAre("", "", ""));
  }
}

}  // namespace

}  // namespace loadstone::test

// Tests the descriptors of all encodings that loadstone writes.
#include "codec/encode.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "codec/families.h"

namespace loadstone {
namespace {

using ::testing::Contains;

constexpr std::array styles = {NamingStyle::unified, NamingStyle::compressed, NamingStyle::bnb,
                               NamingStyle::gguf};

// Returns a quantization that suits rows of 512 values.
Quantization quantization_of(const WrittenEncoding& encoding) {
  Quantization made = {.encoding = std::string(encoding.name), .nested_offset = {}};
  if (encoding.needs_importance) {
    made.importance = std::make_shared<const std::vector<float>>(512, 1.0f);
  }
  return made;
}

QuantizedLayout form_of(const WrittenEncoding& encoding) {
  QuantizedLayout form;
  const auto problem =
      prepare_quantization(quantization_of(encoding), {256, 512}, Dtype::bf16, form);
  EXPECT_FALSE(problem) << encoding.name << ": " << problem->message;
  return form;
}

TEST(WrittenEncodings, HaveNamesOfTheirOwn) {
  std::set<std::string_view> names;
  for (const WrittenEncoding* const each : written_encodings()) {
    EXPECT_TRUE(names.insert(each->name).second) << each->name;
    EXPECT_EQ(find_written_encoding(each->name), each);
    EXPECT_THAT(written_encoding_names(), Contains(each->name));
  }
  EXPECT_EQ(names.size(), 37u);
  EXPECT_EQ(find_written_encoding("nf5"), nullptr);
  EXPECT_EQ(find_written_encoding(""), nullptr);
}

// The descriptors reach every kind of encoder, and each prepared layout matches its descriptor.
TEST(WrittenEncodings, ReachEveryEncoder) {
  std::set<QuantizeKind> kinds;
  for (const WrittenEncoding* const each : written_encodings()) {
    EXPECT_EQ(form_of(*each).kind, each->kind) << each->name;
    kinds.insert(each->kind);
  }
  EXPECT_EQ(kinds.size(), static_cast<std::size_t>(QuantizeKind::gguf_blocks) + 1);
}

TEST(WrittenEncodings, NameEachComponentInEachStyleTheyHave) {
  for (const WrittenEncoding* const each : written_encodings()) {
    const QuantizedLayout form = form_of(*each);
    std::size_t claimed = 0;
    for (const NamingStyle style : styles) {
      if (each->names(style).empty()) continue;
      ++claimed;
      EXPECT_EQ(each->names(style).size(), form.parts.size()) << each->name;
      std::set<std::string_view> suffixes;
      for (const QuantizedPart& part : form.parts) {
        const ComponentName* const found = find_component(*each, style, part.name);
        ASSERT_NE(found, nullptr) << each->name << " " << part.name;
        EXPECT_TRUE(suffixes.insert(found->suffix).second) << each->name << " " << found->suffix;
        // The shape in the file may differ only by dimensions of 1.
        EXPECT_EQ(shape_in_file(found->shape, part.shape).numel(), part.shape.numel());
      }
      EXPECT_EQ(find_component(*each, style, "zeros"), nullptr);
    }
    EXPECT_GT(claimed, 0u) << each->name;
    const bool is_of_one = each->is_bitsandbytes() || each->is_gguf();
    EXPECT_TRUE(!is_of_one || claimed == 1) << each->name;
  }
}

TEST(WrittenEncodings, AreSaidByTheConfigOfEachStyleTheyHave) {
  for (const WrittenEncoding* const each : written_encodings()) {
    EXPECT_EQ(each->unified_names.empty(), each->unified.algorithm.empty()) << each->name;
    EXPECT_EQ(each->compressed_names.empty(), each->compressed.format.empty()) << each->name;
    EXPECT_EQ(each->is_ambiguous == nullptr, each->metadata_key.empty()) << each->name;
    EXPECT_TRUE(each->bits == 4 || each->bits == 8 || each->is_gguf()) << each->name;
    EXPECT_GT(each->row_block, 0u) << each->name;
  }
}

// Inference servers read the written files, so the dialect must be one that servers support.
TEST(WrittenEncodings, ArePreparedInTheDialectOfExportedFiles) {
  for (const WrittenEncoding* const each : written_encodings()) {
    Quantization quantization = quantization_of(*each);
    quantization.dialect = each->exported_dialect;
    QuantizedLayout form;
    EXPECT_FALSE(prepare_quantization(quantization, {256, 512}, Dtype::bf16, form)) << each->name;
    quantization.dialect = "nobody's";
    const auto problem = prepare_quantization(quantization, {256, 512}, Dtype::bf16, form);
    ASSERT_TRUE(problem) << each->name;
    EXPECT_EQ(problem->message, "no dialect has this name");
  }
}

TEST(WrittenEncodings, AreListedWithDialectsThatTheyHaveAndNoOther) {
  std::set<std::string_view> listed;
  for (const QuantizedEncoding& each : quantized_encodings()) {
    EXPECT_TRUE(listed.insert(each.name).second) << each.name;
    const WrittenEncoding* const written = find_written_encoding(each.name);
    ASSERT_EQ(written == nullptr, each.dialects.empty()) << each.name;
    if (written == nullptr) continue;
    QuantizedLayout form;
    for (const std::string_view dialect : {"exact", "modelopt-compat", "modelopt-export", "bnb-cpu",
                                           "bnb-cuda", "ggml", "compressed-tensors"}) {
      Quantization quantization = quantization_of(*written);
      quantization.dialect = dialect;
      EXPECT_EQ(!prepare_quantization(quantization, {256, 512}, Dtype::bf16, form),
                std::ranges::count(each.dialects, dialect) == 1)
          << each.name << " " << dialect;
    }
  }
  EXPECT_EQ(listed.size(), 48u);
  for (const WrittenEncoding* const each : written_encodings()) {
    EXPECT_TRUE(listed.contains(each->name)) << each->name;
  }
}

// The encoding's name determines the block format, and each row must consist of whole blocks.
TEST(WrittenEncodings, MakeBlocksOfWholeRows) {
  std::size_t count = 0;
  for (const WrittenEncoding* const each : written_encodings()) {
    if (!each->is_gguf()) continue;
    ++count;
    QuantizedLayout form = form_of(*each);
    std::string name(Encoding(form.block).name());
    std::ranges::transform(name, name.begin(), [](char letter) {
      return static_cast<char>(letter >= 'A' && letter <= 'Z' ? letter - 'A' + 'a' : letter);
    });
    // The names without a suffix belong to ModelOpt's encodings.
    if (name == "mxfp4" || name == "nvfp4") name += "-gguf";
    EXPECT_EQ(each->name, name);
    const BlockLayout block = layout(form.block);
    EXPECT_EQ(form.parts[0].shape, Shape({256, 512 / block.elements * block.bytes}));
    EXPECT_EQ(form.window_elements, block.elements);
    const auto problem =
        prepare_quantization(quantization_of(*each), {4, 256 + 16}, Dtype::f32, form);
    ASSERT_TRUE(problem) << each->name;
    EXPECT_EQ(problem->found, "[4, 272]");
    EXPECT_EQ(problem->message,
              fmt::format("a row does not consist of whole blocks of {} values", block.elements));
  }
  EXPECT_EQ(count, 23u);
}

TEST(WrittenEncodings, TakeAnImportanceOfColumns) {
  const auto message = [](const char* encoding, std::vector<float> importance) {
    Quantization quantization = quantization_of(*find_written_encoding(encoding));
    quantization.importance = std::make_shared<const std::vector<float>>(std::move(importance));
    QuantizedLayout form;
    const auto problem = prepare_quantization(quantization, {2, 3, 256}, Dtype::bf16, form);
    if (!problem) {
      EXPECT_EQ(form.importance, quantization.importance);
    }
    return problem ? problem->message : "";
  };
  const std::vector<float> good(256, 1.0f);
  EXPECT_EQ(message("q4_k", good), "");
  EXPECT_EQ(message("q4_k", std::vector<float>(512, 0.0f)), "");  // 2 x 256 columns
  EXPECT_EQ(message("q4_k", std::vector<float>(255)),
            "the importance matrix has a different number of columns");
  EXPECT_EQ(message("nf4", good), "this encoding does not use an importance matrix");
  for (const float wrong : {-1.0f, std::numeric_limits<float>::infinity(), std::nanf("")}) {
    std::vector<float> bad = good;
    bad[200] = wrong;
    EXPECT_EQ(message("q4_0", bad),
              "the importance matrix has a value that is negative or not finite");
  }
}

// ggml requires an importance for the same encodings. Control: other encodings reject one.
TEST(WrittenEncodings, NeedAnImportanceWhereGgmlDoes) {
  std::set<std::string_view> needing;
  for (const WrittenEncoding* const each : written_encodings()) {
    Quantization quantization = quantization_of(*each);
    quantization.importance.reset();
    QuantizedLayout form;
    const auto problem = prepare_quantization(quantization, {4, 512}, Dtype::f32, form);
    EXPECT_EQ(problem.has_value(), each->needs_importance) << each->name;
    if (!problem) continue;
    EXPECT_EQ(problem->message, "this encoding needs an importance matrix");
    EXPECT_EQ(problem->expected, "--imatrix");
    needing.insert(each->name);
  }
  EXPECT_EQ(needing, std::set<std::string_view>({"iq1_s", "iq2_xxs", "iq2_xs"}));
}

// Some encodings compute sums over whole rows if there is an importance, so their windows must not
// cut rows.
TEST(WrittenEncodings, CutWindowsWhereAnImportanceAllows) {
  for (const WrittenEncoding* const each : written_encodings()) {
    if (!each->is_gguf()) continue;
    Quantization quantization = quantization_of(*each);
    quantization.importance = std::make_shared<const std::vector<float>>(512);
    QuantizedLayout form;
    ASSERT_FALSE(prepare_quantization(quantization, {4, 512}, Dtype::f32, form)) << each->name;
    const bool is_row = each->name == "q4_0" || each->name == "q4_1" || each->name == "q5_0" ||
                        each->name == "q5_1";
    EXPECT_EQ(form.window_elements, is_row ? 512 : layout(form.block).elements) << each->name;
  }
}

TEST(WrittenEncodings, RefuseUnknownNamesWithTheNearestOnes) {
  QuantizedLayout form;
  const auto problem =
      prepare_quantization({.encoding = "nf5", .nested_offset = {}}, {4, 4}, Dtype::f32, form);
  ASSERT_TRUE(problem);
  EXPECT_EQ(problem->message, "unknown encoding 'nf5'; did you mean 'nf4'?");
}

TEST(WrittenEncodings, GiveBitsandbytesItsConstants) {
  const auto constants = [](const char* name) {
    const WrittenEncoding& encoding = *find_written_encoding(name);
    return encoding.constants(quantization_of(encoding), {6, 4}, Dtype::bf16);
  };
  const auto state = constants("nf4");
  ASSERT_EQ(state.size(), 2u);
  EXPECT_EQ(state[0].suffix, "weight.quant_map");
  EXPECT_EQ(state[0].bytes->size(), 16 * sizeof(float));
  EXPECT_EQ(state[1].suffix, "weight.quant_state.bitsandbytes__nf4");
  const auto& bytes = *state[1].bytes;
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()),
            R"({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [6, 4]})");
  EXPECT_EQ(state[0].bytes, constants("nf4")[0].bytes) << "one table for all weights";
  EXPECT_NE(*state[0].bytes, *constants("fp4")[0].bytes);
  ASSERT_EQ(constants("int8").size(), 1u);
  EXPECT_EQ(*constants("int8")[0].bytes, std::vector{std::byte{0}});
}

}  // namespace
}  // namespace loadstone

// Tests that work succeeds or throws Error when any single allocation fails, and succeeds when it
// is repeated.
#include <gmock/gmock.h>

#include <algorithm>
#include <set>
#include <vector>

#include "loadstone/loadstone.h"
#include "support/files.h"
#include "support/imatrix_file.h"
#include "support/no_memory.h"

namespace loadstone::test {
namespace {

using ::testing::ElementsAre;

std::string fp8_file() {
  return safetensors_bytes({{"layer.weight", "F8_E4M3", {64, 64}, std::string(4096, '\x38')},
                            {"layer.weight_scale_inv", "F32", {1, 1}, raw(0.5f)},
                            {"norm.weight", "BF16", {64}, some_bytes(128)},
                            {"steps", "I64", {}, raw(std::int64_t{7})}},
                           {{"format", "pt"}});
}

Skeleton model() {
  Skeleton skeleton;
  skeleton.targets = {{.name = "layer.weight", .shape = {64, 64}, .dtype = Dtype::bf16},
                      {.name = "norm.weight", .shape = {64}},
                      {.name = "tied", .shape = {64}, .tie_of = "norm.weight"},
                      {.name = "steps", .dtype = Dtype::i64, .kind = TargetKind::attribute}};
  skeleton.values_known = false;
  return skeleton;
}

class MemoryFaults : public testing::Test {
 protected:
  // Repeats the work with a different failing allocation in each run. `step` is the distance
  // between the failing allocations of two runs, more than 1 if a run takes long.
  template <typename Work>
  void walk(const Work& work, std::uint64_t step = 1) {
    work();
    std::set<std::string> codes;
    bool goes_on = true;
    for (std::uint64_t number = 1; goes_on; number += step) {
      fail_allocation(number);
      try {
        work();
      } catch (const Error& error) {
        goes_on = forget_failure();
        codes.insert(error.code());
        EXPECT_TRUE(goes_on) << error.what();
        continue;
      } catch (const std::exception& error) {
        forget_failure();
        FAIL() << "allocation " << number << ": " << error.what();
      }
      goes_on = forget_failure();
      runs_ = number;
    }
    EXPECT_THAT(codes, ElementsAre("memory.host"));
    EXPECT_GT(runs_, 20u * step);  // control: many allocations were reached
    work();
  }

  [[nodiscard]] std::shared_ptr<const Catalog> catalog() const { return open_checkpoint(file_); }

  TemporaryFolder folder_;
  std::string file_ = folder_.write("fp8.safetensors", fp8_file());
  std::uint64_t runs_ = 0;
  const std::vector<float> numbers_ = {1, 2, 3, 4};
};

TEST_F(MemoryFaults, Opening) {
  walk([&] {
    const auto opened = catalog();
    EXPECT_EQ(opened->quantized().tensors().size(), 1u);
    EXPECT_FALSE(to_json(*opened).empty());
    EXPECT_FALSE(to_table(*opened, true).empty());
  });
}

TEST_F(MemoryFaults, ImportanceMatrices) {
  std::string entries;
  GgufWriter writer = imatrix_keys(7, "wiki.txt");
  for (int i = 0; i < 8; ++i) {
    const std::string name = "blk." + std::to_string(i) + ".attn_output.weight";
    entries += imatrix_entry(name, 2, {1, 2, 3});
    add_imatrix_entry(writer, name, {1, 2, 3}, {2});
  }
  const std::string old = folder_.write("x.dat", raw(std::int32_t{8}) + entries);
  const std::string gguf = folder_.write("x.gguf", writer.bytes());
  for (const std::string& path : {old, gguf}) {
    walk([&] { EXPECT_EQ(open_importance_matrix(path).entries.size(), 8u); });
  }
}

TEST_F(MemoryFaults, OpeningShards) {
  const std::string bytes = some_bytes(64);
  folder_.write("a-00001-of-00002.safetensors", safetensors_bytes({{"a", "F32", {16}, bytes}}));
  folder_.write("a-00002-of-00002.safetensors", safetensors_bytes({{"b", "F32", {16}, bytes}}));
  const std::string index = folder_.write(
      "a.safetensors.index.json",
      index_json({{"a", "a-00001-of-00002.safetensors"}, {"b", "a-00002-of-00002.safetensors"}}));
  walk([&] { EXPECT_EQ(open_checkpoint(index)->tensors().size(), 2u); });
}

TEST_F(MemoryFaults, OpeningGguf) {
  GgufWriter writer;
  writer.entry_text("general.architecture", "llama").tensor("t", {32}, 8, std::string(34, '\1'));
  const std::string path = folder_.write("t.gguf", writer.bytes());
  walk([&] { EXPECT_EQ(read_numbers(open_checkpoint(path), "t").size(), 32u); });
}

TEST_F(MemoryFaults, Planning) {
  const auto opened = catalog();
  const std::string rules = R"-([{"op": "transpose", "sources": ["layer\\.(.*)"],
                                  "targets": ["layer.$1"], "dims": [0, 1]}])-";
  const std::string text = model().to_json();
  walk([&] {
    PlanOptions options;
    options.rules = rules_from_json(rules);
    options.missing = MissingPolicy::zeros;
    const Plan plan = make_plan(opened, Skeleton::from_json(text), options);
    require_ok(plan);
    EXPECT_FALSE(to_table(plan).empty());
    EXPECT_FALSE(to_html(plan).empty());
    const Plan again = plan_from_json(to_json(plan));
    EXPECT_EQ(again.targets.size(), 4u);
    EXPECT_FALSE(rules_to_json(options.rules).empty());
  });
}

TEST_F(MemoryFaults, Recipes) {
  const auto opened = catalog();
  std::vector<RecipeBuilder::Value> both(2);
  walk([&] {
    RecipeBuilder builder(opened);
    const auto numbers = builder.numbers(opened->quantized().tensors()[0], Dtype::bf16);
    const auto half = builder.slice(builder.transpose(numbers, 0, 1), 0, 0, 32);
    std::ranges::fill(both, half);
    builder.add("halves", builder.concat(both, -1));
    const Recipes again = recipes_from_json(*opened, to_json(builder.finish(), *opened));
    EXPECT_EQ(again.targets.size(), 1u);
  });
}

TEST_F(MemoryFaults, Loading) {
  const Plan plan = make_plan(catalog(), model());
  walk([&] {
    const HostMemory memory(plan);
    const Report report = execute(plan, memory.destinations(), {.threads = 2});
    audit(plan, report).require_real();
    EXPECT_FALSE(to_json(report).empty());
  });
}

TEST_F(MemoryFaults, Saving) {
  const std::vector<TensorBytes> tensors = {
      {"a", Dtype::f32, {2, 2}, std::as_bytes(std::span(numbers_))},
      {"b", Dtype::u8, {16}, std::as_bytes(std::span(numbers_))}};
  const std::string path = (folder_.path() / "saved.safetensors").string();
  walk([&] {
    save_safetensors(path, tensors);
    EXPECT_EQ(open_checkpoint(path)->tensors().size(), 2u);
  });
}

TEST_F(MemoryFaults, Offloading) {
  PlanOptions options;
  options.device_map.entries = {{"", "disk"}};
  options.offload_folder = folder_ / "offload";
  const Plan plan = make_plan(catalog(), model(), options);
  const std::vector<Destination> none(plan.targets.size());
  walk([&] { EXPECT_GT(execute(plan, none, {.threads = 1}).bytes_written, 0u); });
}

TEST_F(MemoryFaults, Converting) {
  const auto opened = open_checkpoint(folder_.write(
      "plain.safetensors",
      safetensors_bytes(
          {{"model.layers.0.mlp.up_proj.weight", "F32", {32, 64}, some_bytes(32 * 64 * 4)}})));
  ConvertOptions options;
  options.quantize.formats = {{.quantization = parse_quantization("nf4")}};
  options.quantize.allow_non_finite = true;
  options.one_file = false;
  const std::string target = folder_ / "converted";
  walk(
      [&] {
        const Conversion conversion = make_conversion(opened, options);
        EXPECT_FALSE(to_json(conversion).empty());
        EXPECT_FALSE(to_table(conversion, true).empty());
        EXPECT_EQ(convert(conversion, target, {.overwrite = true}).outputs.size(), 2u);
      },
      3);
}

TEST_F(MemoryFaults, Verifying) {
  const auto opened = catalog();
  walk([&] {
    EXPECT_FALSE(to_json(verify_values(*opened, {.threads = 2})).empty());
    EXPECT_TRUE(compare(*opened, *opened, {.threads = 2}).ok());
  });
}

}  // namespace
}  // namespace loadstone::test

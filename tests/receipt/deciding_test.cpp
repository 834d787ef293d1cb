// Tests that receipts contain the tensors that loadstone read while it made the plan, if they
// affect values.
#include <gmock/gmock.h>

#include <memory>
#include <string>
#include <vector>

#include "loadstone/execute.h"
#include "loadstone/plan.h"
#include "loadstone/verify.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/plans.h"
#include "support/random_numbers.h"

namespace loadstone::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAreArray;

FileTensor f32(const std::string& name, const std::vector<std::uint64_t>& shape, unsigned seed) {
  return {name, "F32", shape, raw_all(random_numbers(Shape(shape).numel().value(), seed))};
}

Receipt receipt_of_load(const Plan& plan) {
  EXPECT_TRUE(plan.ok()) << (plan.findings.empty() ? "" : plan.findings.front().message);
  const HostMemory memory(plan);
  return *execute(plan, memory.destinations(), {.receipt = DigestKind::xxh3_128}).receipt;
}

std::vector<std::string> names_in(const ReceiptFile& file) {
  std::vector<std::string> names;
  for (const ReceiptTensor& tensor : file.tensors) names.push_back(tensor.name);
  return names;
}

std::vector<std::string> names_of(const std::vector<Difference>& differences) {
  std::vector<std::string> names;
  for (const Difference& each : differences) names.push_back(each.name);
  return names;
}

// A base with one layer, and an adapter that stores its alpha as a tensor.
class DecidingTensors : public ::testing::Test {
 protected:
  std::string write_adapter(const std::string& name, float alpha) const {
    return folder_.write(name, safetensors_bytes({{"l.alpha", "F32", {}, raw(alpha)},
                                                  f32("l.lora_down.weight", {2, 6}, 1),
                                                  f32("l.lora_up.weight", {4, 2}, 2)}));
  }

  [[nodiscard]] Plan plan() const {
    PlanOptions options;
    options.adapters.emplace_back();
    const auto joined = std::make_shared<const Catalog>(
        std::vector{open_checkpoint(base_), open_checkpoint(adapter_)});
    return make_plan(joined, skeleton_of({target_of("l.weight", {4, 6})}), options);
  }

  TemporaryFolder folder_;
  std::string base_ = folder_.write(
      "base.safetensors", safetensors_bytes({f32("l.weight", {4, 6}, 3), f32("unused", {2}, 4)}));
  std::string adapter_ = write_adapter("adapter.safetensors", 3);
};

TEST_F(DecidingTensors, AnAlphaIsInTheReceiptAlsoOfASavedPlan) {
  const Plan made = plan();
  const std::string saved = to_json(made);
  const Plan again = plan_from_json(saved);
  EXPECT_EQ(to_json(again), saved);
  const std::string other = write_adapter("other.safetensors", 5);
  for (const Plan* const each : {&made, &again}) {
    const Receipt receipt = receipt_of_load(*each);
    ASSERT_EQ(receipt.sources.size(), 2u);
    EXPECT_THAT(names_in(receipt.sources[0]), ElementsAre("l.weight"));
    EXPECT_THAT(names_in(receipt.sources[1]),
                ElementsAre("l.alpha", "l.lora_down.weight", "l.lora_up.weight"));
    EXPECT_TRUE(verify_receipt(receipt, "", {base_, adapter_}).ok());
    EXPECT_THAT(names_of(verify_receipt(receipt, "", {base_, other}).differences),
                ElementsAre("l.alpha"));
  }
}

TEST_F(DecidingTensors, AnAlphaThatChangedAfterThePlanIsNotInTheReceipt) {
  const std::string saved = to_json(plan());
  write_adapter("adapter.safetensors", 8);
  const Plan again = plan_from_json(saved);
  ASSERT_FALSE(again.findings.empty());
  EXPECT_EQ(again.findings.front().code, "io.time");
  EXPECT_THAT(names_in(receipt_of_load(again).sources[1]),
              ElementsAre("l.lora_down.weight", "l.lora_up.weight"));
}

// The adapter repeats a product under a tied name, so the plan compares the tensors of the two
// products.
TEST_F(DecidingTensors, ComparedTensorsOfAnAdapterAreInTheReceipt) {
  std::vector<FileTensor> tensors;
  for (const std::string name : {"l", "m"}) {
    tensors.push_back({name + ".alpha", "F32", {}, raw(3.0F)});
    tensors.push_back(f32(name + ".lora_down.weight", {2, 6}, 1));
    tensors.push_back(f32(name + ".lora_up.weight", {4, 2}, 2));
  }
  folder_.write("adapter.safetensors", safetensors_bytes(tensors));
  PlanOptions options;
  options.adapters.emplace_back();
  Target tie = target_of("m.weight", {4, 6});
  tie.tie_of = "l.weight";
  const auto joined = std::make_shared<const Catalog>(
      std::vector{open_checkpoint(base_), open_checkpoint(adapter_)});
  const Receipt receipt = receipt_of_load(
      make_plan(joined, skeleton_of({target_of("l.weight", {4, 6}), tie}), options));
  std::vector<std::string> expected;
  for (const FileTensor& tensor : tensors) expected.push_back(tensor.name);
  EXPECT_THAT(names_in(receipt.sources.at(1)), UnorderedElementsAreArray(expected));
}

TEST_F(DecidingTensors, SourcesOfAConstantAreInTheReceipt) {
  const auto base = open_checkpoint(base_);
  PlanOptions options;
  options.unexpected = UnexpectedPolicy::ignore;
  options.recipes.targets.push_back(
      {.target = "c",
       .shape = {2},
       .dtype = Dtype::f32,
       .boxes = {},
       .constant = std::make_shared<const std::vector<std::byte>>(2 * sizeof(float)),
       .merge = {}});
  const Skeleton skeleton = skeleton_of({target_of("c", {2})});
  EXPECT_THAT(receipt_of_load(make_plan(base, skeleton, options)).sources, IsEmpty());
  options.recipes.computed_from = {base->find("unused").value()};
  const Receipt receipt = receipt_of_load(make_plan(base, skeleton, options));
  ASSERT_EQ(receipt.sources.size(), 1u);
  EXPECT_THAT(names_in(receipt.sources[0]), ElementsAre("unused"));
}

TEST_F(DecidingTensors, ASourceThatIsNotNamedIsFound) {
  const Receipt receipt = receipt_of_load(plan());
  const VerifyReport report = verify_receipt(receipt, "", {base_});
  EXPECT_TRUE(report.ok());
  ASSERT_EQ(report.findings.size(), 1u);
  EXPECT_EQ(report.findings[0].code, "verify.not_compared");
  EXPECT_EQ(report.findings[0].message,
            "source 2 of the receipt was not compared: 'adapter.safetensors'");
  EXPECT_THAT(to_table(report), HasSubstr("source 2 of the receipt"));
  EXPECT_THAT(verify_receipt(receipt, "", {base_, adapter_}).findings, IsEmpty());
  EXPECT_EQ(code_of([&] { (void)verify_receipt(receipt, "", {}); }), "usage");
}

TEST_F(DecidingTensors, AQuantStateIsInTheReceiptOfItsShard) {
  const std::string state = R"({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", )"
                            R"("shape": [8, 8]})";
  const auto write = [&](const std::string& name, const std::string& text) {
    folder_.write(name + "/a.safetensors",
                  safetensors_bytes({{"l.weight", "U8", {32, 1}, some_bytes(32)},
                                     f32("l.weight.absmax", {1}, 5)}));
    folder_.write(
        name + "/b.safetensors",
        safetensors_bytes({{"l.weight.quant_state.bitsandbytes__nf4", "U8", {text.size()}, text},
                           f32("unused", {2}, 4)}));
    return folder_ / name;
  };
  const std::string source = write("source", state);
  const auto catalog = open_checkpoint(source);
  PlanOptions options;
  options.unexpected = UnexpectedPolicy::ignore;
  const auto plan_for = [&](const std::string& name, Shape shape) {
    return make_plan(catalog, skeleton_of({target_of(name, std::move(shape))}), options);
  };
  const Plan made = plan_for("l.weight", {8, 8});
  const Plan again = plan_from_json(to_json(made));
  std::string changed = state;
  changed.replace(changed.find(": 64"), 4, ":64 ");
  const std::string other = write("other", changed);
  for (const Plan* const each : {&made, &again}) {
    const Receipt receipt = receipt_of_load(*each);
    ASSERT_EQ(receipt.sources.size(), 2u);
    EXPECT_THAT(names_in(receipt.sources[1]),
                ElementsAre("l.weight.quant_state.bitsandbytes__nf4"));
    EXPECT_TRUE(verify_receipt(receipt, "", {source}).ok());
    EXPECT_THAT(names_of(verify_receipt(receipt, "", {other}).differences),
                ElementsAre("l.weight.quant_state.bitsandbytes__nf4"));
  }
  // A load that decodes nothing does not use the state tensor.
  const Receipt plain = receipt_of_load(plan_for("unused", {2}));
  ASSERT_EQ(plain.sources.size(), 1u);
  EXPECT_THAT(names_in(plain.sources[0]), ElementsAre("unused"));
}

}  // namespace
}  // namespace loadstone::test

// Measures the time to make, write and read plans of the size of a large mixture-of-experts model.
// The limit is 0.5 s for 45,000 sources and 1,000 targets of 256 boxes each.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "loadstone/plan.h"
#include "plan/plan_json.h"

namespace {

using loadstone::Catalog;
using loadstone::Plan;
using loadstone::PlanOptions;
using loadstone::Skeleton;

constexpr std::size_t layers = 1000;

loadstone::Target target(std::string name, loadstone::Shape shape) {
  loadstone::Target result;
  result.name = std::move(name);
  result.shape = std::move(shape);
  result.dtype = loadstone::Dtype::bf16;
  return result;
}

// Returns a catalog with `count` experts per layer, whose tensors are [8, 16].
std::shared_ptr<const Catalog> make_catalog(std::size_t count) {
  loadstone::Shard shard;
  shard.relative_path = "model.safetensors";
  std::vector<loadstone::TensorInfo> tensors;
  for (std::size_t i = 0; i < layers * count; ++i) {
    loadstone::TensorInfo tensor;
    tensor.name =
        fmt::format("model.layers.{}.mlp.experts.{}.down_proj.weight", i / count, i % count);
    tensor.encoding = loadstone::Dtype::bf16;
    tensor.shape = {8, 16};
    tensor.offset_begin = i * 256;
    tensor.offset_end = tensor.offset_begin + 256;
    tensors.push_back(std::move(tensor));
  }
  shard.identity.bytes = tensors.size() * 256;
  return std::make_shared<const Catalog>("/", std::vector{shard}, std::move(tensors),
                                         std::map<std::string, loadstone::MetadataValue>(),
                                         std::vector<loadstone::Finding>());
}

Skeleton make_skeleton(std::size_t count) {
  Skeleton skeleton;
  for (std::size_t i = 0; i < layers; ++i) {
    skeleton.targets.push_back(
        target(fmt::format("model.layers.{}.mlp.experts.down_proj", i), {count, 8, 16}));
  }
  return skeleton;
}

PlanOptions stacking_rules() {
  PlanOptions options;
  loadstone::Rule rule;
  rule.op = loadstone::RuleOp::stack;
  rule.sources = {R"((.*\.experts)\.(\d+)\.(down_proj)\.weight)"};
  rule.targets = {"$1.$3"};
  rule.dims = {0};
  options.rules = {rule};
  return options;
}

// Returns recipes that slice the sources, 256 boxes per target, as traced converters do.
PlanOptions traced_boxes(std::size_t sources) {
  PlanOptions options;
  std::uint32_t next = 0;
  for (std::size_t i = 0; i < layers; ++i) {
    std::vector<loadstone::Box> boxes;
    for (std::uint64_t b = 0; b < 256; ++b) {
      boxes.push_back({next, 0, b * 16, {{8, 16, 256 * 16}, {16, 1, 1}}});
      next = (next + 1) % static_cast<std::uint32_t>(sources);
    }
    options.recipes.targets.push_back({fmt::format("model.layers.{}.mlp.experts.down_proj", i),
                                       loadstone::Shape{256, 8, 16}, loadstone::Dtype::bf16,
                                       std::move(boxes)});
  }
  return options;
}

void make(benchmark::State& state, const std::shared_ptr<const Catalog>& catalog,
          const Skeleton& skeleton, const PlanOptions& options) {
  std::size_t boxes = 0;
  double seconds = 0;
  for (auto _ : state) {
    const auto begin = std::chrono::steady_clock::now();
    const Plan plan = loadstone::make_plan(catalog, skeleton, options);
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (!plan.ok()) state.SkipWithError(plan.findings.front().message.c_str());
    boxes = 0;
    for (const auto& planned : plan.targets) boxes += planned.recipe.boxes.size();
  }
  state.counters["sources"] = static_cast<double>(catalog->tensors().size());
  state.counters["boxes"] = static_cast<double>(boxes);
  state.counters["of_limit_0.5s"] = seconds / static_cast<double>(state.iterations()) / 0.5;
}

void plan_by_rules_45k(benchmark::State& state) {
  make(state, make_catalog(45), make_skeleton(45), stacking_rules());
}

void plan_by_rules_256k(benchmark::State& state) {
  make(state, make_catalog(256), make_skeleton(256), stacking_rules());
}

void plan_of_traced_boxes(benchmark::State& state) {
  make(state, make_catalog(45), make_skeleton(256), traced_boxes(45 * layers));
}

void missing_everything(benchmark::State& state) {
  const auto catalog = make_catalog(45);
  Skeleton skeleton;
  for (const auto& tensor : catalog->tensors()) {
    skeleton.targets.push_back(target("language_model." + tensor.name, tensor.shape));
  }
  for (auto _ : state) {
    benchmark::DoNotOptimize(loadstone::make_plan(catalog, skeleton).findings.size());
  }
}

void write_and_read_json(benchmark::State& state) {
  const auto catalog = make_catalog(45);
  const Plan plan = loadstone::make_plan(catalog, make_skeleton(256), traced_boxes(45 * layers));
  std::size_t bytes = 0;
  for (auto _ : state) {
    const std::string text = loadstone::to_json(plan);
    bytes = text.size();
    benchmark::DoNotOptimize(
        loadstone::bind_plan(loadstone::read_plan(text), catalog).targets.size());
  }
  state.counters["json_bytes"] = static_cast<double>(bytes);
}

}  // namespace

BENCHMARK(plan_by_rules_45k)->Unit(benchmark::kMillisecond);
BENCHMARK(plan_by_rules_256k)->Unit(benchmark::kMillisecond);
BENCHMARK(plan_of_traced_boxes)->Unit(benchmark::kMillisecond);
BENCHMARK(missing_everything)->Unit(benchmark::kMillisecond);
BENCHMARK(write_and_read_json)->Unit(benchmark::kMillisecond);

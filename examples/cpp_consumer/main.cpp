// Example of a C++ program without Python: loads a checkpoint that stores each expert separately
// into a model that needs all experts of a layer in one tensor.
#include <loadstone/loadstone.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "make_checkpoint.h"

namespace {

// Describes the model's tensors. A LibTorch program would walk its modules instead.
loadstone::Skeleton make_skeleton(const ModelSize& size) {
  using loadstone::Dtype;
  loadstone::Skeleton skeleton;
  const auto add = [&](const std::string& name, loadstone::Shape shape) {
    loadstone::Target target;
    target.name = name;
    target.shape = std::move(shape);
    target.dtype = Dtype::f32;  // the file has BF16 experts, which the load casts
    skeleton.targets.push_back(target);
  };
  add("model.embed_tokens.weight", {size.vocabulary, size.hidden});
  for (std::size_t layer = 0; layer < size.layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    add(prefix + "mlp.experts.gate_up_proj", {size.experts, 2 * size.intermediate, size.hidden});
    add(prefix + "mlp.experts.down_proj", {size.experts, size.hidden, size.intermediate});
    add(prefix + "norm.weight", {size.hidden});
  }
  add("lm_head.weight", {size.vocabulary, size.hidden});
  skeleton.targets.back().tie_of = "model.embed_tokens.weight";
  return skeleton;
}

// Maps the checkpoint's tensors to the model's. Unmatched tensors keep their names.
loadstone::Rules make_rules() {
  loadstone::Rule gate_up;
  gate_up.op = loadstone::RuleOp::stack_concat;  // stack the experts, then join gate and up
  gate_up.sources = {R"((.*\.experts)\.(\d+)\.gate_proj\.weight)",
                     R"((.*\.experts)\.(\d+)\.up_proj\.weight)"};
  gate_up.targets = {"$1.gate_up_proj"};
  gate_up.dims = {0, 1};

  loadstone::Rule down;
  down.op = loadstone::RuleOp::stack;
  down.sources = {R"((.*\.experts)\.(\d+)\.down_proj\.weight)"};
  down.targets = {"$1.down_proj"};
  down.dims = {0};
  return {gate_up, down};
}

// Returns the loaded values of a target; ends the program if the name is unknown.
std::vector<float> values_of(const loadstone::HostMemory& memory, const std::string& name) {
  const loadstone::Destination* const found = memory.find(name);
  if (found == nullptr || found->data == nullptr) {
    throw loadstone::Error("internal", "no values for " + name);
  }
  std::vector<float> values(found->byte_count / sizeof(float));
  std::memcpy(values.data(), found->data, values.size() * sizeof(float));
  return values;
}

// Counts the values from `begin` on that differ from the checkpoint's original values.
std::size_t wrong_values(const std::vector<float>& values, std::size_t begin, std::size_t count,
                         const std::string& source) {
  if (values.size() < begin + count) return count;
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < count; ++i) wrong += values[begin + i] != value_of(source, i) ? 1 : 0;
  return wrong;
}

std::size_t wrong_values(const loadstone::HostMemory& memory, const ModelSize& size) {
  const auto values = [&](const std::string& name) { return values_of(memory, name); };
  const std::string embedding = "model.embed_tokens.weight";
  std::size_t wrong = 0;
  for (const std::string& name : {embedding, std::string("lm_head.weight")}) {
    wrong += wrong_values(values(name), 0, size.vocabulary * size.hidden, embedding);
  }
  const std::size_t part = size.intermediate * size.hidden;  // elements of an expert's projection
  for (std::size_t layer = 0; layer < size.layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    wrong += wrong_values(values(prefix + "norm.weight"), 0, size.hidden, prefix + "norm.weight");
    const auto gate_up = values(prefix + "mlp.experts.gate_up_proj");
    const auto down = values(prefix + "mlp.experts.down_proj");
    for (std::size_t e = 0; e < size.experts; ++e) {
      wrong += wrong_values(gate_up, 2 * e * part, part, expert_name(layer, e, "gate_proj"));
      wrong += wrong_values(gate_up, (2 * e + 1) * part, part, expert_name(layer, e, "up_proj"));
      wrong += wrong_values(down, e * part, part, expert_name(layer, e, "down_proj"));
    }
  }
  return wrong;
}

int run(const std::filesystem::path& folder) {
  const ModelSize size;
  make_checkpoint(folder, size);
  const auto catalog = loadstone::open_checkpoint(folder.string());
  const loadstone::Skeleton skeleton = make_skeleton(size);

  // Without rules the plan reports missing tensors, and the load reads nothing.
  const loadstone::Plan incomplete = loadstone::make_plan(catalog, skeleton);
  if (incomplete.ok()) {
    std::puts("FAILED: a plan without rules claims to be complete");
    return 1;
  }
  try {
    loadstone::require_ok(incomplete);
  } catch (const loadstone::Error& error) {
    std::printf("Without rules: %s\n\n", error.what());
  }

  loadstone::PlanOptions options;
  options.rules = make_rules();
  const loadstone::Plan plan = loadstone::make_plan(catalog, skeleton, options);
  std::puts(loadstone::to_table(plan).c_str());

  const loadstone::HostMemory memory(plan);
  const loadstone::Report report = loadstone::execute(plan, memory.destinations());
  const loadstone::Audit audit = loadstone::audit(plan, report);
  std::puts(audit.text().c_str());
  audit.require_real();

  const std::size_t wrong = wrong_values(memory, size);
  if (wrong != 0) {
    std::printf("FAILED: %zu values are wrong\n", wrong);
    return 1;
  }
  std::puts("All values are those of the checkpoint.");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s FOLDER   (an example checkpoint is written there)\n", argv[0]);
    return 2;
  }
  try {
    return run(argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

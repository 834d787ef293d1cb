// Measures a load without Python, which is the cost of the engine alone.
//
//   load CHECKPOINT [plain|f32|fused|transposed] [THREADS [CHUNK_BYTES]]
//
// plain: loads every tensor unchanged. f32: casts. fused: stacks and joins the experts of each
// layer into two parameters. transposed: transposes every matrix. Makes catalog and plan, prints
// "ready", waits for a line on standard input, times the load, and prints one line of JSON.
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <regex>
#include <string>
#include <string_view>
#include <utility>

#include "loadstone/loadstone.h"

namespace {

using loadstone::Dtype;
using loadstone::Shape;

constexpr std::string_view expert_rules = R"([
  {"op": "stack_concat", "dims": [0, 1], "targets": ["$1.gate_up"],
   "sources": ["(.*)\\.experts\\.(\\d+)\\.w1\\.weight", "(.*)\\.experts\\.(\\d+)\\.w3\\.weight"]},
  {"op": "stack", "dim": 0, "targets": ["$1.down"],
   "sources": ["(.*)\\.experts\\.(\\d+)\\.w2\\.weight"]}
])";

loadstone::Target target(std::string name, Shape shape) {
  return {.name = std::move(name), .shape = std::move(shape), .dtype = Dtype::bf16};
}

loadstone::Skeleton fused(const loadstone::Catalog& catalog) {
  static const std::regex expert(R"((.*)\.experts\.(\d+)\.(w1|w2|w3)\.weight)");
  std::map<std::string, std::array<std::uint64_t, 3>> experts;  // count, rows and columns of w1
  loadstone::Skeleton skeleton;
  for (const auto& tensor : catalog.tensors()) {
    std::smatch match;
    if (!std::regex_match(tensor.name, match, expert)) {
      skeleton.targets.push_back(target(tensor.name, tensor.shape));
    } else if (match[3] == "w1") {
      auto& layer = experts[match[1]];
      layer = {layer[0] + 1, tensor.shape[0], tensor.shape[1]};
    }
  }
  for (const auto& [name, layer] : experts) {
    const auto [count, rows, columns] = layer;
    skeleton.targets.push_back(target(name + ".gate_up", {count, 2 * rows, columns}));
    skeleton.targets.push_back(target(name + ".down", {count, columns, rows}));
  }
  return skeleton;
}

loadstone::Skeleton transposed(const loadstone::Catalog& catalog) {
  loadstone::Skeleton skeleton = loadstone::Skeleton::from_catalog(catalog);
  for (auto& each : skeleton.targets) {
    if (each.shape.rank() == 2) each.shape = {each.shape[1], each.shape[0]};
  }
  return skeleton;
}

loadstone::Plan plan_for(const std::string& path, std::string_view kind) {
  const auto catalog = loadstone::open_checkpoint(path);
  loadstone::PlanOptions options;
  loadstone::Skeleton skeleton = loadstone::Skeleton::from_catalog(*catalog);
  if (kind == "f32") options.dtype = Dtype::f32;
  if (kind == "fused") {
    skeleton = fused(*catalog);
    options.rules = loadstone::rules_from_json(expert_rules);
  }
  if (kind == "transposed") {
    skeleton = transposed(*catalog);
    options.rules = {{.op = loadstone::RuleOp::transpose,
                      .sources = {"(.*(?:proj|embed_tokens|lm_head|w[123])\\.weight)"},
                      .targets = {"$1"},
                      .dims = {0, 1}}};
  }
  return make_plan(catalog, skeleton, options);
}

// Returns the kilobytes of a field of /proc/self/status.
long status_of(std::string_view key) {
  std::ifstream file("/proc/self/status");
  std::string line;
  while (std::getline(file, line)) {
    if (line.starts_with(key)) return std::atol(line.c_str() + key.size() + 1);
  }
  return 0;
}

int run(int argc, char** argv) {
  const loadstone::Plan plan = plan_for(argv[1], argc > 2 ? argv[2] : "plain");
  loadstone::require_ok(plan);
  const loadstone::HostMemory memory(plan);
  loadstone::ExecuteOptions options;
  if (argc > 3) options.threads = static_cast<unsigned>(std::atoi(argv[3]));
  if (argc > 4) options.chunk_bytes = static_cast<std::uint64_t>(std::atol(argv[4]));
  const long base = status_of("RssAnon");
  std::printf("ready\n");
  std::fflush(stdout);
  while (std::getchar() != '\n') {
    if (std::feof(stdin)) return 1;
  }
  const auto begin = std::chrono::steady_clock::now();
  const loadstone::Report report = execute(plan, memory.destinations(), options);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  loadstone::audit(plan, report).require_real();
  std::printf(
      "{\"seconds\": %.6f, \"bytes_read\": %llu, \"staging_bytes_peak\": %llu, "
      "\"base_kib\": %ld, \"anonymous_kib\": %ld, \"file_kib\": %ld, \"peak_kib\": %ld}\n",
      seconds.count(), static_cast<unsigned long long>(report.bytes_read),
      static_cast<unsigned long long>(report.staging_bytes_peak), base, status_of("RssAnon"),
      status_of("RssFile"), status_of("VmHWM"));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: load CHECKPOINT [KIND [THREADS [CHUNK_BYTES]]]\n");
    return 2;
  }
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "load: %s\n", error.what());
    return 1;
  }
}

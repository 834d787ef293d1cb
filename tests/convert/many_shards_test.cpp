// Converts a checkpoint with many more shards than the process may have descriptors. loadstone must
// open each shard when it is read, and close others.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "load/mapped_shard.h"
#include "loadstone/execute.h"
#include "loadstone/verify.h"
#include "support/files.h"
#include "support/samples.h"

namespace loadstone::test {
namespace {

constexpr unsigned shards = 300;
constexpr std::size_t elements = 600;
constexpr std::size_t bytes_each = 2 * elements;

bool loads(const std::shared_ptr<const Catalog>& catalog) {
  const Plan plan = make_plan(catalog, Skeleton::from_catalog(*catalog));
  const HostMemory memory(plan);
  if (execute(plan, memory.destinations(), {.threads = 3}).bytes_read != shards * bytes_each) {
    return false;
  }
  for (unsigned i = 0; i < shards; ++i) {
    const auto* const bytes = reinterpret_cast<const char*>(memory.destinations()[i].data);
    const auto shard = static_cast<unsigned>(std::stoul(plan.targets[i].name.substr(2)));
    if (std::string_view(bytes, bytes_each) != some_bytes(bytes_each, shard + 1)) return false;
  }
  return true;
}

bool maps(const Catalog& catalog) {
  std::vector<std::shared_ptr<MappedShard>> mapped;
  for (const Shard& shard : catalog.shards()) mapped.push_back(MappedShard::open(shard));
  return mapped.size() == shards;
}

// Converts with few descriptors and ends the process. Exit status 0 means success.
[[noreturn]] void work_with_few_descriptors(const std::string& source, const std::string& folder) {
  const rlimit few = {.rlim_cur = 64, .rlim_max = 64};
  if (::setrlimit(RLIMIT_NOFILE, &few) != 0) std::exit(2);
  const auto catalog = open_checkpoint(source);
  if (!loads(catalog)) std::exit(3);
  if (!maps(*catalog)) std::exit(4);
  converted(source, folder + "/many", {.one_file = false, .shard_bytes_max = bytes_each});
  converted(source, folder + "/one.safetensors");
  const auto many = open_checkpoint(folder + "/many");
  if (many->shards().size() != shards) std::exit(5);
  if (verify_values(*many, {.threads = 3}).bytes_read != shards * bytes_each) std::exit(6);
  if (!compare(*catalog, *many).ok()) std::exit(7);
  if (!compare(*many, *open_checkpoint(folder + "/one.safetensors")).ok()) std::exit(8);
  std::exit(0);
}

TEST(ManyShards, NeedFewDescriptors) {
  const TemporaryFolder folder;
  for (unsigned i = 0; i < shards; ++i) {
    folder.write(
        fmt::format("source/model-{:05}-of-{:05}.safetensors", i + 1, shards),
        safetensors_bytes(
            {{fmt::format("w.{}", i), "BF16", {elements}, some_bytes(bytes_each, i + 1)}}));
  }
  EXPECT_EXIT(work_with_few_descriptors(folder / "source", folder.path().string()),
              testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace loadstone::test

// Loads and reads one checkpoint in several threads at once, with fewer descriptors than shards.
// Meant for the thread sanitizer.
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <atomic>
#include <thread>
#include <vector>

#include "loadstone/error.h"
#include "loadstone/execute.h"
#include "loadstone/verify.h"
#include "support/files.h"

namespace loadstone::test {
namespace {

constexpr std::size_t shards = 80;
constexpr std::size_t elements = 3000;

class Concurrency : public testing::Test {
 protected:
  Concurrency() {
    ::getrlimit(RLIMIT_NOFILE, &limit_);
    rlimit small = limit_;
    small.rlim_cur = 64;
    ::setrlimit(RLIMIT_NOFILE, &small);
    std::vector<std::string> paths;
    for (unsigned i = 0; i < shards; ++i) {
      const std::string name = "w." + std::to_string(i);
      data_.push_back(some_bytes(elements * 2, i + 1));
      paths.push_back(folder_.write(name + ".safetensors",
                                    safetensors_bytes({{name, "BF16", {elements}, data_.back()}})));
    }
    catalog_ = open_checkpoint(paths);
    plan_ = make_plan(catalog_, Skeleton::from_catalog(*catalog_));
    PlanOptions options;
    options.dtype = Dtype::f32;
    cast_ = make_plan(catalog_, Skeleton::from_catalog(*catalog_), options);
  }
  ~Concurrency() override { ::setrlimit(RLIMIT_NOFILE, &limit_); }

  // Returns true if the loaded values match the bytes of the files.
  bool loads() const {
    const HostMemory memory(plan_);
    const Report report = execute(plan_, memory.destinations(), {.threads = 3});
    bool right = report.bytes_read == shards * elements * 2;
    for (std::size_t i = 0; i < plan_.targets.size(); ++i) {
      const std::string& name = plan_.targets[i].name;
      const std::string& wanted = data_[std::stoul(name.substr(2))];
      const auto* const bytes = reinterpret_cast<const char*>(memory.destinations()[i].data);
      right = right && std::string_view(bytes, wanted.size()) == wanted;
    }
    return right;
  }

  TemporaryFolder folder_;
  std::vector<std::string> data_;
  std::shared_ptr<const Catalog> catalog_;
  Plan plan_;
  Plan cast_;

 private:
  rlimit limit_ = {};
};

TEST_F(Concurrency, OnePlanIsCarriedOutByManyThreads) {
  std::atomic<unsigned> wrong = 0;
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        for (int round = 0; round < 4; ++round) wrong += loads() ? 0 : 1;
      });
    }
  }
  EXPECT_EQ(wrong, 0u);
}

TEST_F(Concurrency, LoadsAndVerificationsShareOneCatalog) {
  std::atomic<unsigned> wrong = 0;
  const auto repeat = [&wrong](auto work) {
    return std::jthread([&wrong, work] {
      for (int round = 0; round < 4; ++round) wrong += work() ? 0 : 1;
    });
  };
  {
    const auto loading = repeat([&] { return loads(); });
    const auto casting = repeat([&] {
      const HostMemory memory(cast_);
      return execute(cast_, memory.destinations()).bytes_read == shards * elements * 2;
    });
    const auto verifying = repeat([&] {
      return verify_values(*catalog_, {.threads = 3}).bytes_read == shards * elements * 2;
    });
    const auto comparing = repeat([&] { return compare(*catalog_, *catalog_).ok(); });
    const auto opening =
        repeat([&] { return open_checkpoint(folder_ / "w.0.safetensors")->tensors().size() == 1; });
  }
  EXPECT_EQ(wrong, 0u);
}

// Cancelling one load must not affect the others.
TEST_F(Concurrency, OneOfTwoLoadsIsCancelled) {
  class Stopping final : public Observer {
   public:
    bool on_progress(const Progress&) override { return false; }
  };
  std::atomic<unsigned> cancelled = 0;
  std::atomic<unsigned> wrong = 0;
  {
    const std::jthread other([&] {
      for (int round = 0; round < 4; ++round) wrong += loads() ? 0 : 1;
    });
    for (int round = 0; round < 4; ++round) {
      Stopping observer;
      const HostMemory memory(plan_);
      try {
        execute(plan_, memory.destinations(), {.threads = 2, .observer = &observer});
      } catch (const Error& error) {
        cancelled += error.code() == "cancelled" ? 1 : 0;
      }
    }
  }
  EXPECT_EQ(cancelled, 4u);
  EXPECT_EQ(wrong, 0u);
}

}  // namespace
}  // namespace loadstone::test

// Loads a checkpoint into this program's buffers, with a thread count, progress and Ctrl-C, then
// saves it as one file:
//
//   own_buffers CHECKPOINT SAVED.safetensors [THREADS [CANCEL_AT]]
//
// CANCEL_AT is the number of bytes after which to cancel.
#include <loadstone/loadstone.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

std::atomic<bool> is_stopped = false;
static_assert(std::atomic<bool>::is_always_lock_free);  // a signal handler may set it

// loadstone calls on_progress() about 20 times a second, always from the thread that loads.
class Watch final : public loadstone::Observer {
 public:
  explicit Watch(std::uint64_t cancel_at) : cancel_at_(cancel_at) {}

  bool on_progress(const loadstone::Progress& progress) override {
    std::fprintf(stderr, "\r%llu of %llu bytes",
                 static_cast<unsigned long long>(progress.bytes_done),
                 static_cast<unsigned long long>(progress.bytes_total));
    return !is_stopped && progress.bytes_done < cancel_at_;
  }

 private:
  std::uint64_t cancel_at_;
};

// One buffer for each target that the plan delivers to memory, in the order of plan.targets.
// Instead, a program may use buffers that it already has, such as tensors or pinned memory.
struct Buffers {
  explicit Buffers(const loadstone::Plan& plan)
      : bytes(plan.targets.size()), destinations(plan.targets.size()) {
    for (std::size_t i = 0; i < plan.targets.size(); ++i) {
      const loadstone::PlannedTarget& target = plan.targets[i];
      if (target.delivery != loadstone::Delivery::memory) continue;
      bytes[i].resize(target.byte_count() + 1);  // not empty, because null skips the target
      destinations[i].data = bytes[i].data();
      destinations[i].byte_count = target.byte_count();
      destinations[i].dtype = target.dtype;
    }
  }

  std::vector<std::vector<std::byte>> bytes;
  std::vector<loadstone::Destination> destinations;
};

int run(const std::string& checkpoint, const std::string& saved, unsigned threads,
        std::uint64_t cancel_at) {
  const auto catalog = loadstone::open_checkpoint(checkpoint);
  const auto skeleton = loadstone::Skeleton::from_catalog(*catalog);  // every tensor, unchanged
  loadstone::PlanOptions plan_options;
  plan_options.threads = threads;
  const loadstone::Plan plan = loadstone::make_plan(catalog, skeleton, plan_options);
  loadstone::require_ok(plan);

  Buffers buffers(plan);
  Watch watch(cancel_at);
  loadstone::ExecuteOptions options;
  options.threads = threads;
  options.has_pages = true;  // std::vector has written to all pages of its memory
  options.observer = &watch;
  const loadstone::Report report = loadstone::execute(plan, buffers.destinations, options);
  loadstone::audit(plan, report).require_real();

  std::vector<loadstone::TensorBytes> tensors;
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    const auto& [data, byte_count, dtype, parts, kind] = buffers.destinations[i];
    tensors.push_back({plan.targets[i].name, dtype, plan.targets[i].shape, {data, byte_count}});
  }
  loadstone::save_safetensors(saved, tensors);
  std::printf("\n%zu tensors, %u readers, %.3f s\n", tensors.size(), report.readers,
              report.seconds);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3 || argc > 5) {
    std::fprintf(stderr, "usage: %s CHECKPOINT SAVED.safetensors [THREADS [CANCEL_AT]]\n", argv[0]);
    return 2;
  }
  std::signal(SIGINT, [](int) { is_stopped = true; });
  try {
    return run(argv[1], argv[2],
               argc > 3 ? static_cast<unsigned>(std::strtoul(argv[3], nullptr, 10)) : 0,
               argc > 4 ? std::strtoull(argv[4], nullptr, 10) : UINT64_MAX);
  } catch (const loadstone::Error& error) {
    std::fprintf(stderr, "\n%s\n", error.what());
    return loadstone::exit_status(error.code());  // 130 for "cancelled", 4 for "io.not_found" ...
  }
}

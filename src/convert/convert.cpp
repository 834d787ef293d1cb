// Doing what a conversion says: threads pull windows of the output's tensors and write them to
// their places.
#include "loadstone/convert.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <utility>

#include "convert/output.h"
#include "convert/windows.h"
#include "execute/shard_files.h"
#include "execute/team.h"
#include "execute/value_reader.h"
#include "loadstone/error.h"
#include "plan/decodings.h"

namespace loadstone {

namespace {

using Sources = std::vector<std::shared_ptr<ByteSource>>;

Sources open_needed(const Plan& plan, Storage& storage) {
  std::vector<bool> needed(plan.catalog->shards().size(), false);
  for (const PlannedTarget& target : plan.targets) {
    for (const std::uint32_t source : sources_of(target.recipe.boxes, plan.decodings)) {
      needed.at(plan.catalog->tensors().at(source).shard) = true;
    }
  }
  return open_shards(*plan.catalog, needed, storage);
}

// What all threads share.
struct Work {
  const Conversion& conversion;
  const Sources& sources;
  Output& output;
  WindowQueue& queue;
  std::atomic<bool>& stop;
  std::atomic<std::uint64_t> bytes_done = 0;
  std::atomic<std::uint64_t> bytes_read = 0;
  std::atomic<std::uint64_t> staging_bytes = 0;
};

// One thread's part: window after window. Not thread-safe.
class Puller {
 public:
  explicit Puller(Work& work)
      : work_(work),
        reader_(work.conversion.plan.catalog, work.sources, work.conversion.staging_bytes,
                work.stop),
        buffer_(work.conversion.window_bytes) {}

  void run() {
    Window window;
    while (!work_.stop && work_.queue.next(window)) {
      write(window);
      if (work_.stop) break;
      work_.bytes_done += window.byte_count;
      if (work_.queue.finish(window)) work_.output.finish(window.file);
    }
    work_.bytes_read += reader_.bytes_read();
    work_.staging_bytes += reader_.staging_bytes_peak() + window_bytes_peak_;
  }

 private:
  void write(const Window& window) {
    if (window.byte_count == 0) return;
    const PlannedTarget& target = work_.conversion.plan.targets[window.target];
    std::span<const std::byte> bytes;
    if (const Constant& constant = target.recipe.constant) {
      const std::uint64_t begin = Encoding(target.dtype).byte_count(window.begin).value_or(0);
      bytes = std::span(*constant).subspan(begin, window.byte_count);
    } else {
      if (open_ != window.target) {
        reader_.open({.name = target.name,
                      .boxes = target.recipe.boxes,
                      .decodings = work_.conversion.plan.decodings,
                      .shape = target.shape,
                      .dtype = target.dtype});
        open_ = window.target;
      }
      const std::span<std::byte> piece = {buffer_.data(), window.byte_count};
      reader_.read(window.begin, window.end, piece);
      window_bytes_peak_ = std::max(window_bytes_peak_, window.byte_count);
      bytes = piece;
    }
    if (!work_.stop) work_.output.write(window.file, window.file_offset, bytes);
  }

  static constexpr std::uint32_t none = UINT32_MAX;

  Work& work_;
  ValueReader reader_;
  AnonymousMemory buffer_;
  std::uint32_t open_ = none;
  std::uint64_t window_bytes_peak_ = 0;
};

}  // namespace

ConvertReport convert(const Conversion& conversion, const std::string& target, Observer* observer,
                      Storage* storage) {
  const auto begin = std::chrono::steady_clock::now();
  require_ok(conversion.plan);
  check_target(conversion, target);
  const Sources sources =
      open_needed(conversion.plan, storage != nullptr ? *storage : local_storage());
  Output output(conversion, look_at_target(conversion, target));
  WindowQueue queue(conversion);
  std::atomic<bool> stop = false;
  Work work = {
      .conversion = conversion, .sources = sources, .output = output, .queue = queue, .stop = stop};
  std::uint64_t bytes_total = 0;
  for (const OutputFile& file : conversion.files) bytes_total += file.data_bytes;
  {
    Team team(stop);  // last, so that it is the first to go
    team.start(conversion.threads, [&] { Puller(work).run(); });
    const bool wanted = team.wait([&] {
      return observer == nullptr ||
             observer->on_progress({.bytes_done = work.bytes_done, .bytes_total = bytes_total});
    });
    if (!wanted) throw Error("cancelled", "the conversion was stopped by its caller");
  }
  // What was made of a file that changed meanwhile is not handed out as good.
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (sources[i]) check_identity(conversion.plan.catalog->shards()[i], *sources[i]);
  }
  ConvertReport report;
  report.outputs = output.commit();
  report.findings = conversion.plan.findings;
  report.bytes_read = work.bytes_read;
  report.bytes_written = output.bytes_written();
  const std::uint64_t planned =
      conversion.threads * (conversion.window_bytes + conversion.staging_bytes);
  report.peak_bytes =
      conversion.peak_bytes - planned + std::min(planned, work.staging_bytes.load());
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return report;
}

}  // namespace loadstone

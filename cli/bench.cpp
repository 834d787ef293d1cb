// loadstone bench: measures how fast this machine can move a checkpoint's bytes, and how close a
// load comes to that.
#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/ceil_div.h"
#include "base/text.h"
#include "base/thread_count.h"
#include "boxes/dims.h"
#include "boxes/slice.h"
#include "cli/bench_report.h"
#include "cli/commands.h"
#include "cli/duration.h"
#include "cli/interrupt.h"
#include "cli/machine_limits.h"
#include "cli/options.h"
#include "cli/output.h"
#include "cli/voice.h"
#include "engine/box_read.h"
#include "loadstone/error.h"
#include "loadstone/execute.h"
#include "loadstone/machine.h"
#include "loadstone/plan.h"
#include "plan/values.h"
#include "storage/remote_path.h"

namespace loadstone::cli {

namespace {

// Disks with queues need several concurrent reads. These threads only wait, so they use no core.
constexpr unsigned disk_readers = 8;
constexpr unsigned rounds_min = 3;  // fewer have no useful median
constexpr unsigned rounds_max = 20;
// Pause before each run, because the cost of fresh memory depends on how long the machine was idle.
constexpr auto idle = std::chrono::milliseconds(200);
constexpr std::uint64_t copy_bytes_max = kept_bytes_min;

struct BenchArgs {
  PlanArgs plan;
  double seconds = 30;
  std::string sample = "1GiB";
  std::string write_folder;
  std::vector<std::string> encodings;
};

void rest() {
  std::this_thread::sleep_for(idle);
  if (InterruptibleWork::interrupted()) throw Error("cancelled", "interrupted");
}

// Returns the processor time that this process has used.
double processor_seconds() {
  rusage usage = {};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

class StopOnInterrupt : public Observer {
 public:
  bool on_progress(const Progress&) override { return !InterruptibleWork::interrupted(); }
};

// Returns the bytes in memory or in the files, whichever are more.
std::uint64_t moved_bytes(const ValueSet& values, const Plan& plan, std::size_t target) {
  std::uint64_t bytes = 0;
  for (const SourceExtent& extent : source_extents(values, values[target])) {
    bytes += extent.end - extent.begin;
  }
  return std::max(bytes, plan.targets[target].byte_count());
}

// Shortens a target of `bytes` to its first rows, so that about `bytes_max` remain. Returns false,
// and leaves it unchanged, if that is not possible.
bool shorten(PlannedTarget& target, std::uint64_t bytes, std::uint64_t bytes_max) {
  std::vector<std::uint64_t> extents = target.shape.extents();
  if (target.recipe.merge != nullptr || extents.empty()) return false;
  // Blocks and bytes with several values must stay whole.
  const std::uint64_t step = extents.size() == 1 ? 4096 : target.quantization ? 128 : 1;
  extents[0] = bytes_max / ceil_div(bytes, extents[0]) / step * step;
  if (extents[0] == 0) return false;
  const Slice slice = {.begin = std::vector<std::uint64_t>(extents.size(), 0),
                       .shape = Shape(extents)};
  std::vector<Box> boxes = target.recipe.boxes;
  if (slice_boxes(boxes, target.shape, slice)) return false;
  const auto is_whole = [&](const Box& box) { return moves_whole_bytes(box, bits(target.dtype)); };
  if (!std::ranges::all_of(boxes, is_whole)) return false;
  target.shape = slice.shape;
  target.recipe.boxes = std::move(boxes);
  return true;
}

// The first targets of a plan that are loaded into memory, up to a number of bytes. The last target
// may be only a part of a tensor.
class Sample {
 public:
  Sample(const Plan& plan, std::uint64_t bytes_max) : plan_(plan), taken_(plan.targets.size()) {
    const ValueSet values = values_of(plan);
    std::uint64_t room = bytes_max;
    for (std::size_t i = 0; i < taken_.size(); ++i) {
      PlannedTarget& target = plan_.targets[i];
      if (target.delivery != Delivery::memory || target.recipe.origin != Origin::checkpoint) {
        continue;
      }
      std::uint64_t bytes = moved_bytes(values, plan, i);
      const bool is_whole = bytes <= room;
      if (!is_whole) {
        if (!shorten(target, bytes, room)) continue;
        bytes = moved_bytes(values_of(plan_), plan_, i);
        if (bytes > room) {  // for example the columns of a transposed tensor
          target = plan.targets[i];
          continue;
        }
      }
      taken_[i] = true;
      room -= bytes;
      memory_bytes_ += target.byte_count();
      ++target_count_;
      if (!is_whole) break;
    }
  }

  [[nodiscard]] std::uint64_t memory_bytes() const noexcept { return memory_bytes_; }
  [[nodiscard]] std::uint64_t target_count() const noexcept { return target_count_; }

  // Loads into fresh memory, which is freed before this returns.
  // `threads`: the number of readers; 0: chosen by the load.
  [[nodiscard]] Report load(unsigned threads) const {
    const HostMemory memory(plan_);
    std::vector<Destination> destinations = memory.destinations();
    for (std::size_t i = 0; i < destinations.size(); ++i) {
      if (taken_[i]) continue;
      destinations[i].data = nullptr;
      destinations[i].parts.clear();
    }
    StopOnInterrupt observer;
    ExecuteOptions options;
    options.threads = threads;
    options.observer = &observer;
    return execute(plan_, destinations, options);
  }

  // Returns the ranges of files that load() reads, sorted by shard and offset.
  [[nodiscard]] std::vector<Extent> extents() const {
    const ValueSet values = values_of(plan_);
    std::map<std::string, std::set<std::pair<std::uint64_t, std::uint64_t>>> ranges;
    for (std::size_t i = 0; i < taken_.size(); ++i) {
      if (!taken_[i]) continue;
      for (const SourceExtent& extent : source_extents(values, values[i])) {
        ranges[values.shard_of(extent.source).path].emplace(extent.begin, extent.end);
      }
    }
    std::vector<Extent> extents;
    for (const auto& [path, parts] : ranges) {
      for (const auto& [begin, end] : parts) {
        if (!extents.empty() && extents.back().path == path && begin <= extents.back().end) {
          extents.back().end = std::max(extents.back().end, end);
        } else {
          extents.push_back({path, begin, end});
        }
      }
    }
    return extents;
  }

 private:
  Plan plan_;
  std::uint64_t memory_bytes_ = 0;
  std::uint64_t target_count_ = 0;
  std::vector<bool> taken_;
};

// Rejects remote files and assembled checkpoints, because they have no local file ranges to compare
// loads with.
void require_local_files(const Plan& plan) {
  const std::vector<Shard>& shards = plan.catalog->shards();
  for (std::size_t i = 0; i < shards.size(); ++i) {
    if (is_remote(shards[i].path)) {
      throw Error("usage", "bench can measure only files on this machine",
                  {.path = public_url(shards[i].path)});
    }
    if (plan.catalog->assembly(static_cast<std::uint32_t>(i))) {
      throw Error("usage",
                  "bench can measure only files with whole tensors; convert the checkpoint first",
                  {.path = shards[i].path});
    }
  }
}

std::uint64_t sample_bytes_max(const BenchArgs& args) {
  const std::uint64_t wanted = parse_size("--sample", args.sample, 1);
  const auto available = available_memory_bytes();
  return available ? std::min(wanted, *available / 4) : wanted;
}

class Bench {
 public:
  Bench(const Plan& plan, const BenchArgs& args)
      : plan_(plan),
        readers_(args.plan.options.threads),
        sample_(plan, sample_bytes_max(args)),
        write_folder_(args.write_folder),
        encodings_(args.encodings) {
    if (sample_.target_count() == 0) {
      throw Error("usage",
                  "the plan reads no tensor into memory, or none that fits in --sample: there is "
                  "nothing to measure");
    }
    figures_.checkpoint = plan.catalog->shown_path();
    figures_.total_bytes = plan.catalog->total_bytes();
    figures_.total_targets = plan.targets.size();
    figures_.sample_targets = sample_.target_count();
    figures_.threads = plan.threads;
    figures_.cores = thread_count(0, defaults::threads_most);
    figures_.disk_readers = disk_readers;
    if (write_folder_.empty()) figures_.no_write = "pass --write FOLDER";
  }

  BenchFigures measure(double seconds_max) {
    const auto begin = std::chrono::steady_clock::now();
    const auto elapsed = [&] {
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    static_cast<void>(sample_.load(readers_));  // loads the files into the page cache
    extents_ = sample_.extents();
    figures_.sample_bytes = byte_count(extents_);
    double longest = 0;
    for (unsigned round = 0; round < rounds_max; ++round) {
      const double before = elapsed();
      if (round >= rounds_min && before + longest > seconds_max) break;
      measure_round(round % 2 == 1);
      longest = std::max(longest, elapsed() - before);
    }
    return std::move(figures_);
  }

 private:
  // Measures loads and the limits to compare them with. Alternates their order between rounds,
  // because the second of two runs benefits from the first. Runs that empty the page cache come
  // last.
  void measure_round(bool is_load_first) {
    const unsigned threads = plan_.threads;
    const std::uint64_t copied = std::min(sample_.memory_bytes(), copy_bytes_max);
    // Untimed: reloads the pages that the previous round evicted from the page cache.
    static_cast<void>(seconds_to_read(extents_, threads, ReadInto::memory_at_hand));
    add(figures_.new_memory, sample_.memory_bytes(),
        [&] { return seconds_to_populate(sample_.memory_bytes(), threads); });
    add(figures_.memory_copy, copied, [&] { return seconds_to_copy(copied, threads); });
    add(figures_.page_cache, figures_.sample_bytes,
        [&] { return seconds_to_read(extents_, threads, ReadInto::memory_at_hand); });
    if (!write_folder_.empty()) {
      add(figures_.write, kept_bytes_min,
          [&] { return seconds_to_write(write_folder_, kept_bytes_min); });
    }
    for (const std::string& each : encodings_) {
      add(figures_.encode[each], bytes_to_encode(figures_.cores),
          [&] { return seconds_to_encode(each, figures_.cores); });
    }
    if (is_load_first) add_load(figures_.load_from_page_cache);
    add(figures_.page_cache_to_new_memory, figures_.sample_bytes,
        [&] { return seconds_to_read(extents_, threads, ReadInto::new_memory); });
    if (!is_load_first) add_load(figures_.load_from_page_cache);
    if (!figures_.no_disk_load.empty()) return;
    if (!is_load_first) add_disk();
    if (drop_from_page_cache(extents_)) {
      add_load(figures_.load_from_disk);
    } else {
      figures_.no_disk_load = figures_.no_disk = "the system keeps these files in the page cache";
    }
    if (is_load_first) add_disk();
  }

  template <typename Measure>
  void add(Series& series, std::uint64_t bytes, Measure measure) {
    rest();
    series.bytes = bytes;
    series.seconds.push_back(measure());
  }

  void add_disk() {
    rest();
    if (!figures_.no_disk.empty()) return;
    if (!drop_from_page_cache(extents_)) {
      figures_.no_disk = "the system keeps these files in the page cache";
      return;
    }
    const auto seconds = seconds_to_read_direct(extents_, disk_readers);
    if (!seconds) {
      figures_.no_disk = "the file system does not support direct reads";
      return;
    }
    figures_.disk.bytes = figures_.sample_bytes;
    figures_.disk.seconds.push_back(*seconds);
  }

  void add_load(LoadSeries& load) {
    rest();
    const double before = processor_seconds();
    const Report report = sample_.load(readers_);
    const double used = processor_seconds() - before;
    load.series.bytes = figures_.sample_bytes;
    load.series.seconds.push_back(report.seconds);
    load.readers = std::max(load.readers, static_cast<unsigned>(report.readers));
    const unsigned cores = std::min(load.readers, figures_.cores);
    load.processor_shares.push_back(std::min(1.0, used / (report.seconds * cores)));
  }

  const Plan& plan_;
  const unsigned readers_;
  const Sample sample_;
  const std::string write_folder_;
  const std::vector<std::string> encodings_;
  std::vector<Extent> extents_;
  BenchFigures figures_;
};

int bench(const BenchArgs& args, bool json) {
  const Plan plan = make_plan(args.plan);
  if (const Finding* const first = obstacle(plan.findings, args.plan.open.strict)) {
    return refuse(plan.findings, *first, "'loadstone plan'", json);
  }
  require_local_files(plan);
  if (!json) print_warnings(plan.findings);
  const InterruptibleWork work;
  Bench measurement(plan, args);
  if (!json && is_terminal(stderr)) {
    print_hint(fmt::format("measuring for about {:.0f} s", args.seconds));
  }
  const BenchFigures figures = measurement.measure(args.seconds);
  const std::string unsaved =
      save_rates(figures, plan.catalog->shards().front().path, args.write_folder);
  if (!unsaved.empty() && !json) print_hint(unsaved);
  print_line(json ? to_json(figures) : to_text(figures, style_of(stdout)));
  return 0;
}

}  // namespace

void add_bench(Program& program, Chosen& chosen) {
  const Command command = program.add_subcommand(
      "bench", "Measure the limits of this machine, and how close a load comes to them");
  const auto args = std::make_shared<BenchArgs>();
  add_checkpoint(command, args->plan.open).required();
  add_plan_options(command, args->plan);
  add_readers_option(command, args->plan.options.threads, "Readers");
  command
      .add_option("--seconds", args->seconds, "S",
                  "Approximate duration in seconds; at least three rounds" + default_text("30"))
      .in_range(0.0, 86'400.0);
  command.add_option("--sample", args->sample, "SIZE",
                     "Most bytes of tensors to measure, beginning with the first tensor; of a\n"
                     "larger tensor, its first rows. At most a quarter of the free memory" +
                         default_text(args->sample));
  command.add_option("--write", args->write_folder, "FOLDER",
                     "Also measure writing, of 256 MiB to a file in FOLDER that is removed");
  command.add_option("--quantize", args->encodings, "E",
                     "Also measure encoding of values to E, such as nf4. Repeatable");
  add_open_options(command, args->plan.open);
  add_json_flag(command, chosen.json);
  command.set_action([args, &chosen] { return bench(*args, chosen.json); });
}

}  // namespace loadstone::cli

// Runs a conversion: the engine with files as its sink, and the steps before and after it.
#include "loadstone/convert.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/named.h"
#include "base/only_errors.h"
#include "base/refuse_option.h"
#include "base/text.h"
#include "boxes/sources.h"
#include "boxes/value.h"
#include "catalog/open_shards.h"
#include "convert/lossless.h"
#include "convert/write/files.h"
#include "convert/write/finished.h"
#include "convert/write/output.h"
#include "convert/write/output_sink.h"
#include "convert/write/receipts.h"
#include "convert/write/target.h"
#include "convert/write/work_folder.h"
#include "engine/jobs.h"
#include "engine/run.h"
#include "loadstone/error.h"
#include "loadstone/remote.h"
#include "plan/values.h"

namespace loadstone {

namespace {

// Detects sources that change during a run. Thread-safe.
class SourceWatch {
 public:
  SourceWatch(const OpenShards& shards, WritableStorage& storage)
      : shards_(shards), storage_(storage), named_(shards.sources().size()) {
    for (std::size_t i = 0; i < named_.size(); ++i) {
      const std::string& path = shards.catalog().shards()[i].path;
      if (shards.sources()[i] && !is_remote(path)) named_[i] = storage.status(path, true);
    }
  }

  // Throws Error "io.changed" if a file's size or time has changed, or if a different file now has
  // its name.
  void check() const {
    shards_.require_unchanged();
    for (std::size_t i = 0; i < named_.size(); ++i) {
      if (!named_[i]) continue;
      const Shard& shard = shards_.catalog().shards()[i];
      const auto now = storage_.status(shard.path, true);
      if (now && same_file(*now, *named_[i])) continue;
      throw Error(
          "io.changed",
          now ? "another program replaced this file" : "the file was removed during the conversion",
          {.path = shard.path});
    }
  }

 private:
  const OpenShards& shards_;
  WritableStorage& storage_;
  std::vector<std::optional<FileStatus>> named_;  // nullopt: not a local file
};

// Opens the sources that the wanted files need. Opens all sources if tensors of several files share
// scales. Throws Error "io.changed".
OpenShards open_needed(const Conversion& conversion, const std::vector<bool>& wanted,
                       Storage* storage) {
  const Plan& plan = conversion.plan;
  check_claims(*plan.catalog, plan.catalog->storage(storage));
  const ValueSet values = values_of(plan, SinkKind::files);
  std::vector<std::uint32_t> needed;
  const bool shares = std::ranges::count(wanted, true) > 0 &&
                      std::ranges::any_of(plan.targets, [](const PlannedTarget& target) {
                        return target.quantization.has_value();
                      });
  for (std::size_t i = 0; i < conversion.files.size(); ++i) {
    if (!wanted[i] && !shares) continue;
    for (const OutputTensor& tensor : conversion.files[i].tensors) {
      std::ranges::copy(sources_of(plan.targets[tensor.target].recipe, plan.decodings),
                        std::back_inserter(needed));
      std::ranges::copy(deciding_tensors(values, values[tensor.target]),
                        std::back_inserter(needed));
    }
  }
  return {*plan.catalog, storage, needed};
}

void check_run(const Conversion& conversion, const ConvertRun& run) {
  if (run.part && run.finish)
    refuse_option("finish", "--finish is only for a conversion in parts, after all parts are done");
  if (conversion.one_file && (run.part || run.finish)) {
    refuse_option(
        run.part ? "part" : "finish",
        "a single file cannot be written in parts: pass a folder, or choose smaller shards");
  }
}

bool is_complete(const std::vector<Finding>& findings) {
  return std::ranges::any_of(findings,
                             [](const Finding& each) { return each.code == complete_code; });
}

// Reports one step of a run as a part of the whole, so that the progress never falls when the next
// step begins.
class StepProgress final : public Observer {
 public:
  // The first step checks the output's bytes [0, checked), and the second step makes the others.
  StepProgress(Observer* whole, bool is_check, std::uint64_t checked, std::uint64_t total)
      : whole_(whole),
        is_check_(is_check),
        begin_(is_check ? 0 : checked),
        end_(is_check ? checked : total),
        total_(total) {}

  // Returns null if nobody observes the run.
  [[nodiscard]] Observer* observer() noexcept { return whole_ == nullptr ? nullptr : this; }

  bool on_progress(const Progress& step) override {
    const double share = step.bytes_total == 0 ? 1
                                               : static_cast<double>(step.bytes_done) /
                                                     static_cast<double>(step.bytes_total);
    const double bytes = static_cast<double>(end_ - begin_) * std::min(share, 1.0);
    const std::uint64_t done = begin_ + static_cast<std::uint64_t>(bytes);
    return whole_->on_progress({done, total_, is_check_ ? done : begin_});
  }

 private:
  Observer* const whole_;
  const bool is_check_;
  const std::uint64_t begin_;
  const std::uint64_t end_;
  const std::uint64_t total_;
};

DigestKind kind_of(const ConvertRun& run) { return run.receipt.value_or(DigestKind::xxh3_128); }

using Losses = std::map<std::uint32_t, EncodingLoss>;  // by target

// Adds the losses in the receipt of a file that an earlier run finished.
void add_losses(const Conversion& conversion, std::uint32_t file, const Receipt& receipt,
                Losses& losses) {
  const std::vector<ReceiptTensor>& tensors = receipt.outputs.front().tensors;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].loss) continue;
    const std::uint32_t target = conversion.files[file].tensors[i].target;
    check_loss(conversion, target, *tensors[i].loss);
    losses.emplace(target, *tensors[i].loss);
  }
}

// The files of a run that no earlier run finished.
struct FilesLeft {
  std::vector<bool> files;
  std::map<std::uint32_t, std::string> reasons{};  // why finished shards must be written again
  std::uint64_t bytes_checked = 0;  // of shards that exist, whether they are kept or not
  std::uint64_t bytes_total = 0;    // of all files of the run
};

// Finds the files to write. An existing shard counts as finished only if its digests match.
FilesLeft files_left(const Conversion& conversion, const WorkFolder& work, const ConvertRun& run,
                     Storage& storage, Output& output, Losses& losses, ConvertReport& report) {
  FilesLeft result = {.files = std::vector<bool>(conversion.files.size(), !run.part)};
  std::vector<bool>& left = result.files;
  if (run.part) {
    for (const std::uint32_t file : files_of_part(conversion, *run.part)) left[file] = true;
  }
  std::vector<std::pair<std::uint32_t, KeptFile>> finished;
  for (std::uint32_t i = 0; i < left.size(); ++i) {
    if (!left[i]) continue;
    result.bytes_total += conversion.files[i].byte_count();
    if (conversion.one_file || !work.has_finished(i)) continue;
    finished.emplace_back(i, KeptFile());
    result.bytes_checked += conversion.files[i].byte_count();
  }
  if (finished.empty()) return result;
  StepProgress progress(run.observer, true, result.bytes_checked, result.bytes_total);
  Jobs jobs(1, progress.observer(), result.bytes_checked);
  const auto goes_on = [&](std::uint64_t read) { return jobs.goes_on(read); };
  jobs.run(finished.size(), [&](std::size_t i, std::vector<std::byte>&) {
    auto& [number, found] = finished[i];
    found = work.kept(number, run.receipt, storage, goes_on);
  });
  for (auto& [number, found] : finished) {
    const OutputFile& file = conversion.files[number];
    report.bytes_checked += found.bytes_read;
    if (found.receipt) {
      left[number] = false;
      add_losses(conversion, number, *found.receipt, losses);
      output.keep(number, *std::move(found.receipt));
      if (!run.finish) report.bytes_kept += file.byte_count();
      continue;
    }
    result.reasons[number] = found.changed;
    report.findings.push_back(
        {.severity = Severity::warning,
         .code = "convert.redone",
         .target = file.name,
         .message = fmt::format("'{}' was finished by an earlier run, but {}: it {}",
                                printable(file.name), found.changed,
                                run.finish ? "must be written again" : "is written again")});
  }
  return result;
}

void write_files(const Conversion& conversion, const OpenShards& shards, Output& output,
                 const FilesLeft& left, const ConvertRun& run, Losses& losses,
                 ConvertReport& report) {
  const std::vector<bool>& wanted = left.files;
  const ValueSet values = values_of(conversion.plan, SinkKind::files);
  std::optional<FileReceipts> receipts;
  if (run.receipt || !conversion.one_file) {
    receipts.emplace(conversion, values, shards, wanted, kind_of(run));
    output.record(&*receipts);
  }
  const CacheRelease cache(conversion, values, shards, run.page_cache);
  report.page_cache = cache.is_on() ? PageCache::release : PageCache::keep;
  if (cache.is_on()) output.release_cache();
  OutputSink sink(conversion, values, wanted, output, cache, receipts ? &*receipts : nullptr);
  MemoryCount memory;
  StepProgress rest(run.observer, false, left.bytes_checked, left.bytes_total);
  RunReport made =
      sink.make(receipts ? receipts->sources() : shards.sources(), memory, rest.observer());
  report.bytes_read = made.bytes_read;
  report.bytes_read_ahead = made.bytes_read_ahead;
  losses.insert(sink.losses().begin(), sink.losses().end());
  std::ranges::move(made.findings, std::back_inserter(report.findings));
  report.peak_bytes += memory.bytes_peak();
  output.record(nullptr);
}

// Receives the data of one file, without its header, in the caller's memory.
class MemoryFiles final : public OutputFiles {
 public:
  MemoryFiles(std::span<std::byte> data, std::uint64_t header_bytes)
      : data_(data), header_bytes_(header_bytes) {}

  void write(std::uint32_t, std::uint64_t offset, std::span<const std::byte> bytes) override {
    const std::span<std::byte> place = data_.subspan(offset - header_bytes_, bytes.size());
    std::memcpy(place.data(), bytes.data(), bytes.size());
  }
  void finish(std::uint32_t) override {}

 private:
  std::span<std::byte> data_;
  std::uint64_t header_bytes_ = 0;
};

}  // namespace

static ConvertReport converted(const Conversion& conversion, const std::string& target,
                               const ConvertRun& run) {
  const auto begin = std::chrono::steady_clock::now();
  require_ok(conversion.plan);
  check_run(conversion, run);
  Storage& files = conversion.plan.catalog->storage(run.storage);
  WritableStorage& disk = files.writable();
  const std::vector<Finding> stays = check_target_in(disk, conversion, target, run);
  require_no_errors(stays);
  ConvertReport report;
  if (is_complete(stays)) report = report_finished(conversion, target, run, disk);
  report.findings = conversion.plan.findings;
  std::ranges::copy_if(stays, std::back_inserter(report.findings), [&](const Finding& each) {
    // The caller may have copied the finding into the plan.
    return std::ranges::count(conversion.plan.findings, each) == 0;
  });
  if (is_complete(stays)) return report;
  const TargetPlace place = look_at_target(conversion, target, disk);
  WorkFolder work(conversion, place, run, disk);
  report.peak_bytes = conversion.peak_bytes - conversion.budget.bytes();
  if (work.was_committed()) {
    report.outputs = output_paths(conversion, place.path);
    for (const OutputFile& file : conversion.files) report.bytes_kept += file.byte_count();
    prepare_record(conversion, place, run, place.path, disk);
    work.remove();
    return report;
  }
  std::optional<SourceWatch> watch;
  Output output(conversion, work, files, [&watch] { watch->check(); });
  if (!conversion.one_file) {
    // An interrupted run may have linked files of the target into the work folder. The target may
    // have been restored only now, so look at it again.
    const TargetPlace now = look_at_target(conversion, target, disk);
    require_replaceable(conversion, now, run, disk);
    require_own_files(disk, conversion, now, work.files());
  }
  Losses losses;
  const auto left = [&] {
    return files_left(conversion, work, run, files, output, losses, report);
  };
  FilesLeft wanted = {.files = std::vector<bool>(conversion.files.size(), false)};
  if (!run.finish) wanted = left();
  const OpenShards shards = open_needed(conversion, wanted.files, run.storage);
  watch.emplace(shards, disk);
  if (run.finish) {
    wanted = left();
    work.require_finished(wanted.files, wanted.reasons);
  } else {
    output.check_links(place);
    if (std::ranges::count(wanted.files, true) > 0) {
      write_files(conversion, shards, output, wanted, run, losses, report);
    }
    watch->check();
  }
  report_losses(conversion, losses, report);
  sort_findings(report.findings);
  if (run.part) {
    report.outputs = work.finished_paths(*run.part);
  } else {
    report.outputs = output.commit(target, run);
    work.remove();
  }
  report.bytes_written = output.bytes_written();
  report.sync_seconds = output.sync_seconds();
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return report;
}

static WorkLeft left_for(const Conversion& conversion, const std::string& target,
                         const ConvertRun& run, const std::vector<Finding>& findings) {
  if (is_complete(findings)) return {};
  const bool is_resumed = run.resume || run.part || run.finish;
  if (conversion.one_file || !is_resumed) {
    return {.bytes_to_read = conversion.bytes_to_read, .bytes_to_write = conversion.bytes_to_write};
  }
  WritableStorage& storage = conversion.plan.catalog->storage(run.storage).writable();
  const std::string work = place_of(conversion, target, storage).work;
  const FinishedFiles finished = finished_files(storage, conversion, work, run.part);
  WorkLeft left = {.bytes_to_write = run.finish ? 0 : finished.bytes_left,
                   .bytes_kept = finished.bytes};
  const double share = static_cast<double>(left.bytes_to_write) /
                       static_cast<double>(std::max<std::uint64_t>(conversion.bytes_to_write, 1));
  const double read = static_cast<double>(conversion.bytes_to_read) * std::min(share, 1.0);
  left.bytes_to_read = left.bytes_kept + static_cast<std::uint64_t>(read);
  return left;
}

WorkLeft work_left(const Conversion& conversion, const std::string& target, const ConvertRun& run,
                   const std::vector<Finding>& findings) {
  return only_errors([&] { return left_for(conversion, target, run, findings); });
}

ConvertReport convert(const Conversion& conversion, const std::string& target,
                      const ConvertRun& run) {
  return only_errors([&] { return converted(conversion, target, run); });
}

std::uint64_t make_file(const Conversion& conversion, std::uint32_t file, OutputFiles& files,
                        Observer* observer, Storage* storage) {
  std::vector<bool> wanted(conversion.files.size(), false);
  wanted[file] = true;
  Storage& sources = conversion.plan.catalog->storage(storage);
  const OpenShards shards = open_needed(conversion, wanted, &sources);
  const SourceWatch watch(shards, sources.writable());
  const ValueSet values = values_of(conversion.plan, SinkKind::files);
  const CacheRelease cache(conversion, values, shards, PageCache::keep);
  OutputSink sink(conversion, values, wanted, files, cache);
  MemoryCount count;
  const std::uint64_t bytes_read = sink.make(shards.sources(), count, observer).bytes_read;
  watch.check();
  return bytes_read;
}

std::uint64_t convert_in_memory(const Conversion& conversion, std::uint32_t file,
                                std::span<std::byte> data, Observer* observer, Storage* storage) {
  return only_errors([&] {
    require_ok(conversion.plan);
    if (file >= conversion.files.size() || data.size() != conversion.files[file].data_bytes) {
      throw Error("usage", "the size of the memory differs from the size of the file",
                  {.found = fmt::format("{} bytes for file {}", data.size(), file)});
    }
    MemoryFiles memory(data, conversion.files[file].header_bytes);
    return make_file(conversion, file, memory, observer, storage);
  });
}

std::string_view name(PageCache choice) noexcept {
  return name_among({"auto", "keep", "release"}, choice);
}

std::optional<PageCache> parse_page_cache(std::string_view text) noexcept {
  return from_name<PageCache>(text);
}

}  // namespace loadstone

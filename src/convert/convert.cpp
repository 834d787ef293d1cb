// Doing what a conversion says: the engine with files for a sink, and what comes before and after.
#include "loadstone/convert.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>

#include "base/only_errors.h"
#include "base/refuse_option.h"
#include "base/text.h"
#include "convert/cache_release.h"
#include "convert/output.h"
#include "convert/output_sink.h"
#include "convert/recorder.h"
#include "convert/source_watch.h"
#include "convert/work_folder.h"
#include "plan/values.h"

namespace loadstone {

namespace {

void check_run(const Conversion& conversion, const ConvertRun& run) {
  if (run.part && run.finish)
    refuse_option("finish", "parts are finished when all of them are done");
  if (conversion.one_file && run.part)
    refuse_option("part", "one file has no parts: name a folder");
  if (conversion.one_file && run.finish) {
    refuse_option("finish", "one file has no parts: name a folder");
  }
}

DigestKind kind_of(const ConvertRun& run) { return run.receipt.value_or(DigestKind::xxh3_128); }

// Finished shards are trusted by their digests only.
bool is_kept(const Conversion& conversion, const WorkFolder& work, std::uint32_t file,
             const ConvertRun& run, Storage& storage, Output& output, ConvertReport& report) {
  if (conversion.one_file || !work.has_finished(file)) return false;
  KeptFile kept = work.kept(file, kind_of(run), storage);
  if (kept.receipt) {
    output.keep(file, *std::move(kept.receipt));
    if (!run.finish) report.bytes_kept += conversion.files[file].byte_count();
    return true;
  }
  const std::string& name = conversion.files[file].name;
  report.findings.push_back(
      {.severity = Severity::warning,
       .code = "convert.redone",
       .target = name,
       .message = fmt::format("'{}' was finished by an earlier run and {}: it {}", printable(name),
                              kept.changed, run.finish ? "is to be made again" : "is made again")});
  return false;
}

// Those of the run that no earlier one has finished; the others count as kept.
std::vector<bool> files_to_write(const Conversion& conversion, const WorkFolder& work,
                                 const ConvertRun& run, Storage& storage, Output& output,
                                 ConvertReport& report) {
  std::vector<bool> wanted(conversion.files.size(), !run.part && !run.finish);
  if (run.part) {
    for (const std::uint32_t file : files_of_part(conversion, *run.part)) wanted[file] = true;
  }
  for (std::uint32_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i] && is_kept(conversion, work, i, run, storage, output, report)) wanted[i] = false;
  }
  return wanted;
}

void write_files(const Conversion& conversion, const OpenShards& shards, Output& output,
                 const std::vector<bool>& wanted, Observer* observer, const ConvertRun& run,
                 ConvertReport& report) {
  const ValueSet values = values_of(conversion.plan);
  std::optional<ReceiptRecorder> recorder;
  if (run.receipt || !conversion.one_file) {
    recorder.emplace(conversion, values, shards, wanted, kind_of(run));
    output.record(&*recorder);
  }
  const CacheRelease cache(conversion, values, shards, run.page_cache);
  report.page_cache = cache.is_on() ? PageCache::release : PageCache::keep;
  if (cache.is_on()) output.release_cache();
  OutputSink sink(conversion, values, wanted, output, cache, recorder ? &*recorder : nullptr);
  MemoryCount memory;
  RunReport made = sink.make(recorder ? recorder->sources() : shards.sources(), memory, observer);
  report.bytes_read = made.bytes_read;
  report.bytes_read_ahead = made.bytes_read_ahead;
  std::ranges::move(made.findings, std::back_inserter(report.findings));
  sort_findings(report.findings);
  report.peak_bytes += memory.bytes_peak();
  output.record(nullptr);
}

}  // namespace

static ConvertReport converted(const Conversion& conversion, const std::string& target,
                               Observer* observer, Storage* storage, const ConvertRun& run) {
  const auto begin = std::chrono::steady_clock::now();
  require_ok(conversion.plan);
  check_run(conversion, run);
  Storage& files = conversion.plan.catalog->storage(storage);
  WritableStorage& disk = files.writable();
  const std::vector<Finding> stays = check_target_in(disk, conversion, target, run);
  const TargetPlace place = look_at_target(conversion, target, disk);
  WorkFolder work(conversion, place, run, disk);
  ConvertReport report;
  report.findings = conversion.plan.findings;
  std::ranges::copy_if(stays, std::back_inserter(report.findings), [&](const Finding& each) {
    return std::ranges::count(conversion.plan.findings, each) ==
           0;  // a caller may have put it there
  });
  report.peak_bytes = conversion.peak_bytes - conversion.budget.bytes();
  if (work.was_committed()) {
    report.outputs = output_paths(conversion, place.path);
    for (const OutputFile& file : conversion.files) report.bytes_kept += file.byte_count();
    work.remove();
    return report;
  }
  std::optional<SourceWatch> watch;
  Output output(conversion, work, files, [&watch] { watch->check(); });
  output.require_own_files(target);
  std::vector<bool> wanted = files_to_write(conversion, work, run, files, output, report);
  const OpenShards shards = open_needed(conversion, wanted, storage);
  watch.emplace(shards, disk);
  if (run.finish) {
    std::vector<bool> kept(wanted.size());
    for (std::uint32_t i = 0; i < kept.size(); ++i) {
      kept[i] = is_kept(conversion, work, i, run, files, output, report);
    }
    work.require_finished(kept);
  } else {
    output.check_links(place);
    if (std::ranges::count(wanted, true) > 0) {
      write_files(conversion, shards, output, wanted, observer, run, report);
    }
    watch->check();
  }
  if (run.part) {
    report.outputs = work.finished_paths(*run.part);
  } else {
    report.outputs = output.commit(target, run.receipt);
  }
  report.bytes_written = output.bytes_written();
  report.sync_seconds = output.sync_seconds();
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return report;
}

ConvertReport convert(const Conversion& conversion, const std::string& target, Observer* observer,
                      Storage* storage, const ConvertRun& run) {
  return only_errors([&] { return converted(conversion, target, observer, storage, run); });
}

}  // namespace loadstone

#include "convert/write/finished.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "base/text.h"
#include "catalog/paths.h"
#include "convert/write/container.h"
#include "convert/write/extras.h"
#include "convert/write/files.h"
#include "convert/write/output.h"
#include "convert/write/state.h"
#include "convert/write/work_folder.h"
#include "loadstone/error.h"
#include "storage/remote_path.h"

namespace loadstone {

namespace {

std::string file_of(const TargetPlace& place, const std::string& name) {
  return name.empty() ? place.path : place.path + "/" + name;
}

// Returns true for the name of a file with tensors.
bool is_weights(const Conversion& conversion, std::string_view name) {
  return container_of(conversion.format).is_model_name(name);
}

// Returns the weights and the index, with their sizes, times and inodes. `files`: the folder of the
// files, or the path of the single file. A missing file has size 0.
std::vector<SourceState> files_of(const Conversion& conversion, const std::string& files,
                                  WritableStorage& storage) {
  std::vector<SourceState> states;
  const auto add = [&](const std::string& name) {
    const std::string path = name.empty() ? files : files + "/" + name;
    const FileIdentity found = storage.status(path).value_or(FileStatus()).identity;
    states.push_back({.path = name,
                      .bytes = found.bytes,
                      .modified_ns = found.modified_ns,
                      .inode = found.inode,
                      .header_digest = {}});
  };
  for (const OutputFile& file : conversion.files) add(file.name);
  if (!conversion.index_name.empty()) add(conversion.index_name);
  for (const ExtraFile& extra : conversion.extras) {
    if (is_weights(conversion, extra.name)) add(extra.name);
  }
  return states;
}

bool is_unchanged(const SourceState& recorded, const FileIdentity& file) {
  return recorded.bytes == file.bytes && recorded.modified_ns == file.modified_ns &&
         recorded.inode == file.inode;
}

bool is_same_file(const TargetPlace& place, const SourceState& file, WritableStorage& storage) {
  const auto status = storage.status(file_of(place, file.path));
  return status && is_unchanged(file, status->identity);
}

// Returns the files of the record that are missing or have changed.
std::vector<std::string> lost_files(const TargetPlace& place, const WorkState& record,
                                    WritableStorage& storage) {
  std::vector<std::string> lost;
  for (const SourceState& file : record.outputs) {
    if (is_same_file(place, file, storage)) continue;
    lost.emplace_back(file_name(file_of(place, file.path)));
  }
  return lost;
}

const char* is_or_are(const std::vector<std::string>& names) {
  return names.size() == 1 ? "is" : "are";
}

std::string lost_text(const std::vector<std::string>& lost) {
  return fmt::format(
      "in which {} {} missing or changed (the run writes all files again, because loadstone keeps "
      "no digests of single shards after a conversion is finished)",
      name_list(lost), is_or_are(lost));
}

// Returns the files next to the model, the receipt included, that the output lacks.
std::vector<std::string> missing_companions(const Conversion& conversion, const TargetPlace& place,
                                            const ConvertRun& run, WritableStorage& storage) {
  std::vector<std::string> names;
  for (const ExtraFile& extra : conversion.extras) names.push_back(extra.name);
  if (run.receipt) names.push_back(receipt_name(conversion, place.path));
  const std::string& folder = conversion.one_file ? place.parent : place.path;
  std::erase_if(names, [&](const std::string& name) {
    return storage.status(folder + "/" + name).has_value();
  });
  return names;
}

std::optional<WorkState> read_record(const std::string& path, WritableStorage& storage) {
  const auto text = storage.read_begin(path, state_bytes_max);
  if (!text) return std::nullopt;
  try {
    return work_state_from_json(*text);
  } catch (const Error&) {
    return std::nullopt;  // only a record of this version proves anything
  }
}

std::string receipt_of(const ConvertRun& run) {
  return run.receipt ? std::string(name(*run.receipt)) : std::string();
}

// A resumed run never replaces a finished output of different options: they may be a mistake.
Finding other_output(const TargetPlace& place, const std::string& difference) {
  return {.severity = Severity::error,
          .code = "convert.state",
          .message = fmt::format("'{}' was finished by an earlier run with {}; nothing was changed",
                                 printable(place.shown, 400), difference),
          .suggestion = "choose a different target; or, to replace this one, add --overwrite"};
}

// Both lists have the same paths, sizes and headers.
std::string changed_sources(const std::vector<SourceState>& now,
                            const std::vector<SourceState>& then) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < now.size(); ++i) {
    if (now[i] != then[i]) names.push_back(now[i].path);
  }
  return fmt::format(
      "source files that have been modified or replaced since, so that their values may differ "
      "(size and header are the same): {}",
      name_list(names));
}

// Returns the files that the earlier conversion read which wrote the source, if it left a record.
std::vector<SourceState> sources_of_source(const Conversion& conversion, WritableStorage& storage) {
  std::set<std::string> paths;
  for (const Shard& shard : conversion.plan.catalog->shards()) {
    if (is_remote(shard.path)) continue;
    paths.insert(record_path(shard.path, storage));
    paths.insert(record_path(parent_path(shard.path), storage));
  }
  std::vector<SourceState> sources;
  for (const std::string& path : paths) {
    if (auto record = read_record(path, storage)) {
      std::ranges::move(record->sources, std::back_inserter(sources));
    }
  }
  return sources;
}

// The reason why the conversion must not replace files of the target.
enum class Kept : std::uint8_t { unknown, changed, is_source };

std::optional<Kept> reason_to_keep(const TargetPlace& place, const std::string& name,
                                   const std::vector<WorkState>& records,
                                   const std::vector<SourceState>& before,
                                   WritableStorage& storage) {
  const auto status = storage.status(file_of(place, name));
  const auto is_file = [&](const SourceState& each) {
    return is_unchanged(each, status->identity);
  };
  if (status && std::ranges::any_of(before, is_file)) return Kept::is_source;
  auto reason = Kept::unknown;
  for (const WorkState& record : records) {
    const auto file = std::ranges::find(record.outputs, name, &SourceState::path);
    if (file == record.outputs.end()) continue;
    if (is_same_file(place, *file, storage)) return std::nullopt;
    reason = Kept::changed;
  }
  return reason;
}

// Returns the weights and the index that the conversion replaces.
std::vector<std::string> replaced_weights(const Conversion& conversion, const TargetPlace& place,
                                          WritableStorage& storage) {
  if (conversion.one_file) return std::vector<std::string>(place.exists ? 1 : 0);
  std::vector<std::string> names = place.older;
  std::erase_if(names, [&](const std::string& name) {
    return !container_of(conversion.format).is_output_name(name, conversion.stem);
  });
  for (const ExtraFile& extra : conversion.extras) {
    const bool is_replaced =
        is_weights(conversion, extra.name) && storage.status(file_of(place, extra.name));
    if (is_replaced) names.push_back(extra.name);
  }
  return names;
}

// The work folder has the record of the output that it contains, or that a killed run committed.
std::string waiting_record(const TargetPlace& place) { return place.work + "/record"; }

}  // namespace

std::optional<Finding> kept_model(const Conversion& conversion, const TargetPlace& place,
                                  WritableStorage& storage) {
  const std::vector<std::string> names = replaced_weights(conversion, place, storage);
  if (names.empty()) return std::nullopt;
  std::vector<WorkState> records;
  for (const std::string& path : {place.record, waiting_record(place)}) {
    if (auto record = read_record(path, storage)) records.push_back(*std::move(record));
  }
  const std::vector<SourceState> before = sources_of_source(conversion, storage);
  std::map<Kept, std::vector<std::string>> kept;
  for (const std::string& name : names) {
    const auto reason = reason_to_keep(place, name, records, before, storage);
    if (reason) kept[*reason].push_back(name.empty() ? std::string(file_name(place.path)) : name);
  }
  if (kept.empty()) return std::nullopt;
  const auto& [reason, files] = *kept.rbegin();
  const std::string target = printable(place.shown, 400);
  const std::string count = counted(files.size(), "file");
  const std::string list = name_list(files);
  Finding finding = {
      .severity = Severity::error,
      .code = "convert.target",
      .sources = files,
      .message = fmt::format("'{}' already exists, and no record shows that an earlier conversion "
                             "wrote {} that this conversion would replace: {}",
                             target, count, list),
      .suggestion =
          "check that SOURCE and TARGET are in the right order, and choose a different "
          "target; or, to replace the files, add --overwrite"};
  if (reason == Kept::changed) {
    finding.message = fmt::format("an earlier conversion wrote '{}', but {} changed since: {}",
                                  target, files.size() == 1 ? "a file has" : count + " have", list);
    finding.suggestion = "choose a different target; or, to replace the files, add --overwrite";
  } else if (reason == Kept::is_source) {
    finding.message = fmt::format(
        "the source was made from '{}', which this conversion would "
        "replace: {}",
        target, list);
  }
  return finding;
}

std::optional<Finding> finished_earlier(const Conversion& conversion, const TargetPlace& place,
                                        const ConvertRun& run, WritableStorage& storage,
                                        std::string& difference) {
  const auto found = read_record(place.record, storage);
  if (!found || found->outputs.empty()) return std::nullopt;
  const std::vector<std::string> lost = lost_files(place, *found, storage);
  const WorkState now = state_of(conversion, storage);
  const bool is_resumed = run.resume || run.part || run.finish;
  const auto differs = work_difference(now, *found);
  if (!lost.empty()) {
    if (!differs && is_resumed) difference = lost_text(lost);
    return std::nullopt;
  }
  if (differs) {
    difference = differs->message;
  } else if (run.receipt && receipt_of(run) != found->receipt) {
    difference = "no receipt of this kind";
  } else if (conversion.require_lossless && !found->options.contains("require-lossless")) {
    difference = "no --require-lossless, so values may have changed";
  }
  if (!difference.empty() && is_resumed && !run.overwrite) return other_output(place, difference);
  if (difference.empty() && now.sources != found->sources) {
    difference = changed_sources(now.sources, found->sources);
  }
  if (!difference.empty()) {
    difference = "which was made with " + difference;
  } else if (is_resumed) {
    const auto missing = missing_companions(conversion, place, run, storage);
    if (!missing.empty()) {
      difference = fmt::format("in which {} {} missing", name_list(missing), is_or_are(missing));
    }
  }
  if (!difference.empty() || !is_resumed) return std::nullopt;
  return Finding{
      .severity = Severity::info,
      .code = complete_code,
      .message = fmt::format("'{}' is already complete: an earlier run of this conversion finished "
                             "it, and neither its weights nor the source have changed since",
                             printable(place.shown, 400))};
}

static Finding about_resume(std::string message, std::string suggestion = {}) {
  return {.severity = Severity::info,
          .code = resumed_code,
          .message = std::move(message),
          .suggestion = std::move(suggestion)};
}

// Warns that a run which is not resumed discards finished files, and rejects it if they are parts.
static std::optional<Finding> discarded_work(const Conversion& conversion, const TargetPlace& place,
                                             WritableStorage& storage) {
  const auto found = known_work_state(storage, place.work);
  require_undivided(found, place.work);
  const std::size_t count = finished_files(storage, conversion, place.work, {}).count;
  if (count == 0) return std::nullopt;
  return Finding{.severity = Severity::warning,
                 .code = "convert.replaced",
                 .message = fmt::format("the conversion discards {} of {} that a stopped run of it "
                                        "finished",
                                        count, counted(conversion.files.size(), "file")),
                 .suggestion = "to keep them, add --resume"};
}

std::optional<Finding> resumed_work(const Conversion& conversion, const TargetPlace& place,
                                    const ConvertRun& run, WritableStorage& storage) {
  if (conversion.one_file) {
    if (!run.resume) return std::nullopt;
    return about_resume(
        "the target is a single file, which has no shards to keep: if this run stops, the next run "
        "starts from the beginning",
        "to resume a stopped run, choose a folder as the target");
  }
  if (!run.resume && !run.part && !run.finish) return discarded_work(conversion, place, storage);
  const auto found = read_work_state(storage, place.work);
  if (!found) return std::nullopt;
  WorkState state = state_of(conversion, storage);
  join_work(state, *found, place.work);
  const std::string files = place.work + "/files";
  const bool is_renaming = storage.status(place.work + "/exchange").has_value();
  if (is_renaming || !is_plain_folder(storage, files)) return std::nullopt;
  require_own_files(storage, conversion, place, files);
  if (run.finish) return std::nullopt;
  const FinishedFiles finished = finished_files(storage, conversion, place.work, run.part);
  return about_resume(fmt::format(
      "an earlier run finished {} of {}, which this run keeps if their bytes are unchanged; {} are "
      "left to write",
      finished.count, counted(finished.of, "file"), human_bytes(finished.bytes_left)));
}

ConvertReport report_finished(const Conversion& conversion, const std::string& target,
                              const ConvertRun& run, WritableStorage& storage) {
  const TargetPlace place = place_of(conversion, target, storage);
  ConvertReport report;
  std::vector<bool> wanted(conversion.files.size(), !run.part);
  if (run.part) {
    for (const std::uint32_t file : files_of_part(conversion, *run.part)) wanted[file] = true;
  }
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (!wanted[i]) continue;
    if (run.part) report.outputs.push_back(file_of(place, conversion.files[i].name));
    if (!run.finish) report.bytes_kept += conversion.files[i].byte_count();
  }
  if (!run.part) report.outputs = output_paths(conversion, place.path);
  if (!is_plain_folder(storage, place.work)) return report;
  try {
    WorkFolder(conversion, place, {.resume = true}, storage).remove();
  } catch (const Error& error) {
    if (error.code() != "convert.state" && error.code() != "convert.locked") throw;
  }
  return report;
}

void tell_replaced(const Conversion& conversion, const std::string& difference,
                   const ConvertRun& run, WritableStorage& storage, TargetPlace& place) {
  std::vector<std::string> names = place.older;
  if (conversion.one_file && place.exists) names = {""};
  const bool has_weights = !names.empty();
  auto kept = kept_model(conversion, place, storage);
  if (kept && !run.overwrite) return place.findings.push_back(*std::move(kept));
  std::ranges::copy_if(place.others, std::back_inserter(names),
                       [&](const std::string& name) { return is_extra_name(conversion, name); });
  if (names.empty()) return;
  if (names.front().empty()) names = {std::string(file_name(place.path))};
  const bool is_output = !kept && has_weights;
  std::string message = fmt::format("the conversion replaces {}{}", counted(names.size(), "file"),
                                    is_output ? " of an earlier output" : "");
  if (!difference.empty()) message += ", " + difference;
  const bool is_same = is_output && difference.empty();
  place.findings.push_back({.severity = is_same ? Severity::info : Severity::warning,
                            .code = "convert.replaced",
                            .sources = names,
                            .message = message + ": " + name_list(names)});
}

void require_replaceable(const Conversion& conversion, const TargetPlace& place,
                         const ConvertRun& run, WritableStorage& storage) {
  const auto kept = kept_model(conversion, place, storage);
  if (kept && !run.overwrite) require_no_errors({*kept});
}

void prepare_record(const Conversion& conversion, const TargetPlace& place, const ConvertRun& run,
                    const std::string& files, WritableStorage& storage) {
  WorkState state = state_of(conversion, storage);
  state.outputs = files_of(conversion, files, storage);
  state.receipt = receipt_of(run);
  const std::string path = waiting_record(place);
  storage.write_whole(path, path + std::string(unfinished_mark), to_json(state));
}

static std::optional<WorkState> committed_record(const TargetPlace& place,
                                                 WritableStorage& storage) {
  auto record = read_record(waiting_record(place), storage);
  if (record && !lost_files(place, *record, storage).empty()) record.reset();
  return record;
}

bool is_committed(const TargetPlace& place, WritableStorage& storage) {
  return committed_record(place, storage).has_value();
}

void adopt_record(const TargetPlace& place, WritableStorage& storage) {
  const auto record = committed_record(place, storage);
  if (!record) return;
  const std::string unfinished = place.record + ".unfinished";
  storage.remove(place.record);
  storage.remove(unfinished);  // of a killed process
  try {
    storage.write_whole(place.record, unfinished, to_json(*record));
  } catch (const Error&) {
    storage.remove(unfinished);  // the target is complete; a later run only does not know it
  }
}

}  // namespace loadstone

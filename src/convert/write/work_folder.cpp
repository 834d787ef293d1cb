
#include "convert/write/work_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>

#include "base/text.h"
#include "catalog/paths.h"
#include "convert/write/container.h"
#include "convert/write/extras.h"
#include "convert/write/files.h"
#include "convert/write/finished.h"
#include "convert/write/state.h"
#include "loadstone/error.h"
#include "receipt/receipt_file.h"
#include "storage/new_file.h"

namespace loadstone {

namespace {

// Returns the name of the finished file, such as "model-00001-of-00002.safetensors" for
// "model-00001-of-00002.safetensors.unfinished-1f...".
std::string_view begun_name(std::string_view name) {
  const auto mark = name.rfind(unfinished_mark);
  return mark == std::string_view::npos ? std::string_view() : name.substr(0, mark);
}

bool is_wanted(const Conversion& conversion, const std::vector<bool>& wanted,
               std::string_view name) {
  if (wanted.empty()) return true;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i] && conversion.files[i].name == name) return true;
  }
  return false;
}

[[noreturn]] void refuse_leftovers(const std::string& path) {
  throw Error("io.write", "the system cannot remove the files of the work folder", {.path = path});
}

}  // namespace

std::uint64_t bytes_waiting(WritableStorage& storage, const Conversion& conversion,
                            const std::string& folder, const std::vector<bool>& wanted) {
  std::uint64_t bytes = 0;
  for (const std::string& name : storage.list(folder)) {
    const auto status = storage.status(folder + "/" + name);
    const auto begun = begun_name(name);
    if (!status || begun.empty() || !is_wanted(conversion, wanted, begun)) continue;
    bytes += status->bytes_on_disk;
  }
  const Container& container = container_of(conversion.format);
  for (const std::string& name : storage.list(folder + "/files")) {
    const auto status = storage.status(folder + "/files/" + name);
    if (!status || !container.is_model_name(name) || !is_wanted(conversion, wanted, name)) {
      continue;
    }
    bytes += status->identity.bytes;
  }
  return bytes;
}

bool is_whole(WritableStorage& storage, const Conversion& conversion, const std::string& folder,
              std::uint32_t file) {
  const OutputFile& planned = conversion.files[file];
  const std::string path = folder + "/" + planned.name;
  const auto status = storage.status(path);
  if (!status || status->kind != EntryKind::file ||
      status->identity.bytes != planned.byte_count()) {
    return false;
  }
  const std::string header = container_of(conversion.format).header(conversion, file);
  return storage.read_begin(path, header.size()) == header;
}

FinishedFiles finished_files(WritableStorage& storage, const Conversion& conversion,
                             const std::string& work, const std::optional<ConvertPart>& part) {
  const std::string folder = work + "/files";
  const bool has_files = is_plain_folder(storage, folder);
  const auto files = files_of_part(conversion, part.value_or(ConvertPart{}));
  FinishedFiles finished = {.of = files.size()};
  for (const std::uint32_t file : files) {
    const std::uint64_t bytes = conversion.files[file].byte_count();
    if (has_files && is_whole(storage, conversion, folder, file)) {
      ++finished.count;
      finished.bytes += bytes;
    } else {
      finished.bytes_left += bytes;
    }
  }
  return finished;
}

WorkFolder::WorkFolder(const Conversion& conversion, const TargetPlace& place,
                       const ConvertRun& run, WritableStorage& storage)
    : conversion_(conversion),
      place_(place),
      storage_(storage),
      path_(place.work),
      locks_(storage, path_),
      exchange_(path_ + "/exchange"),
      files_(path_ + "/files"),
      old_(path_ + "/old"),
      older_(path_ + "/older"),
      keeps_(!conversion.one_file && (run.resume || run.part || run.finish)) {
  if (run.finish && !is_plain_folder(storage_, path_)) refuse_nothing_done();
  locks_.take(run);
  try {
    recover_old();
    if (recover_older()) place_ = look_at_target(conversion_, place_.shown, storage_);
    if (run.part) {
      open_part(*run.part);
    } else {
      open_whole(run);
    }
  } catch (...) {
    if (!keeps_ && (is_begun_ || !has_state())) remove();
    throw;
  }
}

WorkFolder::~WorkFolder() {
  if (is_removed_) return;
  try {
    if (!keeps_ || (is_begun_ && state_.parts == 0 && storage_.list(files_).empty())) remove();
  } catch (const std::exception&) {
    return;  // the next run takes over the folder
  }
}

void WorkFolder::open_whole(const ConvertRun& run) {
  if (conversion_.one_file) return begin();
  state_ = state_of(conversion_, storage_);
  const bool is_there = has_state();
  if (is_there && keeps_) return take_over(run.finish);
  if (run.finish) refuse_nothing_done();
  require_undivided(known_work_state(storage_, path_), path_);
  remove_named();
  begin();
}

void WorkFolder::refuse_nothing_done() const {
  throw Error("convert.incomplete", "no part of this conversion has run", {.path = place_.path});
}

// Creates an empty folder with the state of this conversion.
void WorkFolder::begin() {
  is_begun_ = true;
  clear();
  if (conversion_.one_file) return;
  make_files();
  write_state();
}

void WorkFolder::make_files() {
  if (!storage_.make_folder(files_))
    fail_write(EEXIST, "the system cannot create the folder", files_);
}

void WorkFolder::open_part(const ConvertPart& part) {
  state_ = state_of(conversion_, storage_);
  state_.parts = part.count;
  if (!has_state()) {
    empty_files({});
    make_files();
    write_state();
  }
  const WorkState found = read_state();
  join_work(state_, found, path_);
  if (!is_plain_folder(storage_, files_) || storage_.status(exchange_)) {
    throw Error(
        "convert.state",
        "an earlier run ended while it renamed the target: finish or resume that conversion",
        {.path = path_});
  }
  if (found.parts != part.count) divide_anew(found.parts);
  if (found.has_copies != state_.has_copies) write_state();
  locks_.take_part(part);
  std::vector<bool> wanted(conversion_.files.size(), false);
  for (const std::uint32_t file : files_of_part(conversion_, part)) wanted[file] = true;
  remove_unfinished(wanted);
}

// Changes the number of parts, if no other process works on a part. Finished shards stay finished.
void WorkFolder::divide_anew(std::uint32_t parts_before) {
  if (!locks_.exclude_parts()) {
    throw Error(
        "convert.state",
        "other processes are running parts of this conversion, with a different number of parts",
        {.path = path_,
         .found = fmt::format("{}", parts_before),
         .expected = fmt::format("{}", state_.parts)});
  }
  write_state();
  locks_.admit_parts();
}

void WorkFolder::take_over(bool finishes) {
  const WorkState found = read_state();
  join_work(state_, found, path_);
  state_.parts = found.parts;
  stage_ = stage();
  if (stage_ == WorkStage::begun) {
    if (!finishes && found.has_copies != state_.has_copies) write_state();
    remove_unfinished({});
  } else if (stage_ == WorkStage::lost) {
    if (finishes) {
      throw Error("convert.incomplete", "the finished shards are missing", {.path = path_});
    }
    begin();
  }
}

WorkStage WorkFolder::stage() {
  const bool is_exchanged = exchange_is_done();
  if (is_plain_folder(storage_, files_) && !is_exchanged && !all_are_named()) {
    return WorkStage::begun;
  }
  return target_is_whole() ? WorkStage::committed : WorkStage::lost;
}

// Returns true if an interrupted run renamed every file of the model.
bool WorkFolder::all_are_named() const {
  const auto names = storage_.list(files_);
  const Container& container = container_of(conversion_.format);
  const auto count = std::ranges::count_if(
      names, [&](const std::string& name) { return container.is_model_name(name); });
  return !place_.named.empty() && place_.named.size() == static_cast<std::size_t>(count);
}

// Removes an incomplete set of shards that an interrupted run moved into a folder that cannot be
// exchanged. A complete set is an output.
void WorkFolder::remove_named() {
  if (all_are_named()) return;
  for (const std::string& name : place_.named) storage_.remove(place_.path + "/" + name);
}

bool WorkFolder::exchange_is_done() {
  const auto note = storage_.read_begin(exchange_, 100);
  if (!note) return false;
  const bool is_as_before = *note == exchange_text();
  if (is_as_before) forget_exchange();
  return !is_as_before;
}

// Returns the inodes of both folders as text. An exchange of the folders changes it.
std::string WorkFolder::exchange_text() const {
  const auto inode = [&](const std::string& path) {
    const auto status = storage_.status(path);
    return status ? status->identity.inode : 0;
  };
  return fmt::format("{} {}\n", inode(files_), inode(place_.path));
}

// Writes a note first. If this process is killed during the exchange, the next run finds the note.
void WorkFolder::exchange() {
  storage_.write_whole(exchange_, unfinished("exchange"), exchange_text());
  storage_.sync_folder(path_);
  try {
    if (storage_.exchange(files_, place_.path)) return;
    storage_.rename(place_.path, old_);
  } catch (...) {
    forget_exchange();
    throw;
  }
  // The file system cannot exchange folders, so the target does not exist for a moment. If this
  // process is killed now, the next run first restores the old folder.
  try {
    storage_.rename(files_, place_.path);
  } catch (...) {
    put_back_old();
    forget_exchange();
    throw;
  }
  storage_.rename(old_, files_);  // remove() deletes known files there
}

void WorkFolder::forget_exchange() noexcept { storage_.remove(exchange_); }

void WorkFolder::put_back_old() noexcept {
  try {
    storage_.rename(old_, place_.path);
  } catch (const std::exception&) {
    return;  // the next run restores it first
  }
}

// Restores the target after a run that was killed between the two renames that replace an exchange.
void WorkFolder::recover_old() {
  if (!is_plain_folder(storage_, old_)) return;
  if (!storage_.status(place_.path)) {
    storage_.rename(old_, place_.path);
    forget_exchange();
  } else if (!is_plain_folder(storage_, files_)) {
    storage_.rename(old_, files_);  // the target is already the new folder
  }
}

// After an interrupted run, moves the files of an older output back into the target or, if the new
// output is complete, removes them. Returns false without such files.
bool WorkFolder::recover_older() {
  if (!is_plain_folder(storage_, older_)) return false;
  if (is_committed(place_, storage_)) {
    forget_older();
  } else {
    put_back_older();
  }
  if (!storage_.remove_folder(older_) && storage_.status(older_)) refuse_leftovers(older_);
  return true;
}

void WorkFolder::put_back_older() {
  for (const std::string& name : storage_.list(older_)) {
    const std::string to = place_.path + "/" + name;
    const std::string made = files_ + "/" + name;
    if (storage_.status(to) && !same_file(storage_, to, made)) {
      if (storage_.status(made)) {
        throw Error("convert.target",
                    "a new file has the name of a file that an interrupted run moved into its work "
                    "folder: remove or rename the new file",
                    {.path = to, .found = older_ + "/" + name});
      }
      storage_.rename(to, made);  // the file system has no links
    }
    storage_.rename(older_ + "/" + name, to);
  }
}

void WorkFolder::forget_older() {
  is_committed_ = true;
  for (const std::string& name : storage_.list(older_)) storage_.remove(older_ + "/" + name);
  storage_.remove_folder(older_);
}

bool WorkFolder::has_finished(std::uint32_t file) const {
  return is_whole(storage_, conversion_, files_, file);
}

std::string WorkFolder::receipt_of(std::uint32_t file) const {
  return path_ + "/" + conversion_.files[file].name + std::string(receipt_suffix);
}

KeptFile WorkFolder::kept(std::uint32_t file, std::optional<DigestKind> kind, Storage& storage,
                          const GoesOn& goes_on) const {
  const auto text = storage_.read_begin(receipt_of(file), receipt_json_bytes_max);
  return check_kept(planned_file(conversion_, file), kind,
                    files_ + "/" + conversion_.files[file].name, text.value_or(""),
                    *conversion_.plan.catalog, state_.has_copies, storage, goes_on);
}

std::vector<std::string> WorkFolder::finished_paths(const ConvertPart& part) const {
  std::vector<std::string> paths;
  for (const std::uint32_t file : files_of_part(conversion_, part)) {
    paths.push_back(files_ + "/" + conversion_.files[file].name);
  }
  return paths;
}

bool WorkFolder::target_is_whole() const {
  for (std::uint32_t i = 0; i < conversion_.files.size(); ++i) {
    if (!is_whole(storage_, conversion_, place_.path, i)) return false;
  }
  if (conversion_.index_name.empty()) return true;
  const std::string index = container_of(conversion_.format).index(conversion_);
  return storage_.read_begin(place_.path + "/" + conversion_.index_name, index.size() + 1) == index;
}

void WorkFolder::require_finished(const std::vector<bool>& left,
                                  const std::map<std::uint32_t, std::string>& reasons) const {
  std::set<std::uint32_t> missing;
  std::vector<std::uint32_t> part_of(conversion_.files.size(), 0);
  for (std::uint32_t part = 1; part <= state_.parts; ++part) {
    for (const std::uint32_t file :
         files_of_part(conversion_, {.index = part, .count = state_.parts})) {
      part_of[file] = part;
    }
  }
  std::uint32_t first = 0;
  std::size_t count = 0;
  for (std::uint32_t i = 0; i < conversion_.files.size(); ++i) {
    if (!left[i]) continue;
    if (count++ == 0) first = i;
    missing.insert(part_of[i]);
  }
  if (count == 0) return;
  const auto reason = reasons.find(first);
  std::string message = fmt::format(
      "{} of {} shards cannot be used: '{}' ({}){}", count, conversion_.files.size(),
      printable(conversion_.files[first].name),
      reason == reasons.end() ? "it is missing" : reason->second, count == 1 ? "" : " and others");
  if (state_.parts > 0) {
    message += fmt::format("; run {} {} of {} again", missing.size() == 1 ? "part" : "parts",
                           fmt::join(missing, ", "), state_.parts);
  }
  throw Error("convert.incomplete", std::move(message), {.path = path_});
}

std::string WorkFolder::unfinished(const std::string& name) const {
  return fmt::format("{}/{}{}{}", path_, name, unfinished_mark, random_name());
}

bool WorkFolder::has_state() const { return storage_.status(path_ + "/state.json").has_value(); }

WorkState WorkFolder::read_state() const {
  if (auto state = read_work_state(storage_, path_)) return *std::move(state);
  throw Error("convert.state", "loadstone cannot read the state of the conversion",
              {.path = path_ + "/state.json"});
}

void WorkFolder::write_state() {
  storage_.write_whole(path_ + "/state.json", unfinished("state.json"), to_json(state_));
  storage_.sync_folder(path_);
}

void WorkFolder::remove_unfinished(const std::vector<bool>& wanted) {
  for (const std::string& name : storage_.list(path_)) {
    const auto begun = begun_name(name);
    if (begun.empty() || !is_wanted(conversion_, wanted, begun)) continue;
    storage_.remove(path_ + "/" + name);
  }
}

// Removes folders of modules that contain only files of the output. Keeps other folders with all
// their files. Returns false if a file could not be removed.
bool WorkFolder::remove_modules(const WorkState& known) {
  bool all_went = true;
  for (const std::string& folder : storage_.list(files_)) {
    if (!is_plain_folder(storage_, files_ + "/" + folder)) continue;
    const std::vector<std::string> below = paths_below(storage_, files_ + "/" + folder);
    const bool is_known = std::ranges::all_of(below, [&](const std::string& name) {
      const std::string path = folder + "/" + name;
      return is_extra_name(conversion_, path) ||
             std::ranges::find(known.extra_names, path) != known.extra_names.end();
    });
    if (!is_known) continue;
    for (const std::string& name : below) {
      all_went = storage_.remove(files_ + "/" + folder + "/" + name) && all_went;
    }
    all_went = remove_empty_folders(storage_, files_ + "/" + folder) && all_went;
  }
  return all_went;
}

// Removes files of this output and of older outputs. Other files came from an exchanged folder, so
// the folder that contains them is set aside.
void WorkFolder::empty_files(const WorkState& known) {
  const Container& container = container_of(conversion_.format);
  bool all_went = remove_modules(known);
  for (const std::string& name : storage_.list(files_)) {
    const std::string path = files_ + "/" + name;
    if (container.is_output_name(name, conversion_.stem) ||
        container.is_output_name(name, known.stem) || is_extra_name(conversion_, name) ||
        std::ranges::find(known.extra_names, name) != known.extra_names.end() || is_claim(name) ||
        is_receipt_file(storage_, path) || same_file(storage_, path, place_.path + "/" + name)) {
      all_went = storage_.remove(path) && all_went;
    }
  }
  if (storage_.remove_folder(files_) || !storage_.status(files_)) return;
  // A later run recognises the files and can remove them.
  if (!all_went || storage_.list(files_).empty()) {
    refuse_leftovers(files_);
  }
  storage_.rename(files_, join_path(parent_path(path_), unique_part_name()));
}

void WorkFolder::clear() {
  adopt_record(place_, storage_);
  empty_files(known_work_state(storage_, path_));
  forget_exchange();
  storage_.remove(path_ + "/state.json");
  storage_.remove(path_ + "/record");
  for (const std::string& name : storage_.list(path_)) {
    if (name.ends_with(receipt_suffix)) storage_.remove(path_ + "/" + name);
  }
  remove_unfinished({});
}

void WorkFolder::remove() noexcept {
  is_removed_ = true;
  try {
    if (!is_committed_) static_cast<void>(recover_older());
    if (storage_.status(older_)) return;  // the next run needs the record to recover these files
    clear();
    for (const std::string& name : storage_.list(path_)) {
      if (name.ends_with(".lock")) storage_.remove(path_ + "/" + name);
    }
    // Remove the lock last: a waiting process notices that it is gone and creates a new one.
    storage_.remove(path_ + "/lock");
    storage_.remove_folder(path_);
  } catch (const std::exception&) {
    return;  // the next run removes the rest
  }
}

}  // namespace loadstone

#include "convert/work_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <random>
#include <set>
#include <system_error>
#include <utility>

#include "base/text.h"
#include "convert/extras.h"
#include "convert/files.h"
#include "convert/header.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

namespace fs = std::filesystem;

constexpr std::size_t state_bytes_max = 64u << 20;
constexpr std::string_view unfinished_mark = ".unfinished-";

[[noreturn]] void refuse_locked(const std::string& path, std::string message) {
  throw Error("convert.locked", std::move(message), {.path = path});
}

// False where another process has it. File systems without locks have none to take.
bool take_lock(const Descriptor& file, int kind, const std::string& path) {
  while (::flock(file.get(), kind) != 0) {
    if (errno == EINTR) continue;
    if (errno == EWOULDBLOCK) return false;
    if (errno == ENOLCK || errno == EOPNOTSUPP || errno == ENOSYS) return true;
    fail_write(errno, "cannot lock the folder of the work", path);
  }
  return true;
}

// For writing: network file systems lock only what could be written.
Descriptor open_lock(const std::string& path) {
  return Descriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666));
}

// Whether the path still is that file: who had the lock before may have removed it.
bool is_at(const Descriptor& file, const std::string& path) {
  struct stat open {};
  struct stat named {};
  return ::fstat(file.get(), &open) == 0 && ::lstat(path.c_str(), &named) == 0 &&
         same_file(open, named);
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code problem;
  for (fs::directory_iterator entry(folder, problem), end; !problem && entry != end;
       entry.increment(problem)) {
    names.push_back(entry->path().filename().string());
  }
  return names;
}

// "model-00001-of-00002.safetensors" of "model-00001-of-00002.safetensors.unfinished-1f..."
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

}  // namespace

std::uint64_t bytes_waiting(const Conversion& conversion, const std::string& folder,
                            const std::vector<bool>& wanted) {
  std::uint64_t bytes = 0;
  for (const std::string& name : names_in(folder)) {
    const auto status = status_of(folder + "/" + name, false);
    const auto begun = begun_name(name);
    if (!status || begun.empty() || !is_wanted(conversion, wanted, begun)) continue;
    bytes += static_cast<std::uint64_t>(status->st_blocks) * 512;
  }
  for (const std::string& name : names_in(folder + "/files")) {
    const auto status = status_of(folder + "/files/" + name, false);
    if (!status || !is_model_name(name) || !is_wanted(conversion, wanted, name)) continue;
    bytes += static_cast<std::uint64_t>(status->st_size);
  }
  return bytes;
}

WorkFolder::WorkFolder(const Conversion& conversion, const TargetPlace& place,
                       const ConvertRun& run)
    : conversion_(conversion),
      place_(place),
      path_(place.work),
      files_(path_ + "/files"),
      keeps_(!conversion.one_file && (run.resume || run.part || run.finish)) {
  if (run.finish && !is_plain_folder(path_)) {
    throw Error("convert.incomplete", "no part of this conversion has been done",
                {.path = place.path});
  }
  lock(run);
  try {
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
  if (!keeps_) {
    remove();
  } else if (is_begun_ && state_.parts == 0 && names_in(files_).empty()) {
    remove();  // nothing is finished that could be kept
  }
}

void WorkFolder::lock(const ConvertRun& run) {
  constexpr int tries_max = 100;
  const std::string path = path_ + "/lock";
  for (int i = 0; i < tries_max; ++i) {
    if (::mkdir(path_.c_str(), 0777) != 0 && errno != EEXIST) {
      fail_write(errno, "cannot make the folder for what is not whole yet", place_.path);
    }
    const auto status = status_of(path_, false);
    if (!status) continue;  // its last owner has just removed it
    if (!S_ISDIR(status->st_mode)) {
      throw Error("convert.target", "the name for what is not whole yet is taken", {.path = path_});
    }
    if (run.part && !lock_state()) continue;
    Descriptor file = open_lock(path);
    if (file.get() < 0 && errno == ENOENT) continue;
    if (file.get() < 0) fail_write(errno, "cannot lock the folder of the work", path);
    if (!take_lock(file, (run.part ? LOCK_SH : LOCK_EX) | LOCK_NB, path)) {
      refuse_locked(path_, run.finish ? "a part of this conversion is being done"
                                      : "another process is writing this target");
    }
    if (!is_at(file, path)) continue;
    lock_ = std::move(file);
    return;
  }
  refuse_locked(path_, "other processes come and go at this target");
}

// Held for a moment only, and so waited for: parts begin at the same time. False where the folder
// went meanwhile.
bool WorkFolder::lock_state() {
  const std::string path = path_ + "/state.lock";
  Descriptor file = open_lock(path);
  if (file.get() < 0 && errno == ENOENT) return false;
  if (file.get() < 0) fail_write(errno, "cannot lock the state of the work", path);
  static_cast<void>(take_lock(file, LOCK_EX, path));
  if (!is_at(file, path)) return false;
  state_lock_ = std::move(file);
  return true;
}

void WorkFolder::lock_part(const ConvertPart& part) {
  const std::string path = fmt::format("{}/part-{:05}.lock", path_, part.index);
  part_lock_ = open_lock(path);
  if (part_lock_.get() < 0) fail_write(errno, "cannot lock a part of the work", path);
  if (!take_lock(part_lock_, LOCK_EX | LOCK_NB, path)) {
    refuse_locked(path, fmt::format("another process does part {}", part.index));
  }
}

void WorkFolder::open_whole(const ConvertRun& run) {
  if (conversion_.one_file) return begin();
  state_ = state_of(conversion_);
  if (keeps_) {
    if (has_state()) return take_over(run.finish);
    if (run.finish) {
      throw Error("convert.incomplete", "no part of this conversion has been done",
                  {.path = place_.path});
    }
  } else if (has_state()) {
    std::uint32_t parts = 0;
    try {
      parts = read_state().parts;
    } catch (const Error&) {
      parts = 0;  // nobody can go on with it
    }
    if (parts > 0) {
      throw Error("convert.state",
                  fmt::format("a conversion in {} parts is waiting here: finish or resume it, or "
                              "remove the folder",
                              parts),
                  {.path = path_});
    }
  }
  check_named();
  begin();
}

// An empty folder with the state of this conversion.
void WorkFolder::begin() {
  is_begun_ = true;
  clear();
  if (conversion_.one_file) return;
  if (::mkdir(files_.c_str(), 0777) != 0) fail_write(errno, "cannot make the folder", files_);
  write_state();
}

void WorkFolder::open_part(const ConvertPart& part) {
  state_ = state_of(conversion_);
  state_.parts = part.count;
  if (!has_state()) {
    empty_files({});
    if (::mkdir(files_.c_str(), 0777) != 0) fail_write(errno, "cannot make the folder", files_);
    write_state();
  }
  const WorkState found = read_state();
  require_same(found, state_, path_);
  if (!is_plain_folder(files_) || status_of(path_ + "/exchange", false)) {
    throw Error("convert.state", "the target was about to get its name: finish or resume it",
                {.path = path_});
  }
  if (found.parts != part.count) divide_anew(found.parts);
  state_lock_ = Descriptor();
  lock_part(part);
  std::vector<bool> wanted(conversion_.files.size(), false);
  for (const std::uint32_t file : files_of_part(conversion_, part)) wanted[file] = true;
  remove_unfinished(wanted);
}

// What is finished is finished, whichever part it was of; but nobody may be at another part.
void WorkFolder::divide_anew(std::uint32_t parts_before) {
  const std::string path = path_ + "/lock";
  if (!take_lock(lock_, LOCK_EX | LOCK_NB, path)) {
    throw Error("convert.state", "others are at parts of the work, and it is divided otherwise",
                {.path = path_,
                 .found = fmt::format("{}", parts_before),
                 .expected = fmt::format("{}", state_.parts)});
  }
  if (!is_at(lock_, path)) refuse_locked(path_, "another process is writing this target");
  write_state();
  if (!take_lock(lock_, LOCK_SH | LOCK_NB, path) || !is_at(lock_, path)) {
    refuse_locked(path_, "another process is writing this target");
  }
}

void WorkFolder::take_over(bool finishes) {
  const WorkState found = read_state();
  require_same(found, state_, path_);
  state_.parts = found.parts;
  const bool is_named = !place_.named.empty() && place_.named.size() == names_in(files_).size();
  const bool is_exchanged = exchange_is_done();
  if (!is_plain_folder(files_) || is_exchanged || is_named) {
    was_committed_ = target_is_whole();
    if (was_committed_) return;
    if (finishes) {
      throw Error("convert.incomplete", "the finished shards are gone", {.path = path_});
    }
    return begin();
  }
  remove_unfinished({});
}

// Names that an ended run has given in a folder that cannot be exchanged. All of them are a whole
// output; some are nothing, and go.
void WorkFolder::check_named() {
  if (place_.named.empty()) return;
  if (place_.named.size() == names_in(files_).size()) {
    is_begun_ = true;
    throw Error("convert.target", "the folder holds a model that cannot be replaced in one step",
                {.path = place_.path, .found = printable(place_.named.front())});
  }
  for (const std::string& name : place_.named) ::unlink((place_.path + "/" + name).c_str());
}

bool WorkFolder::exchange_is_done() {
  const auto note = read_begin(path_ + "/exchange", 100);
  if (!note) return false;
  const auto target = status_of(place_.path, false);
  const auto files = status_of(files_, false);
  const auto text = [](const std::optional<struct stat>& status) {
    return fmt::format("{}", status ? status->st_ino : 0);
  };
  const bool is_as_before = *note == text(files) + " " + text(target) + "\n";
  if (is_as_before) forget_exchange();
  return !is_as_before;
}

void WorkFolder::note_exchange(const std::string& target) {
  const auto files = status_of(files_, false);
  const auto old = status_of(target, false);
  const std::string text = fmt::format("{} {}\n", files ? files->st_ino : 0, old ? old->st_ino : 0);
  write_whole(path_ + "/exchange", unfinished("exchange"), text);
  sync_folder(path_);
}

void WorkFolder::forget_exchange() { ::unlink((path_ + "/exchange").c_str()); }

bool WorkFolder::is_whole(const std::string& path, std::uint32_t file) const {
  const OutputFile& planned = conversion_.files[file];
  const auto status = status_of(path, false);
  if (!status || !S_ISREG(status->st_mode) ||
      static_cast<std::uint64_t>(status->st_size) != planned.byte_count()) {
    return false;
  }
  const std::string header = header_text(conversion_, planned);
  return read_begin(path, header.size()) == header;
}

bool WorkFolder::has_finished(std::uint32_t file) const {
  return is_whole(files_ + "/" + conversion_.files[file].name, file);
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
    if (!is_whole(place_.path + "/" + conversion_.files[i].name, i)) return false;
  }
  if (conversion_.index_name.empty()) return true;
  const std::string index = index_text(conversion_);
  return read_begin(place_.path + "/" + conversion_.index_name, index.size() + 1) == index;
}

void WorkFolder::require_finished() const {
  std::set<std::uint32_t> missing;
  std::vector<std::uint32_t> part_of(conversion_.files.size(), 0);
  for (std::uint32_t part = 1; part <= state_.parts; ++part) {
    for (const std::uint32_t file :
         files_of_part(conversion_, {.index = part, .count = state_.parts})) {
      part_of[file] = part;
    }
  }
  std::string first;
  std::size_t count = 0;
  for (std::uint32_t i = 0; i < conversion_.files.size(); ++i) {
    if (has_finished(i)) continue;
    if (count++ == 0) first = conversion_.files[i].name;
    missing.insert(part_of[i]);
  }
  if (count == 0) return;
  std::string message =
      fmt::format("{} of {} shards are not there or not whole: {}{}", count,
                  conversion_.files.size(), printable(first), count > 1 ? " ..." : "");
  if (state_.parts > 0) {
    message += fmt::format("; do {} {} of {} again", missing.size() == 1 ? "part" : "parts",
                           fmt::join(missing, ", "), state_.parts);
  }
  throw Error("convert.incomplete", std::move(message), {.path = path_});
}

std::string WorkFolder::unfinished(const std::string& name) const {
  std::random_device random;
  return fmt::format("{}/{}{}{:08x}{:08x}", path_, name, unfinished_mark, random(), random());
}

bool WorkFolder::has_state() const { return status_of(path_ + "/state.json", false).has_value(); }

WorkState WorkFolder::read_state() const {
  const std::string path = path_ + "/state.json";
  const auto text = read_begin(path, state_bytes_max);
  if (!text) throw Error("convert.state", "cannot read the state of the work", {.path = path});
  try {
    return work_state_from_json(*text);
  } catch (const Error& error) {
    Where where = error.where();
    where.path = path;
    throw Error(error.code(), error.message(), where);
  }
}

void WorkFolder::write_state() {
  write_whole(path_ + "/state.json", unfinished("state.json"), to_json(state_));
  sync_folder(path_);
}

void WorkFolder::remove_unfinished(const std::vector<bool>& wanted) {
  for (const std::string& name : names_in(path_)) {
    const auto begun = begun_name(name);
    if (begun.empty() || !is_wanted(conversion_, wanted, begun)) continue;
    ::unlink((path_ + "/" + name).c_str());
  }
}

// Shards, what is to stand beside them, and what stands in the target as well. The rest is
// somebody's: it came into a folder that was exchanged.
void WorkFolder::empty_files(const WorkState& known) {
  for (const std::string& name : names_in(files_)) {
    const std::string path = files_ + "/" + name;
    if (is_output_name(name, conversion_.stem) || is_output_name(name, known.stem) ||
        is_extra_name(conversion_, name) ||
        std::ranges::find(known.extra_names, name) != known.extra_names.end() ||
        same_file(path, place_.path + "/" + name)) {
      ::unlink(path.c_str());
    }
  }
  if (::rmdir(files_.c_str()) == 0 || errno == ENOENT) return;
  const std::string aside = fs::path(path_).parent_path() / unique_part_name();
  give_name(files_, aside);
}

void WorkFolder::clear() {
  WorkState known;
  if (has_state()) {
    try {
      known = read_state();
    } catch (const Error&) {
      known = {};  // what it names is set aside
    }
  }
  empty_files(known);
  forget_exchange();
  ::unlink((path_ + "/state.json").c_str());
  remove_unfinished({});
}

void WorkFolder::remove() noexcept {
  is_removed_ = true;
  try {
    clear();
    for (const std::string& name : names_in(path_)) {
      if (name.ends_with(".lock")) ::unlink((path_ + "/" + name).c_str());
    }
  } catch (const std::exception&) {
    return;  // what is left is taken over by the next run
  }
  // The lock last: who waits for it sees that it is gone, and makes a new one.
  ::unlink((path_ + "/lock").c_str());
  ::rmdir(path_.c_str());
}

}  // namespace loadstone

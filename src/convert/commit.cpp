#include "convert/commit.h"

#include <cerrno>
#include <exception>
#include <set>
#include <utility>

#include "convert/extras.h"
#include "convert/files.h"
#include "storage/new_file.h"

namespace loadstone {

void sync_folders(const Conversion& conversion, WritableStorage& storage, const std::string& root,
                  SyncClock& clock) {
  std::set<std::string> folders;
  for (const ExtraFile& extra : conversion.extras) {
    for_each_folder(extra.name, [&](const std::string& folder) { folders.insert(folder); });
  }
  for (const std::string& folder : folders) clock.sync_folder(storage, root + "/" + folder);
}

Commit::Commit(const Conversion& conversion, WorkFolder& work, const TargetPlace& place,
               WritableStorage& storage, SyncClock& clock)
    : conversion_(conversion), work_(work), place_(place), storage_(storage), clock_(clock) {}

void Commit::run() {
  if (!place_.has_files) {
    storage_.rename(work_.files(), place_.path);  // an empty folder is replaced
    sync_folder(place_.parent);
  } else if (place_.is_exchangeable) {
    link_others();
    sync_folder(work_.files());
    work_.exchange();
    sync_folder(place_.parent);
  } else {
    try {
      name_files();
    } catch (...) {
      take_back();
      throw;
    }
    sync_folders(conversion_, storage_, place_.path, clock_);
    sync_folder(place_.path);
  }
}

// Files that stay are in both folders from now on.
void Commit::link_others() {
  for (const std::string& name : place_.others) {
    // An older receipt says nothing of this output.
    if (is_extra_name(conversion_, name) || name == receipt_name(conversion_, {})) continue;
    const std::string from = place_.path + "/" + name;
    const std::string to = work_.files() + "/" + name;
    if (same_file(storage_, from, to)) continue;  // an ended run did that
    storage_.remove(to);
    storage_.link(from, to);
  }
  if (const auto status = storage_.status(place_.path)) {
    storage_.permit(work_.files(), status->permissions);
  }
}

// Other files stay. The index comes last, so that until then no shard is one of a whole.
void Commit::name_files() {
  for (const OutputFile& file : conversion_.files) name_shard(file.name);
  for (const ExtraFile& extra : conversion_.extras) {
    for_each_folder(extra.name, [&](const std::string& name) {
      const std::string folder = place_.path + "/" + name;
      step([&] { return storage_.make_folder(folder); },
           [=, this] { storage_.remove_folder(folder); });
    });
    name_companion(extra.name);
  }
  if (!conversion_.index_name.empty()) name_shard(conversion_.index_name);
  const std::string receipt = receipt_name(conversion_, {});
  if (storage_.status(work_.files() + "/" + receipt)) name_companion(receipt);
}

// Replaces an older one, which can be put back.
void Commit::name_companion(const std::string& name) {
  const std::string from = work_.files() + "/" + name;
  const std::string to = place_.path + "/" + name;
  const auto move_back = [=, this] { storage_.rename(to, from); };
  if (!storage_.status(to)) return rename(from, to, move_back);
  const auto exchange = [=, this] { return storage_.exchange(from, to); };
  if (step(exchange, exchange)) return;
  const std::string older = work_.unfinished("older");
  storage_.link(to, older);
  rename(from, to, [=, this] { storage_.rename(older, to); });
}

// Adds to the files that are there; if the file system has no links, a shard never has two names.
void Commit::name_shard(const std::string& name) {
  const std::string from = work_.files() + "/" + name;
  const std::string to = place_.path + "/" + name;
  int problem = 0;
  const auto link = [&] { return (problem = storage_.try_link(from, to)) == 0; };
  if (step(link, [=, this] { storage_.remove(to); })) return;
  if (problem != EEXIST) return rename(from, to, [=, this] { storage_.rename(to, from); });
  if (same_file(storage_, from, to)) return;  // an ended run did that
  fail_write(EEXIST, "cannot give the file its name", to);
}

void Commit::rename(const std::string& from, const std::string& to, std::function<void()> undo) {
  const auto act = [&] {
    storage_.rename(from, to);
    return true;
  };
  step(act, std::move(undo));
}

// Returns true, and notes how it is taken back, if the step was done.
template <typename Step>
bool Commit::step(const Step& act, std::function<void()> undo) {
  undo_.reserve(undo_.size() + 1);
  if (!act()) return false;
  undo_.push_back(std::move(undo));
  return true;
}

// The first failure is told; the other steps are taken back all the same.
void Commit::take_back() noexcept {
  for (auto undo = undo_.rbegin(); undo != undo_.rend(); ++undo) {
    try {
      (*undo)();
    } catch (const std::exception&) {
      continue;
    }
  }
}

}  // namespace loadstone

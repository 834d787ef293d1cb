// Converts paths to requests. This is the only file that handles schemes, hubs and buckets.
#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "base/only_errors.h"
#include "base/text.h"
#include "loadstone/error.h"
#include "loadstone/remote.h"
#include "storage/forwarding.h"
#include "storage/remote/http_client.h"
#include "storage/remote/listing.h"
#include "storage/remote/remote_file.h"
#include "storage/remote_path.h"
#include "storage/stop.h"

namespace loadstone {

namespace {

// A file that every repository of a hub has, for requests about a repository.
constexpr std::string_view hub_file = ".gitattributes";

[[noreturn]] void refuse_path(const std::string& path, std::string message,
                              std::string expected = {}) {
  throw Error(
      "io.remote", std::move(message),
      {.path = printable(public_url(path), shown_bytes_max), .expected = std::move(expected)});
}

std::string without_slashes(std::string text) {
  while (text.ends_with('/')) text.pop_back();
  return text;
}

// Thread-safe.
class RemoteStorage final : public ForwardingStorage {
 public:
  explicit RemoteStorage(RemoteOptions options)
      : ForwardingStorage(local_storage()),
        client_(std::make_shared<HttpClient>(std::move(options))) {}

  [[nodiscard]] std::shared_ptr<ByteSource> open(const std::string& path) override {
    if (!is_remote(path)) return ForwardingStorage::open(path);
    return only_errors([&]() -> std::shared_ptr<ByteSource> {
      const Address address = address_of(path);
      if (auto known = known_file(address)) return known;
      return opened(address);
    });
  }

  [[nodiscard]] std::shared_ptr<ByteSource> open_anew(const std::string& path) override {
    if (!is_remote(path)) return ForwardingStorage::open_anew(path);
    return only_errors([&]() -> std::shared_ptr<ByteSource> {
      const Address address = address_of(path);
      if (auto known = take_probed(address.path)) return known;
      return opened(address);
    });
  }

  [[nodiscard]] EntryKind kind(const std::string& path) override {
    if (!is_remote(path)) return ForwardingStorage::kind(path);
    return only_errors([&] {
      if (is_folder(path)) return EntryKind::folder;
      const Address address = address_of(path);
      keep_probed(opened(address));
      return EntryKind::file;
    });
  }

  [[nodiscard]] std::vector<std::string> list(const std::string& folder) override {
    if (!is_remote(folder)) return ForwardingStorage::list(folder);
    if (is_http(folder)) {
      refuse_path(folder, "loadstone cannot list a folder of a web server", "the URL of a file");
    }
    return only_errors([&] {
      if (is_hub(folder)) return list_hub(*client_, tree_address(pinned(parse_hub_path(folder))));
      std::string prefix = without_slashes(s3_key(folder).second);
      if (!prefix.empty()) prefix += '/';
      Address bucket = s3_address("s3://" + s3_key(folder).first + "/");
      bucket.path = folder;
      return list_s3(*client_, bucket, prefix);
    });
  }

  // Returns the path without a query, and with the commit instead of a branch.
  [[nodiscard]] std::string resolve(const std::string& path) override {
    if (!is_remote(path)) return ForwardingStorage::resolve(path);
    return only_errors([&] {
      if (is_hub(path)) return pinned(parse_hub_path(path)).text();
      const bool is_url = is_http(path) && !is_folder(path);
      return is_url ? address_of(path).path : public_url(path);
    });
  }

  void require_wanted() override {
    only_errors([&] { client_->require_wanted(); });
  }

 private:
  static constexpr std::size_t probed_max = 64;
  // Files without blocks take a few hundred bytes each.
  static constexpr std::size_t files_max = 4096;

  struct Opened {
    std::string query;
    std::shared_ptr<RemoteFile> file;
  };

  [[nodiscard]] static bool is_folder(const std::string& path) {
    if (is_http(path)) return public_url(path).ends_with('/');
    if (path.ends_with('/')) return true;
    return is_hub(path) ? parse_hub_path(path).file.empty() : s3_key(path).second.empty();
  }

  [[nodiscard]] static std::pair<std::string, std::string> s3_key(const std::string& path) {
    const std::string rest = path.substr(std::string_view("s3://").size());
    const std::size_t slash = std::min(rest.find('/'), rest.size());
    if (slash == 0) refuse_path(path, "the s3:// path has no bucket", "s3://BUCKET/KEY");
    return {rest.substr(0, slash), slash < rest.size() ? rest.substr(slash + 1) : std::string()};
  }

  [[nodiscard]] Address address_of(const std::string& path) {
    if (path.find('\0') != std::string::npos)
      refuse_path(path, "the path contains a NUL character");
    if (is_hub(path)) return hub_address(parse_hub_path(path));
    return is_s3(path) ? s3_address(path) : url_address(path);
  }

  [[nodiscard]] Address url_address(const std::string& path) {
    Address address{.path = public_url(path), .url = public_url(path)};
    const std::string whole = path.substr(0, path.find('#'));
    const std::size_t query = whole.find('?');
    if (whole.substr(0, query).size() != address.url.size()) {
      refuse_path(path, "a URL must not contain a user or a password");
    }
    const std::lock_guard lock(mutex_);
    if (query != std::string::npos) queries_[address.url] = whole.substr(query);
    if (const auto known = queries_.find(address.url); known != queries_.end()) {
      address.query = known->second;
    }
    const RemoteOptions& options = client_->options();
    const bool is_hubs = origin_of(address.url) == origin_of(options.hub_endpoint);
    if (is_hubs && !options.hub_token.empty()) address.signing = Signing::bearer;
    return address;
  }

  [[nodiscard]] Address hub_address(const HubPath& hub) const {
    const RemoteOptions& options = client_->options();
    return {.path = hub.text(),
            .url = without_slashes(options.hub_endpoint) + "/" + encoded_path(hub.repository) +
                   "/resolve/" + encoded_name(hub.revision) + "/" + encoded_path(hub.file),
            .signing = options.hub_token.empty() ? Signing::none : Signing::bearer};
  }

  // Returns the address of the hub's API that lists the files of one folder.
  [[nodiscard]] Address tree_address(HubPath hub) const {
    hub.file = without_slashes(hub.file);
    Address address = hub_address(hub);
    address.url = without_slashes(client_->options().hub_endpoint) + "/api/models/" +
                  encoded_path(hub.repository) + "/tree/" + encoded_name(hub.revision);
    if (!hub.file.empty()) address.url += "/" + encoded_path(hub.file);
    return address;
  }

  [[nodiscard]] Address s3_address(const std::string& path) const {
    const RemoteOptions& options = client_->options();
    const auto [bucket, key] = s3_key(path);
    const std::string place = "/" + encoded_path(key);
    // A bucket's name with dots cannot be part of the host name, because the certificate would not
    // match.
    const bool is_host = options.s3_endpoint.empty() && bucket.find('.') == std::string::npos;
    const std::string aws = "s3." + options.s3_region + ".amazonaws.com";
    std::string url = options.s3_endpoint.empty() ? "https://" + aws : options.s3_endpoint;
    url = is_host ? "https://" + encoded_name(bucket) + "." + aws
                  : without_slashes(std::move(url)) + "/" + encoded_name(bucket);
    return {.path = path,
            .url = url + place,
            .signing = options.s3_access_key.empty() ? Signing::none : Signing::aws};
  }

  // Replaces a branch by its current commit, so that all files of a checkpoint are from one commit.
  [[nodiscard]] HubPath pinned(HubPath hub) {
    if (hub.is_pinned()) return hub;
    HubPath asked = hub;
    if (asked.file.empty() || asked.file.ends_with('/')) asked.file = hub_file;
    std::string commit;
    std::shared_ptr<RemoteFile> file;
    try {
      file = std::make_shared<RemoteFile>(client_, hub_address(asked), &commit);
    } catch (const Error& error) {
      // The hub reports the commit even if the file is missing.
      if (error.code() != "io.not_found" || commit.empty()) throw;
    }
    hub.revision = commit;
    if (!hub.is_pinned()) {
      throw Error("io.remote", "the hub's response lacks the commit of the revision",
                  {.path = asked.text(), .field = "X-Repo-Commit", .found = printable(commit)});
    }
    return hub;
  }

  [[nodiscard]] std::shared_ptr<RemoteFile> opened(const Address& address) {
    auto file = std::make_shared<RemoteFile>(client_, address);
    const std::lock_guard lock(mutex_);
    if (files_.size() >= files_max) files_.clear();
    files_[address.path] = {address.query, file};
    return file;
  }

  // Returns the last opened file of this path if its query, which contains the signature, is the
  // same.
  [[nodiscard]] std::shared_ptr<RemoteFile> known_file(const Address& address) {
    const std::lock_guard lock(mutex_);
    const auto found = files_.find(address.path);
    const bool is_same = found != files_.end() && found->second.query == address.query;
    return is_same ? found->second.file : nullptr;
  }

  void keep_probed(std::shared_ptr<RemoteFile> file) {
    const std::lock_guard lock(mutex_);
    if (probed_.size() >= probed_max) probed_.clear();
    probed_[file->path()] = std::move(file);
  }

  [[nodiscard]] std::shared_ptr<RemoteFile> take_probed(const std::string& path) {
    const std::lock_guard lock(mutex_);
    const auto found = probed_.find(path);
    if (found == probed_.end()) return nullptr;
    auto file = std::move(found->second);
    probed_.erase(found);
    return file;
  }

  const std::shared_ptr<HttpClient> client_;
  std::mutex mutex_;
  std::map<std::string, std::string> queries_;  // by URL; mutex_ guards it and the next members
  // Files that kind() has opened and that the next open() will use.
  std::map<std::string, std::shared_ptr<RemoteFile>> probed_;
  // The last opened file of each path, so that readers of a catalog's tensors need not request the
  // size again.
  std::map<std::string, Opened> files_;
};

// Reads from a file, and lets the caller cancel the reads. Thread-safe.
class StoppableFile final : public ForwardingSource {
 public:
  StoppableFile(std::shared_ptr<ByteSource> file, std::shared_ptr<const IsStopped> is_stopped)
      : ForwardingSource(std::move(file)), is_stopped_(std::move(is_stopped)) {}

  using ByteSource::read;
  void read(std::uint64_t offset, std::span<const std::span<std::byte>> pieces) override {
    const StopScope scope(*is_stopped_);
    ForwardingSource::read(offset, pieces);
  }

 private:
  const std::shared_ptr<const IsStopped> is_stopped_;
};

// Opens files whose reads the caller can cancel. Thread-safe if the inner storage is thread-safe.
class StoppableStorage final : public ForwardingStorage {
 public:
  StoppableStorage(Storage& storage, IsStopped is_stopped)
      : ForwardingStorage(storage),
        is_stopped_(std::make_shared<const IsStopped>(std::move(is_stopped))) {}

  [[nodiscard]] std::shared_ptr<ByteSource> open(const std::string& path) override {
    const StopScope scope(*is_stopped_);
    return stoppable(path, ForwardingStorage::open(path));
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open_anew(const std::string& path) override {
    const StopScope scope(*is_stopped_);
    return stoppable(path, ForwardingStorage::open_anew(path));
  }
  [[nodiscard]] EntryKind kind(const std::string& path) override {
    const StopScope scope(*is_stopped_);
    return ForwardingStorage::kind(path);
  }
  [[nodiscard]] std::vector<std::string> list(const std::string& folder) override {
    const StopScope scope(*is_stopped_);
    return ForwardingStorage::list(folder);
  }
  [[nodiscard]] std::string resolve(const std::string& path) override {
    const StopScope scope(*is_stopped_);
    return ForwardingStorage::resolve(path);
  }
  void require_wanted() override {
    const StopScope scope(*is_stopped_);
    ForwardingStorage::require_wanted();
  }

 private:
  [[nodiscard]] std::shared_ptr<ByteSource> stoppable(const std::string& path,
                                                      std::shared_ptr<ByteSource> file) const {
    if (!is_remote(path)) return file;
    return std::make_shared<StoppableFile>(std::move(file), is_stopped_);
  }

  const std::shared_ptr<const IsStopped> is_stopped_;
};

}  // namespace

std::unique_ptr<Storage> make_remote_storage(RemoteOptions options) {
  return only_errors([&]() -> std::unique_ptr<Storage> {
    return std::make_unique<RemoteStorage>(std::move(options));
  });
}

std::unique_ptr<Storage> make_stoppable(Storage& storage, std::function<bool()> is_stopped) {
  return only_errors([&]() -> std::unique_ptr<Storage> {
    return std::make_unique<StoppableStorage>(storage, std::move(is_stopped));
  });
}

bool can_read_remote() noexcept { return true; }

}  // namespace loadstone

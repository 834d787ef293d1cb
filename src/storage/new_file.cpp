#include "storage/new_file.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <random>

#include "base/text.h"
#include "loadstone/error.h"

namespace loadstone {

void fail_write(int problem, std::string message, std::string path) {
  const char* code = "io.write";
  if (problem == ENOSPC || problem == EDQUOT || problem == EFBIG) code = "io.no_space";
  if (problem == EACCES || problem == EPERM || problem == EROFS) code = "io.denied";
  throw Error(code, std::move(message), {.path = std::move(path), .system_error = problem});
}

bool may_grow_to(std::uint64_t byte_count) noexcept {
  rlimit limit = {};
  const bool is_limited = ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  return byte_count <= static_cast<std::uint64_t>(std::numeric_limits<off_t>::max()) &&
         (!is_limited || byte_count <= limit.rlim_cur);
}

void check_file_limit(std::uint64_t byte_count, const std::string& path) {
  if (may_grow_to(byte_count)) return;
  rlimit limit = {};
  static_cast<void>(::getrlimit(RLIMIT_FSIZE, &limit));
  throw Error("io.no_space",
              "the file is larger than this process may write: raise the limit on file sizes "
              "('ulimit -f'), or write smaller files",
              {.path = path,
               .found = counted(byte_count, "byte"),
               .expected = fmt::format("at most {} bytes", limit.rlim_cur),
               .system_error = EFBIG});
}

// Uses the system's random source, because process ids repeat: each container counts from 1.
std::string random_name() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

std::string unique_part_name() { return ".loadstone-" + random_name() + ".part"; }

}  // namespace loadstone

// Shares of a conversion's files, so that many processes can do it.
#include <algorithm>
#include <numeric>
#include <vector>

#include "base/only_errors.h"
#include "base/refuse_option.h"
#include "loadstone/convert.h"

namespace loadstone {

// The largest first, each to the share that has least so far.
static std::vector<std::uint32_t> share_of(const Conversion& conversion, const ConvertPart& part) {
  if (part.count == 0 || part.index == 0 || part.index > part.count) {
    refuse_option("part", "a part is one of 1 to as many as there are");
  }
  const auto& files = conversion.files;
  std::vector<std::uint32_t> order(files.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::ranges::greater(),
                           [&](std::uint32_t file) { return files[file].byte_count(); });
  // More shares than files have nothing to do.
  std::vector<std::uint64_t> bytes(std::min<std::size_t>(part.count, files.size()), 0);
  std::vector<std::uint32_t> mine;
  for (const std::uint32_t file : order) {
    const auto least = std::ranges::min_element(bytes);
    *least += files[file].byte_count();
    if (least - bytes.begin() == part.index - 1) mine.push_back(file);
  }
  std::ranges::sort(mine);
  return mine;
}

std::vector<std::uint32_t> files_of_part(const Conversion& conversion, const ConvertPart& part) {
  return only_errors([&] { return share_of(conversion, part); });
}

}  // namespace loadstone

// How many threads a conversion has, and what memory each of them.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <vector>

#include "base/ceil_div.h"
#include "base/text.h"
#include "convert/groups.h"
#include "convert/layout.h"
#include "execute/team.h"
#include "kernels/cast.h"

namespace loadstone {

namespace {

// Of window and staging: more threads are not worth less, and one cannot do with less.
constexpr std::uint64_t thread_bytes_wanted = 1 << 20;
constexpr std::uint64_t window_bytes_least = 32 << 10;
constexpr std::uint64_t staging_bytes_least = 32 << 10;
constexpr std::uint64_t thread_bytes_most = 32 << 20;
constexpr std::uint64_t page_bytes = 4096;
// What a thread takes beside that: its stack, and what the allocator keeps for it.
constexpr std::uint64_t thread_overhead = 256 << 10;
// Numbers that are encoded in one go stay in the nearer caches.
constexpr std::uint64_t piece_bytes_wanted = 1 << 20;

// What lists of tensors take while they are made and gone through. Generous.
std::uint64_t list_bytes(const Conversion& conversion) {
  constexpr std::uint64_t per_tensor = 1536;
  std::uint64_t bytes = 1 << 20;
  for (const TensorInfo& tensor : conversion.plan.catalog->tensors()) {
    bytes += 512 + 2 * tensor.name.size();
  }
  for (const PlannedTarget& target : conversion.plan.targets) {
    bytes += per_tensor + 6 * target.name.size();
    if (target.quantization) bytes += per_tensor + 4 * target.name.size();
    for (const Box& box : target.recipe.boxes) {
      bytes += 4 * (sizeof(Box) + box.dims.size() * sizeof(BoxDim));
    }
    if (target.recipe.constant) bytes += target.recipe.constant->size();
  }
  std::uint64_t header = 0;
  for (const OutputFile& file : conversion.files) {
    header = std::max(header, file.header_bytes);
    for (const OutputTensor& tensor : file.tensors) {
      bytes += sizeof(OutputTensor) + 2 * tensor.name.size();
    }
  }
  for (const ExtraFile& file : conversion.extras) bytes += 2 * file.text.size();
  return bytes + 2 * header;
}

// What the quantized targets need.
struct Needs {
  std::vector<QuantizeForm> forms;  // one of each kind
  std::uint64_t window_bytes = 0;   // of numbers, that no form can do with less than
  std::uint64_t held_bytes = 0;     // of the largest group

  // The most that so many bytes of numbers become.
  [[nodiscard]] std::uint64_t encoded_bytes(std::uint64_t piece_bytes) const {
    std::uint64_t bytes = 0;
    for (const QuantizeForm& form : forms) {
      bytes = std::max(bytes, encoded_bytes_of(form, elements_in(form, piece_bytes)));
    }
    return round_up(bytes, page_bytes);
  }
};

Needs needs_of(const Conversion& conversion) {
  Needs needs;
  std::map<std::string, std::uint64_t> held_of_group;
  std::map<std::pair<std::string, std::string>, bool> seen;
  for (const PlannedTarget& target : conversion.plan.targets) {
    if (!target.quantization) continue;
    QuantizeForm form = form_of(target);
    const std::uint64_t held = held_bytes_of(form);
    std::uint64_t group = held;
    if (!target.quantization->group.empty()) {
      group = held_of_group[target.quantization->group] += held;
    }
    needs.held_bytes = std::max(needs.held_bytes, group);
    needs.window_bytes = std::max(needs.window_bytes, form.step_bytes());
    const auto kind = std::pair(target.shape.text() + std::string(name(target.dtype)),
                                target.quantization->encoding);
    if (seen.emplace(kind, true).second) needs.forms.push_back(std::move(form));
  }
  needs.window_bytes = round_up(needs.window_bytes, page_bytes);
  needs.held_bytes = round_up(needs.held_bytes, page_bytes);
  return needs;
}

void refuse_memory(Conversion& conversion, std::uint64_t limit, std::uint64_t least,
                   std::uint64_t lists) {
  conversion.plan.findings.push_back(
      {.severity = Severity::error,
       .code = "plan.over_budget",
       .message = fmt::format("the conversion needs at least {} of memory: {} for lists of "
                              "tensors, the rest for bytes on their way",
                              human_bytes(least), human_bytes(lists)),
       .suggestion = fmt::format("allow {} bytes", least),
       .found = fmt::format("{} bytes", limit),
       .expected = fmt::format("{} bytes", least)});
}

// Shares what one thread has among windows, what they are encoded to, and staging.
void share(Conversion& conversion, const Needs& needs, std::uint64_t each) {
  if (needs.forms.empty()) {
    conversion.window_bytes = each / 2 / page_bytes * page_bytes;
    conversion.staging_bytes = (each - conversion.window_bytes) / page_bytes * page_bytes;
    return;
  }
  const std::uint64_t least = std::max(needs.window_bytes, window_bytes_least);
  std::uint64_t piece = std::max(least, std::min(piece_bytes_wanted, each / 4));
  if (needs.encoded_bytes(piece) + piece + staging_bytes_least > each) piece = least;
  conversion.encoded_bytes = needs.encoded_bytes(piece);
  conversion.piece_bytes = piece;
  const std::uint64_t rest = each - conversion.encoded_bytes;
  conversion.window_bytes =
      std::clamp(rest / 2, piece, rest - staging_bytes_least) / page_bytes * page_bytes;
  conversion.staging_bytes = (rest - conversion.window_bytes) / page_bytes * page_bytes;
}

}  // namespace

void choose_sizes(Conversion& conversion, const ConvertOptions& options) {
  const std::uint64_t lists = list_bytes(conversion);
  const Needs needs = needs_of(conversion);
  const std::uint64_t window_least = std::max(needs.window_bytes, window_bytes_least);
  const std::uint64_t thread_least =
      window_least + needs.encoded_bytes(window_least) + staging_bytes_least;
  // Groups in hand are at most one more than threads: one waits for its last window.
  const auto held = [&](std::uint64_t threads) { return needs.held_bytes * (threads + 1); };
  const std::uint64_t least = lists + thread_overhead + thread_least + held(1);
  const std::uint64_t wanted = std::max(thread_bytes_wanted, thread_least);
  std::uint64_t staging = std::max(options.staging_bytes_max, thread_least);
  std::uint64_t threads = thread_count(options.threads);
  if (const auto limit = options.memory_bytes_max) {
    if (*limit < least) refuse_memory(conversion, *limit, least, lists);
    const std::uint64_t room = std::max(*limit, least) - lists;
    while (threads > 1 && threads * (thread_overhead + wanted) + held(threads) > room) --threads;
    staging = std::min(staging, room - threads * thread_overhead - held(threads));
  }
  threads = std::clamp<std::uint64_t>(staging / wanted, 1, threads);
  share(conversion, needs, std::max(std::min(staging / threads, thread_bytes_most), thread_least));
  conversion.threads = static_cast<unsigned>(threads);
  conversion.held_bytes = held(threads);
  conversion.peak_bytes = lists + held(threads) +
                          threads * (thread_overhead + conversion.window_bytes +
                                     conversion.encoded_bytes + conversion.staging_bytes);
}

}  // namespace loadstone

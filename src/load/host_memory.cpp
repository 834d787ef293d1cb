#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/checked.h"
#include "base/only_errors.h"
#include "engine/limits.h"
#include "engine/pages.h"
#include "loadstone/error.h"
#include "loadstone/execute.h"
#include "loadstone/name_hash.h"

namespace loadstone {

namespace {

// Large values start on a page boundary, so that two threads rarely fault in the same page. Smaller
// values do not, because the unused rest of their last page would exceed the memory that the plan
// counts.
constexpr std::uint64_t small_alignment = 64;
constexpr std::uint64_t large_bytes = 1 << 20;

[[noreturn]] void too_large() {
  throw Error("memory.host", "the plan's values do not fit in the address space");
}

std::uint64_t align_up(std::uint64_t offset, std::uint64_t alignment) {
  const auto sum = checked_add(offset, alignment - 1);
  if (!sum) too_large();
  return *sum / alignment * alignment;
}

struct Stretch {
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
};

}  // namespace

struct HostMemory::Impl {
  AnonymousMemory memory;
  std::vector<Destination> destinations;
  std::unordered_map<std::string, std::size_t, NameHash, std::equal_to<>> index;  // by name
};

HostMemory::HostMemory(const Plan& plan) try : impl_(std::make_unique<Impl>()) {
  std::uint64_t end = 0;
  const auto reserve = [&](std::uint64_t bytes) {
    const std::uint64_t begin = align_up(end, bytes >= large_bytes ? page_bytes : small_alignment);
    const auto sum = checked_add(begin, bytes);
    if (!sum) too_large();
    end = *sum;
    return begin;
  };
  std::vector<std::vector<Stretch>> places(plan.targets.size());
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    const PlannedTarget& target = plan.targets[i];
    if (target.delivery != Delivery::memory) continue;
    if (!target.quantization) {
      places[i].push_back({reserve(target.byte_count()), target.byte_count()});
      continue;
    }
    for (const auto& part : quantized_parts(*target.quantization, target.shape, target.dtype)) {
      places[i].push_back({reserve(part.byte_count()), part.byte_count()});
    }
  }
  // Allocates at least one byte, so that a value without bytes has an address too.
  impl_->memory = AnonymousMemory(end + 1);
  impl_->destinations.resize(plan.targets.size());
  auto& index = impl_->index;
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    const PlannedTarget& target = plan.targets[i];
    index.emplace(target.name, i);
    Destination& destination = impl_->destinations[i];
    destination.byte_count = target.byte_count();
    destination.dtype = target.dtype;
    if (target.delivery != Delivery::memory) continue;
    std::byte* const memory = impl_->memory.data();
    if (!target.quantization) destination.data = memory + places[i].front().begin;
    for (const auto& [begin, bytes] : places[i]) {
      if (target.quantization) destination.parts.emplace_back(memory + begin, bytes);
    }
  }
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    const Recipe& recipe = plan.targets[i].recipe;
    if (recipe.origin != Origin::tie) continue;
    const auto found = index.find(recipe.tie_of);
    if (found != index.end()) {
      impl_->destinations[i].data = impl_->destinations[found->second].data;
      impl_->destinations[i].parts = impl_->destinations[found->second].parts;
    }
  }
} catch (...) {
  throw_as_error();
}

HostMemory::HostMemory(HostMemory&&) noexcept = default;
HostMemory& HostMemory::operator=(HostMemory&&) noexcept = default;
HostMemory::~HostMemory() = default;

const std::vector<Destination>& HostMemory::destinations() const noexcept {
  return impl_->destinations;
}

const Destination* HostMemory::find(std::string_view target) const noexcept {
  const auto found = impl_->index.find(target);
  return found == impl_->index.end() ? nullptr : &impl_->destinations[found->second];
}

}  // namespace loadstone

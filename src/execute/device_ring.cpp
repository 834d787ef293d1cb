#include "execute/device_ring.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

#include "loadstone/error.h"

namespace loadstone {

namespace {

// A rest of a slot that is worth another value.
constexpr std::uint64_t rest_least = 4096;

}  // namespace

DeviceRing::DeviceRing(const Plan& plan, Device& device, std::string_view first, const Ring& ring,
                       MemoryCount& memory)
    : plan_(plan),
      device_(device),
      ring_(ring),
      memory_(memory),
      data_(device.allocate(first, ring.bytes())),
      slots_(ring.slots),
      free_(ring.slots) {
  std::iota(free_.rbegin(), free_.rend(), 0U);
  memory_.take(ring_.bytes());
}

DeviceRing::~DeviceRing() {
  for (unsigned slot = 0; slot < ring_.slots; ++slot) {
    try {
      device_.wait(slot);
    } catch (const std::exception&) {
      // Whoever gave the ring up knows why, or finish() has said so.
    }
  }
  device_.free(data_);
  memory_.give_back(ring_.bytes());
}

bool DeviceRing::holds(const std::byte* bytes) const noexcept {
  return !std::less<>()(bytes, data_) && std::less<>()(bytes, data_ + ring_.bytes());
}

template <typename Call>
void DeviceRing::name_errors(std::uint32_t target, const Call& call) const {
  try {
    call();
  } catch (const Error& error) {
    Where where = error.where();
    if (where.tensor.empty()) where.tensor = plan_.targets[target].name;
    if (where.field.empty()) where.field = plan_.targets[target].device;
    throw Error(error.code(), error.message(), std::move(where));
  }
}

// Of those with enough room the first that needs no waiting.
unsigned DeviceRing::next_slot(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto pop = [](auto& from, auto place) {
    const unsigned slot = *place;
    from.erase(place);
    return slot;
  };
  const auto has_room = [&](unsigned slot) {
    return ring_.slot_bytes - slots_[slot].used_bytes >= bytes;
  };
  const auto roomy = std::ranges::find_if(open_, has_room);
  if (roomy != open_.end()) return pop(open_, roomy);
  if (!free_.empty()) return pop(free_, free_.end() - 1);
  if (!sent_.empty()) return pop(sent_, sent_.begin());
  if (!open_.empty()) return pop(open_, open_.begin());
  throw Error("internal", "more threads fill slots than there are slots");
}

std::byte* DeviceRing::take(std::uint64_t bytes) {
  if (bytes > ring_.slot_bytes) throw Error("internal", "a window is larger than a slot");
  const unsigned number = next_slot(bytes);
  Slot& slot = slots_[number];  // this thread's until it is sent
  if (ring_.slot_bytes - slot.used_bytes < bytes) wait(number);
  return data_ + number * ring_.slot_bytes + slot.used_bytes;
}

void DeviceRing::wait(unsigned number) {
  name_errors(slots_[number].target, [&] { device_.wait(number); });
  slots_[number].used_bytes = 0;
}

void DeviceRing::send(std::uint32_t target, std::byte* to, std::span<const std::byte> bytes) {
  if (holds(bytes.data())) {
    send_taken(static_cast<unsigned>((bytes.data() - data_) / ring_.slot_bytes), target, to, bytes);
    return;
  }
  while (!bytes.empty()) {
    const auto part = bytes.first(std::min<std::uint64_t>(bytes.size(), ring_.slot_bytes));
    std::byte* const taken = take(part.size());
    std::memcpy(taken, part.data(), part.size());
    send_taken(static_cast<unsigned>((taken - data_) / ring_.slot_bytes), target, to,
               {taken, part.size()});
    to += part.size();
    bytes = bytes.subspan(part.size());
  }
}

void DeviceRing::send_taken(unsigned number, std::uint32_t target, std::byte* to,
                            std::span<const std::byte> bytes) {
  Slot& slot = slots_[number];
  slot.target = target;
  name_errors(target, [&] { device_.copy(number, plan_.targets[target].device, to, bytes); });
  const std::lock_guard lock(mutex_);
  slot.used_bytes = std::min(ring_.slot_bytes, aligned_part(slot.used_bytes + bytes.size()));
  if (ring_.slot_bytes - slot.used_bytes >= rest_least) {
    open_.push_back(number);
  } else {
    sent_.push_back(number);
  }
}

void DeviceRing::finish() {
  for (unsigned slot = 0; slot < ring_.slots; ++slot) wait(slot);
}

}  // namespace loadstone

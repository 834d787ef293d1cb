#include "engine/device_ring.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

namespace loadstone {

namespace {

// A slot with fewer free bytes than this is copied at once instead of waiting for another value.
constexpr std::uint64_t rest_least = 4096;
// Maximum number of small values per batch, because each entry uses memory outside the ring.
constexpr std::size_t batch_copies_max = 1024;

}  // namespace

DeviceRing::DeviceRing(const ValueSet& values, Device& device, std::string_view first,
                       const Ring& ring, MemoryCount& memory)
    : values_(values),
      device_(device),
      ring_(ring),
      memory_(memory),
      slots_(ring.slots),
      free_(ring.slots),
      data_(device.allocate(first, ring.bytes())) {
  std::iota(free_.rbegin(), free_.rend(), 0U);
  memory_.take(ring_.bytes());
}

DeviceRing::~DeviceRing() {
  for (unsigned slot = 0; slot < ring_.slots; ++slot) {
    try {
      device_.wait(slot);
    } catch (...) {
      // The owner already knows the error, or finish() has reported it.
    }
  }
  device_.free(data_);
  memory_.give_back(ring_.bytes());
}

bool DeviceRing::holds(const std::byte* bytes) const noexcept {
  return !std::less<>()(bytes, data_) && std::less<>()(bytes, data_ + ring_.bytes());
}

// Returns a slot in use that has enough space, otherwise an empty slot, otherwise the oldest one.
unsigned DeviceRing::next_slot(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto pop = [](auto& from, auto place) {
    const unsigned slot = *place;
    from.erase(place);
    return slot;
  };
  const auto roomy =
      std::ranges::find_if(used_, [&](unsigned slot) { return has_room(slot, bytes); });
  if (roomy != used_.end()) return pop(used_, roomy);
  if (free_.empty() && used_.empty()) {
    throw Error("internal", "there are more threads than staging slots");
  }
  const auto age = [&](unsigned slot) { return slots_[slot].age; };
  const unsigned slot = free_.empty() ? pop(used_, std::ranges::min_element(used_, {}, age))
                                      : pop(free_, free_.end() - 1);
  slots_[slot].age = ++taken_;
  return slot;
}

std::byte* DeviceRing::take(std::uint64_t bytes) {
  if (bytes > ring_.slot_bytes) throw Error("internal", "a window is larger than a staging slot");
  const unsigned slot = next_slot(bytes);
  if (!has_room(slot, bytes)) wait(slot);
  return data_ + slot * ring_.slot_bytes + slots_[slot].used_bytes;
}

void DeviceRing::wait(unsigned number) {
  begin_copies(number);
  Slot& slot = slots_[number];
  try {
    device_.wait(number);
  } catch (const Error& error) {
    throw named(error, slot.value, error.message());
  }
  slot.used_bytes = 0;
}

Error DeviceRing::named(const Error& error, std::uint32_t value, std::string message) const {
  Where where = error.where();
  if (where.tensor.empty()) where.tensor = values_[value].name;
  if (where.field.empty()) where.field = std::string(device_of(value));
  return {error.code(), std::move(message), std::move(where)};
}

void DeviceRing::send(std::uint32_t value, std::byte* to, std::span<const std::byte> bytes) {
  if (holds(bytes.data())) {
    send_taken(static_cast<unsigned>((bytes.data() - data_) / ring_.slot_bytes), value, to, bytes);
    return;
  }
  while (!bytes.empty()) {
    const auto part = bytes.first(std::min<std::uint64_t>(bytes.size(), ring_.slot_bytes));
    std::byte* const taken = take(part.size());
    std::memcpy(taken, part.data(), part.size());
    send_taken(static_cast<unsigned>((taken - data_) / ring_.slot_bytes), value, to,
               {taken, part.size()});
    to += part.size();
    bytes = bytes.subspan(part.size());
  }
}

void DeviceRing::send_taken(unsigned number, std::uint32_t value, std::byte* to,
                            std::span<const std::byte> bytes) {
  Slot& slot = slots_[number];
  slot.value = value;
  slot.copies.push_back({to, bytes});
  slot.values.push_back(value);
  slot.unsent_bytes += bytes.size();
  slot.used_bytes = std::min(ring_.slot_bytes, aligned_part(slot.used_bytes + bytes.size()));
  if (!has_room(number, std::min(rest_least, ring_.slot_bytes / 4))) {
    slot.used_bytes = ring_.slot_bytes;
  }
  // Most values are as large as the previous one. If a value of this size no longer fits, the next
  // one will probably not fit either.
  if (!has_room(number, std::max<std::uint64_t>(bytes.size(), 1)) ||
      slot.unsent_bytes >= batch_bytes || slot.copies.size() >= batch_copies_max) {
    begin_copies(number);
  }
  const std::lock_guard lock(mutex_);
  used_.push_back(number);
}

// Starts the copies of a slot, in batches that each go to one device.
void DeviceRing::begin_copies(unsigned number) {
  Slot& slot = slots_[number];
  for (std::size_t first = 0; first < slot.copies.size();) {
    const auto other = std::ranges::find_if(
        slot.values.begin() + static_cast<std::ptrdiff_t>(first), slot.values.end(),
        [&](std::uint32_t value) { return device_of(value) != device_of(slot.values[first]); });
    const auto end = static_cast<std::size_t>(other - slot.values.begin());
    begin_batch(number, first, end - first);
    first = end;
  }
  slot.copies.clear();
  slot.values.clear();
  slot.unsent_bytes = 0;
}

void DeviceRing::begin_batch(unsigned number, std::size_t first, std::size_t count) {
  const Slot& slot = slots_[number];
  std::size_t failed = count;
  try {
    device_.copy_all(number, device_of(slot.values[first]),
                     std::span(slot.copies).subspan(first, count), failed);
  } catch (const Error& error) {
    std::string message = error.message();
    if (failed >= count) {
      failed = 0;
      if (count > 1)
        message +=
            fmt::format(", for {} simultaneous copies, of which this tensor's is the first", count);
    }
    throw named(error, slot.values[first + failed], std::move(message));
  }
}

void DeviceRing::finish() {
  for (unsigned slot = 0; slot < ring_.slots; ++slot) begin_copies(slot);
  for (unsigned slot = 0; slot < ring_.slots; ++slot) wait(slot);
}

}  // namespace loadstone

#include "load/memory_sink.h"

#include <atomic>
#include <cstring>

namespace loadstone {

MemorySink::MemorySink(const Plan& plan, const ValueSet& values,
                       std::span<const Destination> destinations, const OffloadFolder& folder,
                       const ExecuteOptions& options, const Budget& budget, MemoryCount& memory)
    : values_(values),
      begun_(options.begun),
      whole_(plan.targets.size(), nullptr),
      parts_(plan.targets.size()),
      is_on_device_(plan.targets.size(), false),
      written_(plan.targets.size()) {
  for (std::uint32_t i = 0; i < whole_.size(); ++i) {
    const PlannedTarget& target = plan.targets[i];
    const bool is_memory = target.delivery == Delivery::memory;
    if (values[i].making == Making::none) continue;
    std::vector<std::byte*> parts;
    if (!is_memory) {
      parts = folder.parts(i);
    } else if (target.quantization) {
      for (const auto& part : destinations[i].parts) parts.push_back(part.data());
    } else if (destinations[i].data != nullptr) {
      parts = {destinations[i].data};
    }
    if (parts.empty() || (!target.quantization && parts.front() == nullptr)) continue;
    if (values[i].making == Making::in_order) {
      whole_[i] = parts.front();
      continue;
    }
    parts_[i] = std::move(parts);
    by_windows_.push_back(i);
    is_on_device_[i] = is_memory && destinations[i].kind == MemoryKind::device;
    if (is_on_device_[i] && !ring_) open_device(options.device, i, budget, memory);
  }
}

void MemorySink::open_device(Device* device, std::uint32_t first, const Budget& budget,
                             MemoryCount& memory) {
  if (device == nullptr) {
    cuda_ = open_cuda();
    device = cuda_.get();
  }
  device_ = device;
  ring_.emplace(values_, *device, values_[first].device, budget.ring, memory);
}

std::byte* MemorySink::address(std::uint32_t target, std::size_t part) const noexcept {
  return parts_[target].empty() ? whole_[target] : parts_[target][part];
}

void MemorySink::note_begun(std::uint32_t target) noexcept {
  if (begun_ != nullptr) std::atomic_ref(begun_[target]).store(1, std::memory_order_relaxed);
}

std::byte* MemorySink::place(std::uint32_t target, std::size_t part) {
  if (is_on_device_[target]) return nullptr;
  note_begun(target);
  return address(target, part);
}

std::byte* MemorySink::room(std::uint32_t target, std::uint64_t bytes) {
  return is_on_device_[target] && bytes > 0 ? ring_->take(bytes) : nullptr;
}

void MemorySink::write(std::uint32_t target, std::size_t part, std::uint64_t offset,
                       std::span<std::byte> bytes) {
  if (bytes.empty()) return;
  note_begun(target);
  if (watch_ && !is_on_device_[target]) watch_(target, part, offset, bytes);
  std::byte* const to = address(target, part) + offset;
  if (is_on_device_[target]) {
    ring_->send(target, to, bytes);
  } else {
    std::memcpy(to, bytes.data(), bytes.size());
  }
}

void MemorySink::made(std::uint32_t target, std::size_t part, std::span<const std::byte> bytes) {
  if (!watch_) return;
  watch_(target, part, static_cast<std::uint64_t>(bytes.data() - address(target, part)), bytes);
}

void MemorySink::complete() {
  if (ring_) ring_->finish();
}

bool MemorySink::has_memory(std::uint32_t target, std::size_t part) const noexcept {
  return part < parts_[target].size() || whole_[target] != nullptr;
}

void MemorySink::read(std::uint32_t target, std::size_t part, std::uint64_t offset,
                      std::span<std::byte> to) {
  const std::byte* const from = address(target, part) + offset;
  if (is_on_device_[target]) {
    device_->read(values_[target].device, from, to);
  } else {
    std::memcpy(to.data(), from, to.size());
  }
}

}  // namespace loadstone

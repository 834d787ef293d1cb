#include "fake_cuda.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "fake_state.h"

namespace fake_cuda {

std::mutex& mutex() {
  static std::mutex only;
  return only;
}

State& state() {
  static State only;
  return only;
}

std::vector<int>& current() {
  thread_local std::vector<int> devices;
  return devices;
}

int violate(const std::string& what, int result) {
  state().violations += what + "\n";
  return result;
}

int enter(const std::string& function) {
  const int number = state().calls[function]++;
  for (const Failure& each : state().failures) {
    if (each.function == "lost" && function == "cuMemcpyHtoDAsync_v2" && each.number == number) {
      state().lost = each.result;
    }
    const bool is_of_call = each.function == function && each.number == number;
    if (is_of_call && each.position == whole_call) return each.result;
  }
  return state().lost;
}

int in_context(const char* function) {
  return current().empty()
             ? violate(std::string(function) + ": no current context", invalid_context)
             : 0;
}

namespace {

template <typename Map>
auto holding(Map& map, const std::byte* address) {
  auto found = map.upper_bound(address);
  return found == map.begin() ? map.end() : std::prev(found);
}

bool is_pinned(const std::byte* begin, std::size_t bytes) {
  const auto found = holding(state().pinned, begin);
  return found != state().pinned.end() && begin + bytes <= found->first + found->second;
}

const std::byte* address_of(unsigned long long number) {
  return reinterpret_cast<const std::byte*>(static_cast<std::uintptr_t>(number));
}

// Checks the rules for batches that cuda.h documents.
int check_batch(const Batch& batch) {
  if (batch.stream == nullptr) return violate("a batch in the legacy stream", invalid_handle);
  if (batch.count == 0) return violate("a batch of nothing", invalid_value);
  const auto wrong = [](const char* what) {
    return violate(std::string("attributes of a batch ") + what, invalid_value);
  };
  if (batch.attribute_count == 0 || batch.attribute_count > batch.count) {
    return wrong("that are missing, or too many");
  }
  for (std::size_t i = 0; i < batch.attribute_count; ++i) {
    const std::size_t first = batch.first_of_attributes[i];
    if (i == 0 ? first != 0 : first <= batch.first_of_attributes[i - 1]) {
      return wrong("that do not ascend from 0");
    }
    if (first >= batch.count) return wrong("behind its end");
    const Attributes& each = batch.attributes[i];
    if (each.source_order < 1 || each.source_order > 3) return wrong("without an order");
    if (each.flags > 1) return wrong("with unknown flags");
  }
  return 0;
}

}  // namespace

bool is_memory(const std::byte* begin, std::size_t bytes, int device) {
  const auto found = holding(state().memory, begin);
  return found != state().memory.end() && begin + bytes <= found->first + found->second.bytes &&
         found->second.device == device;
}

Stream* stream_for_copies(void* handle, int& result) {
  const auto found = state().streams.find(reinterpret_cast<std::uintptr_t>(handle));
  if (found != state().streams.end() && found->second.device == current().back()) {
    return &found->second;
  }
  result = violate("a stream of another context", invalid_handle);
  return nullptr;
}

int add_copy(Stream& stream, const Copy& copy) {
  if (copy.bytes == 0) return violate("a copy of nothing", invalid_value);
  if (!is_memory(copy.to, copy.bytes, current().back())) {
    return violate("a copy outside of the device's memory", illegal_address);
  }
  if (!is_pinned(copy.from, copy.bytes)) {
    return violate("a copy from pageable memory", invalid_value);
  }
  stream.pending.push_back(copy);
  return 0;
}

int copy_batch(const char* function, const Batch& batch, std::size_t& failed) {
  const int number = state().calls[function];
  if (const int result = enter(function)) return result;
  if (const int result = in_context(function)) return result;
  if (const int result = check_batch(batch)) return result;
  int result = 0;
  Stream* const stream = stream_for_copies(batch.stream, result);
  if (stream == nullptr) return result;
  for (std::size_t i = 0; i < batch.count; ++i) {
    const auto asked = std::ranges::find_if(state().failures, [&](const Failure& each) {
      return each.function == function && each.number == number && each.position == i;
    });
    result = asked != state().failures.end()
                 ? asked->result
                 : add_copy(*stream, {const_cast<std::byte*>(address_of(batch.to[i])),
                                      address_of(batch.from[i]), batch.bytes[i]});
    if (result == 0) continue;
    failed = i;
    return result;
  }
  state().order += "batch " + std::to_string(reinterpret_cast<std::uintptr_t>(batch.stream)) + " " +
                   std::to_string(batch.count) + "\n";
  return 0;
}

}  // namespace fake_cuda

using namespace fake_cuda;

namespace {

std::string answer;  // buffer for the last returned string

}  // namespace

extern "C" {

void fake_cuda_reset() {
  const std::lock_guard lock(mutex());
  state() = {};
}

void fake_cuda_register(void* address, std::size_t bytes, int device) {
  const std::lock_guard lock(mutex());
  state().memory[static_cast<const std::byte*>(address)] = {bytes, device};
}

void fake_cuda_fail(const char* function, int number, int result) {
  const std::lock_guard lock(mutex());
  state().failures.push_back({function, number, result});
}

void fake_cuda_fail_copy(const char* function, int number, std::size_t position, int result) {
  const std::lock_guard lock(mutex());
  state().failures.push_back({function, number, result, position});
}

const char* fake_cuda_violations() {
  const std::lock_guard lock(mutex());
  return (answer = state().violations).c_str();
}

int fake_cuda_live() {
  const std::lock_guard lock(mutex());
  std::size_t count = state().pinned.size() + state().streams.size() + state().events.size();
  for (const auto& [device, times] : state().retained) count += static_cast<std::size_t>(times);
  return static_cast<int>(count);
}

std::size_t fake_cuda_pinned_peak() {
  const std::lock_guard lock(mutex());
  return state().pinned_peak;
}

int fake_cuda_calls(const char* function) {
  const std::lock_guard lock(mutex());
  const auto found = state().calls.find(function);
  return found == state().calls.end() ? 0 : found->second;
}

void fake_cuda_note(const char* line) {
  const std::lock_guard lock(mutex());
  state().order += std::string(line) + "\n";
}

const char* fake_cuda_order() {
  const std::lock_guard lock(mutex());
  return (answer = state().order).c_str();
}

}  // extern "C"

// Declares the state that the fake driver's functions share, see fake_cuda.h. There is one state
// per process, even if several versions of the driver are loaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace fake_cuda {

constexpr int invalid_value = 1;
constexpr int out_of_memory = 2;
constexpr int invalid_device = 101;
constexpr int invalid_context = 201;
constexpr int invalid_handle = 400;
constexpr int illegal_address = 700;
constexpr int not_supported = 801;
constexpr int device_count = 2;

struct Copy {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::size_t bytes = 0;
};

struct Stream {
  int device = 0;
  std::vector<Copy> pending{};
};

struct Event {
  int device = 0;
  std::uintptr_t stream = 0;
};

struct Range {
  std::size_t bytes = 0;
  int device = 0;
};

// Position of a failure that concerns the whole call, not a single copy.
constexpr std::size_t whole_call = SIZE_MAX;

struct Failure {
  std::string function;
  int number = 0;
  int result = 0;
  std::size_t position = whole_call;  // index of a copy in a batch
};

struct State {
  std::map<int, int> retained{};
  std::map<std::uintptr_t, Stream> streams{};
  std::map<std::uintptr_t, Event> events{};
  std::map<const std::byte*, std::size_t> pinned{};
  std::map<const std::byte*, Range> memory{};
  std::map<std::string, int> calls{};
  std::vector<Failure> failures{};
  std::uintptr_t next = 0x1000;
  std::size_t pinned_now = 0;
  std::size_t pinned_peak = 0;
  int lost = 0;  // if not 0, the result of every call
  std::string violations{};
  std::string order{};
};

// These structures have only the members of cuda.h that the fake driver uses.
struct Location {
  int type = 0;
  int id = 0;
};
struct Attributes {
  int source_order = 0;
  Location source{};
  Location target{};
  unsigned flags = 0;
};

// Arguments that both versions of cuMemcpyBatchAsync have.
struct Batch {
  const unsigned long long* to;
  const unsigned long long* from;
  const std::size_t* bytes;
  std::size_t count;
  const Attributes* attributes;
  const std::size_t* first_of_attributes;
  std::size_t attribute_count;
  void* stream;
};

std::mutex& mutex();
// Returns the state. The caller must lock mutex(), as for all functions below.
State& state();
// Returns the devices of the contexts that the calling thread has pushed.
std::vector<int>& current();

int violate(const std::string& what, int result);
// Counts a call. Returns the result that the function must return at once, or 0 to continue.
int enter(const std::string& function);
int in_context(const char* function);
bool is_memory(const std::byte* begin, std::size_t bytes, int device);
// Returns the current context's stream for a copy. On failure, returns null and sets `result`.
Stream* stream_for_copies(void* handle, int& result);
// Adds one copy to the stream. Returns the driver's error, or 0.
int add_copy(Stream& stream, const Copy& copy);
// Implements both versions of cuMemcpyBatchAsync. `failed` receives the index that the older
// version reports.
int copy_batch(const char* function, const Batch& batch, std::size_t& failed);

}  // namespace fake_cuda

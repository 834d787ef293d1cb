// Operator new that fails when it is told to, in this whole binary.
#pragma once

namespace loadstone::test {

// While one exists, every allocation of its thread throws std::bad_alloc.
class NoMemory {
 public:
  NoMemory() noexcept;
  ~NoMemory();
  NoMemory(const NoMemory&) = delete;
  NoMemory& operator=(const NoMemory&) = delete;
};

}  // namespace loadstone::test

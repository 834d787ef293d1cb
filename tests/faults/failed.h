// Helper for tests in which calls are expected to fail.
#pragma once

#include <gtest/gtest.h>

#include <new>
#include <string>

#include "loadstone/error.h"

namespace loadstone::test {

// Returns true if the work fails with an I/O or memory error. Other codes fail the test.
template <typename Work>
bool failed(const std::string& what, const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_TRUE(error.code().starts_with("io.") || error.code() == "memory.host")
        << what << ": " << error.what();
    return true;
  } catch (const std::bad_alloc&) {
    return true;
  }
  return false;
}

}  // namespace loadstone::test

#include "base/only_errors.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <new>
#include <stdexcept>
#include <system_error>

#include "support/errors.h"

namespace loadstone::test {
namespace {

template <typename Exception>
std::string code_for(const Exception& exception) {
  return code_of([&] { only_errors([&] { throw exception; }); });
}

TEST(OnlyErrors, HaveCodes) {
  const auto missing = std::make_error_code(std::errc::no_such_file_or_directory);
  const auto denied = std::make_error_code(std::errc::permission_denied);
  EXPECT_EQ(code_for(Error("st.hole", "x")), "st.hole");
  EXPECT_EQ(code_for(std::bad_alloc()), "memory.host");
  EXPECT_EQ(code_for(std::length_error("x")), "memory.host");
  EXPECT_EQ(code_for(std::filesystem::filesystem_error("x", "/p", missing)), "io.not_found");
  EXPECT_EQ(code_for(std::filesystem::filesystem_error("x", "/p", denied)), "io.denied");
  EXPECT_EQ(code_for(std::system_error(denied)), "internal");
  EXPECT_EQ(code_for(std::out_of_range("x")), "internal");
  EXPECT_EQ(code_for(7), "internal");
}

TEST(OnlyErrors, LeaveWhatTheCallerThrewAsItIs) {
  const auto thrown = std::make_exception_ptr(std::out_of_range("the caller's"));
  EXPECT_THROW(only_errors([&] { throw CallerException{thrown}; }), std::out_of_range);
}

// Inner functions may catch the Error for a broken file but must not catch std::bad_alloc, so only
// the outermost function converts std::bad_alloc to an Error.
TEST(OnlyErrors, AreMadeByTheOutermostFunction) {
  bool was_seen = false;
  const auto work = [&] {
    try {
      only_errors([] { throw std::bad_alloc(); });
    } catch (const std::bad_alloc&) {
      was_seen = true;
      throw;
    }
  };
  EXPECT_EQ(code_of([&] { only_errors(work); }), "memory.host");
  EXPECT_TRUE(was_seen);
  EXPECT_FALSE(Inside::current());
}

}  // namespace
}  // namespace loadstone::test

#include "base/only_errors.h"

#include <cxxabi.h>

#include <filesystem>
#include <new>
#include <stdexcept>
#include <system_error>

#include "loadstone/error.h"

namespace loadstone {

namespace {

const char* code_of(const std::error_code& problem) noexcept {
  if (problem == std::errc::no_such_file_or_directory) return "io.not_found";
  return problem == std::errc::permission_denied ? "io.denied" : "io.read";
}

}  // namespace

const std::exception_ptr& out_of_memory() noexcept {
  static const std::exception_ptr made =
      std::make_exception_ptr(Error("memory.host", "there is not enough memory"));
  return made;
}

// Made when the library is loaded, because memory may be exhausted later.
[[maybe_unused]] static const std::exception_ptr& made_early = out_of_memory();

void throw_as_error() {
  if (Inside::current()) throw;
  try {
    throw;
  } catch (const Error&) {
    throw;
  } catch (const abi::__forced_unwind&) {
    throw;  // the thread is being cancelled
  } catch (const CallerException& exception) {
    std::rethrow_exception(exception.thrown);
  } catch (const std::bad_alloc&) {
    std::rethrow_exception(out_of_memory());
  } catch (const std::length_error&) {  // a size larger than any container
    std::rethrow_exception(out_of_memory());
  } catch (const std::filesystem::filesystem_error& error) {
    throw Error(code_of(error.code()), "the system rejected the path",
                {.path = error.path1().string(), .system_error = error.code().value()});
  } catch (const std::system_error& error) {
    throw Error("internal", error.what(), {.system_error = error.code().value()});
  } catch (const std::exception& error) {
    throw Error("internal", error.what());
  } catch (...) {
    throw Error("internal", "an exception of an unknown type");
  }
}

}  // namespace loadstone

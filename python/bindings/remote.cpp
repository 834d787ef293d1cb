#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "base/only_errors.h"
#include "bindings.h"
#include "formats/document.h"
#include "storage/remote_environment.h"

namespace loadstone::python {

namespace {

using Words = std::map<std::string, std::string>;

// Returns the given options, which are keyed by name. The environment supplies absent options.
RemoteOptions options_from(const Words& environment, const Words& given) {
  RemoteOptions options = remote_options_from([&](const std::string& variable) {
    const auto found = environment.find(variable);
    return found == environment.end() ? std::string() : found->second;
  });
  const std::map<std::string, std::string*> known = {
      {"proxy", &options.proxy},
      {"no_proxy", &options.no_proxy},
      {"ca_file", &options.ca_file},
      {"hub_endpoint", &options.hub_endpoint},
      {"hub_token", &options.hub_token},
      {"s3_endpoint", &options.s3_endpoint},
      {"s3_region", &options.s3_region},
      {"s3_access_key", &options.s3_access_key},
      {"s3_secret_key", &options.s3_secret_key},
      {"s3_session_token", &options.s3_session_token},
  };
  for (const auto& [name, value] : given) *known.at(name) = value;
  return options;
}

// Handles Ctrl-C while the main thread itself waits, for example to open a checkpoint. During a
// load, the observer stops the threads instead.
bool is_interrupted(unsigned long main_thread) {
  if (PyThread_get_thread_ident() != main_thread) return false;
  // Limits the checks to 20 per second, because libcurl calls this function for each packet.
  static std::chrono::steady_clock::time_point next;  // used only by the main thread
  const auto now = std::chrono::steady_clock::now();
  if (now < next) return false;
  next = now + std::chrono::milliseconds(50);
  const nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() == 0) return false;
  try {
    nb::raise_python_error();
  } catch (...) {
    throw CallerException{std::current_exception()};
  }
}

}  // namespace

void bind_remote(nb::module_& module) {
  nb::class_<Storage>(module, "Storage");
  // The storage lives as long as the process, because catalogs and plans that read through it may.
  module.def(
      "remote_storage",
      [](const Words& environment, const Words& given, unsigned long main_thread) {
        RemoteOptions options = options_from(environment, given);
        options.is_stopped = [main_thread] { return is_interrupted(main_thread); };
        return make_remote_storage(std::move(options)).release();
      },
      nb::rv_policy::reference, nb::arg("environment"), nb::arg("given"), nb::arg("main_thread"),
      uses_files());
  module.def(
      "write_document",
      [](const std::string& path, std::string_view text) { write_document(path, text); },
      nb::arg("path"), nb::arg("text"), uses_files());
  module.def(
      "is_remote", [](std::string_view path) { return is_remote(path); }, nb::arg("path"));
}

}  // namespace loadstone::python

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "bindings.h"
#include "storage/remote_environment.h"

namespace loadstone::python {

namespace {

using Words = std::map<std::string, std::string>;

// By the options' names; those that are absent are the environment's.
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

}  // namespace

void bind_remote(nb::module_& module) {
  nb::class_<Storage>(module, "Storage");
  // It lives as long as the process, as catalogs and plans may that are read through it.
  module.def(
      "remote_storage",
      [](const Words& environment, const Words& given) {
        return make_remote_storage(options_from(environment, given)).release();
      },
      nb::rv_policy::reference, nb::arg("environment"), nb::arg("given"));
  module.def(
      "is_remote", [](std::string_view path) { return is_remote(path); }, nb::arg("path"));
}

}  // namespace loadstone::python

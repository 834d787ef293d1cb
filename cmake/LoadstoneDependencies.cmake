# The libraries that loadstone depends on: an installed version is preferred, else a pinned version
# is fetched. The minimum versions are Debian 12's, and by default the pinned versions too.

include(FetchContent)
find_package(Threads REQUIRED)

# loadstone_require(NAME TARGET VERSION APT-PACKAGE REPOSITORY TAG)
# A macro, because packages set variables (NAME_VERSION, NAME_SOURCE_DIR) that are read afterwards.
macro(loadstone_require name target version apt repository tag)
  find_package(${name} QUIET)
  if(TARGET ${target} AND NOT "${${name}_VERSION}" VERSION_LESS "${version}")
    string(STRIP "${${name}_VERSION} (found)" text)
    loadstone_note(${name} "${text}")
  elseif(LOADSTONE_FETCH AND NOT TARGET ${target})
    message(STATUS "${name} ${version} or later is not installed (package ${apt}): fetching ${tag}")
    # Old releases request policies that CMake 4 removed.
    set(CMAKE_POLICY_VERSION_MINIMUM 3.5)
    FetchContent_Declare(${name} GIT_REPOSITORY ${repository} GIT_TAG ${tag} GIT_SHALLOW ON SYSTEM)
    FetchContent_MakeAvailable(${name})
    if(NOT TARGET ${target} AND TARGET ${name})
      add_library(${target} ALIAS ${name})
    endif()
    loadstone_note(${name} "${tag} (fetched)")
  else()
    message(FATAL_ERROR "loadstone needs ${name} ${version} or later, found "
      "'${${name}_VERSION}'. Install the package ${apt}, or configure with -DLOADSTONE_FETCH=ON "
      "to fetch ${tag} from ${repository} (where an older one is installed, also with "
      "-DCMAKE_DISABLE_FIND_PACKAGE_${name}=ON).")
  endif()
endmacro()

# Keeps fetched projects from building and installing anything but their library. A linked library
# is installed with loadstone, because users of the static library need it too.
set(CMAKE_POLICY_DEFAULT_CMP0077 NEW)  # their options heed the variables set here
set(BUILD_TESTING OFF)
set(FMT_INSTALL ON)
set(HWY_ENABLE_TESTS OFF)
set(HWY_ENABLE_EXAMPLES OFF)
set(HWY_ENABLE_CONTRIB OFF)
set(RE2_BUILD_TESTING OFF)
set(INSTALL_GTEST OFF)
set(BENCHMARK_ENABLE_TESTING OFF)
set(BENCHMARK_ENABLE_INSTALL OFF)
set(CLI11_BUILD_TESTS OFF)
set(CLI11_BUILD_EXAMPLES OFF)

set(github "https://github.com")
loadstone_require(simdjson simdjson::simdjson 3.0.1 libsimdjson-dev
  ${github}/simdjson/simdjson.git v3.0.1)
loadstone_require(fmt fmt::fmt 9.1 libfmt-dev ${github}/fmtlib/fmt.git 9.1.0)
# The first Highway versions had no CMake package, so a later one is fetched.
loadstone_require(hwy hwy::hwy 1.0.3 libhwy-dev ${github}/google/highway.git 1.2.0)
loadstone_require(re2 re2::re2 0 libre2-dev ${github}/google/re2.git 2022-06-01)
loadstone_require(xxHash xxHash::header 0.8.1 libxxhash-dev ${github}/Cyan4973/xxHash.git v0.8.1)
if(NOT TARGET xxHash::header)  # fetched: it has no top-level CMakeLists.txt, and needs none
  add_library(xxHash::header INTERFACE IMPORTED)
  target_include_directories(xxHash::header INTERFACE "${xxhash_SOURCE_DIR}")
endif()

# Optional: without it, loadstone rejects remote paths.
if(LOADSTONE_REMOTE)
  find_package(CURL 7.85 QUIET)
endif()
if(TARGET CURL::libcurl)
  loadstone_note(libcurl "${CURL_VERSION_STRING} (found)")
elseif(LOADSTONE_REMOTE)
  loadstone_note(libcurl "not found (package libcurl4-openssl-dev): no https://, hf://, s3://")
else()
  loadstone_note(libcurl "not wanted: no https://, hf://, s3://")
endif()

# Optional: without it, receipts have XXH3-128 only.
find_package(OpenSSL 3.0 QUIET COMPONENTS Crypto)
if(TARGET OpenSSL::Crypto)
  loadstone_note(OpenSSL "${OPENSSL_VERSION} (found)")
else()
  loadstone_note(OpenSSL "not found (package libssl-dev): no receipts by sha256-tree")
endif()

if(LOADSTONE_BUILD_CLI)
  loadstone_require(CLI11 CLI11::CLI11 2.1.2 libcli11-dev ${github}/CLIUtils/CLI11.git v2.1.2)
endif()
if(LOADSTONE_BUILD_TESTS)
  loadstone_require(GTest GTest::gmock 1.12 "libgtest-dev, libgmock-dev"
    ${github}/google/googletest.git release-1.12.1)
endif()
if(LOADSTONE_BUILD_BENCH)
  loadstone_require(benchmark benchmark::benchmark 1.7.1 libbenchmark-dev
    ${github}/google/benchmark.git v1.7.1)
endif()

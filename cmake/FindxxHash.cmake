# Only the header is used, so each file that includes it must define XXH_INLINE_ALL first.
find_path(xxHash_INCLUDE_DIR xxhash.h)
mark_as_advanced(xxHash_INCLUDE_DIR)
if(xxHash_INCLUDE_DIR)
  set(version_regex "^#define XXH_VERSION_(MAJOR|MINOR|RELEASE) +([0-9]+).*")
  file(STRINGS "${xxHash_INCLUDE_DIR}/xxhash.h" lines REGEX "${version_regex}")
  list(TRANSFORM lines REPLACE "${version_regex}" "\\2")
  list(JOIN lines "." xxHash_VERSION)
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(xxHash
  REQUIRED_VARS xxHash_INCLUDE_DIR VERSION_VAR xxHash_VERSION)
if(xxHash_FOUND AND NOT TARGET xxHash::header)
  add_library(xxHash::header INTERFACE IMPORTED)
  set_target_properties(xxHash::header PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${xxHash_INCLUDE_DIR}")
endif()

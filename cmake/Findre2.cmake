# Debian 12 ships RE2 without a CMake package: use the package if it exists, else the files.
find_package(re2 CONFIG QUIET)
if(NOT TARGET re2::re2)
  find_path(re2_INCLUDE_DIR re2/re2.h)
  find_library(re2_LIBRARY re2)
  mark_as_advanced(re2_INCLUDE_DIR re2_LIBRARY)
  if(re2_INCLUDE_DIR AND re2_LIBRARY)
    find_package(Threads REQUIRED)
    add_library(re2::re2 UNKNOWN IMPORTED)
    set_target_properties(re2::re2 PROPERTIES
      IMPORTED_LOCATION "${re2_LIBRARY}"
      INTERFACE_INCLUDE_DIRECTORIES "${re2_INCLUDE_DIR}"
      INTERFACE_LINK_LIBRARIES Threads::Threads)
  endif()
endif()
include(FindPackageHandleStandardArgs)
if(TARGET re2::re2)
  set(re2_target re2::re2)
endif()
find_package_handle_standard_args(re2 REQUIRED_VARS re2_target)

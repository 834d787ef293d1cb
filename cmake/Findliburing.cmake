# liburing has a pkg-config file and no CMake package; the header names its version since 2.4.
find_path(liburing_INCLUDE_DIR liburing.h)
find_library(liburing_LIBRARY uring)
mark_as_advanced(liburing_INCLUDE_DIR liburing_LIBRARY)
find_package(PkgConfig QUIET)
if(PkgConfig_FOUND)
  pkg_check_modules(liburing_PC QUIET liburing)
endif()
set(liburing_VERSION "${liburing_PC_VERSION}")
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(liburing
  REQUIRED_VARS liburing_LIBRARY liburing_INCLUDE_DIR VERSION_VAR liburing_VERSION)
if(liburing_FOUND AND NOT TARGET liburing::liburing)
  add_library(liburing::liburing UNKNOWN IMPORTED)
  set_target_properties(liburing::liburing PROPERTIES
    IMPORTED_LOCATION "${liburing_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${liburing_INCLUDE_DIR}")
endif()

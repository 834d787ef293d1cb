# `cmake --install` and the files that find_package(loadstone) reads. A wheel installs only the
# component `python`, so it contains none of them.
include(CMakePackageConfigHelpers)
set(package_folder "${CMAKE_INSTALL_LIBDIR}/cmake/loadstone")

install(TARGETS loadstone EXPORT loadstoneTargets)
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/loadstone" TYPE INCLUDE FILES_MATCHING PATTERN *.h)
install(EXPORT loadstoneTargets NAMESPACE loadstone:: DESTINATION ${package_folder})
if(TARGET loadstone_shared)  # for a test that replaces the other kind
  install(TARGETS loadstone_shared EXPORT loadstoneSharedTargets COMPONENT shared EXCLUDE_FROM_ALL)
  install(EXPORT loadstoneSharedTargets NAMESPACE loadstone:: DESTINATION ${package_folder}
    COMPONENT shared EXCLUDE_FROM_ALL)
endif()
if(TARGET loadstone_cli)
  install(TARGETS loadstone_cli)
  if(TARGET loadstone_command_pages)  # manual page and shell completions
    install(DIRECTORY "${PROJECT_BINARY_DIR}/cli/share/" TYPE DATA)
  endif()
endif()

configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/loadstoneConfig.cmake.in" loadstoneConfig.cmake
  INSTALL_DESTINATION ${package_folder} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(loadstoneConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  "${CMAKE_CURRENT_BINARY_DIR}/loadstoneConfig.cmake"
  "${CMAKE_CURRENT_BINARY_DIR}/loadstoneConfigVersion.cmake"
  "${PROJECT_SOURCE_DIR}/cmake/Findre2.cmake"
  DESTINATION ${package_folder})
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" TYPE DOC)

# For programs without CMake. The paths are relative, so the folder may move.
set(pc_folder "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
cmake_path(RELATIVE_PATH CMAKE_INSTALL_PREFIX BASE_DIRECTORY "${CMAKE_INSTALL_PREFIX}/${pc_folder}"
  OUTPUT_VARIABLE loadstone_pc_prefix)
set(loadstone_pc_requires "")
if(NOT BUILD_SHARED_LIBS)  # programs that link a static library link these too
  set(loadstone_pc_requires "simdjson fmt libhwy re2")
  if(TARGET CURL::libcurl)
    string(APPEND loadstone_pc_requires " libcurl")
  endif()
  if(TARGET OpenSSL::Crypto)
    string(APPEND loadstone_pc_requires " libcrypto")
  endif()
endif()
configure_file("${PROJECT_SOURCE_DIR}/cmake/loadstone.pc.in" loadstone.pc @ONLY)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/loadstone.pc" DESTINATION ${pc_folder})

# A user's programs: installs loadstone into a folder, builds examples/cpp_consumer and
# examples/own_buffers against it, and runs them. Run by ctest, which passes BUILD, SOURCE, WORK,
# COMPILER and NINJA. SHARED: with the shared library; NEEDS_COMPONENT: it is a separate component.
function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE "${WORK}")
run("${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${WORK}/prefix")
if(NEEDS_COMPONENT)
  run("${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${WORK}/prefix" --component shared)
  file(GLOB_RECURSE targets "${WORK}/prefix/loadstoneSharedTargets.cmake")
  string(REPLACE "SharedTargets.cmake" "Targets.cmake" replaced "${targets}")
  file(RENAME "${targets}" "${replaced}")
endif()
run("${CMAKE_COMMAND}" -S "${SOURCE}" -B "${WORK}/build" -G Ninja
  "-DCMAKE_MAKE_PROGRAM=${NINJA}" "-DCMAKE_CXX_COMPILER=${COMPILER}" -DCMAKE_BUILD_TYPE=Release
  "-DCMAKE_PREFIX_PATH=${WORK}/prefix")
run("${CMAKE_COMMAND}" --build "${WORK}/build")
run("${WORK}/build/cpp_consumer" "${WORK}/checkpoint")
file(GET_RUNTIME_DEPENDENCIES EXECUTABLES "${WORK}/build/cpp_consumer"
  RESOLVED_DEPENDENCIES_VAR libraries)
list(FILTER libraries INCLUDE REGEX "^${WORK}/prefix/.*/libloadstone\\.so\\.0\\.1$")
if(SHARED AND NOT libraries OR libraries AND NOT SHARED)
  message(FATAL_ERROR "linked with the other kind of library: '${libraries}'")
endif()
run("${CMAKE_COMMAND}" -S "${SOURCE}/../own_buffers" -B "${WORK}/own_buffers" -G Ninja
  "-DCMAKE_MAKE_PROGRAM=${NINJA}" "-DCMAKE_CXX_COMPILER=${COMPILER}" -DCMAKE_BUILD_TYPE=Release
  "-DCMAKE_PREFIX_PATH=${WORK}/prefix")
run("${CMAKE_COMMAND}" --build "${WORK}/own_buffers")
run("${WORK}/own_buffers/own_buffers" "${WORK}/checkpoint" "${WORK}/saved.safetensors" 2)
run("${WORK}/prefix/bin/loadstone" verify "${WORK}/checkpoint" "${WORK}/saved.safetensors")
execute_process(COMMAND "${WORK}/own_buffers/own_buffers" "${WORK}/checkpoint"
  "${WORK}/cancelled.safetensors" 1 0 RESULT_VARIABLE status ERROR_VARIABLE text)
if(NOT status EQUAL 130 OR NOT text MATCHES "cancelled" OR EXISTS "${WORK}/cancelled.safetensors")
  message(FATAL_ERROR "a load that is cancelled ends with ${status}: '${text}'")
endif()
run("${WORK}/prefix/bin/loadstone" --version)
foreach(page man/man1/loadstone.1 bash-completion/completions/loadstone
    zsh/site-functions/_loadstone fish/vendor_completions.d/loadstone.fish)
  file(READ "${WORK}/prefix/share/${page}" text)
  if(NOT text MATCHES "device.*map")
    message(FATAL_ERROR "share/${page} does not name --device-map")
  endif()
endforeach()

# The same with pkg-config, from a folder that has moved.
find_program(pkg_config pkg-config)
if(pkg_config AND NOT SHARED)
  file(RENAME "${WORK}/prefix" "${WORK}/moved")
  file(GLOB_RECURSE files "${WORK}/moved/*/loadstone.pc")
  cmake_path(GET files PARENT_PATH folder)
  set(ENV{PKG_CONFIG_PATH} "${folder}")
  execute_process(COMMAND "${pkg_config}" --cflags --libs loadstone OUTPUT_VARIABLE flags
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  run("${COMPILER}" -std=c++20 "${SOURCE}/main.cpp" "${SOURCE}/make_checkpoint.cpp" ${flags}
    -o "${WORK}/by_pkg_config")
  run("${WORK}/by_pkg_config" "${WORK}/checkpoint_2")
endif()

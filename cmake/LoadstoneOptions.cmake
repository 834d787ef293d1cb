# How every target of this project is compiled, and how its sources are found.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)  # the static library ends up in a Python extension
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)    # for clang-tidy
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CCACHE_PROGRAM}")
endif()

# -ffp-contract=off: a fused multiply-add rounds once where two operations round twice, so results
# would depend on the instruction set. Values must be the same bytes everywhere.
# -Werror=switch: who adds an enumerator is led to all that decides by it.
# -Wno-missing-field-initializers: {.path = path} leaves the other fields to their defaults.
# -Wno-restrict: GCC 12 sees overlaps inside std::string that are not there (its bug 105651).
function(loadstone_target_options target)
  target_compile_options(${target} PRIVATE
    -ffp-contract=off -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror=switch
    -Wno-missing-field-initializers $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>
    $<$<BOOL:${LOADSTONE_WERROR}>:-Werror>)
  if(LOADSTONE_SANITIZE)
    set(flags "-fsanitize=${LOADSTONE_SANITIZE}" -fno-sanitize-recover=all
      -fno-omit-frame-pointer)
    target_compile_options(${target} PRIVATE ${flags})
    # PUBLIC for a library: whoever links it needs the sanitizer's runtime.
    target_link_options(${target} PUBLIC ${flags})
  endif()
  if(LOADSTONE_ONE_VECTOR_ISA)
    target_compile_definitions(${target} PRIVATE
      "HWY_DISABLED_TARGETS=(HWY_AVX3_DL|HWY_AVX3|HWY_SSE4|HWY_SSSE3)")
  endif()
  if(LOADSTONE_BUILD_FUZZ)
    target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
  endif()
endfunction()

# Sources are globbed, folder by folder: each of their files belongs to it, so a
# list beside it would say the same again. CONFIGURE_DEPENDS makes the build look for new files.
function(loadstone_glob variable)
  file(GLOB found CONFIGURE_DEPENDS ${ARGN})
  set(${variable} ${found} PARENT_SCOPE)
endfunction()

# Compiles the files of each folder eight at a time, in less than half the processor time. Batches
# end with a folder, so a new file leaves the objects of other folders to ccache. Kernels, which
# Highway includes once for each instruction set, are compiled alone.
function(loadstone_unity target)
  if(NOT LOADSTONE_UNITY)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "[.]cpp$")
  list(FILTER sources EXCLUDE REGEX "/kernels/")
  list(FILTER sources EXCLUDE REGEX "^${PROJECT_BINARY_DIR}/")  # made by this build
  set(previous "")
  foreach(source IN LISTS sources)
    get_filename_component(folder "${source}" DIRECTORY)
    file(RELATIVE_PATH folder "${PROJECT_SOURCE_DIR}" "${folder}")
    if(NOT folder STREQUAL previous)
      set(count 0)
      set(previous "${folder}")
    endif()
    math(EXPR batch "${count} / 8")
    math(EXPR count "${count} + 1")
    set_source_files_properties("${source}" PROPERTIES UNITY_GROUP "${folder}/${batch}")
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP
    UNITY_BUILD_RELOCATABLE ON)  # from CMake 4.0 on: other checkouts find the objects in ccache
  # GCC takes the files of a batch for headers, where this warning has its reason.
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
endfunction()

# One line a time, printed together when the configuration is complete.
function(loadstone_note name text)
  string(LENGTH "${name}" length)
  math(EXPR padding "18 - ${length}")
  string(REPEAT " " ${padding} spaces)
  set_property(GLOBAL APPEND PROPERTY loadstone_notes "  ${name}${spaces}${text}")
endfunction()

function(loadstone_print_summary)
  get_property(notes GLOBAL PROPERTY loadstone_notes)
  list(JOIN notes "\n" text)
  message(STATUS "loadstone ${PROJECT_VERSION}, ${CMAKE_BUILD_TYPE}, "
    "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\n${text}")
endfunction()

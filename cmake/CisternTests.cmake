# The tests, *_test.cc of a layer's folder and one folder deeper: a program tests/LAYER_NAME and a
# ctest entry LAYER/NAME for each. Torch-free tests (of base, kernels, io and text) link the light
# layers alone.
#
# With CISTERN_UNITY the tests of a layer are compiled eight files at a time (join_tests.cmake) into
# one program, tests/LAYER_tests, since headers cost more time than tests; each LAYER_NAME is a link
# to it, by which it runs the tests of that file alone (test_main.cc). What a file does before main,
# such as kOneThread of ops/testing.h, then holds for all tests of its layer. Not those of the
# kernels, which are compiled for several processors.
find_package(GTest REQUIRED)

# The headers that nearly every test reads, read once: more than half of the time of a compilation.
# -O1: a test's own code need not be fast, and what it tests is built apart.
function(cistern_test_headers target library)
  add_executable(${target} EXCLUDE_FROM_ALL cmake/test_headers.cc)
  target_link_libraries(${target} PRIVATE ${library} GTest::gtest)
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
  cistern_warnings(${target})
  target_precompile_headers(${target} PRIVATE ${ARGN})
endfunction()
cistern_test_headers(cistern_light_test_headers cistern_light <gtest/gtest.h> <nlohmann/json.hpp>)
add_library(cistern_light_test_main OBJECT cmake/test_main.cc)
target_link_libraries(cistern_light_test_main PRIVATE GTest::gtest)
cistern_warnings(cistern_light_test_main)
if(NOT CISTERN_KERNELS_ONLY)
  cistern_test_headers(cistern_torch_test_headers cistern <ATen/ATen.h> <gtest/gtest.h>
    <nlohmann/json.hpp> <torch/nn/module.h>)
  cistern_quick_torch(cistern_torch_test_headers)
  add_library(cistern_torch_test_main OBJECT cmake/test_main.cc)
  target_link_libraries(cistern_torch_test_main PRIVATE cistern GTest::gtest)
  target_compile_definitions(cistern_torch_test_main PRIVATE CISTERN_TEST_TORCH)
  cistern_warnings(cistern_torch_test_main)
endif()

# A program of tests of a layer. read_by: the files that its sources come from.
function(cistern_test_program target layer light sources read_by)
  add_executable(${target} ${sources})
  if(light)
    target_link_libraries(${target} PRIVATE cistern_light cistern_light_test_main GTest::gtest)
    set(headers cistern_light_test_headers)
  else()
    target_link_libraries(${target} PRIVATE cistern cistern_torch_test_main GTest::gtest)
    set(headers cistern_torch_test_headers)
    cistern_quick_torch(${target})
  endif()
  if(NOT layer STREQUAL "kernels")  # whose tests compare with long plain loops: fully optimised
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
    target_precompile_headers(${target} REUSE_FROM ${headers})
  endif()
  foreach(source IN LISTS read_by)
    file(STRINGS ${source} rapidcheck REGEX "include <rapidcheck")
    if(rapidcheck)
      find_package(rapidcheck REQUIRED CONFIG)
      target_link_libraries(${target} PRIVATE rapidcheck)
    endif()
  endforeach()
  if(TorchWheel_FOUND)
    set_target_properties(${target} PROPERTIES BUILD_RPATH "${TorchWheel_RPATH}")
  endif()
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  cistern_warnings(${target})
  if(layer STREQUAL "cli" AND TARGET cistern_cli)  # they start the program
    add_dependencies(${target} cistern_cli)
  endif()
endfunction()

# All tests of a layer, in one program and with a link to it for each file.
function(cistern_joined_tests layer light sources)
  set(batches)
  list(LENGTH sources count)
  math(EXPR last "${count} - 1")
  foreach(begin RANGE 0 ${last} 8)
    list(SUBLIST sources ${begin} 8 files)
    set(batch ${CMAKE_BINARY_DIR}/tests/${layer}_from_${begin}.cc)
    set(names ${files})
    list(TRANSFORM names REPLACE "^${PROJECT_SOURCE_DIR}/" "")
    add_custom_command(OUTPUT ${batch} VERBATIM
      COMMAND ${CMAKE_COMMAND} -P ${PROJECT_SOURCE_DIR}/cmake/join_tests.cmake ${batch} ${names}
      WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
      DEPENDS ${files} ${PROJECT_SOURCE_DIR}/cmake/join_tests.cmake)
    list(APPEND batches ${batch})
  endforeach()
  cistern_test_program(${layer}_tests ${layer} ${light} "${batches}" "${sources}")
  foreach(source IN LISTS sources)
    cmake_path(GET source STEM name)
    add_custom_command(TARGET ${layer}_tests POST_BUILD VERBATIM COMMAND ${CMAKE_COMMAND} -E
      create_symlink ${layer}_tests ${CMAKE_BINARY_DIR}/tests/${layer}_${name})
  endforeach()
endfunction()

function(cistern_layer_tests layer light)
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/cistern/${layer}/*_test.cc
    ${PROJECT_SOURCE_DIR}/cistern/${layer}/*/*_test.cc)
  if(CISTERN_UNITY AND NOT layer STREQUAL "kernels")
    cistern_joined_tests(${layer} ${light} "${sources}")
  else()
    foreach(source IN LISTS sources)
      cmake_path(GET source STEM name)
      cistern_test_program(${layer}_${name} ${layer} ${light} ${source} ${source})
    endforeach()
  endif()
  foreach(source IN LISTS sources)
    cmake_path(GET source STEM name)
    add_test(NAME ${layer}/${name} COMMAND ${CMAKE_BINARY_DIR}/tests/${layer}_${name})
    set_tests_properties(${layer}/${name} PROPERTIES ENVIRONMENT
      "CISTERN_SOURCE_DIR=${PROJECT_SOURCE_DIR};CISTERN_BINARY=${CMAKE_BINARY_DIR}/cistern")
  endforeach()
endfunction()

foreach(layer base kernels io text)
  cistern_layer_tests(${layer} TRUE)
endforeach()
if(NOT CISTERN_KERNELS_ONLY)
  foreach(layer IN LISTS CISTERN_TORCH_LAYERS ITEMS cli)
    cistern_layer_tests(${layer} FALSE)
  endforeach()
endif()

# libFuzzer targets: fuzz/fuzz_NAME.cc, with seeds in fuzz/seeds/NAME. Run one with
#   build/fuzz/fuzz_npy -max_total_time=60 CORPUS_FOLDER fuzz/seeds/npy
# all of them with scripts/fuzz. `ctest -R fuzz` runs the seeds once.
if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "CISTERN_FUZZ needs clang: use the preset 'fuzz'")
endif()
enable_testing()
add_compile_options(-fsanitize=fuzzer-no-link)
# The torch-free readers of the layers above.
add_library(cistern_fuzz_data OBJECT cistern/data/listops.cc cistern/data/listops_file.cc
  cistern/data/token_cache.cc
  cistern/train/run_state.cc)
target_link_libraries(cistern_fuzz_data PUBLIC cistern_base cistern_io cistern_text)
foreach(layer base io text fuzz_data)  # the kernels read no files
  target_compile_options(cistern_${layer} PRIVATE -fsanitize=fuzzer-no-link)
endforeach()
file(GLOB fuzz_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/fuzz/fuzz_*.cc)
foreach(source IN LISTS fuzz_sources)
  cmake_path(GET source STEM target)
  string(REPLACE "fuzz_" "" name ${target})
  add_executable(${target} ${source})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${target} PRIVATE cistern_base cistern_io cistern_text cistern_fuzz_data)
  target_link_options(${target} PRIVATE -fsanitize=fuzzer)
  cistern_warnings(${target})
  file(GLOB seeds CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/fuzz/seeds/${name}/*)
  if(seeds)
    add_test(NAME fuzz/${name} COMMAND ${target} -runs=0 ${PROJECT_SOURCE_DIR}/fuzz/seeds/${name})
  endif()
endforeach()

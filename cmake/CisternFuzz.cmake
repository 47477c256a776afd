# libFuzzer targets: fuzz/fuzz_NAME.cc, with seeds in fuzz/seeds/NAME. Run one with
#   build/fuzz/fuzz_jsonl -max_total_time=60 CORPUS_FOLDER fuzz/seeds/jsonl
# all of them with scripts/fuzz. `ctest -R fuzz` runs the seeds once.
if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "CISTERN_FUZZ needs clang: use the preset 'fuzz'")
endif()
enable_testing()
add_compile_options(-fsanitize=fuzzer-no-link)
# The torch-free readers of the layers above.
add_library(cistern_fuzz_data OBJECT cistern/data/interruptible.cc cistern/data/listops.cc
  cistern/data/listops_file.cc cistern/data/token_cache.cc cistern/data/images.cc
  cistern/data/pathfinder.cc
  cistern/data/pathfinder_file.cc cistern/data/text_pairs.cc
  cistern/tasks/labelled_rows.cc cistern/tasks/questions.cc cistern/tasks/sentence_pairs.cc
  cistern/train/run_state.cc)
target_link_libraries(cistern_fuzz_data PUBLIC cistern_base cistern_io cistern_text)
foreach(layer base io text fuzz_data)  # the kernels read no files
  target_compile_options(cistern_${layer} PRIVATE -fsanitize=fuzzer-no-link)
endforeach()
# Targets that need torch are linked with the libcistern.so of another build: torch is not built for
# sanitizers. The readers themselves are compiled here, for libFuzzer to see their branches; they
# replace those of the library.
set(CISTERN_FUZZ_LIBRARY "" CACHE FILEPATH
    "libcistern.so of a release build: builds the targets that need torch, too")
set(fuzz_with_torch config experiment state)
if(CISTERN_FUZZ_LIBRARY)
  add_library(cistern_fuzz_torch OBJECT cistern/attention/head_groups.cc cistern/models/config.cc
    cistern/models/config_versions.cc cistern/models/stack.cc cistern/models/model_state_file.cc
    cistern/decode/text_state.cc cistern/cli/analysis_log.cc cistern/cli/experiment.cc
    cistern/cli/published.cc)
  target_include_directories(cistern_fuzz_torch PUBLIC ${PROJECT_SOURCE_DIR})
  target_include_directories(cistern_fuzz_torch SYSTEM PUBLIC ${TorchWheel_INCLUDE_DIRS})
  target_compile_options(cistern_fuzz_torch PRIVATE -fno-sanitize=address,undefined)
  target_link_libraries(cistern_fuzz_torch PUBLIC nlohmann_json::nlohmann_json
    ${CISTERN_FUZZ_LIBRARY} TorchWheel::torch_cpu TorchWheel::gomp)
endif()
file(GLOB fuzz_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/fuzz/fuzz_*.cc)
foreach(source IN LISTS fuzz_sources)
  cmake_path(GET source STEM target)
  string(REPLACE "fuzz_" "" name ${target})
  if(name IN_LIST fuzz_with_torch AND NOT CISTERN_FUZZ_LIBRARY)
    continue()
  endif()
  add_executable(${target} ${source})
  if(name IN_LIST fuzz_with_torch)
    target_link_libraries(${target} PRIVATE cistern_fuzz_torch)
    target_compile_options(${target} PRIVATE -fno-sanitize=address,undefined)
    target_link_options(${target} PRIVATE -fno-sanitize=address,undefined -fsanitize=fuzzer)
    set_target_properties(${target} PROPERTIES BUILD_RPATH "${TorchWheel_RPATH}")
  else()
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
    target_link_libraries(${target} PRIVATE cistern_base cistern_io cistern_text cistern_fuzz_data)
    target_link_options(${target} PRIVATE -fsanitize=fuzzer)
    cistern_warnings(${target})
  endif()
  file(GLOB seeds CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/fuzz/seeds/${name}/*)
  if(seeds)
    add_test(NAME fuzz/${name} COMMAND ${target} -runs=0 ${PROJECT_SOURCE_DIR}/fuzz/seeds/${name})
  endif()
endforeach()

# Compiler settings of our own code, and the layers of cistern/ as object libraries.

function(cistern_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wno-unknown-pragmas)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # false alarms on string concatenation (GCC bug 105651)
    target_compile_options(${target} PRIVATE -Wno-restrict)
  endif()
  if(CISTERN_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()

if(CISTERN_SANITIZE)
  add_compile_options(-fsanitize=${CISTERN_SANITIZE} -fno-omit-frame-pointer
    -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${CISTERN_SANITIZE})
endif()
if(CISTERN_LEFT_OUT_TARGETS)
  add_compile_definitions("CISTERN_LEFT_OUT_TARGETS=(${CISTERN_LEFT_OUT_TARGETS})")
endif()

# The headers that most files above the kernels read, read once for all of them: they are two thirds
# of the time of a batch's compilation. Only with CISTERN_UNITY: without it every file must include
# what it needs.
function(cistern_torch_headers)
  add_library(cistern_torch_headers OBJECT ${PROJECT_SOURCE_DIR}/cmake/torch_headers.cc)
  cistern_torch_options(cistern_torch_headers)
  target_link_libraries(cistern_torch_headers PRIVATE nlohmann_json::nlohmann_json)
  cistern_warnings(cistern_torch_headers)
  target_precompile_headers(cistern_torch_headers PRIVATE <ATen/ATen.h> <nlohmann/json.hpp>
    <torch/nn/module.h>)
endfunction()

# What saves time where a file includes torch, and changes nothing else: a header that stands for a
# long one (torch_declared/), and less collecting of the compiler's own memory.
function(cistern_quick_torch target)
  target_include_directories(${target} SYSTEM BEFORE PRIVATE
    ${PROJECT_SOURCE_DIR}/cmake/torch_declared)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE --param=ggc-min-expand=300
      --param=ggc-min-heapsize=1000000)
  endif()
endfunction()

# How files that include torch are compiled.
function(cistern_torch_options target)
  cistern_quick_torch(${target})
  target_include_directories(${target} SYSTEM PUBLIC ${TorchWheel_INCLUDE_DIRS})
  target_link_libraries(${target} PUBLIC TorchWheel::torch_cpu)
  # -O3 costs an eighth of the compilation; loops over numbers are in kernels and libtorch.
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O2>)
endfunction()

# cistern_layer(NAME [TORCH] [NO_UNITY] [LINK lib...]): cistern/NAME/*.cc and one folder deeper,
# without tests and benchmarks.
function(cistern_layer name)
  cmake_parse_arguments(arg "TORCH;NO_UNITY" "" "LINK" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/cistern/${name}/*.cc
    ${PROJECT_SOURCE_DIR}/cistern/${name}/*/*.cc)
  list(FILTER sources EXCLUDE REGEX "_(test|bench|fuzz)\\.cc$")
  if(NOT sources)
    return()
  endif()
  set(target cistern_${name})
  add_library(${target} OBJECT ${sources})
  cistern_warnings(${target})
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_link_libraries(${target} PUBLIC ${arg_LINK} nlohmann_json::nlohmann_json)
  if(arg_TORCH)
    cistern_torch_options(${target})
    if(CISTERN_UNITY)
      target_precompile_headers(${target} REUSE_FROM cistern_torch_headers)
    endif()
  endif()
  if(CISTERN_UNITY AND NOT arg_NO_UNITY)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 20)
  endif()
  if(name STREQUAL "train")  # what the wheel lacks of Gloo: names (gloo/names.h)
    target_include_directories(${target} SYSTEM PRIVATE ${PROJECT_SOURCE_DIR}/cmake/gloo)
  endif()
  if(name STREQUAL "base")
    target_include_directories(${target} SYSTEM PRIVATE ${CISTERN_XXHASH_INCLUDE})
    if(TARGET TorchWheel::gomp)
      target_link_libraries(${target} PUBLIC TorchWheel::gomp)
    else()
      target_link_libraries(${target} PUBLIC gomp)  # kernels-only: the compiler's own libgomp
    endif()
  endif()
endfunction()

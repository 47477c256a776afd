# FindTorchWheel: the C++ side of a pip-installed torch, CPU libraries alone. Not
# find_package(Torch): that stops without a CUDA toolkit.
#
#   find_package(TorchWheel 2.11)
#
# In:   CISTERN_TORCH, a cache or environment variable: site-packages/torch, or the root of a
#       virtual environment. Empty: python3's torch.
# Out:  TorchWheel_FOUND, TorchWheel_VERSION, TorchWheel_DIR (the torch folder),
#       TorchWheel_INCLUDE_DIRS, TorchWheel_RPATH, and the targets TorchWheel::c10,
#       TorchWheel::torch_cpu and TorchWheel::gomp (the OpenMP runtime that torch loads: link this
#       one, never OpenMP::OpenMP_CXX, so that the process has one pool of threads).
include(FindPackageHandleStandardArgs)
set(CISTERN_TORCH "$ENV{CISTERN_TORCH}" CACHE PATH
  "site-packages/torch of the torch to build with, or its virtual environment")

# The folder that holds include/ and lib/ of torch, or nothing.
function(_torch_wheel_locate result)
  set(${result} "" PARENT_SCOPE)
  if(CISTERN_TORCH)
    file(GLOB inside "${CISTERN_TORCH}/lib/python3*/site-packages/torch")
    foreach(folder IN LISTS CISTERN_TORCH inside)
      if(EXISTS "${folder}/lib/libtorch_cpu.so")
        set(${result} "${folder}" PARENT_SCOPE)
        return()
      endif()
    endforeach()
    return()
  endif()
  set(python "${Python_EXECUTABLE}")  # scikit-build-core names the interpreter it builds for
  if(NOT python)
    find_program(python NAMES python3 NO_CACHE)
  endif()
  if(python)
    execute_process(
      COMMAND "${python}" -c
        "from importlib.util import find_spec
s = find_spec('torch')
print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    set(${result} "${folder}" PARENT_SCOPE)
  endif()
endfunction()

# Sets TorchWheel_VERSION, TorchWheel_GOMP and, when this torch cannot be used,
# TorchWheel_NOT_FOUND_MESSAGE.
function(_torch_wheel_inspect folder)
  if(NOT folder)
    if(CISTERN_TORCH)
      set(TorchWheel_NOT_FOUND_MESSAGE
        "no lib/libtorch_cpu.so under CISTERN_TORCH=${CISTERN_TORCH}" PARENT_SCOPE)
    else()
      set(TorchWheel_NOT_FOUND_MESSAGE "python3 has no torch, and CISTERN_TORCH is not set"
        PARENT_SCOPE)
    endif()
    return()
  endif()
  set(header "${folder}/include/torch/headeronly/version.h")
  file(GLOB gomp "${folder}/lib/libgomp*.so*" "${folder}/../torch.libs/libgomp*.so*")
  foreach(needed "${header}" "${folder}/lib/libc10.so" "${folder}/lib/libtorch_cpu.so")
    if(NOT EXISTS "${needed}")
      set(TorchWheel_NOT_FOUND_MESSAGE "no ${needed}: not a torch wheel of 2.11 or newer"
        PARENT_SCOPE)
      return()
    endif()
  endforeach()
  if(NOT gomp)
    set(TorchWheel_NOT_FOUND_MESSAGE "no libgomp in ${folder}/lib: not a torch wheel from pip"
      PARENT_SCOPE)
    return()
  endif()
  list(GET gomp 0 gomp)
  set(TorchWheel_GOMP "${gomp}" PARENT_SCOPE)
  file(STRINGS "${header}" lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^0-9;]" "" version "${lines}")
  string(REPLACE ";" "." version "${version}")
  set(TorchWheel_VERSION "${version}" PARENT_SCOPE)
endfunction()

# Links a program that calls torch with a std::string: fails where the C++ ABI differs or where a
# library that torch needs is missing.
function(_torch_wheel_check_abi folder rpath)
  if(TORCH_WHEEL_LINKS STREQUAL folder)
    return()
  endif()
  set(source "${CMAKE_BINARY_DIR}/CMakeFiles/torch_wheel_abi.cc")
  file(WRITE "${source}" [=[
#include <cstdint>
#include <string>
namespace c10::detail {
[[noreturn]] void torchCheckFail(const char*, const char*, uint32_t, const std::string&);
}
int main(int argc, char**) {
  if (argc > 99) c10::detail::torchCheckFail("", "", 0, std::string("abi"));
}
]=])
  list(TRANSFORM rpath PREPEND "-Wl,-rpath-link,")
  try_compile(links "${CMAKE_BINARY_DIR}/CMakeFiles/torch_wheel_abi" "${source}"
    LINK_OPTIONS -Wl,--no-as-needed ${rpath}
    LINK_LIBRARIES "${folder}/lib/libc10.so" "${folder}/lib/libtorch_cpu.so"
    CXX_STANDARD 20 OUTPUT_VARIABLE output)
  if(links)
    set(TORCH_WHEEL_LINKS "${folder}" CACHE INTERNAL
      "The torch that programs of this compiler link with")
  else()
    string(REGEX MATCH "[^\n]*(undefined reference|not found|cannot find)[^\n]*" reason "${output}")
    set(TorchWheel_NOT_FOUND_MESSAGE
      "programs of this compiler do not link with ${folder}: ${reason}" PARENT_SCOPE)
  endif()
endfunction()

unset(TorchWheel_NOT_FOUND_MESSAGE)
unset(TorchWheel_VERSION)
_torch_wheel_locate(_folder)
_torch_wheel_inspect("${_folder}")
if(TorchWheel_NOT_FOUND_MESSAGE)
  set(TorchWheel_DIR "")
else()
  set(TorchWheel_DIR "${_folder}")
  file(GLOB _cuda LIST_DIRECTORIES true "${TorchWheel_DIR}/../nvidia/cu[0-9]*/lib")
  set(TorchWheel_RPATH "${TorchWheel_DIR}/lib")
  foreach(_path IN LISTS _cuda)
    cmake_path(NORMAL_PATH _path)
    list(APPEND TorchWheel_RPATH "${_path}")
  endforeach()
  if(TorchWheel_VERSION VERSION_GREATER_EQUAL "${TorchWheel_FIND_VERSION}")
    _torch_wheel_check_abi("${TorchWheel_DIR}" "${TorchWheel_RPATH}")
  endif()
  if(TorchWheel_NOT_FOUND_MESSAGE)
    set(TorchWheel_DIR "")
  endif()
endif()
find_package_handle_standard_args(TorchWheel REQUIRED_VARS TorchWheel_DIR TorchWheel_VERSION
  VERSION_VAR TorchWheel_VERSION REASON_FAILURE_MESSAGE "${TorchWheel_NOT_FOUND_MESSAGE}")

if(TorchWheel_FOUND)
  set(TorchWheel_INCLUDE_DIRS "${TorchWheel_DIR}/include"
    "${TorchWheel_DIR}/include/torch/csrc/api/include")
  if(NOT TARGET TorchWheel::torch_cpu)
    foreach(_library c10 torch_cpu)
      add_library(TorchWheel::${_library} SHARED IMPORTED)
      set_target_properties(TorchWheel::${_library} PROPERTIES
        IMPORTED_LOCATION "${TorchWheel_DIR}/lib/lib${_library}.so"
        IMPORTED_SONAME "lib${_library}.so"
        INTERFACE_INCLUDE_DIRECTORIES "${TorchWheel_INCLUDE_DIRS}"
        INTERFACE_COMPILE_FEATURES cxx_std_20)
    endforeach()
    set_property(TARGET TorchWheel::torch_cpu PROPERTY INTERFACE_LINK_LIBRARIES TorchWheel::c10)
    cmake_path(GET TorchWheel_GOMP FILENAME _soname)
    add_library(TorchWheel::gomp SHARED IMPORTED)
    set_target_properties(TorchWheel::gomp PROPERTIES IMPORTED_LOCATION "${TorchWheel_GOMP}"
      IMPORTED_SONAME "${_soname}")
  endif()
endif()

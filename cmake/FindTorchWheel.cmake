# Finds libtorch inside a pip torch wheel without Caffe2Config (which demands a CUDA toolkit).
# In:  CISTERN_TORCH (cache or environment): .../site-packages/torch, or a venv root, or empty -> python3's torch.
# Out: TorchWheel::c10, TorchWheel::torch_cpu, TorchWheel_DIR, TorchWheel_VERSION, TorchWheel_RPATH
set(CISTERN_TORCH "$ENV{CISTERN_TORCH}" CACHE PATH "site-packages/torch of the torch to build with, or its virtual environment")
set(_dir "${CISTERN_TORCH}")
if(_dir AND NOT EXISTS "${_dir}/lib/libtorch_cpu.so")
  file(GLOB _hit "${_dir}/lib/python3*/site-packages/torch/lib/libtorch_cpu.so")
  if(_hit)
    list(GET _hit 0 _hit)
    cmake_path(GET _hit PARENT_PATH _dir)
    cmake_path(GET _dir PARENT_PATH _dir)
  endif()
endif()
if(NOT _dir)
  set(_py "${Python_EXECUTABLE}")  # scikit-build-core gives the interpreter it builds for
  if(NOT _py)
    find_program(_py NAMES python3 NO_CACHE)
  endif()
  execute_process(COMMAND ${_py} -c "import importlib.util as u; s=u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE _dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
set(TorchWheel_DIR "${_dir}")
foreach(_p include/torch/headeronly/version.h lib/libtorch_cpu.so lib/libc10.so lib/libgomp.so.1)
  if(NOT EXISTS "${TorchWheel_DIR}/${_p}")
    set(TorchWheel_NOT_FOUND_MESSAGE "no ${_p} under '${TorchWheel_DIR}'")
  endif()
endforeach()
if(NOT TorchWheel_NOT_FOUND_MESSAGE)
  file(STRINGS "${TorchWheel_DIR}/include/torch/headeronly/version.h" _v REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^0-9;]" "" _v "${_v}")
  string(REPLACE ";" "." TorchWheel_VERSION "${_v}")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(TorchWheel REQUIRED_VARS TorchWheel_DIR TorchWheel_VERSION
  VERSION_VAR TorchWheel_VERSION REASON_FAILURE_MESSAGE "${TorchWheel_NOT_FOUND_MESSAGE}")
if(TorchWheel_FOUND AND NOT TARGET TorchWheel::torch_cpu)
  cmake_path(GET TorchWheel_DIR PARENT_PATH _site)
  file(GLOB _nv LIST_DIRECTORIES true "${_site}/nvidia/cu[0-9]*/lib")
  set(TorchWheel_RPATH "${TorchWheel_DIR}/lib" ${_nv})
  set(TorchWheel_INCLUDE_DIRS "${TorchWheel_DIR}/include" "${TorchWheel_DIR}/include/torch/csrc/api/include")
  foreach(_lib c10 torch_cpu)
    add_library(TorchWheel::${_lib} SHARED IMPORTED)
    set_target_properties(TorchWheel::${_lib} PROPERTIES
      IMPORTED_LOCATION "${TorchWheel_DIR}/lib/lib${_lib}.so"
      IMPORTED_SONAME "lib${_lib}.so"
      INTERFACE_INCLUDE_DIRECTORIES "${TorchWheel_INCLUDE_DIRS}"
      INTERFACE_COMPILE_FEATURES cxx_std_20)
  endforeach()
  set_property(TARGET TorchWheel::torch_cpu PROPERTY INTERFACE_LINK_LIBRARIES TorchWheel::c10)
  # The OpenMP runtime torch loads; link this one, never OpenMP::OpenMP_CXX, so that names and versions agree.
  add_library(TorchWheel::gomp SHARED IMPORTED)
  set_target_properties(TorchWheel::gomp PROPERTIES IMPORTED_LOCATION "${TorchWheel_DIR}/lib/libgomp.so.1" IMPORTED_SONAME libgomp.so.1)
endif()

# The Python package: libcistern_python.so, the operators that python/cistern loads, on top of
# libcistern.so. No Python headers and no libtorch_python: operators reach Python through torch's
# dispatcher. `cmake --install BUILD --component python --prefix DIR` makes a folder DIR/cistern to
# put on PYTHONPATH; pip does the same through pyproject.toml.
file(GLOB python_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/python/src/*.cc)
add_library(cistern_python SHARED ${python_sources})
target_link_libraries(cistern_python PRIVATE cistern)
cistern_warnings(cistern_python)
if(CISTERN_UNITY)
  set_target_properties(cistern_python PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 10)
endif()
set_target_properties(cistern_python PROPERTIES BUILD_RPATH "${TorchWheel_RPATH}")
if(SKBUILD)  # beside torch in site-packages, or where it was when this was built
  set_target_properties(cistern cistern_python PROPERTIES INSTALL_RPATH
    "$ORIGIN;$ORIGIN/../../torch/lib;${TorchWheel_RPATH}")
else()
  set_target_properties(cistern_python PROPERTIES INSTALL_RPATH "$ORIGIN;${TorchWheel_RPATH}")
endif()
configure_file(${PROJECT_SOURCE_DIR}/python/build.py.in ${CMAKE_BINARY_DIR}/python/_build.py @ONLY)

set(python_install COMPONENT python EXCLUDE_FROM_ALL)
if(SKBUILD)
  set(python_install COMPONENT python)
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/python/cistern DESTINATION . ${python_install}
  FILES_MATCHING PATTERN "*.py" PATTERN "py.typed" PATTERN "__pycache__" EXCLUDE)
install(FILES ${CMAKE_BINARY_DIR}/python/_build.py DESTINATION cistern ${python_install})
install(TARGETS cistern cistern_python LIBRARY DESTINATION cistern/lib
  NAMELINK_SKIP ${python_install})

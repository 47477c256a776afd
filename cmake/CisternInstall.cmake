# cmake --install: the library, the program, the headers, and what find_package(cistern) needs.
# Built on torch, so not without it.
if(CISTERN_KERNELS_ONLY)
  return()
endif()
include(CMakePackageConfigHelpers)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" TorchWheel_VERSION_MAJOR_MINOR "${TorchWheel_VERSION}")
set(cistern_config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/cistern)

install(TARGETS cistern EXPORT cisternTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET cistern_cli)
  install(TARGETS cistern_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(DIRECTORY cistern/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/cistern
  FILES_MATCHING PATTERN "*.h" PATTERN "*.def" PATTERN "*_test*" EXCLUDE
  PATTERN "test_*" EXCLUDE PATTERN "testing*" EXCLUDE PATTERN "*-inl.h" EXCLUDE
  PATTERN "cli" EXCLUDE PATTERN "rows_ahead.h" EXCLUDE)
# `cistern reproduce` finds its tables there.
install(DIRECTORY configs DESTINATION ${CMAKE_INSTALL_DATADIR}/cistern)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

install(EXPORT cisternTargets NAMESPACE cistern:: DESTINATION ${cistern_config_dir})
configure_package_config_file(
  ${CMAKE_CURRENT_LIST_DIR}/cisternConfig.cmake.in ${CMAKE_BINARY_DIR}/cisternConfig.cmake
  INSTALL_DESTINATION ${cistern_config_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/cisternConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/cisternConfig.cmake ${CMAKE_BINARY_DIR}/cisternConfigVersion.cmake
  ${CMAKE_CURRENT_LIST_DIR}/FindTorchWheel.cmake DESTINATION ${cistern_config_dir})

# cmake -P join_tests.cmake OUTPUT SOURCE...: one file of all these tests, for a compiler that takes
# longer for the headers than for the tests. The unnamed namespace of each gets a name, so that each
# keeps its own helpers; messages name the lines of the sources.
math(EXPR last "${CMAKE_ARGC} - 1")
set(output ${CMAKE_ARGV3})
set(joined "")
foreach(i RANGE 4 ${last})
  set(source ${CMAKE_ARGV${i}})
  cmake_path(GET source STEM name)
  file(READ ${source} text)
  string(REPLACE "\nnamespace {\n" "\nnamespace ${name}_cc {\n" text "${text}")
  string(APPEND joined "#line 1 \"${source}\"\n${text}\n")
endforeach()
file(WRITE ${output} "${joined}")

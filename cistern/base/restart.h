#pragma once
// Settings that the C library and libgomp read from the environment as a program is loaded.

namespace cistern {

// Begins the program `argv` again (0.25 s) with the settings for long runs, where the
// environment does not say otherwise; to be called first in main. Returns where nothing is to be
// set, or the program cannot begin again.
//
// - Threads that wait for each other, or for work, sleep after 0.1 to 0.2 ms in place of libgomp's
//   10: a thread that looks on holds a core that another one of them, beside another program, could
//   use. GOMP_SPINCOUNT; left alone where that or OMP_WAIT_POLICY is set.
// - Memory in huge pages, where the system grants them to those that ask. GLIBC_TUNABLES, to which
//   glibc.malloc.hugetlb=1 is added; left alone where it names that one.
void RestartForLongRuns(char** argv);

}  // namespace cistern

// Preloaded into the program by scripts/mutate: the program stops before its main and runs that in
// a child for each command that it is given, so that the quarter of a second in which torch is
// loaded is spent once. What a child does is what the program does, main and exit included.
//
// On standard input, for each command: two ints, the number of arguments and of their bytes, then
// the arguments with a 0 after each; standard output and error go to the two files that the first
// two name. Answers on descriptor 3: the child's process id, then its status.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

using Main = int (*)(int, char**, char**);
Main program_main = nullptr;

bool Read(void* to, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = ::read(STDIN_FILENO, static_cast<char*>(to) + done, bytes - done);
    if (n <= 0) return false;
    done += size_t(n);
  }
  return true;
}

void Redirect(const char* path, int to) {
  const int fd = ::open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0 || ::dup2(fd, to) < 0) ::_exit(126);
}

int Serve(int, char**, char** environment) {
  int sizes[2];
  while (Read(sizes, sizeof sizes)) {
    std::string bytes(size_t(sizes[1]), '\0');
    if (!Read(bytes.data(), bytes.size())) break;
    std::vector<char*> words;
    for (char* at = bytes.data(); int(words.size()) < sizes[0]; at += std::string(at).size() + 1)
      words.push_back(at);
    words.push_back(nullptr);
    const pid_t child = ::fork();
    if (child == 0) {
      Redirect(words[0], STDOUT_FILENO);
      Redirect(words[1], STDERR_FILENO);
      ::close(3);
      const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
      ::dup2(null, STDIN_FILENO);
      std::exit(program_main(sizes[0] - 2, words.data() + 2, environment));
    }
    int answer[2] = {int(child), 0};
    if (::write(3, &answer[0], sizeof(int)) < 0) break;
    ::waitpid(child, &answer[1], 0);
    if (::write(3, &answer[1], sizeof(int)) < 0) break;
  }
  ::_exit(0);
}

}  // namespace

extern "C" int __libc_start_main(Main main, int argc, char** argv, void (*init)(), void (*fini)(),
                                 void (*rtld_fini)(), void* stack_end) {
  using Start = int (*)(Main, int, char**, void (*)(), void (*)(), void (*)(), void*);
  program_main = main;
  // Programs that this one starts are themselves.
  ::unsetenv("LD_PRELOAD");
  const auto start = reinterpret_cast<Start>(::dlsym(RTLD_NEXT, "__libc_start_main"));
  return start(Serve, argc, argv, init, fini, rtld_fini, stack_end);
}

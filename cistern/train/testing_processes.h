#pragma once
// For tests: several processes that train together, as threads of this one.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cistern/base/error.h"
#include "cistern/train/processes.h"

namespace cistern::testing {

// A port of this machine that nobody listened on a moment ago.
inline int64_t FreePort() {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  CISTERN_CHECK(::bind(socket, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                    ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) == 0,
                "no free port");
  ::close(socket);
  return ntohs(address.sin_port);
}

// Calls f(processes) for each rank; the message of what it throws at the rank's place, else "".
inline std::vector<std::string> Together(
    int64_t count, const std::function<void(const std::shared_ptr<Processes>&)>& f) {
  const Processes::Meeting meeting{.address = "127.0.0.1", .port = FreePort(), .seconds = 60};
  std::vector<std::string> errors(static_cast<size_t>(count));
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < count; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        f(std::make_shared<Processes>(rank, count, meeting));
      } catch (const std::exception& e) {
        errors[size_t(rank)] = e.what();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  return errors;
}

}  // namespace cistern::testing

#include "cistern/train/processes.h"

#define USE_C10D_GLOO  // as libtorch_cpu was built
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <functional>
#include <future>
#include <thread>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/base/interrupt.h"
#include "cistern/base/terminal.h"
#include "cistern/tensors/torch_error.h"
#include "cistern/train/signs_of_life.h"

namespace cistern {
namespace {

using Milliseconds = std::chrono::milliseconds;

// How long one process waits for another that is at something else, such as writing a checkpoint.
// One that has ended closes its connection, which the others see at once.
constexpr Milliseconds kPatience = std::chrono::hours(24);
constexpr Milliseconds kWait(500);  // for an operation, between looks for one that is lost
constexpr int64_t kMostProcesses = 4096;

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

int64_t NumberOf(const char* name, int64_t least, int64_t most) {
  const std::string text = Variable(name);
  if (text.empty())
    FailUsage("WORLD_SIZE=", Variable("WORLD_SIZE"), " asks for several processes, and ", name,
              " is not set; torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT");
  int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < least || value > most)
    FailUsage(name, "=", text, ": expected a whole number from ", least, " to ", most);
  return value;
}

int64_t WorldSize() {
  return Variable("WORLD_SIZE").empty() ? 1 : NumberOf("WORLD_SIZE", 1, kMostProcesses);
}

// Returns once somebody listens there. torch would wait as well, but with a page of warnings, for
// longer than it is told to, and deaf to Ctrl-C.
void AwaitListener(const Processes::Meeting& meeting, Milliseconds patience) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(meeting.port);
  if (const int error = ::getaddrinfo(meeting.address.c_str(), port.c_str(), &hints, &found))
    FailUsage("MASTER_ADDR=", meeting.address, " is no address: ", ::gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(found, ::freeaddrinfo);
  const auto end = std::chrono::steady_clock::now() + patience;
  while (!Interrupted()) {
    for (const addrinfo* a = found; a; a = a->ai_next) {
      const int socket = ::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol);
      const bool listens = socket >= 0 && ::connect(socket, a->ai_addr, a->ai_addrlen) == 0;
      if (socket >= 0) ::close(socket);
      if (listens) return;
    }
    if (std::chrono::steady_clock::now() >= end)
      Fail("nobody listens there after ", meeting.seconds, " s");
    std::this_thread::sleep_for(Milliseconds(200));
  }
  Fail("interrupted");
}

// Returns once all have come to the store. torch would wait as well, but deaf to Ctrl-C.
void AwaitOthers(c10d::Store& store, int64_t rank, int64_t count, const Processes::Meeting& meeting,
                 Milliseconds patience) {
  const auto key = [](int64_t r) { return StrCat("came/", r); };
  std::vector<std::string> missing;
  for (int64_t r = 0; r < count; ++r) missing.push_back(key(r));
  store.set(key(rank), "1");
  const auto begin = std::chrono::steady_clock::now();
  bool said = rank > 0;  // one of them says it
  for (;;) {
    std::erase_if(missing, [&](const std::string& k) { return store.check({k}); });
    if (missing.empty()) return;
    if (Interrupted()) Fail("interrupted");
    const auto waited = std::chrono::steady_clock::now() - begin;
    if (waited >= patience)
      Fail(missing.size(), " of ", count, " have not come after ", meeting.seconds, " s");
    if (!said && waited >= Milliseconds(1000)) {
      Note(StrCat("waiting for ", missing.size(), " of ", count, " processes at ", meeting.address,
                  ":", meeting.port));
      said = true;
    }
    std::this_thread::sleep_for(Milliseconds(200));
  }
}

}  // namespace

struct Processes::Group {
  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo;
  std::unique_ptr<SignsOfLife> signs;
  double silence = 0;  // in seconds

  // Gloo's end waits for its operations, and one may wait for a process that is lost.
  ~Group() {
    try {
      std::promise<void> promise;
      const std::future<void> ended = promise.get_future();
      std::thread([gloo = std::move(gloo), promise = std::move(promise)]() mutable {
        gloo.reset();
        promise.set_value_at_thread_exit();
      }).detach();
      ended.wait_for(kWait);
    } catch (const std::exception&) {  // no thread is to be had
    }
  }

  // Waits for what `start` begins.
  void Do(const std::function<c10::intrusive_ptr<c10d::Work>()>& start) const {
    std::string lost;
    try {
      const auto work = start();
      int64_t looks = -1, waits = 0;  // waits since the last look
      while (lost.empty() && !EndsWithin(*work, kWait)) {
        if (!signs) continue;
        const int64_t now = signs->Looks();
        waits = now == looks ? waits + 1 : 0;
        looks = now;
        lost = signs->Lost();
        if (lost.empty() && double(waits) * 1e-3 * double(kWait.count()) > silence)
          lost = StrCat("the store where they met, of process 0 or torchrun, has not answered for ",
                        silence, " s");
      }
    } catch (const std::exception& e) {
      lost = StrCat("it has ended or cannot be reached: ", FirstLine(e));
    }
    if (!lost.empty()) Fail("the processes that train together have lost one: ", lost);
  }

 private:
  // Throws what the work has ended with.
  static bool EndsWithin(c10d::Work& work, Milliseconds time) {
    try {
      return work.wait(time);
    } catch (const std::exception&) {
      if (work.isCompleted()) return work.wait();
      return false;
    }
  }
};

Processes::Processes() = default;
Processes::~Processes() = default;

std::shared_ptr<Processes> Processes::FromEnvironment() {
  const int64_t count = WorldSize();
  if (count == 1) return std::make_shared<Processes>();
  const int64_t rank = NumberOf("RANK", 0, count - 1), port = NumberOf("MASTER_PORT", 1, 65535);
  const std::string address = Variable("MASTER_ADDR");
  if (address.empty())
    FailUsage("WORLD_SIZE=", count, " asks for several processes, and MASTER_ADDR, the address of ",
              "the machine of RANK=0, is not set; torchrun sets both");
  Meeting meeting{address, port};
  meeting.served = Variable("TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (meeting.served && !Variable("TORCHELASTIC_RESTART_COUNT").empty())
    meeting.attempt = NumberOf("TORCHELASTIC_RESTART_COUNT", 0, int64_t{1} << 40);
  return std::make_shared<Processes>(rank, count, meeting);
}

void RequireOneProcess(const std::string& command) {
  if (const int64_t count = WorldSize(); count > 1)
    FailUsage("WORLD_SIZE=", count, " asks for several processes, and each would do the whole of ",
              "cistern ", command, "; only cistern train shares its work among them");
}

Processes::Processes(int64_t rank, int64_t count, const Meeting& meeting)
    : rank_(rank), count_(count) {
  if (count == 1) return;
  // Gloo writes to a process that may have ended: an error then, where the signal would end this
  // one without a word.
  std::signal(SIGPIPE, SIG_IGN);
  const auto patience =
      std::chrono::duration_cast<Milliseconds>(std::chrono::duration<double>(meeting.seconds));
  group_ = std::make_unique<Group>();
  try {
    if (rank > 0 || meeting.served) AwaitListener(meeting, patience);
    c10d::TCPStoreOptions place;
    place.port = uint16_t(meeting.port);
    place.isServer = rank == 0 && !meeting.served;
    place.waitWorkers = false;
    place.timeout = patience;
    const auto store = c10::make_intrusive<c10d::PrefixStore>(
        StrCat("cistern/", meeting.attempt),
        c10::make_intrusive<c10d::TCPStore>(meeting.address, place));
    AwaitOthers(*store, rank, count, meeting, patience);
    const auto options = c10d::ProcessGroupGloo::Options::create(patience);
    const std::string interface = Variable("GLOO_SOCKET_IFNAME");
    options->devices.push_back(interface.empty()
                                   ? c10d::ProcessGroupGloo::createDefaultDevice()
                                   : c10d::ProcessGroupGloo::createDeviceForInterface(interface));
    group_->gloo =
        c10::make_intrusive<c10d::ProcessGroupGloo>(store, int(rank), int(count), options);
    auto signs = std::make_unique<SignsOfLife>(store, rank, count, meeting.silence);
    Any(false);  // all are there
    group_->signs = std::move(signs);
    group_->silence = meeting.silence;
    group_->gloo->setTimeout(kPatience);
  } catch (const UsageError&) {
    throw;
  } catch (const std::exception& e) {
    Fail(Name(), " did not meet the others at ", meeting.address, ":", meeting.port, ": ",
         FirstLine(e), ". The machine of MASTER_ADDR runs RANK=0; on several machines ",
         "GLOO_SOCKET_IFNAME names the network interface that the others can reach");
  }
}

std::string Processes::Name() const { return StrCat("process ", rank_, " of ", count_); }

void Processes::Sum(const std::vector<at::Tensor>& tensors) const {
  if (alone()) return;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (const at::Tensor& t : tensors) {
    CISTERN_CHECK(t.is_contiguous() && t.device().is_cpu(), "Sum takes dense tensors on the CPU");
    std::vector<at::Tensor> one{t};
    works.push_back(group_->gloo->allreduce(one));
  }
  for (const auto& work : works) group_->Do([&] { return work; });
}

void Processes::TakeFirst(const std::vector<at::Tensor>& tensors) const {
  if (alone()) return;
  const at::NoGradGuard guard;
  for (const at::Tensor& t : tensors) {
    const at::Tensor dense = t.contiguous();
    std::vector<at::Tensor> one{dense};
    group_->Do([&] { return group_->gloo->broadcast(one); });
    if (!dense.is_same(t)) t.copy_(dense);
  }
}

std::string Processes::OfFirst(const std::string& text) const {
  if (alone()) return text;
  const at::Tensor bytes = at::full({1}, int64_t(text.size()), at::kLong);
  TakeFirst({bytes});
  const at::Tensor all = at::empty({bytes.item<int64_t>()}, at::kByte);
  if (first()) std::memcpy(all.mutable_data_ptr(), text.data(), text.size());
  if (all.numel() > 0) TakeFirst({all});
  return {static_cast<const char*>(all.const_data_ptr()), size_t(all.numel())};
}

std::vector<std::string> Processes::Gather(const std::string& text) const {
  if (alone()) return {text};
  const at::Tensor sizes = at::zeros({count_}, at::kLong);
  sizes[rank_] = int64_t(text.size());
  Sum({sizes});
  const int64_t longest = std::max<int64_t>(1, sizes.max().item<int64_t>());
  const at::Tensor mine = at::zeros({longest}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), text.data(), text.size());
  std::vector<at::Tensor> in{mine};
  std::vector<std::vector<at::Tensor>> out(1);
  for (int64_t r = 0; r < count_; ++r) out[0].push_back(at::empty({longest}, at::kByte));
  group_->Do([&] { return group_->gloo->allgather(out, in); });
  std::vector<std::string> texts;
  for (int64_t r = 0; r < count_; ++r)
    texts.emplace_back(static_cast<const char*>(out[0][size_t(r)].const_data_ptr()),
                       size_t(sizes[r].item<int64_t>()));
  return texts;
}

int64_t Processes::Here() const {
  if (alone()) return 1;
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  std::string boot;  // no two machines have it in common, as they may have a name
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  const std::vector<std::string> all = Gather(StrCat(host, " ", boot));
  return std::count(all.begin(), all.end(), all[size_t(rank_)]);
}

bool Processes::Any(bool value) const {
  if (alone()) return value;
  const at::Tensor sum = at::full({1}, value ? 1.0 : 0.0, at::kDouble);
  Sum({sum});
  return sum.item<double>() > 0;
}

}  // namespace cistern

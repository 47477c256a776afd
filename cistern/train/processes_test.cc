#include "cistern/train/processes.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cistern/base/error.h"
#include "cistern/base/interrupt.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"
#include "cistern/ops/testing.h"
#include "cistern/train/shared_run.h"
#include "cistern/train/testing_processes.h"

namespace cistern {
namespace {

using testing::ExpectContains;
using testing::Together;
using Texts = std::vector<std::string>;

TEST(Processes, SumTakeAndGather) {
  std::mutex mutex;
  std::vector<at::Tensor> sums;
  const Texts errors = Together(3, [&](const std::shared_ptr<Processes>& p) {
    EXPECT_FALSE(p->alone());
    EXPECT_EQ(p->first(), p->rank() == 0);
    const auto rank = double(p->rank());
    const at::Tensor floats = at::full({100003}, 0.1f) * at::arange(100003) * (rank + 0.3),
                     whole = at::full({2}, p->rank() + 1, at::kLong);
    p->Sum({floats, whole});
    EXPECT_TRUE(at::equal(whole, at::full({2}, 6, at::kLong)));
    {
      const std::lock_guard lock(mutex);
      sums.push_back(floats);
    }
    // Dense or not, becomes that of the first.
    const at::Tensor turned = (at::arange(6, at::kDouble).view({2, 3}) + 10 * rank).t();
    p->TakeFirst({turned});
    EXPECT_TRUE(at::equal(turned, at::arange(6, at::kDouble).view({2, 3}).t()));
    const std::string text = std::string(size_t(1000 * p->rank()), 'x') + '\0' + "end";
    EXPECT_EQ(p->OfFirst(text), std::string(1, '\0') + "end");
    EXPECT_EQ(p->OfFirst(p->first() ? "" : "other"), "");
    const Texts all = p->Gather(text);
    ASSERT_EQ(all.size(), 3);
    for (size_t r = 0; r < 3; ++r) EXPECT_EQ(all[r], std::string(1000 * r, 'x') + '\0' + "end");
    EXPECT_TRUE(p->Any(p->rank() == 1));
    EXPECT_FALSE(p->Any(false));
  });
  EXPECT_EQ(errors, Texts(3));
  ASSERT_EQ(sums.size(), 3);
  EXPECT_TRUE(at::equal(sums[0], sums[1]));
  EXPECT_TRUE(at::equal(sums[0], sums[2]));
  const at::Tensor right = 0.1 * at::arange(100003, at::kDouble) * (0.3 + 1.3 + 2.3);
  EXPECT_LT(((sums[0] - right).abs() / (right + 1)).max().item<double>(), 1e-6);
}

TEST(Processes, AloneNothingChanges) {
  const Processes p;
  EXPECT_TRUE(p.alone());
  EXPECT_TRUE(p.first());
  const at::Tensor x = at::ones({3});
  p.Sum({x});
  p.TakeFirst({x});
  EXPECT_TRUE(at::equal(x, at::ones({3})));
  EXPECT_EQ(p.OfFirst("a"), "a");
  EXPECT_EQ(p.Gather("a"), Texts{"a"});
  EXPECT_TRUE(p.Any(true));
  EXPECT_FALSE(p.Any(false));
}

// One that ends is noticed by the others, which do not wait for it for ever.
TEST(Processes, OneThatEndsIsNoticed) {
  const Texts errors = Together(2, [&](const std::shared_ptr<Processes>& p) {
    if (p->rank() == 0) Fail("the disk is full");
    p->Sum({at::ones({1000})});
  });
  EXPECT_EQ(errors[0], "the disk is full");
  ExpectContains(errors[1], {"have lost one"});
}

// One that was stopped keeps its connections: here one that gives a sign once in ten hours.
TEST(Processes, OneThatIsSilentIsNoticed) {
  const int64_t port = testing::FreePort();
  std::promise<void> noticed;
  std::thread silent([&] {
    const Processes p(1, 2, {.address = "127.0.0.1", .port = port, .silence = 1e6});
    noticed.get_future().wait_for(std::chrono::seconds(60));  // then its end is noticed
  });
  const std::string error = ErrorMessage([&] {
    const Processes p(0, 2, {.address = "127.0.0.1", .port = port, .silence = 0.2});
    p.Sum({at::ones({1000})});
  });
  ExpectContains(error, {"have lost one", "process 1 has given no sign of life for 0.2 s"});
  noticed.set_value();
  silent.join();
}

TEST(Processes, WaitForTheOthersForSomeTime) {
  const auto met = [](int64_t rank, const std::string& address) {
    const Processes p(rank, 2, {.address = address, .port = testing::FreePort(), .seconds = 1});
  };
  ExpectContains(ErrorMessage([&] { met(0, "127.0.0.1"); }),
                 {"process 0 of 2 did not meet the others at 127.0.0.1",
                  "1 of 2 have not come after 1 s", "RANK=0"});
  ExpectContains(ErrorMessage([&] { met(1, "127.0.0.1"); }),
                 {"process 1 of 2 did not meet the others", "nobody listens there after 1 s"});
  EXPECT_THROW(met(1, "no address"), UsageError);
  Interrupted() = true;
  for (const int64_t rank : {0, 1})
    ExpectContains(ErrorMessage([&] { met(rank, "127.0.0.1"); }), {"interrupted"});
  Interrupted() = false;
}

class EnvironmentTest : public ::testing::Test {
 protected:
  void TearDown() override { Set({}); }
  // The variables that have these values, and no others.
  static void Set(const std::map<std::string, std::string>& values) {
    for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
      ::unsetenv(name);
      if (values.contains(name)) ::setenv(name, values.at(name).c_str(), 1);
    }
  }
  static std::string Refused() {
    try {
      Processes::FromEnvironment();
    } catch (const UsageError& e) {
      return e.what();
    }
    return "";
  }
};

TEST_F(EnvironmentTest, OfOneProcessNeedsNothing) {
  Set({});
  EXPECT_TRUE(Processes::FromEnvironment()->alone());
  RequireOneProcess("eval");
  Set({{"WORLD_SIZE", "1"}});
  EXPECT_TRUE(Processes::FromEnvironment()->alone());
  RequireOneProcess("eval");
}

TEST_F(EnvironmentTest, WhatIsMissingOrWrongIsNamed) {
  Set({{"WORLD_SIZE", "2"}});
  ExpectContains(Refused(), {"RANK is not set; torchrun sets"});
  EXPECT_THROW(RequireOneProcess("eval"), UsageError);
  Set({{"WORLD_SIZE", "two"}});
  ExpectContains(Refused(), {"WORLD_SIZE=two: expected a whole number from 1"});
  Set({{"WORLD_SIZE", "2"}, {"RANK", "2"}});
  ExpectContains(Refused(), {"RANK=2: expected a whole number from 0 to 1"});
  Set({{"WORLD_SIZE", "2"}, {"RANK", "1"}, {"MASTER_PORT", "70000"}});
  ExpectContains(Refused(), {"MASTER_PORT=70000"});
  Set({{"WORLD_SIZE", "2"}, {"RANK", "1"}, {"MASTER_PORT", "29500"}});
  ExpectContains(Refused(), {"MASTER_ADDR"});
}

TEST(RunCopy, TheOthersGetTheFilesOfTheFirst) {
  const TestFolder folder;
  const std::string run = folder / "run";
  EnsureDirectory(run + "/checkpoint-3");
  WriteFileAtomically(run + "/config.json", "{}");
  WriteFileAtomically(run + "/checkpoint-3/weights", std::string(100000, '\0') + "w");
  WriteFileAtomically(run + "/empty", "");
  WriteFileAtomically(run + "/lock", "");
  WriteFileAtomically(run + "/events.out.tfevents.1", "e");
  std::mutex mutex;
  Texts copies;
  const Texts errors = Together(3, [&](const std::shared_ptr<Processes>& p) {
    const RunCopy empty(*p, run, false);
    const RunCopy copy(*p, p->first() ? run : "/nowhere", true);
    EXPECT_EQ(empty.path() == run, p->first());
    EXPECT_EQ(copy.path() == run, p->first());
    EXPECT_EQ(ReadFile(copy.path() + "/checkpoint-3/weights"), std::string(100000, '\0') + "w");
    EXPECT_EQ(ReadFile(copy.path() + "/config.json"), "{}");
    EXPECT_EQ(ReadFile(copy.path() + "/empty"), "");
    if (p->first()) return;
    EXPECT_TRUE(std::filesystem::is_empty(empty.path()));
    EXPECT_FALSE(std::filesystem::exists(copy.path() + "/lock"));
    EXPECT_FALSE(std::filesystem::exists(copy.path() + "/events.out.tfevents.1"));
    const std::lock_guard lock(mutex);
    copies.push_back(copy.path());
  });
  EXPECT_EQ(errors, Texts(3));
  ASSERT_EQ(copies.size(), 2);
  EXPECT_NE(copies[0], copies[1]);
  for (const std::string& path : copies) EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_TRUE(std::filesystem::exists(run + "/lock"));
}

TEST(RunCopy, WhatAKilledProcessLeftGoes) {
  const TestFolder folder;
  const std::string ours = StrCat(".tmp-", ::getpid(), "-");
  std::string left;
  const Texts errors = Together(2, [&](const std::shared_ptr<Processes>& p) {
    if (p->first()) return;
    const pid_t child = ::fork();
    if (child == 0) ::_exit(0);
    ::waitpid(child, nullptr, 0);
    left = RunCopy(*p, "", false).path();
    left.replace(left.find(ours), left.npos, StrCat(".tmp-", child, "-0"));
    EnsureDirectory(left + "/checkpoint-3");
    const RunCopy next(*p, "", false);
    EXPECT_FALSE(std::filesystem::exists(left)) << left;
    EXPECT_TRUE(std::filesystem::exists(next.path()));
  });
  EXPECT_EQ(errors, Texts(2));
}

// What each of two processes says, of an experiment and a first batch.
Texts SameRun(const Json& one, const Json& other, double of_batch = 0) {
  return Together(2, [&](const std::shared_ptr<Processes>& p) {
    Batch batch;
    batch.Add("ids", at::full({2, 3}, p->first() ? 0.0 : of_batch, at::kFloat));
    RequireSameRun(*p, p->first() ? one : other, batch);
  });
}

TEST(RequireSameRun, NamesWhatDiffersToAll) {
  const Json run = {{"seed", 1}, {"task", {{"lm", {{"text", "/a"}, {"length", 8}}}}}};
  Json other = run;
  EXPECT_EQ(SameRun(run, other), Texts(2));
  other["environment"]["dtype"] = "float32: asked for";
  other["task"]["lm"]["text"] = "/b";
  EXPECT_EQ(SameRun(run, other), Texts(2));
  other["data"]["notes"] = {"/b holds CR LF"};
  other["from"] = "/b/model";
  EXPECT_EQ(SameRun(run, other), Texts(2));
  other["environment"]["threads"] = 7;
  for (const std::string& error : SameRun(run, other))
    ExpectContains(error, {"differ in threads", "--threads"});
  other.erase("environment");
  other["task"]["lm"]["length"] = 9;
  for (const std::string& error : SameRun(run, other)) {
    ExpectContains(error, {"process 1 trains another run than process 0"});
    ExpectContains(error, {"task/lm/length"});
  }
  other = run;
  other.erase("seed");
  for (const std::string& error : SameRun(run, other)) ExpectContains(error, {"differ in seed"});
  for (const std::string& error : SameRun(run, run, 1)) ExpectContains(error, {"first batch/ids"});
}

}  // namespace
}  // namespace cistern

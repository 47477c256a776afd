#include <gtest/gtest.h>

#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"
#include "cistern/ops/testing.h"
#include "cistern/tasks/cache.h"
#include "cistern/tasks/task.h"

namespace cistern {
namespace {

// What a task recommends works: its settings are known, and its mechanisms fit them.
TEST(Tasks, DefaultsAndMechanismsFit) {
  for (const TaskInfo* info : Tasks()) {
    for (const std::string& mechanism : info->mechanisms) {
      ModelConfig model;
      model.kind = info->models[0];
      Fields fields;
      fields.Group("model", model.Describe());
      TaskOptions task;
      task.kind = info->name;
      Fields options;
      options.Group("task", task.Describe());
      for (const std::string& assignment : info->defaults) {
        const std::string full = TaskOptions::Grouped(assignment, info->name);
        if (full.starts_with("model.")) fields.Set(full);
        if (full.starts_with("task.")) options.Set(full);
      }
      model.attention = {mechanism};
      EXPECT_EQ(ErrorMessage([&] { model.Validate(); }), "no error")
          << info->name << " " << mechanism;
    }
  }
}

TEST(Cache, AFolderThatCannotBeMadeIsSaidToBeTheCache) {
  const TestFolder folder;
  WriteFileAtomically(folder / "file", "");
  const std::string message = ErrorMessage([&] { CacheFolder(folder / "file/cache"); });
  testing::ExpectContains(message, {"cache", folder / "file/cache", "--set task.cache=FOLDER"});
}

TEST(Cache, AFolderThatCannotBeWrittenIsSaidToBeTheCache) {
  const TestFolder folder;
  std::filesystem::permissions(folder.path(), std::filesystem::perms(0555));
  const bool root = ::geteuid() == 0;
  constexpr uid_t kNobody = 65534;
  if (root && ::seteuid(kNobody) != 0) GTEST_SKIP() << "needs to be another user";
  const std::string message = ErrorMessage([&] { CacheFolder(folder.path()); });
  if (root) {
    ASSERT_EQ(::seteuid(0), 0);
  }
  std::filesystem::permissions(folder.path(), std::filesystem::perms(0755));
  testing::ExpectContains(message,
                          {"cache", "cannot write in " + folder.path(), "--set task.cache=FOLDER"});
}

TEST(Tasks, OptionsMayLeaveTheirGroupAway) {
  EXPECT_EQ(TaskOptions::Grouped("task.length=5", "lm"), "task.lm.length=5");
  EXPECT_EQ(TaskOptions::Grouped("task.length=5", "listops"), "task.listops.length=5");
  EXPECT_EQ(TaskOptions::Grouped("task.kind=lm", "lm"), "task.kind=lm");
  EXPECT_EQ(TaskOptions::Grouped("task.lenght=1", "lm"), "task.lm.lenght=1");
  EXPECT_EQ(TaskOptions::Grouped("model.dim=8", "lm"), "model.dim=8");
  EXPECT_EQ(TaskOptions::Grouped("task.lm.length=5", "lm"), "task.lm.length=5");
  EXPECT_EQ(ErrorMessage([] { TaskOptions::Grouped("task.lm.length=5", "listops"); }),
            "task.lm.length=5: the task is listops; options of lm have no effect on it");
  const Json old = {{"kind", "listops"}, {"text", "a.txt"}, {"length", 9}, {"data_seed", 3}};
  EXPECT_EQ(TaskOptions::Grouped(old, "listops", true),
            (Json{{"kind", "listops"}, {"listops", {{"length", 9}, {"data_seed", 3}}}}));
  // Those of another task are an error where nobody says that they are of an old file.
  EXPECT_TRUE(TaskOptions::Grouped(old, "listops", false).contains("text"));
  EXPECT_EQ(ErrorMessage([] { TaskOfData("/nowhere/at all"); }),
            "/nowhere/at all: no such file or folder");
  EXPECT_NE(ErrorMessage([] { FindTask("listop"); }).find("did you mean 'listops'?"),
            std::string::npos);
}

}  // namespace
}  // namespace cistern

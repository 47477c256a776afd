#include "cistern/io/jsonl.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

TEST(Jsonl, AppendsAndReads) {
  TestFolder folder;
  const std::string path = folder / "log.jsonl";
  for (int i = 0; i < 2; ++i) {
    JsonlWriter writer(path);
    writer.Write({{"step", i}, {"text", "a\nb"}, {"loss", NAN}});
    EXPECT_EQ(ReadJsonl(path).size(), size_t(i + 1));
  }
  EXPECT_EQ(ReadFile(path),
            "{\"step\":0,\"text\":\"a\\nb\",\"loss\":null}\n{\"step\":1,\"text\":\"a\\nb\","
            "\"loss\":null}\n");
}

TEST(Jsonl, MendsATornLastLine) {
  TestFolder folder;
  const std::string path = folder / "log.jsonl",
                    filler = "{\"x\":\"" + std::string(10000, 'y') + "\"}\n";
  const auto mended = [&](const std::string& text) {
    WriteFileAtomically(path, text);
    JsonlWriter(path).Write(1);
    return ReadFile(path);
  };
  EXPECT_EQ(mended("{\"a\":1}\n{\"b\":"), "{\"a\":1}\n1\n");
  EXPECT_EQ(mended("{\"a\":1}\n{\"b\":2}"), "{\"a\":1}\n{\"b\":2}\n1\n");
  EXPECT_EQ(mended("{\"a\":1}\n12"), "{\"a\":1}\n1\n");
  EXPECT_EQ(mended("{"), "1\n");
  EXPECT_EQ(mended(""), "1\n");
  EXPECT_EQ(mended(filler + filler.substr(0, 9000)), filler + "1\n");
}

TEST(Jsonl, ErrorsNameTheLine) {
  TestFolder folder;
  const std::string path = folder / "a";
  WriteFileAtomically(path, "1\r\n\n{\"a\": }\n");
  const std::string message = ErrorMessage([&] { ReadJsonl(path); });
  EXPECT_EQ(message.rfind(path + ":3:7: not valid JSON: ", 0), 0u) << message;
  EXPECT_NE(message.find("; the line is: {\"a\": }"), std::string::npos) << message;
  EXPECT_EQ(ErrorMessage([&] { ParseJsonl("1\n\n{\"a\": }\n", path); }), message);
  EXPECT_EQ(ErrorMessage([] { ReadJsonl("/nowhere/x"); }),
            "cannot read /nowhere/x: No such file or directory");
  EXPECT_EQ(ErrorMessage([&] { ReadJsonl(folder.path()); }),
            "cannot read " + folder.path() + ": Is a directory");
}

TEST(Jsonl, ARefusedLineLeavesWholeLines) {
  TestFolder folder;
  JsonlWriter writer(folder / "a");
  writer.Write("first");
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small = {50, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const std::string message = ErrorMessage([&] { writer.Write(std::string(100, 'x')); });
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_EQ(message, "cannot write " + (folder / "a") + ": File too large");
  EXPECT_EQ(ReadFile(folder / "a"), "\"first\"\n");
  EXPECT_EQ(ErrorMessage([] { JsonlWriter("/dev/full").Write(1); }),
            "cannot write /dev/full: No space left on device");
}

}  // namespace
}  // namespace cistern

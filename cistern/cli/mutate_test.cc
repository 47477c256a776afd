// A short scripts/mutate: the files of a model, a saved state, a run and the caches, each damaged
// some times. What the program makes of them is a refusal that names the file, or the result of the
// whole file, or another one that is said.
#include <algorithm>
#include <functional>
#include <random>

#include "cistern/cli/testing_cli.h"

namespace cistern {
namespace {

// A bit, zeros, a cut, a repeated piece, another digit.
std::string Damaged(std::string bytes, std::mt19937& draw) {
  const auto below = [&](size_t n) { return size_t(draw()) % n; };
  const size_t at = below(bytes.size()), size = std::min(size_t{1} << below(7), bytes.size() - at);
  const std::string whole = bytes;
  switch (below(5)) {
    case 0:
      bytes[at] = char(bytes[at] ^ (1 << below(8)));
      break;
    case 1:
      std::fill_n(bytes.begin() + int64_t(at), size, '\0');
      break;
    case 2:
      bytes.erase(at, below(2) ? size : bytes.size() - at);
      break;
    case 3:
      bytes.insert(at, bytes.substr(at, size));
      break;
    default: {
      const size_t digit = bytes.find_first_of("0123456789", at);
      if (digit != std::string::npos) bytes[digit] = char('0' + (bytes[digit] - '0' + 1) % 10);
    }
  }
  return bytes == whole ? whole.substr(0, whole.size() - 2) : bytes;
}

class MutateTest : public CliTest {
 protected:
  using Result = std::function<std::string(const Outcome&)>;

  // The word of scripts/mutate for what became of it; in capitals where it should not be.
  static std::string Verdict(const Outcome& o, const std::string& path, bool same) {
    const auto says = [&](const std::string& text) {
      return o.err.find(text) != std::string::npos;
    };
    const bool named = says(path) || says(fs::path(path).parent_path());
    if (o.code == 1 || o.code == 2) return says("cistern: ") && named ? "refused" : "UNNAMED";
    if (o.code != 0) return "CRASH";
    if (same) return says("anew: ") ? "healed" : "no effect";
    return says("note: ") && named ? "said" : "SILENT";
  }

  void Check(const std::string& kind, const Outcome& o, const std::string& path, bool same,
             const std::string& bytes) {
    const std::string word = Verdict(o, path, same);
    if (std::isupper(static_cast<unsigned char>(word[1])))
      ADD_FAILURE() << word << ": " << kind << ", " << bytes.size() << " bytes\n" << o;
    ++counts_[word];
  }

  // `words` of a run folder of its own, whose file `name` is damaged; four processes at a time.
  void OfRuns(const std::string& name, int count, const std::function<Words(std::string)>& words,
              const std::function<std::string(const std::string&, const Outcome&)>& result) {
    const std::string whole = Copy("whole");
    const Outcome good = Run(words(whole));
    ASSERT_EQ(good.code, 0) << good;
    const std::string expected = result(whole, good);
    EXPECT_NE(expected, "");
    std::mt19937 draw(7);
    for (int first = 0; first < count; first += 4) {
      std::vector<std::string> runs, bytes;
      std::vector<pid_t> children;
      for (int i = first; i < std::min(first + 4, count); ++i) {
        runs.push_back(Copy(StrCat("run-", i)));
        const std::string path = runs.back() + "/" + name;
        bytes.push_back(Damaged(ReadFile(path), draw));
        WriteFileAtomically(path, bytes.back());
        children.push_back(Start(words(runs.back()), runs.back() + "-said"));
      }
      for (size_t i = 0; i < runs.size(); ++i) {
        const Outcome o = Wait(children[i], runs[i] + "-said");
        Check(name, o, runs[i] + "/" + name, o.code == 0 && result(runs[i], o) == expected,
              bytes[i]);
        fs::remove_all(runs[i]);
      }
    }
    fs::remove_all(whole);
  }

  static Words Generate(const std::string& model) {
    return {"generate", model, "--prompt", "line 1", "-n", "6", "--threads", "1"};
  }
  static Words Resume(const std::string& run) {
    return {"train", "--resume", "--out", run, "--steps", "5", "--threads", "1", "--quiet"};
  }
  static std::string Printed(const std::string&, const Outcome& o) { return o.out; }
  static std::string Trained5(const std::string& run, const Outcome&) {
    std::string all;
    for (const char* file : {"checkpoint-5/model.safetensors", "checkpoint-5/optimizer.safetensors",
                             "model.safetensors", "tokenizer.json"})
      all += ReadFile(StrCat(run, "/", file));
    return all;
  }

  std::map<std::string, int> counts_;
};

TEST_F(MutateTest, FilesOfAModel) {
  for (const char* name : {"model.safetensors", "config.json", "tokenizer.json"})
    OfRuns(name, 10, Generate, Printed);
  EXPECT_GE(counts_["refused"], 15) << ::testing::PrintToString(counts_);
}

TEST_F(MutateTest, ASavedState) {
  ASSERT_EQ(Run(Generate(Trained()) + Words{"--save-state", folder_ / "state"}).code, 0);
  const auto words = [](const std::string& run) {
    return Words{"generate", Trained(), "--load-state", run + "/state",
                 "-n",       "6",       "--threads",    "1"};
  };
  // Each run folder has a state of its own beside the model that they share.
  const std::string in_model = Trained() + "/state";
  fs::copy_file(folder_ / "state", in_model);
  OfRuns("state", 10, words, Printed);
  fs::remove(in_model);
  EXPECT_EQ(counts_["refused"] + counts_["no effect"], 10);
}

TEST_F(MutateTest, FilesOfARun) {
  for (const char* name :
       {"checkpoint-3/model.safetensors", "checkpoint-3/optimizer.safetensors",
        "checkpoint-3/trainer.json", "experiment.json", "model.safetensors", "tokenizer.json"})
    OfRuns(name, 6, Resume, Trained5);
  EXPECT_GE(counts_["refused"], 20) << ::testing::PrintToString(counts_);
}

TEST_F(MutateTest, Caches) {
  const std::string expected = ReadFile(Trained() + "/checkpoint-3/model.safetensors");
  const fs::path caches = fs::path(*shared_ / "cache") / "cistern";
  std::mt19937 draw(7);
  int files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(caches)) {
    const std::string path = entry.path();
    if (!entry.is_regular_file() || entry.path().extension() == ".lock") continue;
    ++files;
    const std::string good = ReadFile(path);
    for (int i = 0; i < 3; ++i) {
      const std::string out = folder_ / StrCat("run-", files, "-", i), bad = Damaged(good, draw);
      WriteFileAtomically(path, bad);
      const Outcome o = Run(Train(TrainedText(), out));
      Check(path, o, path,
            o.code == 0 && ReadFile(out + "/checkpoint-3/model.safetensors") == expected, bad);
      EXPECT_EQ(ReadFile(path), good) << path << "\n" << o;
    }
  }
  EXPECT_GE(files, 2);
  EXPECT_GE(counts_["healed"], files) << ::testing::PrintToString(counts_);
}

}  // namespace
}  // namespace cistern

// JSON, TOML and `--set` into options. The first byte picks the format.
#include "cistern/io/fields.h"
#include "cistern/io/json_text.h"
#include "fuzz/fuzz_input.h"

namespace {

struct Options {
  int64_t steps = 1;
  double lr = 1;
  bool amp = false;
  std::string name;
  std::vector<std::string> names;
  std::vector<int64_t> sizes;
  cistern::Json extra;

  cistern::Fields fields() {
    cistern::Fields train, all;
    train.Add("lr", &lr, "rate", {0, 10})
        .Add("steps", &steps, "steps", {1, 1000000})
        .Add("amp", &amp, "bf16");
    all.Add("name", &name, "a name", {"a", "b"})
        .Add("names", &names, "names")
        .Add("sizes", &sizes, "sizes", {0, 100});
    all.Add("extra", &extra, "anything").Group("train", train);
    return all;
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return cistern::FuzzOne(data, size, [](std::string_view text) {
    if (text.empty()) return;
    const char format = text[0];
    text.remove_prefix(1);
    Options options;
    cistern::Fields fields = options.fields();
    if (format == 's') {
      fields.Set(std::string(text));
    } else {
      fields.Read(
          format == 't' ? cistern::ParseToml(text, "fuzz") : cistern::ParseJson(text, "fuzz"),
          "fuzz");
    }
    if (options.steps < 1 || options.steps > 1000000 || !(options.lr >= 0 && options.lr <= 10))
      __builtin_trap();
    const cistern::Json written = fields.Write();
    (void)fields.Help();
    Options again;
    cistern::Fields reader = again.fields();
    if (options.name.empty()) return;  // the default is no choice
    reader.Read(written, "again");
    if (reader.Write() != written) __builtin_trap();
  });
}

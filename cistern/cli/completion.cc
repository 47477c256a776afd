// cistern completion: a shell's completion of commands, options and their values, written from the
// declarations of all commands.
#include <algorithm>
#include <cstdio>
#include <map>

#include "cistern/attention/mechanism.h"
#include "cistern/base/error.h"
#include "cistern/cli/command.h"
#include "cistern/cli/experiment.h"
#include "cistern/tasks/task.h"

namespace cistern::cli {
namespace {

using CompletionWords = std::vector<std::string>;

std::string InQuotes(const CompletionWords& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return "'" + text + "'";
}

// "TEXT:{a,b}" as CLI11 describes a choice.
CompletionWords ChoicesOf(const std::string& type) {
  CompletionWords words;
  const size_t begin = type.find('{'), end = type.find('}');
  if (begin == type.npos || end == type.npos) return words;
  std::string word;
  for (const char c : type.substr(begin + 1, end - begin - 1)) {
    if (c != ',') {
      word += c;
    } else {
      words.push_back(std::move(word));
      word.clear();
    }
  }
  words.push_back(std::move(word));
  return words;
}

struct CompletionTable {
  std::map<std::string, CompletionWords> options, commands;              // by path: " bench ops"
  std::map<std::string, std::map<std::string, CompletionWords>> values;  // by path and option
};

void Collect(const CLI::App& app, const std::string& path, CompletionTable* table) {
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_group().empty()) continue;  // not in the help either
    if (option->get_positional()) {
      for (std::string& word : ChoicesOf(option->get_type_name()))
        table->commands[path].push_back(std::move(word));
    }
    for (const std::string& name : option->get_lnames()) {
      table->options[path].push_back("--" + name);
      if (CompletionWords words = ChoicesOf(option->get_type_name()); !words.empty())
        table->values[path]["--" + name] = std::move(words);
    }
  }
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
    table->commands[path].push_back(sub->get_name());
    Collect(*sub, path + " " + sub->get_name(), table);
  }
}

// What the program knows by name, whatever command asks.
std::map<std::string, CompletionWords> KnownValues() {
  std::map<std::string, CompletionWords> known;
  for (const TaskInfo* task : Tasks()) known["--task"].push_back(task->name);
  for (const MechanismInfo* mechanism : Mechanisms())
    known["--mechanisms"].push_back(mechanism->name);
  known["--mechanism"] = known["--mechanisms"];
  known["--dtype"] = {"float32", "float64", "bfloat16", "auto"};
  known["--device"] = {"cpu", "cuda"};
  known["--pretrain"] = {"masked", "causal"};
  Experiment experiment;
  for (const std::string& name : experiment.Describe().Names())
    known["--set"].push_back(name + "=");
  return known;
}

std::string BashCompletion(const CLI::App& app) {
  CompletionTable table;
  Collect(app, "", &table);
  std::string text =
      "# bash completion of cistern: source <(cistern completion bash)\n"
      "_cistern() {\n"
      "  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} path= words= i\n"
      "  COMPREPLY=()\n"
      "  for ((i = 1; i < COMP_CWORD; i++)); do\n"
      "    case \"$path ${COMP_WORDS[i]}\" in\n"
      "      ";
  std::string paths;
  for (const auto& [path, commands] : table.commands) {
    for (const std::string& name : commands)
      paths += StrCat(paths.empty() ? "" : " | ", "'", path, " ", name, "'");
  }
  text += paths + ") path+=\" ${COMP_WORDS[i]}\" ;;\n    esac\n  done\n";
  text += "  case \"$path $prev\" in\n";
  for (const auto& [path, options] : table.values) {
    for (const auto& [name, words] : options)
      text += StrCat("    '", path, " ", name, "') words=", InQuotes(words), " ;;\n");
  }
  text += "    *) case $prev in\n";
  for (const auto& [name, words] : KnownValues())
    text += StrCat("      ", name, ") words=", InQuotes(words), " ;;\n");
  text +=
      "    esac ;;\n  esac\n"
      "  if [[ -z $words && $cur == -* ]]; then\n"
      "    case $path in\n";
  for (const auto& [path, options] : table.options)
    text += StrCat("      '", path, "') words=", InQuotes(options), " ;;\n");
  text += "    esac\n  elif [[ -z $words ]]; then\n    case $path in\n";
  for (const auto& [path, commands] : table.commands)
    text += StrCat("      '", path, "') words=", InQuotes(commands), " ;;\n");
  text +=
      "    esac\n  fi\n"
      "  [[ -z $words ]] || mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$cur\")\n"
      "  [[ ${COMPREPLY[0]-} != *= ]] || compopt -o nospace 2>/dev/null\n"
      "  return 0\n"
      "}\n"
      "complete -o bashdefault -o default -F _cistern cistern\n";  // else: names of files
  return text;
}

}  // namespace

void AddCompletion(CLI::App& app, Run& run) {
  auto shell = std::make_shared<std::string>();
  CLI::App* command =
      app.add_subcommand("completion", "print a shell's completion of commands and options");
  command->add_option("shell", *shell, "bash (zsh reads the same, after bashcompinit)")
      ->required()
      ->check(CLI::IsMember({"bash"}));
  command->footer(
      "Examples:\n"
      "  source <(cistern completion bash)                 for this shell\n"
      "  cistern completion bash > ~/.local/share/bash-completion/completions/cistern");
  command->callback([&app, &run] {
    run = [&app] {
      std::printf("%s", BashCompletion(app).c_str());
      return 0;
    };
  });
}

}  // namespace cistern::cli

// loadstone explain: prints the meaning of an error code, and the remedy.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_writer.h"
#include "base/text.h"
#include "base/unknown_word.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "loadstone/error.h"

namespace loadstone {

void visit_fields(JsonWriter& json, Like<CodeInfo> auto& info) {
  json.member("code", info.code);
  json.member("meaning", info.meaning);
  json.member("advice", info.advice);
  json.member("exit_status", exit_status(info.code));
}

}  // namespace loadstone

namespace loadstone::cli {

namespace {

std::string unknown_code(const std::string& code) {
  std::vector<std::string> codes;
  for (const CodeInfo& info : all_codes()) codes.emplace_back(info.code);
  const std::string near = did_you_mean(code, codes);
  return fmt::format("unknown code '{}'{}", printable(code), near);
}

int explain_one(const std::string& code, bool json) {
  const CodeInfo* const info = find_code(code);
  if (info == nullptr) throw Error("usage", unknown_code(code));
  if (json) {
    print_line(json_text(*info, 2));
  } else {
    print(fmt::format("{}\n  {}\n  {}\n  As an error: exit status {}.\n", info->code, info->meaning,
                      info->advice, exit_status(info->code)));
  }
  return 0;
}

int explain_all(bool json) {
  if (json) {
    print_line(json_text(all_codes(), 2));
    return 0;
  }
  std::size_t width = 0;
  for (const CodeInfo& info : all_codes()) width = std::max(width, info.code.size());
  std::string text;
  for (const CodeInfo& info : all_codes()) {
    text += fmt::format("{:<{}}  {}\n", info.code, width, info.meaning);
  }
  print(text);
  return 0;
}

}  // namespace

void add_explain(Program& program, Chosen& chosen) {
  const Command command =
      program.add_subcommand("explain", "Explain what an error or finding means, and what to do");
  const auto code = std::make_shared<std::string>();
  command.add_option("CODE", *code, "TEXT",
                     "The code printed in [brackets]; without it, all codes are listed");
  command.add_flag("--json", chosen.json, "One JSON document on stdout");
  command.set_action([code, &chosen] {
    return code->empty() ? explain_all(chosen.json) : explain_one(*code, chosen.json);
  });
}

}  // namespace loadstone::cli

// Lists the exit statuses with their descriptions.
#pragma once

#include <array>
#include <string_view>

namespace loadstone::cli {

struct ExitStatus {
  int status;
  std::string_view meaning;
};

inline constexpr std::array<ExitStatus, 8> exit_statuses = {{
    {0, "done"},
    {1, "finished, with findings"},
    {2, "wrong usage"},
    {3, "bad or unsupported file"},
    {4, "input/output"},
    {5, "does not fit in memory"},
    {130, "interrupted by SIGINT (Ctrl-C), SIGTERM or SIGHUP"},
    {137, "killed by the system (SIGKILL), usually because memory ran out"},
}};

}  // namespace loadstone::cli

// The output of commands: results on stdout, errors and warnings on stderr. With --json there is
// one document on stdout, also for an error, and nothing else.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/json_writer.h"
#include "loadstone/error.h"
#include "loadstone/finding.h"
#include "loadstone/machine.h"

namespace loadstone::cli {

// Error "usage" whose message ends with a hint to the command's --help.
[[nodiscard]] Error usage_error(const std::string& command, const std::string& message,
                                const Where& where = {});

// Throw Error "io.write", "io.no_space" or "io.denied" if stdout cannot be written.
void print(std::string_view text);
void print_line(std::string_view text);  // adds a line break if necessary
void finish_output();

// "loadstone: ... [code]" on stderr, or with `json` {"error": ...} on stdout. Never throws.
// `findings`: all findings of a plan, if the error is one of them.
void report_error(const Error& error, bool json,
                  const std::vector<Finding>& findings = {}) noexcept;

// Returns the finding that prevents the work, or null. Findings are sorted by severity.
[[nodiscard]] const Finding* obstacle(const std::vector<Finding>& findings, bool strict);
// Reports the obstacle `first`, and how many more there are, which `teller` shows. Returns the exit
// status.
[[nodiscard]] int refuse(const std::vector<Finding>& findings, const Finding& first,
                         std::string_view teller, bool json);

// The report of work that was done, which --quiet leaves out; a document of --json is always
// printed.
void print_report(std::string_view text, bool json);
// A line on stderr, in addition to errors and warnings, which --quiet omits.
void print_hint(std::string_view text);

// The line "memory ..." with the planned and the measured peak.
[[nodiscard]] std::string memory_text(std::uint64_t planned_bytes, const ProcessMemory& used,
                                      std::uint64_t anonymous_bytes_peak);

// Returns the findings that depend on values, such as non-finite values.
[[nodiscard]] std::vector<Finding> found_since(const std::vector<Finding>& known,
                                               std::vector<Finding> findings);
// Warnings for people, on stderr: the first few (all with --verbose), then how many more.
void print_warnings(const std::vector<Finding>& findings);

[[nodiscard]] bool has_warnings(const std::vector<Finding>& findings) noexcept;

// One object: the members of `json`, an object that is still open, and those of a report.
[[nodiscard]] std::string joined(JsonWriter json, const std::string& report);
// "process": what this process took, measured.
void write_process(JsonWriter& json, const ProcessMemory& memory,
                   std::uint64_t anonymous_bytes_peak);
// "1.234 s, 2.34 GB/s"
[[nodiscard]] std::string speed_text(std::uint64_t bytes, double seconds);

// The longest text that is read, and the code of the Error for a longer one.
struct TextLimit {
  std::string code = "usage";
  std::uint64_t bytes_max = std::uint64_t{2} << 30;
};

// "-" is standard input, which can be read once: Error "usage" for the second time.
[[nodiscard]] std::string read_file(const std::string& path, const TextLimit& limit = {});
// Error "usage" for the second option that reads standard input.
[[noreturn]] void standard_input_is_taken();
// Returns the path as messages show it.
[[nodiscard]] std::string shown_path(const std::string& path);

// The result of `parse` for a file's text. Its errors know nothing of files: they get the path
// here.
template <typename Parse>
[[nodiscard]] auto parse_file(const std::string& path, Parse parse, const TextLimit& limit = {}) {
  const std::string text = read_file(path, limit);
  try {
    return parse(text);
  } catch (const Error& error) {
    Where where = error.where();
    if (where.path.empty()) where.path = shown_path(path);
    throw Error(error.code(), error.message(), where);
  }
}

}  // namespace loadstone::cli

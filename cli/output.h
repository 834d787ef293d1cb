// Prints results on stdout, and errors and warnings on stderr and in the log. With --json, stdout
// gets exactly one JSON document, even for an error.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_writer.h"
#include "cli/log.h"
#include "cli/voice.h"
#include "loadstone/error.h"
#include "loadstone/finding.h"
#include "loadstone/machine.h"

namespace loadstone::cli {

// Returns an Error "usage" whose message ends with a hint to the command's --help.
[[nodiscard]] Error usage_error(const std::string& command, const std::string& message,
                                const Where& where = {});

// Prints text on stdout. Throws Error "io.write", "io.no_space" or "io.denied" if stdout cannot be
// written.
void print(std::string_view text);
void print_line(std::string_view text);  // adds a line break if necessary
void finish_output();

// Prints "loadstone: ... [code]" on stderr, or with `json` {"error": ...} on stdout. Never throws.
// `findings`: all findings of a plan, if the error is one of them.
void report_error(const Error& error, bool json,
                  const std::vector<Finding>& findings = {}) noexcept;

// Returns the finding that prevents the work, or null. Findings are sorted by severity.
[[nodiscard]] const Finding* obstacle(const std::vector<Finding>& findings, bool strict);
// Reports the obstacle `first` and the number of further obstacles, which the command `teller`
// shows. Returns the exit status.
[[nodiscard]] int refuse(const std::vector<Finding>& findings, const Finding& first,
                         std::string_view teller, bool json);

// Prints the report of finished work: the JSON document or, if `json` is empty, the text, which
// --quiet omits. The log gets the text.
template <typename Text>
void print_report(const Text& text, std::string_view json) {
  log_report(text);
  if (!json.empty()) return print_line(json);
  if (!is_quiet()) print_line(text(style_of(stdout)));
}
// Prints a line on stderr in addition to errors and warnings. --quiet omits it.
void print_hint(std::string_view text);

// Returns the line "memory ..." with the planned and the measured peak.
[[nodiscard]] std::string memory_text(std::uint64_t planned_bytes, const ProcessMemory& used,
                                      std::uint64_t anonymous_bytes_peak);

// Returns the findings that are not in `known`, such as findings about non-finite values.
[[nodiscard]] std::vector<Finding> found_since(const std::vector<Finding>& known,
                                               std::vector<Finding> findings);
// Prints warnings on stderr: the first few (all with --verbose), then the number of further
// warnings.
void print_warnings(const std::vector<Finding>& findings);

[[nodiscard]] bool has_warnings(const std::vector<Finding>& findings) noexcept;

// Joins two JSON objects into one: the members of `json`, whose object is still open, and the
// members of a report.
[[nodiscard]] std::string joined(JsonWriter json, const std::string& report);
// Writes the member "process": the measured memory of this process.
void write_process(JsonWriter& json, const ProcessMemory& memory,
                   std::uint64_t anonymous_bytes_peak);
// Returns a text such as "1.234 s, 2.34 GB/s".
[[nodiscard]] std::string speed_text(std::uint64_t bytes, double seconds);

// The longest text that loadstone reads, and the error code for a longer text.
struct TextLimit {
  std::string code = "usage";
  std::uint64_t bytes_max = std::uint64_t{2} << 30;
};

// Reads a file. "-" means standard input, which can be read only once: a second time throws Error
// "usage".
[[nodiscard]] std::string read_file(const std::string& path, const TextLimit& limit = {});
// Throws Error "usage", because a second option reads standard input.
[[noreturn]] void standard_input_is_taken();
// Returns the path in the form that messages show.
[[nodiscard]] std::string shown_path(const std::string& path);

// Returns the result of `parse` for a file's text. Adds the path to errors of `parse`.
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

#include "cli/output.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <span>
#include <system_error>

#include "base/finding_json.h"
#include "base/text.h"
#include "cli/interrupt.h"
#include "loadstone/storage.h"

namespace loadstone::cli {

namespace {

constexpr std::size_t warnings_shown_max = 10;

[[noreturn]] void fail_write(const std::string& path, int system_error) {
  Where where;
  where.path = path;
  where.system_error = system_error;
  throw Error(system_error == ENOSPC ? "io.no_space" : "io.write", "cannot write", where);
}

// A string, or null where nothing is known.
void text_member(JsonWriter& json, std::string_view name, const std::string& text) {
  json.key(name);
  if (text.empty()) {
    json.null();
  } else {
    json.value(text);
  }
}

std::string error_json(const Error& error, const std::vector<Finding>& findings) {
  const Where& where = error.where();
  JsonWriter json(2);
  json.begin_object();
  json.key("error");
  json.begin_object();
  json.member("code", error.code());
  json.member("message", error.message());
  text_member(json, "path", where.path);
  text_member(json, "tensor", where.tensor);
  json.key("byte_offset");
  if (where.byte_offset) {
    json.value(*where.byte_offset);
  } else {
    json.null();
  }
  text_member(json, "field", where.field);
  text_member(json, "found", where.found);
  text_member(json, "expected", where.expected);
  const int number = where.system_error;
  text_member(json, "system_error",
              number == 0 ? std::string() : std::generic_category().message(number));
  json.end_object();
  if (!findings.empty()) {
    json.key("findings");
    write_findings(json, findings);
  }
  json.end_object();
  return json.take() + "\n";
}

}  // namespace

Error usage_error(const std::string& command, const std::string& message, const Where& where) {
  return Error("usage", fmt::format("{}; see '{} --help'", message, command), where);
}

void print(std::string_view text) {
  result_begins();
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size()) {
    fail_write("standard output", errno);
  }
}

void print_line(std::string_view text) {
  print(text);
  if (text.empty() || text.back() != '\n') print("\n");
}

void finish_output() {
  if (std::fflush(stdout) != 0) fail_write("standard output", errno);
}

void report_error(const Error& error, bool json, const std::vector<Finding>& findings) noexcept {
  try {
    if (json) {
      result_begins();
      const std::string text = error_json(error, findings);
      std::fwrite(text.data(), 1, text.size(), stdout);
      std::fflush(stdout);
      return;
    }
    std::fflush(stdout);
    fmt::print(stderr, "loadstone: {}\n", error.what());
  } catch (...) {
    // No memory to say more, and nowhere to say it: the exit status still tells.
    std::fputs("loadstone: an error that could not be told\n", stderr);
  }
}

void print_warnings(const std::vector<Finding>& findings) {
  std::size_t count = 0;
  for (const Finding& finding : findings) {
    if (finding.severity != Severity::warning || ++count > warnings_shown_max) continue;
    fmt::print(stderr, "loadstone: warning: {} [{}]\n", printable(finding.message, 2000),
               finding.code);
  }
  if (count > warnings_shown_max) {
    fmt::print(stderr, "loadstone: {} more warnings; 'loadstone plan' shows all\n",
               count - warnings_shown_max);
  }
}

bool has_warnings(const std::vector<Finding>& findings) noexcept {
  return std::ranges::any_of(
      findings, [](const Finding& finding) { return finding.severity == Severity::warning; });
}

void write_file(const std::string& path, std::string_view text) {
  std::FILE* const file = std::fopen(path.c_str(), "wbe");
  if (file == nullptr) fail_write(path, errno);
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const int write_error = errno;
  const bool closed = std::fclose(file) == 0;
  if (!written) fail_write(path, write_error);
  if (!closed) fail_write(path, errno);
}

std::string read_file(const std::string& path) {
  const auto source = local_storage().open(path);
  std::string text(source->identity().bytes, '\0');
  source->read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace loadstone::cli

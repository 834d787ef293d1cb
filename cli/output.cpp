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
#include "cli/log.h"
#include "cli/voice.h"
#include "loadstone/storage.h"
#include "storage/new_file.h"

namespace loadstone {

// Writes a string member; an empty string is unknown and becomes null.
static void text_member(JsonWriter& json, std::string_view name, const std::string& text) {
  json.member(name, text.empty() ? nullptr : &text);
}

static void write_json(JsonWriter& json, const Error& error) {
  const Where& where = error.where();
  json.begin_object();
  json.member("code", error.code());
  json.member("message", error.message());
  text_member(json, "path", where.path);
  text_member(json, "tensor", where.tensor);
  json.member("byte_offset", where.byte_offset);
  text_member(json, "field", where.field);
  text_member(json, "found", where.found);
  text_member(json, "expected", where.expected);
  const int number = where.system_error;
  text_member(json, "system_error",
              number == 0 ? std::string() : std::generic_category().message(number));
  json.end_object();
}

}  // namespace loadstone

namespace loadstone::cli {

namespace {

constexpr std::size_t warnings_shown_max = 10;

[[noreturn]] void fail_output() { fail_write(errno, "the system cannot write", "standard output"); }

void require_length(const std::string& path, std::uint64_t bytes, const TextLimit& limit) {
  if (bytes <= limit.bytes_max) return;
  throw Error(limit.code, "the text is too long",
              {.path = shown_path(path),
               .found = human_bytes(bytes),
               .expected = fmt::format("at most {}", human_bytes(limit.bytes_max))});
}

// Reads all of standard input. A second call throws.
std::string read_standard_input(const TextLimit& limit) {
  static bool was_read = false;
  if (was_read) standard_input_is_taken();
  was_read = true;
  std::string text;
  std::array<char, 64 << 10> part;
  while (const std::size_t count = std::fread(part.data(), 1, part.size(), stdin)) {
    text.append(part.data(), count);
    require_length("-", text.size(), limit);
  }
  if (std::ferror(stdin) == 0) return text;
  Where where;
  where.path = shown_path("-");
  where.system_error = errno;
  throw Error("io.read", "the system cannot read the file", where);
}

std::string error_json(const Error& error, const std::vector<Finding>& findings) {
  JsonWriter json(2);
  json.begin_object();
  json.member("error", error);
  json.optional("more_errors", error.others());
  json.optional("findings", findings);
  json.end_object();
  return json.take() + "\n";
}

std::string error_text(const Error& error, const TextStyle& style) {
  std::string text = fmt::format("{} {}\n", style.error("loadstone:"), error.what());
  const CodeInfo* const info = is_verbose() ? find_code(error.code()) : nullptr;
  if (info != nullptr) text += fmt::format("  {}\n  {}\n", info->meaning, info->advice);
  for (const Error& other : error.others()) text += error_text(other, style);
  return text;
}

}  // namespace

Error usage_error(const std::string& command, const std::string& message, const Where& where) {
  return Error("usage", fmt::format("{}; see '{} --help'", message, command), where);
}

void print(std::string_view given) {
  result_begins();
  const std::string text = visible_json(given);
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size()) fail_output();
}

void print_line(std::string_view text) {
  print(text);
  if (text.empty() || text.back() != '\n') print("\n");
}

void finish_output() {
  if (std::fflush(stdout) != 0) fail_output();
}

void report_error(const Error& error, bool json, const std::vector<Finding>& findings) noexcept {
  try {
    if (json) {
      result_begins();
      const std::string text = visible_json(error_json(error, findings));
      std::fwrite(text.data(), 1, text.size(), stdout);
    }
    std::fflush(stdout);
    print_and_log(!json, [&](const TextStyle& style) { return error_text(error, style); });
  } catch (...) {
    // Without memory for a message, the exit status is the only report.
    std::fputs("loadstone: an error occurred, but there is not enough memory to describe it\n",
               stderr);
  }
}

const Finding* obstacle(const std::vector<Finding>& findings, bool strict) {
  if (findings.empty()) return nullptr;
  const Finding& first = findings.front();
  if (first.severity == Severity::error) return &first;
  return strict && first.severity == Severity::warning ? &first : nullptr;
}

int refuse(const std::vector<Finding>& findings, const Finding& first, std::string_view teller,
           bool json) {
  const auto count = std::ranges::count(findings, first.severity, &Finding::severity);
  std::string message = advised_message(first);
  if (count > 1) message += fmt::format(" ({} more; {} shows all)", count - 1, teller);
  // The message already contains target, found and expected, and a text line would repeat them.
  Where where;
  if (json) where = {.tensor = first.target, .found = first.found, .expected = first.expected};
  report_error(Error(first.code, message, where), json, findings);
  return first.severity == Severity::error ? exit_status(first.code) : 3;
}

std::string joined(JsonWriter json, const std::string& report) {
  // Removes the opening brace of the report. The writer has not written its closing brace yet.
  return json.take() + "," + report.substr(1);
}

void write_process(JsonWriter& json, const ProcessMemory& memory,
                   std::uint64_t anonymous_bytes_peak) {
  json.key("process");
  json.begin_object();
  json.member("resident_bytes_peak", memory.peak_bytes);
  json.member("anonymous_bytes_peak", anonymous_bytes_peak);
  json.end_object();
}

std::string speed_text(std::uint64_t bytes, double seconds) {
  if (!(seconds > 0)) return fmt::format("{:.3f} s", seconds);
  return fmt::format("{:.3f} s, {:.2f} GB/s", seconds, static_cast<double>(bytes) / 1e9 / seconds);
}

void print_hint(std::string_view text) {
  print_and_log(!is_quiet(), [&](const TextStyle&) {
    return fmt::format("loadstone: {}\n", printable(text, 2000));
  });
}

std::string memory_text(std::uint64_t planned_bytes, const ProcessMemory& used,
                        std::uint64_t anonymous_bytes_peak) {
  return fmt::format(
      "memory    planned peak {}; process used {} at its peak ({} anonymous, "
      "{} of files)",
      human_bytes(planned_bytes), human_bytes(used.peak_bytes), human_bytes(anonymous_bytes_peak),
      human_bytes(used.file_bytes));
}

std::vector<Finding> found_since(const std::vector<Finding>& known, std::vector<Finding> findings) {
  std::erase_if(findings, [&](const Finding& each) {
    return std::ranges::any_of(known, [&](const Finding& before) {
      return before.code == each.code && before.target == each.target &&
             before.message == each.message;
    });
  });
  return findings;
}

void print_warnings(const std::vector<Finding>& findings) {
  const std::size_t shown_max = is_verbose() ? findings.size() : warnings_shown_max;
  print_and_log(!is_quiet(), [&](const TextStyle& style) {
    const std::string label = style.warning("warning:");
    std::string text;
    std::size_t count = 0;
    for (const Finding& finding : findings) {
      if (finding.severity != Severity::warning || ++count > shown_max) continue;
      text += fmt::format("loadstone: {} {} [{}]\n", label,
                          printable(advised_message(finding), 2000), finding.code);
    }
    if (count <= shown_max) return text;
    return text + fmt::format("loadstone: {}; --verbose shows all\n",
                              counted(count - shown_max, "more warning"));
  });
}

bool has_warnings(const std::vector<Finding>& findings) noexcept {
  return std::ranges::any_of(
      findings, [](const Finding& finding) { return finding.severity == Severity::warning; });
}

void standard_input_is_taken() {
  throw Error("usage", "only one option can read standard input ('-')");
}

std::string shown_path(const std::string& path) { return path == "-" ? "standard input" : path; }

std::string read_file(const std::string& path, const TextLimit& limit) {
  if (path == "-") return read_standard_input(limit);
  const auto source = local_storage().open(path);
  require_length(path, source->identity().bytes, limit);
  std::string text(source->identity().bytes, '\0');
  source->read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace loadstone::cli

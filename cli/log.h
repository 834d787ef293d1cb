// Prints messages on stderr, and appends them to the file of --log.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

#include "cli/voice.h"

namespace loadstone::cli {

// Opens the file to append to, which stays open until the process ends. Call at most once. Throws
// Error "io.exists" for a file that is not a text or that belongs to a model, and the errors of
// opening.
void open_log(const std::string& path);
[[nodiscard]] bool has_log() noexcept;

// Appends each line of `text` with the time, if there is a log. Returns false if the system cannot
// write. Async-signal-safe.
bool append_to_log(std::string_view text) noexcept;

// Returns the arguments of the command as one line, without the secrets that URLs may contain.
[[nodiscard]] std::string shown_arguments(int argc, const char* const* argv);

// Prints on stderr, and ignores errors: work must not fail because nobody reads its messages.
void print_error_text(std::string_view text) noexcept;

// Appends to the log, and reports the first failure on stderr.
void log_text(const std::string& text);

// Appends the report of finished work to the log, if there is one.
template <typename Text>
void log_report(const Text& text) {
  if (has_log()) log_text(text(TextStyle{}));
}

// Prints lines on stderr if `is_printed`, and appends them to the log in any case. `text` returns
// the lines in a style, because the log has no colours.
template <typename Text>
void print_and_log(bool is_printed, const Text& text) {
  if (is_printed) print_error_text(text(style_of(stderr)));
  if (has_log()) log_text(text(TextStyle{}));
}

}  // namespace loadstone::cli

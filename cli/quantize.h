// What of convert is about quantizing.
#pragma once

#include <string>
#include <vector>

#include "cli/parser.h"
#include "loadstone/convert.h"

namespace loadstone::cli {

// As typed.
struct QuantizeArgs {
  std::vector<std::string> formats;
  std::vector<std::string> include;
  std::vector<std::string> exclude;
  std::string style;
  std::string mode = "exact";
  std::string imatrix;
  bool allow_non_finite = false;
  bool copy_code = false;
};

void add_quantize_options(Command command, QuantizeArgs& args);

// Reads the importance matrix. Throws Error "usage" for options that mean nothing without
// --quantize.
[[nodiscard]] QuantizeOptions quantize_options(const QuantizeArgs& args, FileFormat format);

}  // namespace loadstone::cli

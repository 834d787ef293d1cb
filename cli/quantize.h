// Declares the quantization options of the convert command.
#pragma once

#include <string>
#include <vector>

#include "cli/parser.h"
#include "loadstone/convert.h"

namespace loadstone::cli {

// Options for quantization, as typed.
struct QuantizeArgs {
  std::vector<std::string> formats;
  std::string style;
  QuantizeMode mode = QuantizeMode::exact;
  std::string imatrix;
  QuantizeOptions options;  // options that are stored as typed
  bool copy_code = false;
};

// Returns the group of the options.
Command add_quantize_options(Command command, QuantizeArgs& args);

// Reads the importance matrix and returns the options. Throws Error "usage" for options that have
// no effect without --quantize.
[[nodiscard]] QuantizeOptions quantize_options(const QuantizeArgs& args, FileFormat format);

}  // namespace loadstone::cli

#include "cli/quantize.h"

#include "base/named.h"
#include "cli/options.h"
#include "codec/encode.h"
#include "loadstone/error.h"

namespace loadstone::cli {

namespace {

// Breaks a text into lines that fit the help.
std::string in_lines(std::string words) {
  constexpr std::size_t columns = 75;
  for (std::size_t begin = 0; begin + columns < words.size();) {
    const std::size_t space = words.rfind(' ', begin + columns);
    words[space] = '\n';
    begin = space + 1;
  }
  return words;
}

}  // namespace

Command add_quantize_options(Command command, QuantizeArgs& args) {
  const Command group = command.in_group("Quantizing");
  std::string encodings;
  for (const WrittenEncoding* const each : written_encodings()) {
    encodings += std::string(each->name) + ", ";
  }
  group.add_option("--quantize", args.formats, "[REGEX=]E",
                   "Encoding of weights inside decoder layers:\n" + in_lines(encodings + "none;") +
                       "\nwith a pattern: only the tensors that match. Repeatable, the first match "
                       "wins.\nFor NAME.gguf also llama.cpp's mixes: q4_k_m, q5_k_s, f16 ...");
  group.add_option("--include", args.options.include, "REGEX",
                   "Pattern of tensors to quantize too. Repeatable");
  group.add_option("--exclude", args.options.exclude, "REGEX",
                   "Pattern of tensors to leave unchanged. Repeatable");
  group
      .add_option("--style", args.style, "STYLE",
                  "Library whose names and configs to write (default: modelopt; encodings "
                  "of\nbitsandbytes: always its own). Without --quantize: repack existing codes")
      .one_of({std::string(name(QuantizeStyle::unified)),
               std::string(name(QuantizeStyle::compressed_tensors))});
  group.add_choice("--mode", args.mode, "MODE", "exact (default), or the same bytes as ModelOpt");
  group.add_option("--imatrix", args.imatrix, "FILE",
                   "GGUF: an importance matrix of llama-imatrix (.gguf or .dat)");
  group.add_flag("--allow-non-finite", args.options.allow_non_finite,
                 "Continue if values are NaN or infinite, or become so in the output's dtype");
  return group;
}

QuantizeOptions quantize_options(const QuantizeArgs& args, FileFormat format) {
  QuantizeOptions options = args.options;
  options.style = from_name<QuantizeStyle>(args.style);
  if (args.formats.empty()) {
    if (args.mode != QuantizeMode::exact) {
      throw Error("usage", "--mode needs --quantize");
    }
    if (!args.imatrix.empty()) {
      throw Error("usage", "--imatrix needs --quantize");
    }
    return options;
  }
  for (const std::string& text : args.formats) {
    // Split at the last '=', because patterns may contain '=' but names of encodings do not.
    const auto sign = text.rfind('=');
    QuantizeFormat& made = options.formats.emplace_back();
    if (sign != std::string::npos) made.pattern = text.substr(0, sign);
    made.quantization = parse_quantization(sign == std::string::npos ? text : text.substr(sign + 1),
                                           args.mode, format);
  }
  if (!args.imatrix.empty()) {
    if (format != FileFormat::gguf) {
      throw Error("usage",
                  "--imatrix needs NAME.gguf as TARGET: only GGUF files have blocks that use it");
    }
    options.importance =
        std::make_shared<const ImportanceMatrix>(open_importance_matrix(args.imatrix));
  }
  return options;
}

}  // namespace loadstone::cli

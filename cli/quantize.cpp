#include "cli/quantize.h"

#include "base/named.h"
#include "cli/options.h"
#include "codec/encode.h"
#include "loadstone/error.h"

namespace loadstone::cli {

namespace {

// Words, as many in a line as help has place for.
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

void add_quantize_options(Command command, QuantizeArgs& args) {
  const char* const group = "Quantizing";
  // One word each time: a list would swallow TARGET.
  const auto add_words = [&](const char* names, std::vector<std::string>& words, const char* type,
                             const std::string& help) {
    command.add_option(names, words, help).type_name(type).one_each().group(group);
  };
  std::string encodings;
  for (const WrittenEncoding* const each : written_encodings()) {
    encodings += std::string(each->name) + ", ";
  }
  add_words("--quantize", args.formats, "[REGEX=]E",
            "Encoding of weights inside decoder layers:\n" + in_lines(encodings + "none;") +
                "\nwith a pattern of names: of these only. Repeatable, the first that fits wins."
                "\nTo NAME.gguf also llama.cpp's mixes: q4_k_m, q5_k_s, f16 ...");
  add_words("--include", args.include, "REGEX", "Quantize these too. Repeatable");
  add_words("--exclude", args.exclude, "REGEX", "Leave these as they are. Repeatable");
  command
      .add_option("--style", args.style,
                  "Whose names and configs (default: modelopt; for encodings of bitsandbytes:\n"
                  "always its own). Without --quantize: codes get them, and no number changes")
      .type_name("STYLE")
      .one_of(names_of<QuantizeStyle>())
      .group(group);
  command.add_option("--mode", args.mode, "exact (default), or the bytes of ModelOpt itself")
      .type_name("MODE")
      .one_of({"exact", "modelopt-compat"})
      .group(group);
  command
      .add_option("--imatrix", args.imatrix,
                  "GGUF: how much columns matter, as llama-imatrix measured it (.gguf or .dat)")
      .type_name("FILE")
      .group(group);
  command
      .add_flag("--allow-non-finite", args.allow_non_finite,
                "Go on where numbers are NaN or inf, or become so in the dtype that is written")
      .group(group);
}

QuantizeOptions quantize_options(const QuantizeArgs& args, FileFormat format) {
  QuantizeOptions options;
  options.allow_non_finite = args.allow_non_finite;
  if (args.formats.empty()) {
    if (args.mode != "exact") {
      throw Error("usage", "--mode says how --quantize writes; it is not there");
    }
    if (!args.imatrix.empty()) {
      throw Error("usage", "--imatrix weighs what --quantize rounds; it is not there");
    }
    options.include = args.include;
    options.exclude = args.exclude;
    options.style = from_name<QuantizeStyle>(args.style);
    return options;
  }
  const QuantizeMode mode = quantize_mode(args.mode).value_or(QuantizeMode::exact);
  for (const std::string& text : args.formats) {
    // Patterns may hold the sign too; encodings do not.
    const auto sign = text.rfind('=');
    QuantizeFormat& made = options.formats.emplace_back();
    if (sign != std::string::npos) made.pattern = text.substr(0, sign);
    made.quantization = quantization_from_user(
        sign == std::string::npos ? text : text.substr(sign + 1), mode, format);
  }
  options.include = args.include;
  options.exclude = args.exclude;
  options.style = from_name<QuantizeStyle>(args.style);
  if (!args.imatrix.empty()) {
    if (format != FileFormat::gguf) {
      throw Error("usage", "--imatrix is for NAME.gguf as TARGET: other files have no such blocks");
    }
    options.importance =
        std::make_shared<const ImportanceMatrix>(open_importance_matrix(args.imatrix));
  }
  return options;
}

}  // namespace loadstone::cli

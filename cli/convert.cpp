// loadstone convert: one checkpoint made into another, file to file, in bounded memory.
#include "loadstone/convert.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_writer.h"
#include "base/named.h"
#include "base/text.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/machine.h"
#include "cli/options.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/quantize.h"
#include "loadstone/error.h"
#include "plan/rules.h"

namespace loadstone::cli {

namespace {

struct Args {
  OpenArgs open;
  std::string target;
  std::string to = "safetensors";
  std::string rules_path;
  std::string dtype;
  std::string block_dtype;
  std::string shard_size;
  std::string name;
  std::string max_memory;
  std::string unexpected = "warn";
  unsigned threads = 0;
  std::string part;
  bool resume = false;
  bool finish = false;
  bool dry_run = false;
  bool tensors = false;
  bool dequantize = false;
  std::string experts = "keep";
  QuantizeArgs quantize;
};

// More dims than ggml knows: files of video models hold patch embeddings of five.
constexpr std::uint32_t gguf_rank_max = 8;

void read_rules(const Args& args, const Catalog& catalog, ConvertOptions& options) {
  if (args.rules_path.empty()) return;
  const std::string path = args.rules_path;
  const auto read = [&](const std::string& text) {
    if (is_rules_json(text)) {
      options.rules = rules_from_json(text);
    } else {
      options.recipes = recipes_from_json(catalog, text);
    }
    return true;
  };
  static_cast<void>(parse_file(path, read));
}

ConvertOptions convert_options(const Args& args, const Catalog& catalog) {
  ConvertOptions options;
  read_rules(args, catalog, options);
  options.one_file = args.target.ends_with(".safetensors");
  if (options.one_file && !args.shard_size.empty()) {
    throw Error("usage", "--shard-size needs a folder as TARGET, and this is a file's name");
  }
  if (options.one_file && !args.name.empty()) {
    throw Error("usage", "--name is for a folder as TARGET, and this is a file's name");
  }
  if (!args.name.empty()) options.stem = args.name;
  if (!args.dtype.empty() && args.dtype != "auto") {
    options.dtype = dtype_option("--dtype", args.dtype);
  }
  if (!args.block_dtype.empty()) {
    options.block_dtype = dtype_option("--block-dtype", args.block_dtype);
  }
  if (!args.shard_size.empty()) {
    options.shard_bytes_max = bytes_from_user("--shard-size", args.shard_size, 1);
  }
  if (!args.max_memory.empty()) {
    options.memory_bytes_max = bytes_from_user("--max-memory", args.max_memory, 1);
  }
  options.unexpected = from_name<UnexpectedPolicy>(args.unexpected).value();
  options.threads = args.threads;
  options.quantize = quantize_options(args.quantize);
  options.experts = expert_layout(args.experts).value_or(ExpertLayout::keep);
  options.dequantize = args.dequantize;
  if (!options.one_file) {
    options.folder = read_model_folder(args.open.paths.front(), args.quantize.copy_code);
  }
  return options;
}

// "2/8"
ConvertPart part_option(const std::string& text) {
  ConvertPart part;
  const char* const end = text.data() + text.size();
  const auto index = std::from_chars(text.data(), end, part.index);
  const bool has_count = index.ec == std::errc() && index.ptr != end && *index.ptr == '/';
  const auto count = has_count ? std::from_chars(index.ptr + 1, end, part.count) : index;
  if (!has_count || count.ec != std::errc() || count.ptr != end || part.index == 0 ||
      part.index > part.count) {
    throw Error("usage",
                fmt::format("--part: '{}' is no part such as 1/4 or 4/4", printable(text)));
  }
  return part;
}

ConvertRun run_options(const Args& args) {
  ConvertRun run = {.resume = args.resume, .part = {}, .finish = args.finish};
  if (!args.part.empty()) run.part = part_option(args.part);
  if (run.part && run.finish) {
    throw Error("usage", "--finish comes when all parts are done, not with --part");
  }
  if (run.resume && run.finish) {
    throw Error("usage", "--finish does none of the work: leave out --resume");
  }
  if ((run.part || run.finish) && args.target.ends_with(".safetensors")) {
    throw Error("usage", fmt::format("{} needs a folder as TARGET, and this is a file's name",
                                     run.part ? "--part" : "--finish"));
  }
  return run;
}

// The report's own members, and what only this process knows.
std::string json_of(const ConvertReport& report, const ProcessMemory& memory,
                    std::uint64_t anonymous_bytes_peak) {
  JsonWriter json(2);
  json.begin_object();
  write_process(json, memory, anonymous_bytes_peak);
  return joined(std::move(json), to_json(report));
}

std::string text_of(const ConvertReport& report, const ConvertRun& run,
                    const ProcessMemory& memory) {
  std::string text = run.part
                         ? fmt::format("part      {} of {}: ", run.part->index, run.part->count)
                         : std::string("wrote     ");
  text += report.outputs.empty() ? "nothing to do" : printable(report.outputs.front(), 400);
  if (report.outputs.size() > 1)
    text += fmt::format(" and {} more files", report.outputs.size() - 1);
  if (report.bytes_kept > 0) {
    text += fmt::format("\nkept      {} of files that were finished before",
                        human_bytes(report.bytes_kept));
  }
  text += fmt::format("\nbytes     {} read, {} written in {}", human_bytes(report.bytes_read),
                      human_bytes(report.bytes_written),
                      speed_text(report.bytes_written, report.seconds));
  if (report.sync_seconds > 0) {
    text += fmt::format("; {:.3f} s of it to bring them to the disk", report.sync_seconds);
  }
  return text + fmt::format("\nmemory    peak {} of the process; the plan said {}",
                            human_bytes(memory.peak_bytes), human_bytes(report.peak_bytes));
}

int dry_run(const Args& args, const Conversion& conversion, const ConvertRun& run, bool json) {
  const Finding* const first = obstacle(conversion.plan.findings, args.open.strict);
  if (first == nullptr) check_target(conversion, args.target, run);
  print_line(json ? to_json(conversion) : to_table(conversion, args.tensors));
  if (first == nullptr) return 0;
  return first->severity == Severity::error ? exit_status(first->code) : 3;
}

int convert(const Args& args, bool json) {
  if (args.to != "safetensors") {
    throw Error("usage",
                fmt::format("--to {}: this version writes safetensors only", printable(args.to)));
  }
  check_target_name(args.target);
  const ConvertRun run = run_options(args);
  const auto catalog = open_paths(args.open);
  const Conversion conversion = make_conversion(catalog, convert_options(args, *catalog));
  if (args.dry_run) return dry_run(args, conversion, run, json);
  if (const Finding* const first = obstacle(conversion.plan.findings, args.open.strict)) {
    return refuse(conversion.plan.findings, *first, "--dry-run", json);
  }
  if (!json) print_warnings(conversion.plan.findings);
  const InterruptibleWork work;
  WorkWatch watch;
  const ConvertReport report = loadstone::convert(conversion, args.target, &watch, nullptr, run);
  watch.clear();
  const ProcessMemory memory = process_memory();
  const std::uint64_t anonymous = std::max(watch.anonymous_bytes_peak(), memory.anonymous_bytes);
  print_line(json ? json_of(report, memory, anonymous) : text_of(report, run, memory));
  return 0;
}

}  // namespace

void add_convert(CLI::App& app, Chosen& chosen) {
  auto* command = app.add_subcommand("convert", "Write a checkpoint anew, in bounded memory");
  const auto args = std::make_shared<Args>();
  args->open.paths.resize(1);
  args->open.gguf_rank_max = gguf_rank_max;
  command
      ->add_option("SOURCE", args->open.paths.front(), "A file, a folder, an index, or a pattern")
      ->type_name("")
      ->required();
  command
      ->add_option("TARGET", args->target,
                   "NAME.safetensors: one file; else a folder for shards and index")
      ->type_name("")
      ->required();
  const auto add = [&](const char* names, std::string& value, const char* type,
                       const std::string& help) {
    return command->add_option(names, value, help)->type_name(type);
  };
  add("--to", args->to, "FORMAT", "Format to write (default: safetensors)");
  add("--rules", args->rules_path, "FILE",
      "How names and layouts map, as JSON: rules, or recipes that Python wrote");
  add("--dtype", args->dtype, "T",
      "Cast floats of 16 bits and more, and decode blocks, to this dtype\n"
      "(default: floats stay as they are)");
  add("--block-dtype", args->block_dtype, "T",
      "What blocks of GGUF become without --dtype: bf16 (default), f16 or f32");
  add("--shard-size", args->shard_size, "SIZE",
      "Bytes of tensors in a shard" + default_text(exact_bytes(defaults::shard_bytes_max)));
  add("--name", args->name, "STEM", "What files in the folder are called (default: model)");
  add("--max-memory", args->max_memory, "SIZE", "Never take more, or refuse to start");
  add("--unexpected", args->unexpected, "P", "Tensors that recipes leave over")
      ->check(CLI::IsMember(names_of<UnexpectedPolicy>()));
  add_threads_option(*command, args->threads, "Threads");
  command->add_flag("--resume", args->resume,
                    "Keep the shards that an ended run of the same conversion finished");
  add("--part", args->part, "I/N",
      "Do this share of the shards only; they wait beside TARGET for --finish");
  command->add_flag("--finish", args->finish, "Check the shards of all parts and make TARGET");
  command->add_flag("--dry-run", args->dry_run, "Say what would be written, and stop");
  command->add_flag("--tensors", args->tensors, "With --dry-run: list every tensor");
  command->add_flag("--copy-code", args->quantize.copy_code,
                    "Copy Python files beside the model too");
  add_quantize_options(*command, args->quantize);
  command->add_flag("--dequantize", args->dequantize,
                    "Make numbers (--dtype, or bf16) of what is quantized in SOURCE");
  add("--experts", args->experts, "LAYOUT",
      "fused: all experts of a layer in one tensor; separate: each by itself")
      ->check(CLI::IsMember({"keep", "fused", "separate"}));
  add_open_options(*command, args->open);
  add_json_flag(*command, chosen.json);
  command->callback(
      [args, &chosen] { chosen.action = [args, &chosen] { return convert(*args, chosen.json); }; });
}

}  // namespace loadstone::cli

#include "cli/write.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <string_view>
#include <utility>
#include <vector>

#include "base/finding_json.h"
#include "base/json_writer.h"
#include "base/text.h"
#include "cli/duration.h"
#include "cli/interrupt.h"
#include "cli/options.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "convert/repack.h"
#include "convert/write/target.h"
#include "formats/gguf_keys.h"
#include "formats/metadata.h"
#include "loadstone/error.h"
#include "loadstone/machine.h"

namespace loadstone::cli {

namespace {

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
                fmt::format("--part: '{}' is not a part such as 1/4 or 4/4", printable(text)));
  }
  return part;
}

// Returns true for GGUF shards, which have the target's name as llama.cpp expects.
bool is_split(const WriteArgs& args) {
  return !args.shard_size.empty() && format_of_target(args.target) == FileFormat::gguf;
}

Metadata metadata_option(const WriteArgs& args) {
  Metadata metadata;
  if (!args.metadata_path.empty()) metadata = parse_file(args.metadata_path, metadata_from_json);
  if (args.architecture.empty()) return metadata;
  const MetadataValue given = {.value = args.architecture, .type = MetadataType::string};
  const auto [found, is_new] = metadata.emplace(gguf_architecture_key, given);
  if (const std::string other = json_of(found->second); !is_new && other != json_of(given)) {
    throw Error("usage", fmt::format("--arch {} contradicts --metadata, which sets {} to {}: omit "
                                     "one of the two",
                                     printable(args.architecture), gguf_architecture_key, other));
  }
  return metadata;
}

ConvertRun run_options(const WriteArgs& args) {
  ConvertRun run = args.run;
  if (!args.part.empty()) run.part = part_option(args.part);
  if (!args.receipt.empty()) run.receipt = digest_kind(args.receipt);
  if (run.part && run.finish) {
    throw Error("usage",
                "--finish cannot be combined with --part: pass it when all parts are done");
  }
  if (run.resume && run.finish) {
    throw Error("usage", "--finish does not convert tensors: omit --resume");
  }
  if ((run.part || run.finish) && format_of_target(args.target) && !is_split(args)) {
    throw Error("usage", fmt::format("{} needs a folder as TARGET, but this is the name of a file",
                                     run.part ? "--part" : "--finish"));
  }
  return run;
}

// Returns the report and measurements of this process as JSON.
std::string conversion_json(const ConvertReport& report, const ProcessMemory& memory,
                            std::uint64_t anonymous_bytes_peak) {
  JsonWriter json(2);
  json.begin_object();
  write_process(json, memory, anonymous_bytes_peak);
  return joined(std::move(json), to_json(report));
}

std::string conversion_text(const Conversion& conversion, const ConvertReport& report,
                            const WriteArgs& args, const ProcessMemory& memory,
                            std::uint64_t anonymous_bytes_peak) {
  const ConvertRun run = run_options(args);
  const auto with_code = [&](const char* code) {
    const auto found = std::ranges::find(report.findings, code, &Finding::code);
    return found == report.findings.end() ? nullptr : &*found;
  };
  if (const Finding* const complete = with_code("convert.complete")) return complete->message;
  std::string text = run.part
                         ? fmt::format("part      {} of {}: ", run.part->index, run.part->count)
                         : std::string("wrote     ");
  text += report.outputs.empty() ? "nothing to do" : printable(report.outputs.front(), 400);
  if (report.outputs.size() > 1) text += " and " + counted(report.outputs.size() - 1, "more file");
  if (report.bytes_kept > 0) {
    text += fmt::format("\nkept      {} of files that were finished before",
                        human_bytes(report.bytes_kept));
  }
  if (report.bytes_checked > 0) {
    text += fmt::format("\nchecked   {} read to check finished files",
                        human_bytes(report.bytes_checked));
  }
  if (const Finding* const replaced = with_code("convert.replaced"); replaced && !run.part) {
    text += "\nreplaced  " + counted(replaced->sources.size(), "file");
  }
  if (const std::size_t count = conversion.repacked.size(); count > 0) {
    const std::string rounding = rounding_text(conversion.repacked);
    text += "\nrepacked  " + (rounding.empty() ? counted(count, "tensor") + ", exact" : rounding);
  }
  for (const Finding& each : report.findings) {
    if (each.code == "convert.decoded") text += "\nencoding  " + each.message;
    if (each.code == "convert.readers") text += "\nreaders   " + advised_message(each);
  }
  text += fmt::format("\nbytes     {} read, {} written in {}", human_bytes(report.bytes_read),
                      human_bytes(report.bytes_written),
                      speed_text(report.bytes_written, report.seconds));
  if (report.sync_seconds > 0) {
    text += fmt::format(", of which {:.3f} s to sync the files to the disk", report.sync_seconds);
  }
  WritableStorage& storage = conversion.plan.catalog->storage().writable();
  const std::string record = record_path(args.target, storage);
  if (!run.part && storage.status(record)) {
    text += fmt::format("\nrecord    {}: lets later runs replace this output; you may delete it",
                        printable(record, 400));
  }
  return text + '\n' + to_text(report.requantized) +
         memory_text(conversion.peak_bytes, memory, anonymous_bytes_peak);
}

// Returns true if finished shards are kept, or if this is unknown.
bool keeps_shards(const Conversion& conversion, const WriteArgs& args, const ConvertRun& run) {
  try {
    return work_left(conversion, args.target, run).bytes_kept > 0;
  } catch (const Error&) {
    return true;  // for example, the disk is gone; the caller reports the first error
  }
}

// Reports which work is left after Ctrl-C or a failure to read or write, and how to continue.
void hint_at_resume(const Conversion& conversion, const WriteArgs& args, const ConvertRun& run) {
  if (conversion.one_file) return print_hint("the unfinished output was removed");
  if (!run.resume && !run.part && !run.finish) {
    return print_hint(
        "the unfinished output was removed; to keep finished shards, run the "
        "conversion with --resume");
  }
  print_hint(keeps_shards(conversion, args, run)
                 ? "finished shards are kept; run the same command again to continue"
                 : "no shard was finished; run the same command again to start from the beginning");
}

int dry_run(const WriteArgs& args, Conversion& conversion, const ConvertRun& run, bool is_strict,
            bool json) {
  const Finding* const first = obstacle(conversion.plan.findings, is_strict);
  WorkLeft left = {.bytes_to_read = conversion.bytes_to_read,
                   .bytes_to_write = conversion.bytes_to_write};
  if (conversion.ok()) left = work_left(conversion, args.target, run, conversion.plan.findings);
  const Duration duration = duration_of(conversion, left, args.target);
  conversion.bytes_to_read = left.bytes_to_read;
  conversion.bytes_to_write = left.bytes_to_write;
  print_line(json ? with_duration(duration, to_json(conversion))
                  : to_table(conversion, args.tensors) + duration_line(duration));
  if (first == nullptr) return 0;
  return first->severity == Severity::error ? exit_status(first->code) : 3;
}

}  // namespace

static void add_value_options(Command command, WriteArgs& args) {
  command.add_option("--dtype", args.dtype, "T",
                     "Cast floats of 16 bits and more, and decode blocks, to this dtype\n(default: "
                     "floats are not cast)");
  command.add_option("--block-dtype", args.block_dtype, "T",
                     "Dtype of decoded GGUF blocks without --dtype, in files that cannot "
                     "store\nblocks: bf16 (default), f16 or f32");
  command.add_option("--metadata", args.metadata_path, "FILE",
                     "Metadata keys to add or replace, as JSON: {\"KEY\": VALUE}, with or without "
                     "GGUF\ntypes");
  command.add_option("--arch", args.architecture, "NAME",
                     "Set general.architecture, which every GGUF file needs: llama, wan ...");
  command.add_flag("--beyond-ggml", args.options.beyond_ggml,
                   "GGUF: allow more than 4 dimensions and long names, which ComfyUI supports\nand "
                   "ggml rejects");
}

void add_write_options(Command command, WriteArgs& args) {
  add_value_options(command, args);
  command.add_option("--shard-size", args.shard_size, "SIZE",
                     "Maximum bytes of a shard; NAME.gguf becomes NAME-00001-of-00003.gguf ..." +
                         default_text(exact_bytes(defaults::shard_bytes_max)));
  command.add_option("--name", args.name, "STEM",
                     "Beginning of the file names in the folder (default: model,\nor "
                     "diffusion_pytorch_model for a model of diffusers)");
  command.add_option(
      "--max-memory", args.max_memory, "SIZE",
      "Memory limit: 8GiB, 500MB or 4096 (bytes); the conversion does not start if it "
      "is\ntoo small");
  add_threads_option(command, args.options.threads, "Threads");
  command.add_flag("--resume", args.run.resume,
                   "Keep the shards that an earlier run of the same conversion finished");
  command.add_option("--part", args.part, "I/N",
                     "Write only this part of the shards, next to TARGET, for --finish to join");
  command.add_flag("--finish", args.run.finish,
                   "When all parts are done: check their shards and make TARGET");
  command.add_flag("--overwrite", args.run.overwrite,
                   "Replace a model at TARGET that loadstone did not write, or that has changed");
  add_receipt_option(command, args.receipt,
                     "Write a receipt with digests (KIND) of all bytes read and written:\n");
  command.add_choice(
      "--page-cache", args.run.page_cache, "WHEN",
      "Page cache of files that were read or written: keep, release, or auto (default):\nrelease "
      "if the files are larger than half of the machine's memory");
  command.add_flag("--dry-run", args.dry_run, "Print the planned output, and stop");
  command.add_flag("--tensors", args.tensors, "With --dry-run: list every tensor");
  command.add_flag("--copy-code", args.quantize.copy_code,
                   "Also copy the Python files in the model's folder");
  add_quantize_options(command, args.quantize);
}

void add_rules_option(Command command, WriteArgs& args) {
  command.add_option("--rules", args.rules_path, "FILE", rules_help);
}

void add_layout_options(Command command, WriteArgs& args) {
  command.add_flag("--dequantize", args.options.dequantize,
                   "Decode quantized tensors of SOURCE (to --dtype, or bf16)");
  command.add_choice("--experts", args.options.experts, "LAYOUT",
                     "fused: one tensor for all experts of a layer; separate: one tensor for each");
}

std::vector<Command> add_conversion_options(Command command, WriteArgs& args) {
  const Command group = command.in_group("The conversion of A that made B");
  add_rules_option(group, args);
  add_value_options(group, args);
  add_layout_options(group, args);
  return {group, add_quantize_options(command, args.quantize)};
}

void check_write(const WriteArgs& args) {
  static_cast<void>(format_of_target(args.target));
  static_cast<void>(run_options(args));
}

ConvertOptions write_options(const WriteArgs& args, const std::string& source,
                             const Catalog& catalog) {
  ConvertOptions options = args.options;
  const auto format = format_of_target(args.target);
  options.format = format.value_or(FileFormat::safetensors);
  options.is_split = is_split(args);
  options.one_file = format && !options.is_split;
  if (options.is_split) options.stem = std::filesystem::path(args.target).stem().string();
  options.metadata = metadata_option(args);
  if (!args.rules_path.empty()) {
    RulesOrRecipes given = read_rules(args.rules_path, catalog);
    options.rules = std::move(given.rules);
    options.recipes = std::move(given.recipes);
  }
  if (options.one_file && !args.shard_size.empty()) {
    throw Error("usage", "--shard-size needs a folder as TARGET, but this is the name of a file");
  }
  if (format && !args.name.empty()) {
    throw Error("usage", "--name needs a folder as TARGET, but this is the name of a file");
  }
  if (!args.name.empty()) options.stem = args.name;
  if (!args.dtype.empty() && args.dtype != "auto") {
    options.dtype = dtype_option("--dtype", args.dtype);
  }
  if (!args.block_dtype.empty()) {
    options.block_dtype = dtype_option("--block-dtype", args.block_dtype);
  }
  if (!args.shard_size.empty()) {
    options.shard_bytes_max = parse_size("--shard-size", args.shard_size, 1);
  }
  if (!args.max_memory.empty()) {
    options.memory_bytes_max = parse_size("--max-memory", args.max_memory, 1);
  }
  options.quantize = quantize_options(args.quantize, options.format);
  options.folder = format ? folders_left_out(source)
                          : read_model_folder(catalog, source, args.quantize.copy_code);
  return options;
}

int write_checkpoint(const std::shared_ptr<const Catalog>& catalog, const ConvertOptions& options,
                     const WriteArgs& args, bool is_strict, bool json) {
  ConvertRun run = run_options(args);
  Conversion conversion = make_conversion(catalog, options);
  if (conversion.ok()) {
    std::ranges::move(check_target(conversion, args.target, run),
                      std::back_inserter(conversion.plan.findings));
    sort_findings(conversion.plan.findings);
  }
  if (args.dry_run) return dry_run(args, conversion, run, is_strict, json);
  if (const Finding* const first = obstacle(conversion.plan.findings, is_strict)) {
    return refuse(conversion.plan.findings, *first, "--dry-run", json);
  }
  if (!json) {
    print_warnings(conversion.plan.findings);
    for (const Finding& each : conversion.plan.findings) {
      if (options.one_file && each.code == "convert.resumed") print_hint(each.message);
    }
  }
  const InterruptibleWork work;
  WorkWatch watch;
  run.observer = &watch;
  const ConvertReport report = [&] {
    try {
      return convert(conversion, args.target, run);
    } catch (const Error& error) {
      watch.clear();
      const bool is_partway = error.code() == "cancelled" || error.code().starts_with("io.");
      if (is_partway && !json) hint_at_resume(conversion, args, run);
      throw;
    }
  }();
  watch.finish();
  const ProcessMemory memory = process_memory();
  const std::uint64_t anonymous = std::max(watch.anonymous_bytes_peak(), memory.anonymous_bytes);
  if (!json) print_warnings(found_since(conversion.plan.findings, report.findings));
  print_report(
      [&](const TextStyle&) {
        return conversion_text(conversion, report, args, memory, anonymous);
      },
      json ? conversion_json(report, memory, anonymous) : std::string());
  return 0;
}

}  // namespace loadstone::cli

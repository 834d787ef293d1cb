// Compares conversions with the digests in tests/golden/conversions.txt. The inputs are small
// checkpoints with values from fixed seeds. Each conversion has a section, with one line for each
// code of a finding or for the error (severity, code, count, digest of the messages), one line for
// the origin of each tensor, and one line for each file (name, bytes, digest). If the conversion
// writes no files, the section has lines for the values of each tensor and for the companion
// configs instead. After an intended change, write the file again with
//   LOADSTONE_WRITE_GOLDENS=1 build/release/bin/convert_test --gtest_filter='Golden.*'
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <span>
#include <sstream>

#include "loadstone/convert.h"
#include "loadstone/error.h"
#include "loadstone/importance.h"
#include "support/files.h"
#include "support/golden_models.h"
#include "support/samples.h"
#include "support/sha256.h"

namespace loadstone::test {

namespace {

namespace fs = std::filesystem;
using Change = std::function<void(ConvertOptions&)>;

const std::string goldens_path = std::string(LOADSTONE_GOLDEN_DIR) + "/conversions.txt";

std::string digest(std::string_view text) {
  return sha256(std::as_bytes(std::span(text))).substr(0, 24);
}

// ---- conversions

MetadataValue number(std::uint64_t value) { return {.value = value, .type = MetadataType::u32}; }

Change quantized(const std::string& encoding, std::optional<QuantizeStyle> style = {},
                 QuantizeMode mode = QuantizeMode::exact) {
  return [=](ConvertOptions& options) {
    options.quantize.formats.push_back(
        {.quantization = parse_quantization(encoding, mode, options.format)});
    options.quantize.style = style;
  };
}

Change styled(QuantizeStyle style) {
  return [=](ConvertOptions& options) { options.quantize.style = style; };
}

Change for_names(const std::string& pattern, const std::string& encoding) {
  return [=](ConvertOptions& options) {
    options.quantize.formats.push_back(
        {.pattern = pattern,
         .quantization = parse_quantization(encoding, QuantizeMode::exact, options.format)});
  };
}

Change gguf(const std::string& architecture, std::uint64_t layers = 16, std::uint64_t experts = 0) {
  return [=](ConvertOptions& options) {
    options.format = FileFormat::gguf;
    options.one_file = true;
    if (architecture.empty()) return;
    options.metadata = {{"general.architecture", {.value = architecture}},
                        {architecture + ".block_count", number(layers)},
                        {architecture + ".attention.head_count", number(8)},
                        {architecture + ".attention.head_count_kv", number(1)},
                        {architecture + ".expert_count", number(experts)}};
  };
}

Change importance(bool fits) {
  return [=](ConvertOptions& options) {
    auto matrix = std::make_shared<ImportanceMatrix>();
    std::vector<float> columns(256);
    for (std::size_t i = 0; i < columns.size(); ++i) columns[i] = static_cast<float>(i % 7);
    const auto entry = std::make_shared<const std::vector<float>>(columns);
    for (int layer = 0; layer < 15; ++layer) {
      for (const char* const name : {"attn_q", "attn_k", "attn_v", "ffn_up", "ffn_gate"}) {
        matrix->entries.emplace(fmt::format("blk.{}.{}.weight", layer, name), entry);
      }
    }
    matrix->entries.emplace("blk.99.attn_q.weight", entry);
    const auto other = std::make_shared<const std::vector<float>>(3, 1.0F);
    if (!fits) matrix->entries.emplace("blk.0.ffn_down.weight", other);
    matrix->path = "imatrix.gguf";
    matrix->dataset = "text";
    matrix->chunks = 3;
    options.quantize.importance = std::move(matrix);
  };
}

Change experts(ExpertLayout layout) {
  return [=](ConvertOptions& options) { options.experts = layout; };
}
Change dtype(Dtype dtype) {
  return [=](ConvertOptions& options) { options.dtype = dtype; };
}
void dequantized(ConvertOptions& options) { options.dequantize = true; }
void one_file(ConvertOptions& options) { options.one_file = true; }

// Runs conversions. Each writes to its own folder or file, which later conversions may read.
class Conversions {
 public:
  Conversions() { write_golden_models(folder_); }

  [[nodiscard]] const std::string& text() const { return text_; }

  // `source` contains names below the folder, joined by +.
  void plan(const std::string& name, const std::string& source,
            const std::vector<Change>& changes) {
    add(name, source, changes, What::plan);
  }
  // Records digests of the tensors' values without writing a file.
  void values(const std::string& name, const std::string& source,
              const std::vector<Change>& changes) {
    add(name, source, changes, What::values);
  }
  void write(const std::string& name, const std::string& source,
             const std::vector<Change>& changes) {
    add(name, source, changes, What::files);
  }

 private:
  enum class What : std::uint8_t { plan, values, files };

  void add(const std::string& name, const std::string& source, const std::vector<Change>& changes,
           What what) {
    text_ += fmt::format("[{}] {}\n", name, source);
    try {
      const Conversion conversion = make_conversion(opened(source), options_for(source, changes));
      add_findings(conversion.plan.findings);
      add_rows(conversion);
      if (!conversion.ok()) return;
      if (what == What::values) add_values(conversion);
      if (what != What::files) return add_extras(conversion);
      const bool is_gguf = conversion.format == FileFormat::gguf;
      const std::string target = folder_ / (name + (!conversion.one_file ? ""
                                                    : is_gguf            ? ".gguf"
                                                                         : ".safetensors"));
      for (const std::string& path : convert(conversion, target).outputs) {
        add_file(fs::path(path).filename().string(), read_file(path));
      }
    } catch (const Error& error) {
      text_ += fmt::format("error {} {}\n", error.code(), text_digest(error.what()));
    }
  }

  [[nodiscard]] std::shared_ptr<const Catalog> opened(const std::string& source) const {
    std::vector<std::shared_ptr<const Catalog>> all;
    for (std::size_t begin = 0; begin < source.size();) {
      const std::size_t end = std::min(source.find('+', begin), source.size());
      all.push_back(open_checkpoint(folder_ / source.substr(begin, end - begin)));
      begin = end + 1;
    }
    return all.size() == 1 ? all.front() : std::make_shared<const Catalog>(std::move(all));
  }

  [[nodiscard]] ConvertOptions options_for(const std::string& source,
                                           const std::vector<Change>& changes) const {
    ConvertOptions options;
    options.one_file = false;
    options.shard_bytes_max = 300'000;
    options.threads = 2;
    options.folder = read_model_folder(folder_ / source.substr(0, source.find('+')));
    for (const Change& change : changes) change(options);
    return options;
  }

  // Returns the digest of a text after replacing the folder's path.
  [[nodiscard]] std::string text_digest(std::string text) const {
    const std::string path = folder_.path().string();
    for (auto at = text.find(path); at != std::string::npos; at = text.find(path, at)) {
      text.replace(at, path.size(), "/test");
    }
    return digest(text);
  }

  // Adds one line per code.
  void add_findings(const std::vector<Finding>& findings) {
    for (auto first = findings.begin(); first != findings.end();) {
      const auto last = std::find_if(first, findings.end(), [&](const Finding& each) {
        return each.code != first->code || each.severity != first->severity;
      });
      std::string texts;
      for (auto each = first; each != last; ++each) {
        for (const std::string& text : {each->target, each->message, each->suggestion, each->found,
                                        each->expected, fmt::format("{}", each->sources.size())}) {
          texts += text + "\n";
        }
        for (const std::string& source : each->sources) texts += source + "\n";
      }
      text_ += fmt::format("{} {} {} {}\n", name(first->severity), first->code, last - first,
                           text_digest(std::move(texts)));
      first = last;
    }
  }

  void add_rows(const Conversion& conversion) {
    std::string rows;
    for (const QuantizeRow& row : conversion.quantize_rows) {
      rows += fmt::format("{} {} {} {} {} {} {} {}\n", row.names, row.shape, row.before, row.after,
                          row.reason, row.tensors, row.bytes_before, row.bytes_after);
    }
    for (const OutputFile& file : conversion.files) {
      for (const OutputTensor& tensor : file.tensors) {
        rows += fmt::format("{} {} {} {}\n", file.name, tensor.name, tensor.encoding.name(),
                            tensor.shape.text());
      }
    }
    text_ += fmt::format("tensors {}\n", digest(rows));
  }

  void add_values(const Conversion& conversion) {
    for (std::uint32_t file = 0; file < conversion.files.size(); ++file) {
      std::string bytes(conversion.files[file].data_bytes, '\0');
      convert_in_memory(conversion, file, std::as_writable_bytes(std::span(bytes)));
      add_file("values", bytes);
    }
  }

  void add_extras(const Conversion& conversion) {
    for (const ExtraFile& file : conversion.extras) {
      add_file(file.name, file.copy_of.empty() ? file.text : read_file(file.copy_of));
    }
  }

  void add_file(const std::string& name, const std::string& bytes) {
    text_ += fmt::format("{} {} {}\n", name, bytes.size(), digest(bytes));
  }

  TemporaryFolder folder_;
  std::string text_;
};

void add_encodings(Conversions& all) {
  constexpr auto unified = QuantizeStyle::unified;
  constexpr auto compressed = QuantizeStyle::compressed_tensors;
  const std::vector<std::string> encodings = {
      "fp8",      "fp8-channel", "fp8-block", "mxfp8",        "nvfp4", "mxfp4",      "int4",
      "int4-awq", "nf4",         "fp4",       "int8-channel", "int8",  "int4-packed"};
  for (const std::string& encoding : encodings) {
    all.write(encoding, "moe", {quantized(encoding)});
    all.write(encoding + "-compressed", "moe", {quantized(encoding, compressed)});
    all.values(encoding + "-compat", "moe", {quantized(encoding, unified, QuantizeMode::compat)});
    all.values(encoding + "-file", "moe", {one_file, quantized(encoding)});
    all.values(encoding + "-numbers", encoding, {dequantized});
    all.values(encoding + "-again", encoding + "-compressed", {quantized("fp8")});
    all.values(encoding + "-repacked", encoding, {styled(compressed)});
    all.values(encoding + "-unified", encoding + "-compressed", {styled(unified)});
    all.plan(encoding + "-gpt2", "gpt2", {quantized(encoding)});
    all.plan(encoding + "-diffusers", "diffusers", {quantized(encoding)});
    all.plan(encoding + "-gguf", encoding, {gguf("llama")});
    all.plan(encoding + "-cast", encoding, {dtype(Dtype::f16)});
    all.plan(encoding + "-fused", encoding, {experts(ExpertLayout::fused)});
    for (const char* const type : {"falcon", "dinov2", "ernie4_5_vl_moe", "deepseek_v3"}) {
      const std::string source = fmt::format("type-{}", type);
      all.plan(encoding + "-" + type, source, {quantized(encoding, compressed)});
      all.plan(encoding + "-unified-" + type, source, {quantized(encoding)});
    }
    for (const char* const type : {"qwen3_moe", "mixtral", "lfm2_moe", "llama4"}) {
      all.plan(encoding + "-stack-" + type, fmt::format("stack-{}", type), {quantized(encoding)});
      all.plan(encoding + "-stack-compressed-" + type, fmt::format("stack-{}", type),
               {quantized(encoding, compressed)});
    }
  }
  all.values("int8-gpt2-values", "gpt2", {quantized("int8")});
  for (const auto style : {unified, compressed}) {
    const std::string end(name(style));
    all.write("two-" + end, "moe", {for_names("experts", "nvfp4"), quantized("fp8", style)});
    all.write("three-" + end, "moe",
              {for_names(R"(layers\.0\..*q_proj)", "none"), for_names("down_proj", "fp8-channel"),
               quantized("mxfp8", style)});
    all.plan("mixed-experts-" + end, "moe",
             {for_names("up_proj", "nvfp4"), quantized("fp8", style)});
  }
  all.values("chosen", "moe", {quantized("fp8"), [](ConvertOptions& options) {
                                 options.quantize.include = {"lm_head", R"(visual\.)"};
                                 options.quantize.exclude = {"experts", "nothing"};
                               }});
  all.plan("nothing-included", "moe", {quantized("nf4"), [](ConvertOptions& options) {
                                         options.quantize.include = {"absent", "norm"};
                                       }});
  all.plan("nothing-found", "moe", {for_names("absent", "nf4"), for_names("norm", "fp4")});
  all.plan("two-of-bnb", "moe", {for_names("experts", "fp4"), quantized("nf4")});
  all.plan("gguf-in-safetensors", "moe", {quantized("q4_k_m")});
  all.plan("style-of-bnb", "moe", {quantized("nf4", unified)});
  all.plan("style-alone", "moe", {styled(compressed)});
}

void add_layouts(Conversions& all) {
  for (const auto layout : {ExpertLayout::fused, ExpertLayout::separate}) {
    const std::string end(name(layout));
    for (const char* const source :
         {"moe", "stack-qwen3_moe", "stack-mixtral", "stack-lfm2_moe", "stack-llama4", "gpt2"}) {
      all.values(fmt::format("{}-{}", source, end), source, {experts(layout)});
    }
    all.plan("quantized-" + end, "stack-mixtral", {experts(layout), quantized("fp8")});
  }
  for (const auto to : {Dtype::f32, Dtype::f16, Dtype::f8_e4m3}) {
    const std::string end(name(to));
    all.values("cast-" + end, "moe", {dtype(to)});
    all.plan("cast-mixed-" + end, "mixed", {dtype(to)});
    all.plan("cast-gguf-" + end, "small.safetensors", {gguf("llama"), dtype(to)});
  }
  all.values("rules", "moe", {[](ConvertOptions& options) {
               options.rules = {{.sources = {R"(model\.(.*))"}, .targets = {"$1"}},
                                {.op = RuleOp::split,
                                 .sources = {R"(visual\.(.*)\.qkv\.weight)"},
                                 .targets = {"v.$1.q", "v.$1.k", "v.$1.v"},
                                 .dims = {0}}};
             }});
  for (const char* const source : {"fp8", "nvfp4-compressed", "nf4"}) {
    all.plan(fmt::format("rules-{}", source), source, {[](ConvertOptions& options) {
               options.rules = {{.sources = {R"(model\.layers\.(.*))"}, .targets = {"l.$1"}}};
             }});
  }
  all.write("copied", "moe", {});
  all.write("tied-fp8", "tied", {quantized("fp8")});
}

void add_gguf(Conversions& all) {
  const std::string small = "small.safetensors";
  const std::string llama = "llama.safetensors";
  for (const char* const mix :
       {"f32",    "f16",    "bf16",    "q4_0",   "q4_1",   "q5_0",     "q5_1",    "q8_0",   "q2_k",
        "q2_k_s", "q3_k_s", "q3_k_m",  "q3_k_l", "q4_k_s", "q4_k_m",   "q5_k_s",  "q5_k_m", "q6_k",
        "iq1_s",  "iq1_m",  "iq2_xxs", "iq2_xs", "iq2_s",  "iq2_m",    "iq3_xxs", "iq3_xs", "iq3_s",
        "iq3_m",  "iq4_nl", "iq4_xs",  "tq1_0",  "tq2_0",  "mxfp4_moe"}) {
    const std::string name = mix;
    all.plan(name + "-llama", llama, {gguf("llama"), quantized(mix)});
    all.plan(name + "-70b", llama, {gguf("llama", 80), quantized(mix)});
    all.plan(name + "-falcon", llama, {gguf("falcon"), quantized(mix)});
    all.plan(name + "-experts", llama, {gguf("llama", 16, 8), quantized(mix)});
    all.plan(name + "-experts-falcon", llama, {gguf("falcon", 16, 4), quantized(mix)});
    all.plan(name + "-importance", llama, {gguf("llama"), quantized(mix), importance(false)});
    all.plan(name + "-wan", "wan.safetensors", {gguf(""), quantized(mix)});
    all.plan(name + "-sd1", "sd1.safetensors", {gguf(""), quantized(mix)});
    all.plan(name + "-moe", "moe", {gguf("llama"), quantized(mix)});
    all.write(name, small, {gguf("llama"), quantized(mix), importance(true)});
    all.plan(name + "-back", name + ".gguf", {dequantized});
    all.plan(name + "-requantized", name + ".gguf", {gguf(""), quantized("q8_0")});
    all.plan(name + "-kept", name + ".gguf", {gguf("")});
    all.plan(name + "-repacked", name + ".gguf", {styled(QuantizeStyle::compressed_tensors)});
  }
  for (const char* const source : {"q4_k_m", "iq2_xxs", "mxfp4_moe"}) {
    all.values(fmt::format("{}-numbers", source), fmt::format("{}.gguf", source), {dequantized});
  }
  all.values("wan", "wan.safetensors", {gguf(""), quantized("q4_k_m")});
  all.write("split", llama, {gguf("llama"), quantized("q8_0"), [](ConvertOptions& options) {
                               options.one_file = false;
                               options.is_split = true;
                               options.stem = "part";
                             }});
  all.plan("patterns", small,
           {gguf("llama"), for_names("attn_v", "q8_0"), for_names("ffn", "none"),
            for_names("absent", "f16"), quantized("q4_k_m")});
  all.plan("no-architecture", small, {gguf(""), quantized("q4_k_m")});
  all.plan("not-in-gguf", small, {gguf("llama"), quantized("nvfp4")});
  all.values("mxfp4-blocks", "mxfp4", {gguf("llama"), quantized("mxfp4_moe")});
}

void add_merges(Conversions& all) {
  const auto merge = [&](const std::string& name, const std::string& source, MergeOptions options) {
    all.values("merge-" + name, source,
               {[=](ConvertOptions& all_options) { all_options.merge = options; }});
  };
  for (const char* const each :
       {"linear", "task-arithmetic", "ties", "dare-linear", "dare-ties"}) {  // slerp needs libm
    const std::string method = each;
    MergeOptions options = {.weights = {1, 0.5F}, .method = *parse_merge_method(method)};
    merge(method, "moe+moe2", options);
    options.density = 0.5;
    if (method != "ties") options.seed = 3;
    merge(method + "-density", "moe+moe2", options);
    options.seed.reset();
    options.scale = 0.5F;
    options.normalise = true;
    merge(method + "-scale", "moe+moe2", options);
  }
  merge("adapter", "moe+adapter", {.weights = {1}, .adapters = {{.factor = 0.5F}}});
  merge("adapter-tied", "tied+adapter", {.adapters = {{}}, .tie = TiePolicy::keep});
  merge("others", "moe+gpt2", {.weights = {1, 1}});
  merge("apart", "adapter+adapter", {.weights = {1, 1}});
  merge("weights", "moe+moe2", {.weights = {1, -1}, .normalise = true});
  all.values("merge-quantized", "moe+moe2", {quantized("fp8"), [](ConvertOptions& options) {
                                               options.merge = {.weights = {0.5F, 0.5F}};
                                             }});
}

}  // namespace

TEST(Golden, ConversionsWriteTheBytesThatTheyAlwaysWrote) {
  Conversions all;
  add_encodings(all);
  add_layouts(all);
  add_gguf(all);
  add_merges(all);
  if (std::getenv("LOADSTONE_WRITE_GOLDENS") != nullptr) {
    std::ofstream(goldens_path, std::ios::binary) << all.text();
  }
  std::istringstream wanted(read_file(goldens_path));
  std::istringstream found(all.text());
  std::string section;
  int differences = 0;
  for (std::string expected, line; differences < 20 && std::getline(wanted, expected);) {
    std::getline(found, line);
    if (line.starts_with('[')) section = line;
    EXPECT_EQ(line, expected) << section;
    if (line != expected) ++differences;
  }
  EXPECT_EQ(all.text().size(), read_file(goldens_path).size());
}

}  // namespace loadstone::test

#include "fuzz/checkpoint_input.h"

#include <array>
#include <set>
#include <vector>

#include "fuzz/mutate.h"
#include "loadstone/dtype.h"
#include "support/files.h"
#include "support/torch_file.h"

namespace loadstone::fuzz {

namespace {

using test::FileTensor;

constexpr std::uint64_t tensor_bytes_max = 16 << 10;

constexpr auto dtypes = std::to_array<const char*>(
    {"F32", "BF16", "F16", "F64", "U8",  "I8",   "F8_E4M3", "F8_E5M2", "F8_E8M0", "I64",
     "I32", "I16",  "U16", "U32", "U64", "BOOL", "C64",     "F4",      "F6_E2M3", "F6_E3M2"});

std::vector<std::uint64_t> shape_of(Input& input) {
  static constexpr auto extents =
      std::to_array<std::uint64_t>({2, 1, 3, 4, 8, 16, 32, 64, 128, 5, 7, 33, 0, 256, 130});
  std::vector<std::uint64_t> shape(input.chance(10) ? input.below(9) : input.below(4));
  for (auto& extent : shape) extent = input.pick(extents);
  return shape;
}

// Returns the size of a tensor; nullopt if it is too large or not a whole number of bytes.
std::optional<std::uint64_t> bytes_of(Encoding encoding, const std::vector<std::uint64_t>& shape) {
  std::uint64_t elements = 1;
  for (const std::uint64_t extent : shape) elements = std::min(elements * extent, tensor_bytes_max);
  const auto bytes = encoding.byte_count(elements);
  if (!bytes || *bytes > tensor_bytes_max) return std::nullopt;
  return bytes;
}

std::string quant_state(Input& input) {
  static constexpr auto states = std::to_array<const char*>(
      {R"({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [2, 64]})",
       R"({"quant_type": "fp4", "blocksize": 64, "dtype": "float16", "shape": [4, 32]})",
       R"({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [128],)"
       R"( "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5})"});
  return mutated_json(input.pick(states), input, 2);
}

std::vector<FileTensor> random_tensors(Input& input) {
  std::vector<FileTensor> tensors;
  std::set<std::string> names;
  for (std::uint64_t count = 1 + input.below(8); count > 0; --count) {
    FileTensor tensor = {
        .name = tensor_name(input), .dtype = input.pick(dtypes), .shape = {}, .data = {}};
    if (!names.insert(tensor.name).second) tensor.name += std::to_string(count);
    if (tensor.name.find("quant_state") != std::string::npos) {
      tensor.data = quant_state(input);
      tensor.dtype = "U8";
      tensor.shape = {tensor.data.size()};
    } else {
      tensor.shape = shape_of(input);
      auto bytes = bytes_of(*parse_encoding(tensor.dtype), tensor.shape);
      if (!bytes) {
        tensor.shape = {8};
        bytes = bytes_of(*parse_encoding(tensor.dtype), tensor.shape);
      }
      tensor.data = values(input, *bytes);
    }
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

FileTensor make(std::string name, const char* dtype, std::vector<std::uint64_t> shape,
                Input& input) {
  const auto bytes = bytes_of(*parse_encoding(dtype), shape).value_or(0);
  return {std::move(name), dtype, std::move(shape), values(input, bytes)};
}

// Returns weights with their components, in the layouts that loadstone decodes.
std::vector<FileTensor> quantized_tensors(Input& input) {
  std::vector<FileTensor> tensors;
  for (std::uint64_t count = 1 + input.below(3); count > 0; --count) {
    const std::string module = "model.layers." + std::to_string(count) + ".mlp.up_proj";
    const std::string weight = module + ".weight";
    const std::uint64_t rows = 16u << input.below(3);
    const std::uint64_t columns = 32u << input.below(3);
    const auto add = [&](const std::string& suffix, const char* dtype,
                         std::vector<std::uint64_t> shape) {
      tensors.push_back(make(module + suffix, dtype, std::move(shape), input));
    };
    switch (input.below(8)) {
      case 0:
        add(".weight", "F8_E4M3", {rows, columns});
        add(".weight_scale", "F32", {});
        break;
      case 1:
        add(".weight", "F8_E4M3", {rows, columns});
        add(".weight_scale", "BF16", {rows, 1});
        break;
      case 2:
        add(".weight", "F8_E4M3", {rows, columns});
        add(".weight_scale_inv", "F32", {(rows + 127) / 128, (columns + 127) / 128});
        break;
      case 3:
        add(".weight", "U8", {rows, columns / 2});
        add(".weight_scale", "F8_E4M3", {rows, columns / 16});
        add(".weight_scale_2", "F32", {});
        break;
      case 4:
        add(".weight_packed", "U8", {rows, columns / 2});
        add(".weight_scale", "F8_E4M3", {rows, columns / 16});
        add(".weight_global_scale", "F32", {1});
        break;
      case 5:
        add("_blocks", "U8", {2, rows, columns / 32, 16});
        add("_scales", "U8", {2, rows, columns / 32});
        break;
      case 6: {
        add(".weight", "U8", {rows * columns / 2, 1});
        add(".weight.absmax", "F32", {rows * columns / 64});
        add(".weight.quant_map", "F32", {16});
        const std::string state = R"({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", )"
                                  R"("shape": [)" +
                                  std::to_string(rows) + ", " + std::to_string(columns) + "]}";
        tensors.push_back({weight + ".quant_state.bitsandbytes__nf4", "U8", {state.size()}, state});
        break;
      }
      default:
        add(".weight", "I8", {rows, columns});
        add(".weight.SCB", "F32", {rows});
    }
    if (input.chance(20)) tensors.pop_back();
    if (input.chance(20)) tensors.back().shape.push_back(1);
  }
  return tensors;
}

std::string gguf_bytes(Input& input) {
  test::GgufWriter writer;
  writer.entry_text("general.architecture", "llama");
  if (input.chance(30)) {
    writer.alignment = 8u << input.below(5);
    writer.entry_number("general.alignment", test::GgufWriter::u32,
                        static_cast<std::uint32_t>(writer.alignment));
  }
  for (std::uint64_t count = input.below(4); count > 0; --count) {
    const auto type = static_cast<std::uint32_t>(input.below(14));
    writer.entry("key" + std::to_string(count), type, input.text(input.below(32)));
  }
  std::set<std::string> names;
  for (std::uint64_t count = 1 + input.below(6); count > 0; --count) {
    std::string name = tensor_name(input).substr(0, 60);
    if (!names.insert(name).second) name = std::to_string(count);
    // Blocks have at most 256 elements and 292 bytes.
    std::vector<std::uint64_t> dims = {input.chance(30) ? 1 + input.below(64) : 256,
                                       1 + input.below(4)};
    dims.resize(1 + input.below(3), 2);
    std::uint64_t elements = 1;
    for (const std::uint64_t dim : dims) elements *= dim;
    const auto type = static_cast<std::uint32_t>(input.below(43));
    // The file may have extra bytes, which form a hole between tensors or a tail.
    static constexpr auto sizes = std::to_array<std::pair<std::uint32_t, std::uint32_t>>(
        {{1, 4},     {1, 2},     {32, 18},   {32, 20},  {32, 1},    {32, 1},    {32, 22},
         {32, 24},   {32, 34},   {32, 36},   {256, 84}, {256, 110}, {256, 144}, {256, 176},
         {256, 210}, {256, 292}, {256, 66},  {256, 74}, {256, 98},  {256, 50},  {32, 18},
         {256, 110}, {256, 82},  {256, 136}, {1, 1},    {1, 2},     {1, 4},     {1, 8},
         {1, 8},     {256, 56},  {1, 2}});
    const auto [block, bytes] =
        type < sizes.size() ? sizes[type] : std::pair<std::uint32_t, std::uint32_t>{32, 17};
    writer.tensor(name, dims, type, values(input, elements / block * bytes));
  }
  return writer.bytes();
}

struct TorchType {
  const char* name;
  std::int32_t bytes;
};
constexpr auto torch_types = std::to_array<TorchType>({{"FloatStorage", 4},
                                                       {"ComplexDoubleStorage", 16},
                                                       {"BFloat16Storage", 2},
                                                       {"DoubleStorage", 8},
                                                       {"ComplexFloatStorage", 8},
                                                       {"ByteStorage", 1},
                                                       {"LongStorage", 8},
                                                       {"BoolStorage", 1}});

std::string torch_bytes(Input& input) {
  std::vector<test::ZipEntry> entries;
  std::vector<std::string> items;
  for (std::uint64_t count = 1 + input.below(3); count > 0; --count) {
    const TorchType& type = input.pick(torch_types);
    const std::string key = std::to_string(count);
    const auto numel = static_cast<std::int32_t>(1 + input.below(200));
    entries.push_back(
        {"archive/data/" + key, values(input, static_cast<std::size_t>(numel * type.bytes))});
    for (std::uint64_t views = 1 + input.below(2); views > 0; --views) {
      test::pickle::View view = {
          .type = type.name, .key = key, .numel = numel, .offset = 0, .size = {}, .stride = {}};
      view.offset = static_cast<std::int32_t>(input.below(4));
      for (std::uint64_t rank = input.below(4); rank > 0; --rank) {
        view.size.push_back(static_cast<std::int32_t>(input.below(9)));
        view.stride.push_back(static_cast<std::int32_t>(input.below(12)));
      }
      items.push_back(test::pickle::text(tensor_name(input) + std::to_string(views)));
      items.push_back(test::pickle::tensor(view));
    }
  }
  const std::string pickle = test::pickle::whole(test::pickle::dict(items));
  entries.insert(entries.begin(), {{"archive/data.pkl", mutated_bytes(pickle, input, 2)},
                                   {"archive/byteorder", "little"}});
  return test::zip_bytes(entries, {.zip64 = input.chance(20)});
}

std::string add_sharded(Input& input, test::MemoryStorage& storage,
                        std::vector<FileTensor> tensors) {
  std::vector<std::vector<FileTensor>> shards(1 + input.below(3));
  std::map<std::string, std::string> weight_map;
  for (FileTensor& tensor : tensors) {
    const std::size_t shard = input.below(shards.size());
    weight_map[tensor.name] = "s" + std::to_string(shard) + ".safetensors";
    shards[shard].push_back(std::move(tensor));
  }
  for (std::size_t i = 0; i < shards.size(); ++i) {
    storage.add_file("/m/s" + std::to_string(i) + ".safetensors",
                     mutated_bytes(test::safetensors_bytes(shards[i]), input, 1));
  }
  storage.add_file("/m/model.safetensors.index.json",
                   mutated_json(test::index_json(weight_map), input, 2));
  return "/m";
}

}  // namespace

std::string values(Input& input, std::size_t count) {
  std::string bytes(count, '\0');
  const std::uint8_t seed = input.byte();
  std::uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (char& byte : bytes) {
    if (seed == 0) break;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    byte = static_cast<char>(state >> 32);
    // Every second byte is the upper byte of a 16-bit float near 1.
    if (seed % 3 == 0 && (&byte - bytes.data()) % 2 == 1)
      byte = static_cast<char>(0x3c | (byte & 0x81));
  }
  return bytes;
}

std::string tensor_name(Input& input) {
  static constexpr auto modules =
      std::to_array<const char*>({"a",
                                  "model.layers.0.self_attn.q_proj",
                                  "model.layers.1.mlp.up_proj",
                                  "model.layers.0.mlp.gate_proj",
                                  "model.embed_tokens",
                                  "lm_head",
                                  "model.layers.0.mlp.experts.0.up_proj",
                                  "model.layers.0.mlp.experts.1.up_proj",
                                  "model.layers.0.mlp.experts.2.up_proj",
                                  "model.layers.0.mlp.experts.0.gate_proj",
                                  "model.layers.0.mlp.experts.1.gate_proj",
                                  "model.layers.0.mlp.experts.0.down_proj",
                                  "model.layers.0.mlp.experts.1.down_proj",
                                  "model.layers.0.mlp.experts.01.up_proj",
                                  "model.layers.0.mlp.experts.4000000000.up_proj",
                                  "model.layers.0.block_sparse_moe.experts.0.w1",
                                  "model.layers.0.block_sparse_moe.experts.0.w2",
                                  "model.layers.0.block_sparse_moe.experts.0.w3",
                                  "model.layers.0.mlp.experts.gate_up_proj",
                                  "model.layers.0.mlp.experts.down_proj",
                                  "model.layers.0.input_layernorm",
                                  "blk.0.attn_q",
                                  "b",
                                  ""});
  static constexpr auto suffixes =
      std::to_array<const char*>({".weight",
                                  "",
                                  ".bias",
                                  ".weight_scale",
                                  ".weight_scale_inv",
                                  ".weight_scale_2",
                                  ".weight_packed",
                                  ".weight_global_scale",
                                  ".weight_shape",
                                  "_blocks",
                                  "_scales",
                                  ".weight.absmax",
                                  ".weight.quant_map",
                                  ".weight.nested_absmax",
                                  ".weight.nested_quant_map",
                                  ".weight.quant_state.bitsandbytes__nf4",
                                  ".weight.quant_state.bitsandbytes__fp4",
                                  ".weight.SCB",
                                  ".weight_format",
                                  ".input_scale",
                                  "_scale",
                                  "_bias"});
  const char* module = input.pick(modules);
  const std::string name = std::string(module) + input.pick(suffixes);
  return name.empty() ? "c" : name;
}

std::string add_checkpoint(Input& input, test::MemoryStorage& storage) {
  std::string path = "/m/model.safetensors";
  std::string bytes;
  switch (input.below(8)) {
    case 0:
      bytes = test::safetensors_bytes(random_tensors(input));
      break;
    case 1:
      bytes = test::safetensors_bytes(quantized_tensors(input));
      break;
    case 2:
      return add_sharded(input, storage, random_tensors(input));
    case 3:
      return add_sharded(input, storage, quantized_tensors(input));
    case 4:
      path = "/m/model.gguf";
      bytes = gguf_bytes(input);
      break;
    case 5:
      path = "/m/model.pt";
      bytes = torch_bytes(input);
      break;
    default: {  // the input's own bytes become the file
      static constexpr auto paths = std::to_array<const char*>(
          {"/m/model.safetensors", "/m/model.gguf", "/m/model.pt", "/m/pytorch_model.bin"});
      path = input.pick(paths);
      const std::size_t low = input.byte();
      bytes = input.text(low | std::size_t{input.byte()} << 8);
    }
  }
  storage.add_file(path, mutated_bytes(std::move(bytes), input, 3));
  return path;
}

}  // namespace loadstone::fuzz

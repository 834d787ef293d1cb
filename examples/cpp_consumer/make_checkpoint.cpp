#include "make_checkpoint.h"

#include <bit>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <stdexcept>
#include <vector>

namespace {

struct Tensor {
  std::string name;
  std::string dtype;  // "F32" or "BF16"
  std::vector<std::size_t> shape;
};

std::size_t element_count(const Tensor& tensor) {
  std::size_t count = 1;
  for (const std::size_t extent : tensor.shape) count *= extent;
  return count;
}

// safetensors files are little-endian, and this example copies values as they are in memory.
static_assert(std::endian::native == std::endian::little);

void append_values(const Tensor& tensor, std::string& data) {
  for (std::size_t i = 0; i < element_count(tensor); ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(value_of(tensor.name, i));
    const std::uint32_t kept = tensor.dtype == "BF16" ? bits >> 16 : bits;
    char bytes[4];
    std::memcpy(bytes, &kept, sizeof bytes);
    data.append(bytes, tensor.dtype == "BF16" ? 2 : 4);
  }
}

std::string shape_text(const std::vector<std::size_t>& shape) {
  std::string text = "[";
  for (const std::size_t extent : shape) {
    if (text.size() > 1) text += ",";
    text += std::to_string(extent);
  }
  return text + "]";
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) throw std::runtime_error("cannot write " + path.string());
}

void write_shard(const std::filesystem::path& path, const std::vector<Tensor>& tensors) {
  std::string header = "{";
  std::string data;
  for (const Tensor& tensor : tensors) {
    const std::size_t begin = data.size();
    append_values(tensor, data);
    if (header.size() > 1) header += ",";
    header += "\"" + tensor.name + "\":{\"dtype\":\"" + tensor.dtype +
              "\",\"shape\":" + shape_text(tensor.shape) + ",\"data_offsets\":[" +
              std::to_string(begin) + "," + std::to_string(data.size()) + "]}";
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const std::uint64_t header_bytes = header.size();
  char length[8];
  std::memcpy(length, &header_bytes, sizeof length);
  write_text(path, std::string(length, sizeof length) + header + data);
}

std::vector<Tensor> layer_tensors(std::size_t layer, const ModelSize& size) {
  std::vector<Tensor> tensors;
  // Sorted by name as text, so expert 10 precedes expert 2; any order is valid.
  std::map<std::string, Tensor> experts;
  for (std::size_t expert = 0; expert < size.experts; ++expert) {
    for (const std::string projection : {"gate_proj", "up_proj", "down_proj"}) {
      const std::string name = expert_name(layer, expert, projection);
      const bool down = projection == "down_proj";
      experts[name] = {name, "BF16",
                       down ? std::vector{size.hidden, size.intermediate}
                            : std::vector{size.intermediate, size.hidden}};
    }
  }
  for (const auto& [name, tensor] : experts) tensors.push_back(tensor);
  const std::string prefix = "model.layers." + std::to_string(layer) + ".";
  tensors.push_back({prefix + "norm.weight", "F32", {size.hidden}});
  return tensors;
}

}  // namespace

float value_of(const std::string& name, std::size_t index) {
  std::uint32_t hash = 2166136261u;
  for (const char character : name + "#" + std::to_string(index)) {
    hash = (hash ^ static_cast<unsigned char>(character)) * 16777619u;
  }
  return static_cast<float>(static_cast<int>((hash >> 8) % 255) - 127);
}

std::string expert_name(std::size_t layer, std::size_t expert, const std::string& projection) {
  return "model.layers." + std::to_string(layer) + ".mlp.experts." + std::to_string(expert) + "." +
         projection + ".weight";
}

void make_checkpoint(const std::filesystem::path& folder, const ModelSize& size) {
  std::filesystem::create_directories(folder);
  std::vector<std::vector<Tensor>> shards(2);
  shards[0].push_back({"model.embed_tokens.weight", "F32", {size.vocabulary, size.hidden}});
  for (std::size_t layer = 0; layer < size.layers; ++layer) {
    for (Tensor& tensor : layer_tensors(layer, size)) {
      shards[layer % shards.size()].push_back(std::move(tensor));
    }
  }
  std::string map;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::string file = "model-0000" + std::to_string(i + 1) + "-of-00002.safetensors";
    write_shard(folder / file, shards[i]);
    for (const Tensor& tensor : shards[i]) {
      if (!map.empty()) map += ",\n";
      map += "    \"" + tensor.name + "\": \"" + file + "\"";
    }
  }
  write_text(folder / "model.safetensors.index.json",
             "{\n  \"metadata\": {},\n  \"weight_map\": {\n" + map + "\n  }\n}\n");
}

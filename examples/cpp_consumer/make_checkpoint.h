// Writes a small checkpoint like that of a training framework: sharded safetensors with an index,
// and separate tensors for each expert of a mixture of experts.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

struct ModelSize {
  std::size_t vocabulary = 64;
  std::size_t hidden = 16;
  std::size_t intermediate = 24;
  std::size_t layers = 2;
  std::size_t experts = 12;  // more than ten, to show that "10" comes after "9" and not after "1"
};

// Returns the value at `index` of the checkpoint's tensor `name`: a small integer, so that bfloat16
// and float represent the same value.
float value_of(const std::string& name, std::size_t index);

std::string expert_name(std::size_t layer, std::size_t expert, const std::string& projection);

// Writes two shards and model.safetensors.index.json to `folder`, which it creates if needed.
void make_checkpoint(const std::filesystem::path& folder, const ModelSize& size);

// Writes a small checkpoint as trainers leave it: sharded safetensors with an index, and each
// expert of a mixture of experts in tensors of its own.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

struct ModelSize {
  std::size_t vocabulary = 64;
  std::size_t hidden = 16;
  std::size_t intermediate = 24;
  std::size_t layers = 2;
  std::size_t experts = 12;  // more than ten: "10" must come after "9", not after "1"
};

// The value at `index` of the tensor that the checkpoint calls `name`: a small integer, so that it
// is the same number in bfloat16 as in float.
float value_of(const std::string& name, std::size_t index);

std::string expert_name(std::size_t layer, std::size_t expert, const std::string& projection);

// Two shards and model.safetensors.index.json in `folder`, which is made if it is not there.
void make_checkpoint(const std::filesystem::path& folder, const ModelSize& size);

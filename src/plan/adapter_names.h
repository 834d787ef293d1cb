// Names of an adapter's tensors for a module, and the place of that module's weight in a base.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

// The part that a tensor of an adapter has in the change of its module.
enum class AdapterRole : std::uint8_t {
  right,            // lora_A, lora_down: [rank, in]
  left,             // lora_B, lora_up: [out, rank]
  embedding_right,  // [rank, rows]
  embedding_left,   // [columns, rank]
  alpha,
  magnitude,  // DoRA
  value,      // no product: the base's tensor of this name is replaced
  unknown,    // of a method that is not LoRA
};

struct AdapterName {
  std::string module;  // "base_model.model.model.layers.0.self_attn.q_proj"; of a value its name
  AdapterRole role = AdapterRole::value;
};

// "x.lora_A.weight", "x.lora.down.weight", "lora_unet_x.lora_down.weight" ...
[[nodiscard]] AdapterName adapter_name(std::string_view tensor);

// Returns true for names of matrices that an adapter multiplies with each other.
[[nodiscard]] bool is_factor_of_adapter(std::string_view tensor);

// The target of a module's product: a tensor of the base, or a part of it.
struct AdapterPlace {
  enum class Part : std::uint8_t {
    all,
    first,   // of rows that are joined: queries, gates
    middle,  // keys
    last,    // values
    expert,  // one matrix of a stack
  };

  std::string name;  // of the base's tensor
  Part part = Part::all;
  std::uint64_t expert = 0;
  std::uint64_t share = 0;   // of an expert's rows: the first or the second ...
  std::uint64_t shares = 1;  // number of equal parts
  // The number of the pipeline's text encoder that contains the module. 0: the base is the whole
  // pipeline, or the module is not in an encoder.
  unsigned encoder = 0;
};

// Finds modules of adapters among the names of a base. Not thread-safe.
class AdapterPlaces {
 public:
  explicit AdapterPlaces(const std::vector<std::string>& base);

  // nullopt if the base has no such module. `ambiguous` receives names that match several tensors
  // of the base.
  [[nodiscard]] std::optional<AdapterPlace> find(const std::string& module,
                                                 std::vector<std::string>& ambiguous) const;
  // The base's tensor that one of the adapter replaces.
  [[nodiscard]] std::optional<std::string> find_value(const std::string& tensor) const;

 private:
  [[nodiscard]] std::optional<AdapterPlace> find_exact(const std::string& module) const;
  [[nodiscard]] bool has(const std::string& name) const { return names_.contains(name); }

  std::map<std::string, bool, std::less<>> names_;
  // By the module's name with underscores for dots, with or without the prefix of a pipeline's
  // single file.
  std::map<std::string, std::vector<std::string>, std::less<>> underscored_;
};

}  // namespace loadstone

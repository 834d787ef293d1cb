// Parses the names of an adapter's tensors, and finds the base weight that each module changes.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

// peft's prefix of module names.
inline constexpr std::string_view peft_prefix = "base_model.model.";

// The role of an adapter's tensor in the change of a module's weight.
enum class AdapterRole : std::uint8_t {
  right,            // lora_A, lora_down: [rank, in]
  left,             // lora_B, lora_up: [out, rank]
  embedding_right,  // [rank, rows]
  embedding_left,   // [columns, rank]
  alpha,
  magnitude,        // DoRA
  difference,       // added to the weight
  bias_difference,  // added to the bias
  value,            // not a factor: replaces the base's tensor of the same name
  unknown,          // belongs to a method other than LoRA
};

struct AdapterName {
  // "base_model.model.model.layers.0.self_attn.q_proj"; for `value`, the tensor's name
  std::string module;
  AdapterRole role = AdapterRole::value;
};

// Parses names such as "x.lora_A.weight", "x.lora.down.weight" and "lora_unet_x.lora_down.weight".
[[nodiscard]] AdapterName adapter_name(std::string_view tensor);

// Returns true if the tensor is a factor of a low-rank product.
[[nodiscard]] bool is_factor_of_adapter(std::string_view tensor);

// The destination of a module's product: a tensor of the base, or a part of that tensor.
struct AdapterPlace {
  enum class Part : std::uint8_t {
    all,
    first,   // queries or gates, which are the first rows of a joined matrix
    middle,  // keys
    last,    // values
    expert,  // one matrix of a stack
  };

  std::string name;  // name of the base tensor
  Part part = Part::all;
  std::uint64_t expert = 0;
  std::uint64_t share = 0;   // index of the product's part if the expert's rows have equal parts
  std::uint64_t shares = 1;  // number of equal parts
  // For square matrices of a stack: true if the product is added as its transpose. nullopt:
  // unknown.
  std::optional<bool> is_transposed{};
  // Number of the pipeline's text encoder that contains the module. 0 if the base is the whole
  // pipeline, or the module is not in a text encoder.
  unsigned encoder = 0;
};

// Finds modules of adapters among the names of a base. The adapter and the base may put different
// prefixes before a name. A name that the base has unchanged takes precedence. Not thread-safe.
class AdapterPlaces {
 public:
  explicit AdapterPlaces(const std::vector<std::string>& base);

  // Returns all places that the module's name can refer to; empty if the base does not have the
  // module.
  [[nodiscard]] std::vector<AdapterPlace> find(const std::string& module) const;
  // Returns the tensors of the base that the adapter's tensor can replace.
  [[nodiscard]] std::vector<AdapterPlace> find_value(const std::string& tensor) const;

 private:
  [[nodiscard]] std::optional<AdapterPlace> find_exact(const std::string& module) const;
  [[nodiscard]] std::optional<AdapterPlace> find_tensor(const std::string& name) const;
  [[nodiscard]] std::vector<AdapterPlace> find_underscored(const std::string& module) const;
  [[nodiscard]] bool has(const std::string& name) const { return names_.contains(name); }

  std::map<std::string, bool, std::less<>> names_;
  // Base weights by module name with underscores instead of dots, with and without the base's
  // prefix, which keeps its dots.
  std::map<std::string, std::vector<std::string>, std::less<>> underscored_;
};

}  // namespace loadstone

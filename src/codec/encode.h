// The writing half of codecs: one descriptor per encoding, with the layout of components, their
// names in files and their description in configs. No other code compares names of written
// encodings.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/problem.h"
#include "kernels/quantize.h"
#include "loadstone/dtype.h"
#include "loadstone/quantization.h"
#include "loadstone/shape.h"

namespace loadstone {

// The naming style of components in files.
enum class NamingStyle : std::uint8_t {
  unified,     // ModelOpt's exports
  compressed,  // compressed-tensors
  bnb,
  gguf  // GGUF: the tensor's own name, and a block format for its encoding
};

// The shape of a component in a style.
enum class ComponentShape : std::uint8_t {
  same,      // as the encoder has it
  flat,      // [rows] in place of [rows, 1]
  column,    // [rows, 1] in place of [rows]
  one,       // [1] in place of []
  blocks_4d  // [a, 1, b, 1] in place of [a, b]: ModelOpt's blocks in two dims
};

struct ComponentName {
  std::string_view component;  // "data", "scale": one of QuantizedLayout::parts
  std::string_view suffix;     // after the module's name and a dot
  ComponentShape shape = ComponentShape::same;
  bool is_inverted = false;  // files store the reciprocal
};

// A tensor next to the components whose bytes do not depend on values.
struct ConstantComponent {
  std::string suffix;
  Shape shape;
  Dtype dtype = Dtype::u8;
  std::shared_ptr<const std::vector<std::byte>> bytes;
};

// The detail of ModelOpt's section in addition to the algorithm's name. Without calibration nothing
// is known about activations: ModelOpt's "FP8" means FP8 weights with or without quantized
// activations.
enum class Described : std::uint8_t { nothing, weights, weights_and_activations };

// Members of ModelOpt's sections.
struct UnifiedConfig {
  std::string_view algorithm;
  Described described = Described::nothing;
  unsigned group_size = 0;  // 0: not written
  std::string_view strategy{};
  bool is_awq = false;
  bool has_groups = false;  // write "config_groups" if it is the only encoding
};

// Members of compressed-tensors' section.
struct CompressedConfig {
  std::string_view format;
  std::string_view strategy;
  // The strategy of activations, which servers quantize at run time; empty: not quantized.
  std::string_view activations;
  unsigned group_size = 0;
  std::string_view scale_dtype{};
};

// Variants of the bytes, the default first. ModelOpt's: with one rounding, and of compressed
// models.
inline constexpr std::array<std::string_view, 2> scaled_dialects = {"exact", "modelopt-compat"};

// An encoding that loadstone can write. Only constants of a family; immutable.
struct WrittenEncoding {
  std::string_view name;
  QuantizeKind kind;           // of the kernels that encode its windows
  unsigned bits;               // of a code
  std::string_view code_type;  // "float" or "int", for configs
  std::string_view kernel;     // decodes the components, in their order: a DecodeKernel's name
  // Sets dialect, geometry and components of a form with kind, dtype and number of elements, or
  // returns the problem. The dialect is empty or one of `dialects`.
  std::optional<Problem> (*prepare)(const Quantization& quantization, const Shape& shape,
                                    QuantizedLayout& form);

  // The component names in each naming style. Empty: the style cannot store this encoding.
  std::span<const ComponentName> unified_names{};
  std::span<const ComponentName> compressed_names{};
  std::span<const ComponentName> bnb_names{};
  std::span<const ComponentName> gguf_names{};
  // Makes the other tensors of a weight with this shape and dtype in files. Null: none.
  std::vector<ConstantComponent> (*constants)(const Quantization& quantization, const Shape& shape,
                                              Dtype dtype) = nullptr;

  UnifiedConfig unified{};
  CompressedConfig compressed{};
  // transformers decodes single experts in the style of compressed-tensors before it joins them.
  bool decodes_experts = false;

  std::span<const std::string_view> dialects = scaled_dialects;
  // The dialect of files that ModelOpt exports, which is not always that of a compressed model.
  // Empty: its files have the bytes of "exact".
  std::string_view exported_dialect{};
  // The dialect for values that a load sends to CUDA devices, if none is specified: the library's
  // bytes on such devices. Empty: the first.
  std::string_view cuda_dialect{};
  bool takes_block_size = false;  // users may choose Quantization::block_size
  bool needs_importance = false;  // `prepare` refuses a Quantization without one
  // Servers need rows of whole blocks, although a kernel may accept others.
  std::uint64_t row_block = 1;
  // Shapes of some weights fit another encoding as well. Null: of none. A conversion writes the
  // encoding's name under `metadata_key` of the header's metadata then.
  bool (*is_ambiguous)(const Shape& shape) noexcept = nullptr;
  std::string_view metadata_key{};

  [[nodiscard]] std::span<const ComponentName> names(NamingStyle style) const noexcept;
  // bitsandbytes' encodings have its names, its config and no others.
  [[nodiscard]] bool is_bitsandbytes() const noexcept { return !bnb_names.empty(); }
  // The data is blocks, whose format is QuantizedLayout::block; GGUF files alone hold them.
  [[nodiscard]] bool is_gguf() const noexcept { return !gguf_names.empty(); }
};

// Sets `form` and returns nullopt, or returns the problem.
[[nodiscard]] std::optional<Problem> prepare_quantization(const Quantization& quantization,
                                                          const Shape& shape, Dtype dtype,
                                                          QuantizedLayout& form);
// Returns true if the group's largest magnitude is this tensor's.
[[nodiscard]] inline bool shares_scale(const Quantization& quantization,
                                       const QuantizedLayout& form) noexcept {
  return form.needs_amax && !quantization.group.empty();
}

// Returns null for an unknown name.
[[nodiscard]] const WrittenEncoding* find_written_encoding(std::string_view name) noexcept;
// Requires a prepared quantization; Error "internal" for others.
[[nodiscard]] const WrittenEncoding& written_encoding(const Quantization& quantization);
// All of them, in the order of families.
[[nodiscard]] std::vector<const WrittenEncoding*> written_encodings();
// "nf4", "fp4", "int8", "fp8" ...
[[nodiscard]] std::vector<std::string> written_encoding_names();

// Returns null if the style has no such component.
[[nodiscard]] const ComponentName* find_component(const WrittenEncoding& encoding,
                                                  NamingStyle style, std::string_view component);
[[nodiscard]] Shape shape_in_file(ComponentShape in_file, const Shape& shape);

}  // namespace loadstone

// Describes the encodings that loadstone writes. Each has one descriptor, with the layout of its
// components, their names in files and their description in configs. No other code depends on the
// name of a written encoding.
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
#include "codec/block_grid.h"
#include "kernels/quantize.h"
#include "loadstone/dtype.h"
#include "loadstone/quantization.h"
#include "loadstone/shape.h"

namespace loadstone {

// The library or format whose component names files use.
enum class NamingStyle : std::uint8_t {
  unified,     // ModelOpt's exports
  compressed,  // compressed-tensors
  bnb,
  gguf  // GGUF: one tensor with its own name, and a block format as its encoding
};

// Change from the shape that the encoder gives a component to the shape in files.
enum class ComponentShape : std::uint8_t {
  same,      // unchanged
  flat,      // [rows] instead of [rows, 1]
  column,    // [rows, 1] instead of [rows]
  one,       // [1] instead of []
  blocks_4d  // [a, 1, b, 1] instead of [a, b], as ModelOpt writes two-dimensional blocks
};

struct ComponentName {
  std::string_view component;  // such as "data" or "scale": one of QuantizedLayout::parts
  std::string_view suffix;     // follows the module's name and a dot
  ComponentShape shape = ComponentShape::same;
  bool is_inverted = false;  // files store the reciprocal
};

// An additional tensor whose bytes do not depend on the values.
struct ConstantComponent {
  std::string suffix;
  Shape shape;
  Dtype dtype = Dtype::u8;
  std::shared_ptr<const std::vector<std::byte>> bytes;
};

// Parts that ModelOpt's config section describes in addition to the algorithm. Without calibration,
// nothing is known about activations: ModelOpt uses "FP8" for FP8 weights both with and without
// quantized activations.
enum class Described : std::uint8_t { nothing, weights, weights_and_activations };

// Fields of ModelOpt's config sections.
struct UnifiedConfig {
  std::string_view algorithm;
  Described described = Described::nothing;
  unsigned group_size = 0;  // 0 if the config must not contain it
  std::string_view strategy{};
  bool is_awq = false;
  bool has_groups = false;  // true to write "config_groups" if this is the only encoding
};

// Fields of compressed-tensors' config section.
struct CompressedConfig {
  std::string_view format;
  std::string_view strategy;
  // The strategy with which servers quantize activations at run time. Empty if they do not.
  std::string_view activations;
  unsigned group_size = 0;
  std::string_view scale_dtype{};
};

// Variants of the bytes of ModelOpt's encodings, the default first: "exact" rounds once, and
// "modelopt-compat" has the bytes of models that ModelOpt compressed.
inline constexpr std::array<std::string_view, 2> scaled_dialects = {"exact", "modelopt-compat"};

// An encoding that loadstone can write. All instances are constants of the families.
struct WrittenEncoding {
  std::string_view name;
  QuantizeKind kind;           // selects the kernels that encode its windows
  unsigned bits;               // bits per code
  std::string_view code_type;  // "float" or "int" in configs
  std::string_view kernel;     // name of the DecodeKernel that decodes the components in this order
  // Sets dialect, shape and components of `form`, whose kind, dtype and number of elements are set,
  // or returns the problem. The quantization's dialect is empty or one of `dialects`.
  std::optional<Problem> (*prepare)(const Quantization& quantization, const Shape& shape,
                                    QuantizedLayout& form);

  // The component names in each naming style. Empty if the style cannot store this encoding.
  std::span<const ComponentName> unified_names{};
  std::span<const ComponentName> compressed_names{};
  std::span<const ComponentName> bnb_names{};
  std::span<const ComponentName> gguf_names{};
  // Returns the additional tensors of a weight with this shape and dtype. Null if a weight has no
  // additional tensors.
  std::vector<ConstantComponent> (*constants)(const Quantization& quantization, const Shape& shape,
                                              Dtype dtype) = nullptr;

  UnifiedConfig unified{};
  CompressedConfig compressed{};
  // The root mean square error of normally distributed values, relative to their root mean square,
  // without importance and with the default block size; 0 if unknown. A test measures it.
  float typical_error = 0;
  // True if transformers decodes experts in compressed-tensors' style one by one, before it joins
  // them.
  bool decodes_experts = false;

  std::span<const std::string_view> dialects = scaled_dialects;
  // The dialect of files that ModelOpt exports, which may differ from that of compressed models.
  // Empty if exported files have the bytes of "exact".
  std::string_view exported_dialect{};
  // The default dialect of values that a load sends to CUDA devices: the bytes that the library
  // writes on these devices. Empty if it is the first dialect.
  std::string_view cuda_dialect{};
  bool takes_block_size = false;  // true if users may set Quantization::block_size
  bool needs_importance =
      false;  // true if `prepare` rejects a Quantization that has no importance matrix
  // Rows must be multiples of this, because servers need whole blocks even if a kernel does not.
  std::uint64_t row_block = 1;
  // Returns true for shapes with which a weight could also be read as a different encoding. For
  // these shapes, a conversion writes the encoding's name under `metadata_key` of the header's
  // metadata. Null if no shape is ambiguous.
  bool (*is_ambiguous)(const Shape& shape) noexcept = nullptr;
  std::string_view metadata_key{};

  [[nodiscard]] std::span<const ComponentName> names(NamingStyle style) const noexcept;
  // True for encodings with bitsandbytes' component names and config, which exclude other styles.
  [[nodiscard]] bool is_bitsandbytes() const noexcept { return !bnb_names.empty(); }
  // True if the first component has blocks of the format QuantizedLayout::block, which only GGUF
  // files store.
  [[nodiscard]] bool is_gguf() const noexcept { return !gguf_names.empty(); }
};

// Sets `form` and returns nullopt, or returns the problem.
[[nodiscard]] std::optional<Problem> prepare_quantization(const Quantization& quantization,
                                                          const Shape& shape, Dtype dtype,
                                                          QuantizedLayout& form);
// Returns the values that the encoding can represent; nullopt if the encoder does not search for
// exact scales.
[[nodiscard]] std::optional<BlockGrid> exact_grid(const Quantization& quantization,
                                                  const Shape& shape, Dtype dtype);
// Returns true if the encoder of the form can search for exact scales.
[[nodiscard]] inline bool can_be_exact_first(const QuantizedLayout& form) noexcept {
  return !is_bitsandbytes(form.kind) && form.dialect == QuantizeDialect::exact;
}

// Returns true if the scale depends on the largest magnitude of the tensor's group.
[[nodiscard]] inline bool shares_scale(const Quantization& quantization,
                                       const QuantizedLayout& form) noexcept {
  return form.needs_amax && !quantization.group.empty();
}

// Returns null for an unknown name.
[[nodiscard]] const WrittenEncoding* find_written_encoding(std::string_view name) noexcept;
// Returns the name of the encoding that stores the same codes in blocks of GGUF, or the same name
// without such an encoding.
[[nodiscard]] std::string name_in_gguf(std::string_view name);
// `quantization` must be prepared. Otherwise throws Error "internal".
[[nodiscard]] const WrittenEncoding& written_encoding(const Quantization& quantization);
// Returns all written encodings, in the order of families.
[[nodiscard]] std::vector<const WrittenEncoding*> written_encodings();
// Returns the names of the written encodings, such as "nf4", "int8" and "fp8".
[[nodiscard]] std::vector<std::string> written_encoding_names();

// Returns null if the style has no such component.
[[nodiscard]] const ComponentName* find_component(const WrittenEncoding& encoding,
                                                  NamingStyle style, std::string_view component);
[[nodiscard]] Shape shape_in_file(ComponentShape in_file, const Shape& shape);

}  // namespace loadstone

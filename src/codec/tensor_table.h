// The tensors of a checkpoint as codecs see them.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "codec/decode.h"
#include "loadstone/error.h"
#include "loadstone/quantized_tensor.h"
#include "loadstone/tensor_info.h"

namespace loadstone {

// Not thread-safe: may cache read bytes.
class TensorTable {
 public:
  static constexpr std::uint32_t none = QuantizedTensor::none;
  // A state or a table of codes is smaller.
  static constexpr std::uint64_t small_bytes_max = 4096;

  TensorTable() = default;
  TensorTable(const TensorTable&) = delete;
  TensorTable& operator=(const TensorTable&) = delete;
  virtual ~TensorTable() = default;

  [[nodiscard]] virtual const std::vector<TensorInfo>& tensors() const noexcept = 0;
  // nullopt: no tensor has the name.
  [[nodiscard]] virtual std::optional<std::uint32_t> index_of(std::string_view name) const = 0;
  // The first tensor whose name begins so, and its successors, in the order of names.
  [[nodiscard]] virtual std::vector<std::uint32_t> beginning_with(std::string_view stem,
                                                                  std::size_t count_max) const = 0;
  [[nodiscard]] virtual const QuantizationClaim& claim() const noexcept = 0;
  // A text of the header's metadata, or an empty text.
  [[nodiscard]] virtual std::string_view metadata(std::string_view key) const = 0;
  // The first bytes of a tensor that is read as headers are: a state, a table, an order of columns.
  // Throws Error.
  [[nodiscard]] virtual std::string read(std::uint32_t tensor, std::uint64_t bytes) const = 0;
  // Adds a finding about the whole checkpoint, once.
  virtual void note(Finding finding) const = 0;

  // All bytes; Error "q.quant_state" for a tensor that is larger than what one would expect.
  [[nodiscard]] std::string bytes_of(std::uint32_t tensor,
                                     std::uint64_t bytes_max = small_bytes_max) const;
  // Returns the values of a little-endian integer tensor: I8, I32 or I64.
  [[nodiscard]] std::vector<std::int64_t> integers_of(std::uint32_t tensor,
                                                      std::uint64_t bytes_max) const;

  [[nodiscard]] const TensorInfo& operator[](std::uint32_t tensor) const {
    return tensors()[tensor];
  }
  // Returns `none` if no tensor has the name.
  [[nodiscard]] std::uint32_t find(const std::string& name) const {
    return index_of(name).value_or(none);
  }
  // The first of these names that is there.
  [[nodiscard]] std::uint32_t find_any(const std::string& stem,
                                       std::initializer_list<std::string_view> suffixes) const;
};

[[nodiscard]] bool is_dtype(const TensorInfo& tensor, std::initializer_list<Dtype> dtypes) noexcept;
[[nodiscard]] bool is_fp8(const TensorInfo& tensor) noexcept;
// F4, F6 and FP8 of FNUZ: no codec reads them, and nothing casts them.
[[nodiscard]] bool is_foreign_float(const TensorInfo& tensor) noexcept;
[[nodiscard]] std::string without_suffix(const std::string& name, std::string_view suffix);

// ---- Results of a recogniser

// Returns an entry for codes in `data` with existing scales.
[[nodiscard]] QuantizedTensor quantized_tensor(std::string name, std::uint32_t data,
                                               std::initializer_list<std::uint32_t> scales);

// Marks a tensor that cannot be decoded. `what` follows the name: "has no scales"; then `sources`
// are named.
void refuse(QuantizedTensor& quantized, std::string code, std::string_view what,
            std::vector<std::string> sources, std::string found = {}, std::string expected = {});

// A component could not be read.
void refuse(QuantizedTensor& quantized, const Error& error, const std::string& component);

// Sets kernel and sources for values of this shape; if they do not fit each other, sets the defect
// "q.scale_shape".
void set_decoding(const TensorTable& table, QuantizedTensor& quantized, std::string_view encoding,
                  Decoding decoding);

// Checks everything about a decoding: that its sources are there and its kernel takes them.
[[nodiscard]] std::optional<Problem> check_decoding(const std::vector<TensorInfo>& tensors,
                                                    const Decoding& decoding,
                                                    PreparedDecoder& form);

}  // namespace loadstone

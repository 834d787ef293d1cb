// The interface through which codecs read the tensors of a checkpoint.
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

// Not thread-safe, because implementations may cache bytes.
class TensorTable {
 public:
  static constexpr std::uint32_t none = QuantizedTensor::none;
  // Upper limit on the bytes of a quantization state or a code table.
  static constexpr std::uint64_t small_bytes_max = 4096;

  TensorTable() = default;
  TensorTable(const TensorTable&) = delete;
  TensorTable& operator=(const TensorTable&) = delete;
  virtual ~TensorTable() = default;

  [[nodiscard]] virtual const std::vector<TensorInfo>& tensors() const noexcept = 0;
  // Returns nullopt if no tensor has the name.
  [[nodiscard]] virtual std::optional<std::uint32_t> index_of(std::string_view name) const = 0;
  // Returns up to `count_max` tensors whose names begin with `stem`, in the order of names.
  [[nodiscard]] virtual std::vector<std::uint32_t> beginning_with(std::string_view stem,
                                                                  std::size_t count_max) const = 0;
  [[nodiscard]] virtual const QuantizationClaim& claim() const noexcept = 0;
  // Returns a string of the header's metadata, or an empty string.
  [[nodiscard]] virtual std::string_view metadata(std::string_view key) const = 0;
  // Returns the first bytes of a small tensor, such as a state, a table or an order of columns.
  // This reads the file when a checkpoint is opened, as for headers. Throws Error.
  [[nodiscard]] virtual std::string read(std::uint32_t tensor, std::uint64_t bytes) const = 0;
  // Adds a finding about the whole checkpoint, unless a finding with the same code was added
  // before.
  virtual void note(Finding finding) const = 0;

  // Returns all bytes. Throws Error "q.quant_state" if there are more than `bytes_max`.
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
  // Returns the tensor whose name is `stem` plus the first suffix that exists, or `none`.
  [[nodiscard]] std::uint32_t find_any(const std::string& stem,
                                       std::initializer_list<std::string_view> suffixes) const;
};

[[nodiscard]] bool is_dtype(const TensorInfo& tensor, std::initializer_list<Dtype> dtypes) noexcept;
[[nodiscard]] bool is_fp8(const TensorInfo& tensor) noexcept;
// Returns true for F4, F6 and the FNUZ variants of FP8, which no codec reads and no cast supports.
[[nodiscard]] bool is_foreign_float(const TensorInfo& tensor) noexcept;
[[nodiscard]] std::string without_suffix(const std::string& name, std::string_view suffix);

// ---- Results of a recogniser

// Returns a quantized tensor with codes in `data`. Ignores scales that are `none`.
[[nodiscard]] QuantizedTensor quantized_tensor(std::string name, std::uint32_t data,
                                               std::initializer_list<std::uint32_t> scales);

// Marks the tensor as not decodable. `what` follows the tensor's name in the message, such as "has
// no scales". The message also names the `sources`.
void refuse(QuantizedTensor& quantized, std::string code, std::string_view what,
            std::vector<std::string> sources, std::string found = {}, std::string expected = {});

// Marks the tensor as not decodable because a component could not be read.
void refuse(QuantizedTensor& quantized, const Error& error, const std::string& component);

// Sets the encoding and the decoding. If the sources do not fit each other or the shape, marks the
// tensor as not decodable with "q.scale_shape".
void set_decoding(const TensorTable& table, QuantizedTensor& quantized, std::string_view encoding,
                  Decoding decoding);

// Checks that the decoding's sources exist and that its kernel accepts them. Sets `form`.
[[nodiscard]] std::optional<Problem> check_decoding(const std::vector<TensorInfo>& tensors,
                                                    const Decoding& decoding,
                                                    PreparedDecoder& form);

}  // namespace loadstone

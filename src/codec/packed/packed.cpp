// Recognises and decodes integers that compressed-tensors packs in words, and writes those of 4
// bits. See docs/formats/compressed-tensors.md
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/ceil_div.h"
#include "base/text.h"
#include "codec/families.h"
#include "codec/scaled/scaled.h"
#include "codec/words/words.h"

namespace loadstone {

namespace {

constexpr std::uint64_t word_bits = 32;
constexpr std::uint32_t none = TensorTable::none;

// ---- Decoding: words I32 [rows, ceil(columns * bits / 32)] and scales [rows, groups] or one.
// Optional: zero points I32 [ceil(rows * bits / 32), groups], or I8 for one scale; and the group of
// each column I32 [columns].

template <unsigned bits>
std::optional<Problem> prepare(const DecodeRequest& request, PreparedDecoder& made) {
  const auto& parts = request.parts;
  const auto refuse = [](const char* message, std::string found, std::string expected) {
    return Problem{message, std::move(found), std::move(expected)};
  };
  if (parts.size() < 2 || parts.size() > 4) {
    return refuse(
        "the decoder needs words and scales, and optionally zero points and an order of groups",
        counted(parts.size(), "tensor"), "2 to 4 tensors");
  }
  if (request.shape.rank() != 2)
    return refuse("the weight is not a matrix", request.shape.text(), {});
  words::Packing form = {.layout = words::Layout::across,
                         .bits = bits,
                         .rows = request.shape[0],
                         .columns = request.shape[1],
                         .group_size = request.group_size,
                         .dtype = request.dtype};
  const Shape codes({form.rows, ceil_div(form.columns * bits, word_bits)});
  if (!scaled::is_one_of(parts[0].encoding, {Dtype::i32}) || parts[0].shape != codes) {
    return refuse("the number of words does not fit the shape", parts[0].shape.text(),
                  codes.text());
  }
  if (!scaled::is_one_of(parts[1].encoding, {Dtype::f32, Dtype::f16, Dtype::bf16})) {
    return refuse("the decoder does not support the dtype of the scales",
                  std::string(parts[1].encoding.name()), "F32, F16 or BF16");
  }
  form.scale = parts[1].encoding.dtype();
  const Shape& scales = parts[1].shape;
  if (form.group_size == 0) return refuse("the group size is 0", "0", "1 or more");
  form.groups = ceil_div(form.columns, form.group_size);
  const Shape per_group({form.rows, form.groups});
  form.has_one_scale =
      scales.numel() == 1u && form.group_size == form.columns && scales != per_group;
  if (!form.has_one_scale && scales != per_group) {
    return refuse("the numbers of groups and scales differ", scales.text(), per_group.text());
  }
  for (std::size_t i = 2; i < parts.size(); ++i) {
    const bool is_words = scaled::is_one_of(parts[i].encoding, {Dtype::i32});
    const Shape zeros({ceil_div(form.rows * bits, word_bits), form.groups});
    if (i + 1 == parts.size() && is_words && parts[i].shape == Shape({form.columns})) {
      form.has_order = true;
    } else if (i == 2 && is_words && parts[i].shape == zeros && !form.has_one_scale) {
      form.has_zeros = true;
    } else if (i == 2 && scaled::is_one_of(parts[i].encoding, {Dtype::i8}) &&
               parts[i].shape.numel() == 1u && form.has_one_scale) {
      form.has_zeros = form.has_plain_zero = true;
    } else {
      return refuse("the zero points or the order of groups do not fit the matrix",
                    fmt::format("{} {}", parts[i].encoding.name(), parts[i].shape.text()),
                    fmt::format("I32 {} or I32 [{}]", zeros.text(), form.columns));
    }
  }
  words::finish(form, made);
  return std::nullopt;
}

// The largest code, 7, is stored as 15 because of an offset of 8.
constexpr ErrorBound int4_error = error_bound::of_integers(7, std::byte{0xff}, Dtype::u8);

constexpr std::array kernels = {
    DecodeKernel{"packed_int4", prepare<4>, false, false, true, &int4_error},
    DecodeKernel{"packed_int8", prepare<8>, false, false, true},
};

// ---- recognising

// Recognises one tensor. Each instance is used once.
class Recogniser {
 public:
  Recogniser(const TensorTable& table, std::uint32_t tensor)
      : table_(table),
        name_(without_suffix(table[tensor].name, "_packed")),
        words_(table[tensor]),
        scale_(table.find(name_ + "_scale")),
        zero_(table.find(name_ + "_zero_point")),
        order_(table.find(name_ + "_g_idx")),
        shape_(table.find(name_ + "_shape")),
        made_(quantized_tensor(name_, tensor, {scale_, zero_})) {
    made_.has_zero_points = zero_ != none;
    for (const std::uint32_t state : {order_, shape_}) {
      if (state != none) made_.states.push_back(state);
    }
  }

  QuantizedTensor run() && {
    try {
      if (find_components() && find_shape() && find_groups() && find_order()) decode();
    } catch (const Error& error) {
      refuse(made_, error, words_.name);
    }
    return std::move(made_);
  }

 private:
  bool fail(const char* code, const std::string& what, std::vector<std::string> sources,
            std::string found = {}, std::string expected = {}) {
    refuse(made_, code, what, std::move(sources), std::move(found), std::move(expected));
    return false;
  }

  bool find_components() {
    std::vector<std::string> lacks;
    if (scale_ == none) lacks.push_back(name_ + "_scale");
    if (shape_ == none) lacks.push_back(name_ + "_shape");
    const auto symmetric = table_.claim().is_symmetric;
    if (zero_ == none && symmetric == false) lacks.push_back(name_ + "_zero_point");
    if (!lacks.empty()) return fail("q.scale_missing", "lacks components", std::move(lacks));
    if (zero_ != none && symmetric == true) {
      return fail("plan.config_mismatch",
                  "has zero points, but the config declares symmetric quantization",
                  {table_[zero_].name}, "zero points", "symmetric: true");
    }
    return true;
  }

  bool find_shape() {
    const TensorInfo& tensor = table_[shape_];
    const bool is_pair = is_dtype(tensor, {Dtype::i64, Dtype::i32}) && tensor.shape == Shape({2});
    const auto extents = is_pair ? table_.integers_of(shape_, TensorTable::small_bytes_max)
                                 : std::vector<std::int64_t>();
    constexpr std::int64_t extent_max = std::int64_t{1} << 31;
    const auto is_sound = [](std::int64_t extent) { return extent > 0 && extent < extent_max; };
    if (extents.size() != 2 || !std::ranges::all_of(extents, is_sound)) {
      return fail("q.shape", "has an invalid shape", {tensor.name},
                  fmt::format("{}", fmt::join(extents, ", ")), "rows, columns");
    }
    rows_ = static_cast<std::uint64_t>(extents[0]);
    columns_ = static_cast<std::uint64_t>(extents[1]);
    const auto fits = [&](std::uint64_t bits) {
      return words_.shape == Shape({rows_, ceil_div(columns_ * bits, word_bits)});
    };
    const auto& claimed = table_.claim().bits;
    if (claimed && *claimed != 4 && *claimed != 8 && fits(*claimed)) {
      return fail("plan.encoding", "has codes with a number of bits that loadstone does not decode",
                  {words_.name}, counted(*claimed, "bit"), "4 or 8 bits");
    }
    if (!claimed && fits(4) && fits(8)) {
      return fail("q.shape", "has so few columns that its codes can have 4 or 8 bits",
                  {words_.name}, words_.shape.text(), "num_bits in the config");
    }
    bits_ = claimed == 8u && fits(8) ? 8 : fits(4) ? 4 : 8;
    if (!fits(bits_)) {
      return fail("q.shape", "has a number of words that does not fit its shape",
                  {words_.name, tensor.name}, words_.shape.text(),
                  fmt::format("[{}, {}] codes", rows_, columns_));
    }
    if (claimed && *claimed != bits_) {
      return fail("plan.config_mismatch", "has a different number of bits than the config declares",
                  {words_.name}, std::to_string(bits_), std::to_string(*claimed));
    }
    return true;
  }

  bool find_groups() {
    const TensorInfo& scales = table_[scale_];
    const std::size_t rank = scales.shape.rank();
    const bool is_one = scales.shape.numel() == 1u;
    if (!is_one && (rank != 2 || scales.shape[0] != rows_ || scales.shape[1] == 0)) {
      return fail("q.scale_shape", "has scales for a different number of rows", {scales.name},
                  scales.shape.text(), fmt::format("[{}, groups]", rows_));
    }
    const std::uint64_t groups = is_one ? 1 : scales.shape[1];
    group_size_ = ceil_div(columns_, groups);
    const auto& claimed = table_.claim().group_size;
    if (!claimed && !words::are_even(columns_, groups) && order_ == none) {
      return fail("q.group_size", "has groups of an unknown size", {scales.name},
                  fmt::format("{} groups of {} columns", groups, columns_),
                  "group_size in the config");
    }
    if (groups > 1 && claimed) {
      if (*claimed == 0 || ceil_div(columns_, *claimed) != groups) {
        return fail("plan.config_mismatch", "has a different group size than the config declares",
                    {scales.name}, counted(groups, "group"), fmt::format("groups of {}", *claimed));
      }
      group_size_ = *claimed;
    }
    return true;
  }

  // The library writes an order only for reordered groups. An order of only -1 means no order.
  bool find_order() {
    if (order_ == none) {
      if (table_.claim().is_reordered != true) return true;
      return fail("q.scale_missing",
                  "has reordered groups, but lacks the tensor with their order (weight_g_idx)",
                  {name_ + "_g_idx"});
    }
    const TensorInfo& tensor = table_[order_];
    if (!is_dtype(tensor, {Dtype::i32}) || tensor.shape != Shape({columns_})) {
      return fail("q.scale_shape", "has an order of groups for a different number of columns",
                  {tensor.name}, tensor.shape.text(), Shape({columns_}).text());
    }
    const auto order = table_.integers_of(order_, words::order_bytes_max);
    if (std::ranges::all_of(order, [](std::int64_t group) { return group == -1; })) return true;
    const auto groups = static_cast<std::int64_t>(ceil_div(columns_, group_size_));
    for (std::size_t i = 0; i < order.size(); ++i) {
      if (order[i] < 0 || order[i] >= groups) {
        return fail("q.index_range", fmt::format("has column {} in a group that does not exist", i),
                    {tensor.name}, std::to_string(order[i]), fmt::format("0 to {}", groups - 1));
      }
      has_order_ = has_order_ || static_cast<std::uint64_t>(order[i]) != i / group_size_;
    }
    return true;
  }

  void decode() {
    Decoding decoding = {bits_ == 4 ? "packed_int4" : "packed_int8",
                         {made_.data, scale_},
                         Shape({rows_, columns_}),
                         Dtype::bf16,
                         0,
                         group_size_};
    if (zero_ != none) decoding.sources.push_back(zero_);
    if (has_order_) decoding.sources.push_back(order_);
    const bool has_short_groups = bits_ == 4 && group_size_ == 32;
    const std::string encoding =
        has_short_groups ? "int4-packed-32" : fmt::format("int{}-packed", bits_);
    set_decoding(table_, made_, encoding, std::move(decoding));
    made_.unneeded.push_back(shape_);
    if (order_ != none && !has_order_) made_.unneeded.push_back(order_);
  }

  const TensorTable& table_;
  const std::string name_;
  const TensorInfo& words_;
  const std::uint32_t scale_;
  const std::uint32_t zero_;
  const std::uint32_t order_;
  const std::uint32_t shape_;
  QuantizedTensor made_;
  std::uint64_t rows_ = 0;
  std::uint64_t columns_ = 0;
  std::uint64_t bits_ = 4;
  std::uint64_t group_size_ = 0;
  bool has_order_ = false;
};

std::optional<QuantizedTensor> recognise(const TensorTable& table, std::uint32_t tensor) {
  const TensorInfo& words = table[tensor];
  if (!is_dtype(words, {Dtype::i32}) || !words.name.ends_with("_packed")) return std::nullopt;
  const std::string name = without_suffix(words.name, "_packed");
  if (table.find_any(name, {"_scale", "_shape"}) == none) return std::nullopt;
  return Recogniser(table, tensor).run();
}

// ---- writing: symmetric codes of 4 bits, with one scale per group of columns

template <std::uint64_t group_size>
std::optional<Problem> write_int4(const Quantization& quantization, const Shape& shape,
                                  QuantizedLayout& form) {
  if (auto problem = scaled::begin_matrices(quantization, shape, form)) return problem;
  if (shape.rank() > 2) {
    return Problem{"this encoding quantizes only single matrices", shape.text(), "[rows, columns]"};
  }
  if (form.columns % group_size != 0) {
    return Problem{fmt::format("a row does not consist of whole groups of {} values", group_size),
                   shape.text(), fmt::format("a multiple of {} columns", group_size)};
  }
  form.group_size = form.window_elements = group_size;
  form.parts = {{"data", {form.rows, form.columns * 4 / word_bits}, Dtype::i32},
                {"scale", {form.rows, form.columns / group_size}, form.dtype}};
  return std::nullopt;
}

std::vector<ConstantComponent> shape_of(const Quantization& /*quantization*/, const Shape& shape,
                                        Dtype /*dtype*/) {
  const std::array extents = {static_cast<std::int64_t>(shape[0]),
                              static_cast<std::int64_t>(shape[1])};
  const auto bytes = std::as_bytes(std::span(extents));
  return {{"weight_shape",
           {extents.size()},
           Dtype::i64,
           std::make_shared<const std::vector<std::byte>>(bytes.begin(), bytes.end())}};
}

constexpr std::array names = {ComponentName{"data", "weight_packed"},
                              ComponentName{"scale", "weight_scale"}};

// The only dialect: the bytes of the library's quantizer, which rounds to the dtype of the values.
constexpr std::array<std::string_view, 1> dialects = {"compressed-tensors"};

template <unsigned group_size>
constexpr WrittenEncoding written_as(std::string_view name, float typical_error) {
  return {.name = name,
          .kind = QuantizeKind::int4_packed,
          .bits = 4,
          .code_type = "int",
          .kernel = "packed_int4",
          .prepare = write_int4<group_size>,
          .compressed_names = names,
          .constants = shape_of,
          .compressed = {"pack-quantized", "group", {}, group_size},
          .typical_error = typical_error,
          .decodes_experts = true,
          .dialects = dialects};
}

constexpr std::array written = {written_as<128>("int4-packed", 0.1105F),
                                written_as<32>("int4-packed-32", 0.0947F)};

}  // namespace

constexpr std::array<std::string_view, 3> encodings = {"int4-packed", "int4-packed-32",
                                                       "int8-packed"};

extern const Family packed_family = {.kernels = kernels,
                                     .recognise = recognise,
                                     .reads_all = true,
                                     .encodings = encodings,
                                     .written = written,
                                     .method = "compressed-tensors"};

}  // namespace loadstone

#include "formats/torch_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "base/text.h"

namespace loadstone {

namespace {

// Maximum depth of parameters inside parameters; no writer nests them deeper.
constexpr int parameter_wrappers_max = 8;

// A function of torch that makes a tensor, and the positions of its arguments.
struct RebuildFunction {
  std::string_view name;
  std::size_t arguments_min;
  std::size_t hooks;  // position of the hooks; 0: no such argument
  std::size_t dtype;  // position of the dtype; 0: the storage has the dtype
};

constexpr auto rebuild_functions = std::to_array<RebuildFunction>({
    {"torch._utils._rebuild_tensor", 4, 0, 0},
    {"torch._utils._rebuild_tensor_v2", 6, 5, 0},
    {"torch._utils._rebuild_tensor_v3", 7, 5, 6},
});
constexpr auto parameter_rebuilds = std::to_array<std::string_view>({
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
});

// Not thread-safe; used once.
class ViewReader {
 public:
  ViewReader(const TorchFile& file, CopyBudget& budget, std::string_view name)
      : path_(file.path),
        pickle_(file.pickle),
        storages_(file.storages),
        budget_(budget),
        name_(name) {}

  TensorInfo read(std::uint32_t node) {
    node = unwrapped(node);
    const auto* function =
        std::ranges::find(rebuild_functions, pickle_.callee(node), &RebuildFunction::name);
    if (function == rebuild_functions.end()) refuse_function(node);
    const auto& arguments = pickle_.items(pickle_.items(node)[1]);
    const bool fits = arguments.size() >= function->arguments_min &&
                      pickle_.kind(arguments[0]) == PickleKind::storage;
    if (!fits) refuse_arguments(node);
    if (function->hooks != 0) require_no_hooks(arguments[function->hooks]);
    if (arguments.size() > std::max<std::size_t>(function->arguments_min, 6)) {
      require_no_metadata(arguments.back());
    }
    const std::int64_t offset = number_of(arguments[1], "storage_offset");
    if (offset < 0) refuse_view("storage_offset", std::to_string(offset), "0 or more");
    const auto extents = numbers_of(arguments[2], "size");
    const auto strides = numbers_of(arguments[3], "stride");
    if (extents.size() != strides.size()) {
      refuse_view("stride", counted(strides.size(), "stride"),
                  fmt::format("{}, as many as dimensions", extents.size()));
    }
    TensorInfo tensor;
    tensor.name = name_;
    tensor.shape = Shape(extents);
    const auto storage = storage_of(arguments[0]);
    const Dtype dtype = function->dtype == 0 ? storage.dtype : dtype_of(arguments[function->dtype]);
    if (storage.is_untyped == (function->dtype == 0)) refuse_arguments(node);
    tensor.encoding = dtype;
    const bool is_packed = dtype == Dtype::f4;
    place(tensor, storage, is_packed ? Dtype::u8 : dtype, static_cast<std::uint64_t>(offset),
          strides);
    if (is_packed) count_values(tensor);
    return tensor;
  }

 private:
  [[noreturn]] void refuse(HeaderProblem problem) const {
    loadstone::refuse(path_, std::move(problem), name_);
  }
  [[noreturn]] void refuse_view(std::string_view field, std::string found,
                                std::string expected) const {
    refuse({"pt.view_bounds", "the pickle does not make the tensor as a view of a storage", field,
            std::move(found), std::move(expected)});
  }
  [[noreturn]] void refuse_arguments(std::uint32_t node) const {
    refuse({"pt.arguments", "the call that makes the tensor has unexpected arguments", "REDUCE",
            pickle_.describe(node), "a storage, its offset, a size and strides"});
  }
  [[noreturn]] void refuse_function(std::uint32_t node) const {
    refuse({"pt.unsupported", "loadstone does not support this kind of tensor", "GLOBAL",
            printable(pickle_.callee(node)), "a dense tensor"});
  }

  // Returns the tensor inside a parameter, or `node` if it is a tensor.
  [[nodiscard]] std::uint32_t unwrapped(std::uint32_t node) const {
    for (int i = 0; i < parameter_wrappers_max; ++i) {
      if (pickle_.kind(node) != PickleKind::call) refuse_arguments(node);
      const std::string_view callee = pickle_.callee(node);
      if (std::ranges::find(parameter_rebuilds, callee) == parameter_rebuilds.end()) return node;
      const auto& arguments = pickle_.items(pickle_.items(node)[1]);
      if (arguments.size() < 3) refuse_arguments(node);
      require_no_hooks(arguments[2]);
      node = arguments[0];
    }
    refuse_arguments(node);
  }

  // Rejects hooks, which are functions that torch would call later.
  void require_no_hooks(std::uint32_t node) const {
    const PickleKind kind = pickle_.kind(node);
    if (kind == PickleKind::none) return;
    if (kind == PickleKind::dict && pickle_.items(node).empty()) return;
    refuse({"pt.global_refused", "the tensor has backward hooks, which are code to call", "hooks",
            pickle_.describe(node), "no hooks"});
  }

  // Rejects metadata such as {"conj": True}, which would change the values.
  void require_no_metadata(std::uint32_t node) const {
    const PickleKind kind = pickle_.kind(node);
    if (kind == PickleKind::none) return;
    if (kind == PickleKind::dict && pickle_.items(node).empty()) return;
    refuse({"pt.unsupported", "the tensor has additional state, such as a conjugate flag", "REDUCE",
            pickle_.describe(node), "a plain tensor"});
  }

  [[nodiscard]] std::int64_t number_of(std::uint32_t node, std::string_view field) const {
    if (pickle_.kind(node) != PickleKind::integer) {
      refuse_view(field, pickle_.describe(node), "an integer");
    }
    return pickle_.node(node).number;
  }

  [[nodiscard]] std::vector<std::uint64_t> numbers_of(std::uint32_t node, std::string_view field) {
    if (pickle_.kind(node) != PickleKind::tuple && pickle_.kind(node) != PickleKind::list) {
      refuse_view(field, pickle_.describe(node), "a tuple of integers");
    }
    budget_.take(path_, pickle_.items(node).size() * sizeof(std::uint64_t), pickle_.bytes);
    std::vector<std::uint64_t> numbers;
    for (const std::uint32_t item : pickle_.items(node)) {
      const std::int64_t number = number_of(item, field);
      if (number < 0) refuse_view(field, std::to_string(number), "0 or more");
      numbers.push_back(static_cast<std::uint64_t>(number));
    }
    return numbers;
  }

  [[nodiscard]] TorchStorage storage_of(std::uint32_t node) const {
    const std::string_view key = pickle_.text(pickle_.items(node)[1]);
    const auto found = storages_.find(key);
    if (found != storages_.end() && found->second.is_found) return found->second;
    refuse({"pt.storage_missing", "the file does not contain the tensor's storage", "storage",
            "no data/" + printable(key), "the tensor's values"});
  }

  [[nodiscard]] Dtype dtype_of(std::uint32_t node) const {
    constexpr std::string_view module = "torch.";
    if (pickle_.kind(node) == PickleKind::global && pickle_.text(node).starts_with(module)) {
      const std::string_view spelled = pickle_.text(node).substr(module.size());
      const auto dtype = parse_dtype(spelled);
      if (dtype && (bits(*dtype) % 8 == 0 || *dtype == Dtype::f4)) return *dtype;
    }
    refuse({"pt.storage_type", "loadstone does not support this dtype", "dtype",
            pickle_.describe(node), "torch.uint16, torch.float8_e4m3fn ..."});
  }

  // Sets the byte range in the file, from the first to the last element.
  void place(TensorInfo& tensor, const TorchStorage& storage, Dtype dtype, std::uint64_t offset,
             const std::vector<std::uint64_t>& strides) const {
    const std::uint64_t element_bytes = bits(dtype) / 8;
    const auto numel = tensor.shape.numel();
    if (!numel || !Encoding(dtype).byte_count(*numel)) {
      refuse({"pt.overflow", "the tensor's size does not fit in 64 bits", "size",
              tensor.shape.text(), "fewer elements"});
    }
    if (*numel == 0) {
      tensor.offset_begin = tensor.offset_end = storage.file_begin;
      return;
    }
    std::optional<std::uint64_t> last = offset;
    for (std::size_t d = 0; d < strides.size(); ++d) {
      if (last) last = checked_mul_add(tensor.shape[d] - 1, strides[d], *last);
      if (!last) refuse_view("stride", Shape(strides).text(), "steps inside the storage");
    }
    const std::uint64_t elements = storage.bytes / element_bytes;
    if (*last >= elements) {
      refuse_view("storage_offset", fmt::format("element {} of the storage", *last),
                  fmt::format("one of {}", elements));
    }
    tensor.offset_begin = storage.file_begin + offset * element_bytes;
    tensor.offset_end = storage.file_begin + (*last + 1) * element_bytes;
    if (!is_c_order(tensor.shape, strides)) tensor.strides = strides;
  }

  // Doubles the last extent of packed pairs, because torch counts bytes, but loadstone values.
  void count_values(TensorInfo& tensor) const {
    auto extents =
        std::vector<std::uint64_t>(tensor.shape.extents().begin(), tensor.shape.extents().end());
    const auto last =
        extents.empty() ? std::nullopt : checked_mul(extents.back(), std::uint64_t{2});
    if (!last || !tensor.strides.empty()) {
      refuse({"pt.unsupported", "packed pairs of values are not in the order of the file", "size",
              tensor.shape.text(), "rows of pairs"});
    }
    extents.back() = *last;
    tensor.shape = Shape(extents);
  }

  static bool is_c_order(const Shape& shape, const std::vector<std::uint64_t>& strides) {
    std::uint64_t expected = 1;  // no product overflows, because numel() has been checked
    for (std::size_t d = strides.size(); d-- > 0;) {
      if (shape[d] == 1) continue;
      if (strides[d] != expected) return false;
      expected *= shape[d];
    }
    return true;
  }

  const std::string& path_;
  const Pickle& pickle_;
  const TorchStorages& storages_;
  CopyBudget& budget_;
  std::string_view name_;
};

}  // namespace

TensorInfo read_torch_view(const TorchFile& file, CopyBudget& budget, std::uint32_t node,
                           std::string_view name) {
  return ViewReader(file, budget, name).read(node);
}

}  // namespace loadstone

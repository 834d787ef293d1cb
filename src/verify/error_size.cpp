#include "verify/error_size.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "kernels/cast.h"
#include "loadstone/quantized_tensors.h"
#include "verify/element_reader.h"

namespace loadstone {

namespace {

// The values of one tensor in both checkpoints.
struct Measured {
  TensorRecipe first;
  TensorRecipe second;
  std::vector<Difference*> differences{};  // of the tensor, or of its components
};

// Returns true for blocks and for floats that are not components of a quantized tensor.
bool has_values(const Catalog& catalog, std::uint32_t tensor) {
  if (catalog.quantized().is_component(tensor)) return false;
  const Encoding encoding = catalog.tensors()[tensor].encoding;
  return !encoding.is_dtype() ||
         (kind(encoding.dtype()) == DtypeKind::floating && can_cast(encoding.dtype(), Dtype::f32));
}

// Collects the tensors to measure. A tensor is measured once, even if several of its components
// differ.
class Measurements {
 public:
  Measurements(const Pairs& pairs, const Catalog& first, const Catalog& second)
      : first_(first), second_(second) {
    for (const Pair& pair : pairs.all()) pairs_.emplace(pair.name, &pair);
    for (const QuantizedTensor& each : first.quantized().tensors()) {
      if (!each.is_readable()) continue;
      for (const std::uint32_t source : each.decoding.sources) quantized_.emplace(source, &each);
    }
  }

  void add(Difference& difference) {
    const auto pair = pairs_.find(difference.name);
    if (pair != pairs_.end()) {
      const Pair& found = *pair->second;
      add(difference.name, {found.first.value, found.second.value}, difference);
      return;
    }
    const auto a = first_.find(difference.name);
    const auto b = second_.find(difference.name);
    if (!a || !b) return;
    if (const auto found = quantized_.find(*a); found != quantized_.end()) {
      add_decoded(*found->second, difference);
    } else if (has_values(first_, *a) && has_values(second_, *b)) {
      add(difference.name, {tensor_recipe(first_, *a), tensor_recipe(second_, *b)}, difference);
    }
  }

  [[nodiscard]] std::map<std::string, Measured>& all() noexcept { return all_; }

 private:
  // Adds a quantized tensor with a different component.
  void add_decoded(const QuantizedTensor& quantized, Difference& difference) {
    const auto data = second_.find(first_.tensors()[quantized.data].name);
    const QuantizedTensor* const other = data ? second_.quantized().find(*data) : nullptr;
    if (other == nullptr || !other->is_readable() || other->shape() != quantized.shape()) return;
    add(quantized.name, {tensor_recipe(first_, quantized.data), tensor_recipe(second_, *data)},
        difference);
  }

  void add(const std::string& name, Measured measured, Difference& difference) {
    all_.try_emplace(name, std::move(measured)).first->second.differences.push_back(&difference);
  }

  const Catalog& first_;
  const Catalog& second_;
  std::map<std::string_view, const Pair*> pairs_;
  std::map<std::uint32_t, const QuantizedTensor*> quantized_;  // of the first, by component
  std::map<std::string, Measured> all_;                        // by the tensor's name
};

template <typename Number>
void add_all(std::span<const std::byte> first, std::span<const std::byte> second, ErrorSum& sum) {
  for (std::size_t at = 0; at < first.size(); at += sizeof(Number)) {
    Number a = 0;
    Number b = 0;
    std::memcpy(&a, first.data() + at, sizeof a);
    std::memcpy(&b, second.data() + at, sizeof b);
    sum.add(double{a}, double{b});
  }
}

std::string text_of(const ErrorSize& error) {
  if (error.largest == 0) return "equal as real numbers";
  return fmt::format("largest error {:.2g}, relative error {:.2g}", error.largest, error.relative);
}

}  // namespace

ErrorSize size_of_difference(const std::string& name, const TensorRecipe& first_value,
                             const TensorRecipe& second_value, const OpenShards& first,
                             const OpenShards& second, Jobs& jobs,
                             std::vector<std::byte>& scratch) {
  // F32 can represent all decoded values, and all floats except F64.
  const bool is_wide = first_value.dtype == Dtype::f64 || second_value.dtype == Dtype::f64;
  const Dtype dtype = is_wide ? Dtype::f64 : Dtype::f32;
  ElementReader left(first, name, first_value, dtype, jobs.stop());
  ElementReader right(second, name, second_value, dtype, jobs.stop());
  const std::uint64_t step = std::max(bytes_at_once(first_value), bytes_at_once(second_value));
  ErrorSum sum;
  const auto add = [&](std::span<const std::byte> a, std::span<const std::byte> b) {
    is_wide ? add_all<double>(a, b, sum) : add_all<float>(a, b, sum);
    return std::optional<std::uint64_t>();
  };
  static_cast<void>(compare_in_steps(left, right, step, jobs, scratch, add));
  return sum.size();
}

void measure_differences(const Pairs& pairs, const OpenShards& first, const OpenShards& second,
                         Jobs& jobs, VerifyReport& report) {
  Measurements measurements(pairs, first.catalog(), second.catalog());
  for (Difference& each : report.differences) {
    const bool is_measurable =
        each.kind == DifferenceKind::bytes || each.kind == DifferenceKind::values;
    if (is_measurable && !each.error) measurements.add(each);
  }
  std::vector<std::pair<const std::string, Measured>*> work;
  for (auto& each : measurements.all()) {
    work.push_back(&each);
    jobs.expect_instead(0, 2 * sizeof(float) * each.second.first.shape.numel().value_or(0));
  }
  jobs.run(work.size(), [&](std::size_t i, std::vector<std::byte>& scratch) {
    const auto& [name, measured] = *work[i];
    const ErrorSize error =
        size_of_difference(name, measured.first, measured.second, first, second, jobs, scratch);
    for (Difference* const each : measured.differences) {
      each->error = error;
      const bool is_component = each->name != name;
      each->found += "; ";
      if (is_component) each->found += fmt::format("decoded values of '{}': ", printable(name));
      each->found += text_of(error);
    }
  });
  report.bytes_read = jobs.bytes_done();
}

}  // namespace loadstone

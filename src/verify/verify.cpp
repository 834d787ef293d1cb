#include "loadstone/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "base/only_errors.h"
#include "base/text.h"
#include "catalog/header_findings.h"
#include "catalog/reading_threads.h"
#include "codec/decode.h"
#include "convert/write/output_sink.h"
#include "engine/jobs.h"
#include "kernels/cast.h"
#include "loadstone/error.h"
#include "verify/claim.h"
#include "verify/element_reader.h"
#include "verify/error_size.h"
#include "verify/losses.h"
#include "verify/names.h"
#include "verify/pairs.h"
#include "verify/quantized.h"
#include "verify/ranges.h"
#include "verify/report_pairs.h"
#include "verify/values.h"

namespace loadstone {

namespace {

// Returns the size of as many whole units as fit into a chunk.
std::size_t chunk_bytes(Encoding encoding) noexcept {
  const std::size_t unit = unit_bytes(encoding);
  return chunk_bytes_max / unit * unit;
}

// Counts all values in the range, including gaps of a strided view.
ValueCounts count_range(const OpenShards& shards, const DistinctRange& range, Jobs& jobs,
                        std::vector<std::byte>& scratch) {
  const TensorInfo& tensor = shards.catalog().tensors()[range.tensor];
  ValueCounts counts;
  const std::uint64_t step = chunk_bytes(tensor.encoding);
  for (std::uint64_t at = range.begin; at < range.end; at += step) {
    scratch.resize(std::min(step, range.end - at));
    shards.read(tensor, at, scratch);
    if (!jobs.goes_on(scratch.size())) break;
    counts += count_values(tensor.encoding, scratch);
  }
  return counts;
}

Finding bad_values(const Catalog& catalog, const TensorInfo& tensor, const ValueCounts& counts) {
  if (counts.bad_bools > 0) {
    return finding_of(catalog, tensor, "st.bool_value",
                      counted(counts.bad_bools, "byte") + " other than 0 and 1", "0 or 1");
  }
  return finding_of(catalog, tensor, "gg.scale_nan",
                    counted(counts.bad_scales, "block") + " with a scale that is not finite",
                    "finite scales");
}

Finding not_finite(const Catalog& catalog, const TensorInfo& tensor, const ValueCounts& counts) {
  return finding_of(catalog, tensor, "verify.not_finite",
                    fmt::format("{} NaN, {} infinite", counts.nan, counts.infinite),
                    "finite values");
}

// Returns the first different byte, or nullopt.
std::optional<std::size_t> first_byte(std::span<const std::byte> left,
                                      std::span<const std::byte> right) {
  const auto [in_left, in_right] = std::ranges::mismatch(left, right);
  if (in_left == left.end()) return std::nullopt;
  return static_cast<std::size_t>(in_left - left.begin());
}

// Compares F32 values; zeros of both signs are equal, because GGUF's 4-bit codes have one zero.
std::optional<std::size_t> first_number(std::span<const std::byte> left,
                                        std::span<const std::byte> right) {
  for (std::size_t at = 0; const auto skipped = first_byte(left.subspan(at), right.subspan(at));) {
    at = (at + *skipped) / sizeof(float) * sizeof(float);
    float a = 0;
    float b = 0;
    std::memcpy(&a, left.data() + at, sizeof a);
    std::memcpy(&b, right.data() + at, sizeof b);
    if (a != b) return at;
    at += sizeof(float);
  }
  return std::nullopt;
}

// Compares F32 values that may differ by a relative tolerance. Adds their differences to `sum`.
std::optional<std::size_t> first_beyond(double tolerance, std::span<const std::byte> left,
                                        std::span<const std::byte> right, ErrorSum& sum) {
  for (std::size_t at = 0; at < left.size(); at += sizeof(float)) {
    float a = 0;
    float b = 0;
    std::memcpy(&a, left.data() + at, sizeof a);
    std::memcpy(&b, right.data() + at, sizeof b);
    sum.add(double{a}, double{b});
    if (a == b || (std::isnan(a) && std::isnan(b))) continue;
    constexpr double least = 2 * double{std::numeric_limits<float>::denorm_min()};
    const double bound = least + tolerance * std::abs(double{a});
    if (!(std::abs(double{a} - double{b}) <= bound)) return at;
  }
  return std::nullopt;
}

// Compares values of any dtype; NaN equals every NaN, because programs write different NaN bits.
std::optional<std::size_t> first_value(Dtype dtype, std::span<const std::byte> left,
                                       std::span<const std::byte> right) {
  const std::size_t size = element_bytes(dtype);
  const auto is_nan = [&](const std::byte* from) {
    double value = 0;
    cast_between(dtype, Dtype::f64).run(from, reinterpret_cast<std::byte*>(&value), 1);
    return std::isnan(value);
  };
  for (std::size_t at = 0; const auto skipped = first_byte(left.subspan(at), right.subspan(at));) {
    at = (at + *skipped) / size * size;
    if (!can_cast(dtype, Dtype::f64) || !is_nan(left.data() + at) || !is_nan(right.data() + at)) {
      return at;
    }
    at += size;
  }
  return std::nullopt;
}

// Compares in element order, which is the byte order if both tensors have the same strides.
std::optional<std::uint64_t> first_difference(const OpenShards& first, const TensorInfo& a,
                                              const OpenShards& second, const TensorInfo& b,
                                              Jobs& jobs, std::vector<std::byte>& scratch) {
  const bool same_order = a.strides == b.strides;
  ElementReader left(first, a, same_order, jobs.stop());
  ElementReader right(second, b, same_order, jobs.stop());
  const std::size_t step = same_order ? chunk_bytes_max : strided_chunk_bytes_max;
  return compare_in_steps(left, right, step, jobs, scratch, first_byte);
}

// Compares values that must be equal, regardless of position and encoding. Adds the differences
// that the pair's tolerance allows to `sum`.
std::optional<Difference> number_difference(const OpenShards& first, const OpenShards& second,
                                            const Pair& pair, Jobs& jobs,
                                            std::vector<std::byte>& scratch, ErrorSum& sum) {
  ElementReader left(first, pair.name, pair.first.value, pair.dtype, jobs.stop());
  ElementReader right(second, pair.name, pair.second.value, pair.dtype, jobs.stop());
  const std::size_t step =
      std::max(bytes_at_once(pair.first.value), bytes_at_once(pair.second.value));
  const bool is_cast = pair.first.value.dtype != pair.second.value.dtype;
  const auto compare = [&](std::span<const std::byte> a, std::span<const std::byte> b) {
    if (pair.tolerance > 0) return first_beyond(pair.tolerance, a, b, sum);
    if (pair.first.is_quantized()) return first_number(a, b);
    return is_cast ? first_value(pair.dtype, a, b) : first_byte(a, b);
  };
  const auto at = compare_in_steps(left, right, step, jobs, scratch, compare);
  if (const Overflow beyond = left.take_overflow(); beyond.count > 0 && !at) {
    return Difference{pair.name, DifferenceKind::values,
                      fmt::format("{}, for which {} of the values {} too large", name(pair.dtype),
                                  beyond.count, beyond.count == 1 ? "is" : "are"),
                      fmt::format("a dtype that can represent {}", beyond.largest)};
  }
  if (!at) return std::nullopt;
  return Difference{
      pair.name, DifferenceKind::values,
      fmt::format("different values, first at element {}", *at / element_bytes(pair.dtype)),
      "equal values"};
}

// Returns a difference that headers reveal.
std::optional<Difference> header_difference(const TensorInfo& a, const TensorInfo* b) {
  if (b == nullptr) {
    return Difference{a.name, DifferenceKind::missing, "nothing",
                      fmt::format("{} {}", a.encoding.name(), a.shape.text())};
  }
  if (a.encoding != b->encoding) {
    return Difference{a.name, DifferenceKind::encoding, std::string(b->encoding.name()),
                      std::string(a.encoding.name())};
  }
  if (a.shape != b->shape) {
    return Difference{a.name, DifferenceKind::shape, b->shape.text(), a.shape.text()};
  }
  return std::nullopt;
}

Difference unexpected(const TensorInfo& tensor) {
  return {tensor.name, DifferenceKind::unexpected,
          fmt::format("{} {}", tensor.encoding.name(), tensor.shape.text()), "nothing"};
}

bool is_of_config(const Finding& finding) { return finding.code == "q.config"; }

// Reports the progress of one of several calls as a part of the whole.
class PartOfWork final : public Observer {
 public:
  PartOfWork(Observer* whole, std::uint64_t bytes_total)
      : whole_(whole), bytes_total_(bytes_total) {}

  void finish(std::uint64_t bytes) noexcept { bytes_before_ += bytes; }
  bool on_progress(const Progress& progress) override {
    if (whole_ == nullptr) return true;
    const std::uint64_t bytes = std::min(bytes_before_ + progress.bytes_done, bytes_total_);
    return whole_->on_progress({bytes, bytes_total_});
  }

 private:
  Observer* const whole_;
  const std::uint64_t bytes_total_;
  std::uint64_t bytes_before_ = 0;
};

const TensorInfo* partner(const Catalog& catalog, const std::string& name) {
  const auto index = catalog.find(name);
  return index ? &catalog.tensors()[*index] : nullptr;
}

}  // namespace

// Returns findings about configs and ties that contradict the tensors. Adds to `bytes_read`.
static std::vector<Finding> config_findings(const Catalog& catalog, Storage* storage,
                                            std::atomic<bool>& stop, std::uint64_t& bytes_read) {
  std::vector<Finding> findings;
  std::ranges::copy_if(catalog.quantized().findings(), std::back_inserter(findings), is_of_config);
  for (auto more :
       {check_claim(catalog, storage), check_ties(catalog, storage, stop, bytes_read)}) {
    std::ranges::move(more, std::back_inserter(findings));
  }
  return findings;
}

static VerifyReport verified(const Catalog& catalog, const VerifyOptions& options) {
  const OpenShards shards(catalog, options.storage);
  const auto& tensors = catalog.tensors();
  const DistinctRanges distinct(catalog);
  std::vector<ValueCounts> range_counts(distinct.ranges().size());
  Jobs jobs(reading_threads(catalog, options.threads, defaults::verify_threads_max),
            options.observer, distinct.bytes());
  jobs.run(range_counts.size(), [&](std::size_t i, std::vector<std::byte>& scratch) {
    range_counts[i] = count_range(shards, distinct.ranges()[i], jobs, scratch);
  });
  const std::vector<ValueCounts> counts = distinct.of_tensors(range_counts);
  VerifyReport report;
  report.bytes_read = jobs.bytes_done();
  const QuantizedTensors& stored = catalog.quantized();
  // Floats that store packed codes are not values.
  const auto is_storage = [&](std::size_t i) {
    const QuantizedTensor* const found = stored.find(static_cast<std::uint32_t>(i));
    const auto* const kernel =
        found == nullptr ? nullptr : find_decode_kernel(found->decoding.kernel);
    return kernel != nullptr && kernel->packs_any_dtype;
  };
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (counts[i].nan + counts[i].infinite > 0 && !is_storage(i)) {
      report.not_finite.push_back({tensors[i].name, counts[i].nan, counts[i].infinite});
      if (options.is_finite) report.findings.push_back(not_finite(catalog, tensors[i], counts[i]));
    }
    if (counts[i].bad_bools + counts[i].bad_scales > 0) {
      report.findings.push_back(bad_values(catalog, tensors[i], counts[i]));
    }
  }
  std::vector<Finding> headers = header_findings(catalog);
  std::erase_if(headers, is_of_config);
  std::ranges::move(headers, std::back_inserter(report.findings));
  jobs.run_one([&] {
    for (auto findings :
         {check_scales(shards, stored, jobs.stop()),
          config_findings(catalog, options.storage, jobs.stop(), report.bytes_read)}) {
      std::ranges::move(findings, std::back_inserter(report.findings));
    }
  });
  for (const QuantizedTensor& value : stored.tensors()) {
    if (!value.is_readable() || counts[value.data].nan == 0 || is_storage(value.data)) continue;
    const std::uint32_t data = value.data;
    // No encoder converts a finite value to NaN.
    report.findings.push_back(finding_of(catalog, tensors[data], "q.nan",
                                         counted(counts[data].nan, "NaN value"),
                                         "no NaN in a quantized weight"));
  }
  shards.require_unchanged();
  return report;
}

VerifyReport verify_values(const Catalog& catalog, const VerifyOptions& options) {
  return only_errors([&] { return verified(catalog, options); });
}

// Compares bytes of a tensor that both checkpoints, or only the first, have under its name.
static std::optional<Difference> tensor_difference(const OpenShards& first,
                                                   const OpenShards& second, const TensorInfo& a,
                                                   Jobs& jobs, std::vector<std::byte>& scratch) {
  const TensorInfo* const b = partner(second.catalog(), a.name);
  if (auto found = header_difference(a, b)) return found;
  const auto at = first_difference(first, a, second, *b, jobs, scratch);
  if (!at) return std::nullopt;
  return Difference{a.name, DifferenceKind::bytes,
                    fmt::format("different bytes, first at byte {} of the tensor", *at),
                    "equal bytes"};
}

static VerifyReport compared(const Catalog& first, const Catalog& second,
                             const VerifyOptions& options) {
  const OpenShards first_shards(first, options.storage);
  const OpenShards second_shards(second, options.storage);
  const auto& tensors = first.tensors();
  const Pairs pairs(first, second);
  std::vector<std::optional<Difference>> found(tensors.size() + pairs.all().size());
  std::vector<ErrorSum> rounded(pairs.all().size());
  const Catalog& remote = reads_at_once(first) > reads_at_once(second) ? first : second;
  Jobs jobs(reading_threads(remote, options.threads, defaults::verify_threads_max),
            options.observer, bytes_to_compare(pairs, first, second));
  jobs.run(found.size(), [&](std::size_t i, std::vector<std::byte>& scratch) {
    if (i >= tensors.size()) {
      const Pair& pair = pairs.all()[i - tensors.size()];
      if (!pair.is_exact) return;
      found[i] = number_difference(first_shards, second_shards, pair, jobs, scratch,
                                   rounded[i - tensors.size()]);
    } else if (!pairs.covers_first(static_cast<std::uint32_t>(i))) {
      found[i] = tensor_difference(first_shards, second_shards, tensors[i], jobs, scratch);
    }
  });
  VerifyReport report;
  report.is_comparison = true;
  report.differences = pairs.differences();
  for (auto& each : found) {
    if (each) report.differences.push_back(*std::move(each));
  }
  for (std::uint32_t i = 0; i < second.tensors().size(); ++i) {
    const TensorInfo& tensor = second.tensors()[i];
    if (pairs.covers_second(i) || first.find(tensor.name)) continue;
    report.differences.push_back(unexpected(tensor));
  }
  if (auto finding = names_differ(tensors.size(), report)) {
    report.findings.push_back(*std::move(finding));
  }
  report_pairs(pairs, rounded, first_shards, second_shards, jobs, report);
  measure_differences(pairs, first_shards, second_shards, jobs, report);
  if (options.require_lossless) report_losses(pairs, first_shards, second_shards, jobs, report);
  jobs.run_one([&] {
    for (const Catalog* const each : {&first, &second}) {
      auto findings = config_findings(*each, options.storage, jobs.stop(), report.bytes_read);
      for (Finding& finding : findings) {
        if (!is_of_config(finding)) {  // the finding names no file
          finding.message = fmt::format("{}: {}", printable(each->root(), 400), finding.message);
        }
        report.findings.push_back(std::move(finding));
      }
    }
  });
  first_shards.require_unchanged();
  second_shards.require_unchanged();
  return report;
}

// Compares the data of one file of a conversion, as it is made, with the tensors of the output.
// Thread-safe.
class ComparedFile final : public OutputFiles {
 public:
  ComparedFile(const OutputFile& file, const OpenShards& output)
      : file_(file), output_(output), found_(file.tensors.size()) {
    for (std::size_t i = 0; i < found_.size(); ++i) {
      const OutputTensor& tensor = file.tensors[i];
      const TensorInfo expected = {
          .name = tensor.name, .encoding = tensor.encoding, .shape = tensor.shape};
      found_[i].header = header_difference(expected, partner(output.catalog(), tensor.name));
    }
  }

  void write(std::uint32_t, std::uint64_t offset, std::span<const std::byte> bytes) override {
    const std::uint64_t at = offset - file_.header_bytes;
    const auto tensor = std::ranges::upper_bound(file_.tensors, at, {}, &OutputTensor::end);
    Found& found = found_[static_cast<std::size_t>(tensor - file_.tensors.begin())];
    if (found.header) return;
    const TensorInfo& stored = *partner(output_.catalog(), tensor->name);
    std::atomic<bool> stop = false;  // the conversion takes the time, so only it is interrupted
    std::vector<std::byte> read(bytes.size());
    ElementReader(output_, stored, stored.strides.empty(), stop).read(at - tensor->begin, read);
    const auto first = first_byte(bytes, read);
    const std::lock_guard lock(mutex_);
    bytes_read_ += bytes.size();
    if (first) found.byte = std::min(found.byte.value_or(UINT64_MAX), at - tensor->begin + *first);
  }
  void finish(std::uint32_t) override {}

  // Returns the bytes of the output that were read, and appends the differences. Call at the end.
  std::uint64_t report(std::vector<Difference>& differences) {
    for (std::size_t i = 0; i < found_.size(); ++i) {
      if (found_[i].header) {
        differences.push_back(*std::move(found_[i].header));
      } else if (found_[i].byte) {
        differences.push_back(
            {file_.tensors[i].name, DifferenceKind::bytes,
             fmt::format("different bytes, first at byte {} of the tensor", *found_[i].byte),
             "the bytes that the conversion writes"});
      }
    }
    return bytes_read_;
  }

 private:
  struct Found {
    std::optional<Difference> header;   // set before the first call of write()
    std::optional<std::uint64_t> byte;  // the first different byte; guarded by mutex_
  };

  const OutputFile& file_;
  const OpenShards& output_;
  std::mutex mutex_;
  std::uint64_t bytes_read_ = 0;  // guarded by mutex_
  std::vector<Found> found_;
};

static VerifyReport compared_with_conversion(const Conversion& conversion, const Catalog& output,
                                             const VerifyOptions& options) {
  require_ok(conversion.plan);
  const OpenShards shards(output, options.storage);
  PartOfWork observer(options.observer, conversion.bytes_to_read);
  VerifyReport report;
  report.is_comparison = true;
  std::set<std::string_view> names;
  for (std::uint32_t i = 0; i < conversion.files.size(); ++i) {
    ComparedFile compared(conversion.files[i], shards);
    const std::uint64_t bytes = make_file(conversion, i, compared, &observer, options.storage);
    observer.finish(bytes);
    report.bytes_read += bytes + compared.report(report.differences);
    for (const OutputTensor& tensor : conversion.files[i].tensors) names.insert(tensor.name);
  }
  for (const TensorInfo& tensor : output.tensors()) {
    if (names.contains(tensor.name)) continue;
    report.differences.push_back(unexpected(tensor));
  }
  // Without rules, the output should have the names of the source.
  const bool are_sources = std::ranges::all_of(names, [&](std::string_view name) {
    return conversion.plan.catalog->find(name).has_value();
  });
  auto finding = are_sources ? prefix_differs(names.size(), report) : std::nullopt;
  if (finding) report.findings.push_back(*std::move(finding));
  shards.require_unchanged();
  return report;
}

VerifyReport compare_with_conversion(const Conversion& conversion, const Catalog& output,
                                     const VerifyOptions& options) {
  return only_errors([&] { return compared_with_conversion(conversion, output, options); });
}

VerifyReport compare(const Catalog& first, const Catalog& second, const VerifyOptions& options) {
  return only_errors([&] { return compared(first, second, options); });
}

}  // namespace loadstone

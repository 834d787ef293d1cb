// Checks the values of a checkpoint, which opening does not read, and compares two checkpoints.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/export.h"
#include "loadstone/finding.h"
#include "loadstone/observer.h"
#include "loadstone/receipt.h"
#include "loadstone/storage.h"

namespace loadstone {

// Number of non-finite values in one tensor. They are legal, but notable.
struct NotFinite {
  std::string name;
  std::uint64_t nan = 0;
  std::uint64_t infinite = 0;

  friend bool operator==(const NotFinite&, const NotFinite&) = default;
};

enum class DifferenceKind : std::uint8_t { missing, unexpected, encoding, shape, bytes, values };

[[nodiscard]] LOADSTONE_API std::string_view name(DifferenceKind kind) noexcept;

// The difference between the values of one tensor in two checkpoints.
struct ErrorSize {
  double largest = 0;   // the largest difference of a value; 0: all values are equal
  double relative = 0;  // see QuantizationError

  friend bool operator==(const ErrorSize&, const ErrorSize&) = default;
};

struct Difference {
  std::string name;
  DifferenceKind kind = DifferenceKind::bytes;
  std::string found;     // in the second checkpoint
  std::string expected;  // in the first checkpoint
  bool is_file = false;  // `name` is a file, not a tensor
  // From compare(), for floats and quantized tensors with different bytes or values. For a
  // component: the error of the decoded values of its tensor.
  std::optional<ErrorSize> error{};

  friend bool operator==(const Difference&, const Difference&) = default;
};

// The error of a tensor that is quantized in one of two checkpoints, or differently in both:
// `relative` is the root mean square of the difference between the decoded values, divided by the
// root mean square of the first checkpoint's values, estimated from samples.
struct QuantizationError {
  std::string name;
  std::string encoding;  // "nvfp4"
  double relative = 0;
  double largest = 0;  // largest difference of a sample

  friend bool operator==(const QuantizationError&, const QuantizationError&) = default;
};

// A tensor with a different dtype in the second checkpoint: a wider dtype with the same values, or
// a dtype to which the values are rounded.
struct Widened {
  std::string name;
  std::string found;     // in the second checkpoint: "F32"
  std::string expected;  // in the first checkpoint: "BF16"

  friend bool operator==(const Widened&, const Widened&) = default;
};

struct VerifyReport {
  std::vector<NotFinite>
      not_finite;  // floating-point tensors with non-finite values, in file order
  // Findings for invalid values: "st.bool_value", "gg.scale_nan", "q.nan", "q.scale_value" for
  // scales, "q.config" for a config that contradicts the tensors, and "q.scale_missing" and others
  // for weights that cannot be decoded.
  std::vector<Finding> findings;
  std::vector<QuantizationError> quantized;  // from compare(), by name
  std::uint64_t sampled = 0;                 // number of these tensors compared only by samples
  bool is_comparison = false;                // from compare()
  std::vector<Widened> widened;              // from compare(); these are not differences
  std::vector<Widened> rounded;              // from compare(); these are not differences
  std::vector<Difference>
      differences;  // in the first checkpoint's order, then tensors that it lacks
  std::uint64_t bytes_read = 0;
  // From verify_digests(): the number of all files, and of those that match their digests.
  std::uint64_t files = 0;
  std::uint64_t files_equal = 0;

  // Returns true if `differences` is empty and all findings have severity info.
  [[nodiscard]] bool ok() const noexcept {
    return differences.empty() && std::ranges::all_of(findings, [](const Finding& finding) {
             return finding.severity == Severity::info;
           });
  }
};

struct VerifyOptions {
  Storage* storage = nullptr;  // null: the storage of each catalog
  unsigned threads = 0;  // 0: one per core, at most defaults::verify_threads_max. Each: 8 MiB.
  Observer* observer = nullptr;
  bool is_folder = false;  // verify_digests(): check all files of the checkpoint's folder
  bool is_finite = false;  // verify_values(): report non-finite values as "verify.not_finite"
  // compare(): values must be equal as real numbers, as with ConvertOptions::require_lossless.
  // Reports an error "verify.lossy" per change of encoding that changed values, with their largest
  // error. Different bytes of equal values then do not count as differences. Reads tensors with
  // different values completely, not only samples of them.
  bool require_lossless = false;
};

// Reads every tensor once. Throws Error "io.changed" if a shard has changed since it was opened.
[[nodiscard]] LOADSTONE_API VerifyReport verify_values(const Catalog& catalog,
                                                       const VerifyOptions& options = {});

// Compares names, encodings, shapes and bytes, regardless of files: a sharded checkpoint equals the
// same tensors in a single file. Reads each tensor of both once, up to its first difference, and
// reads the values of tensors that differ again, to measure the size of the error. Values
// that convert() makes from the first checkpoint without a change count as equal: experts that were
// joined or separated, re-packed codes, floats in a different dtype with the same values or rounded
// to the nearest. Tensors that are quantized in only one checkpoint are compared after decoding: an
// error larger than the encoding explains is a difference. NVFP4 codes with the inverse of a global
// scale may differ by the rounding of this inverse. The findings are the findings of
// verify_values() about configs and ties.
[[nodiscard]] LOADSTONE_API VerifyReport compare(const Catalog& first, const Catalog& second,
                                                 const VerifyOptions& options = {});

// Compares the tensors of `output` with those that the conversion writes: names, encodings, shapes
// and bytes. Makes the conversion's values window by window, in the memory that its plan predicts;
// the output may have different files. Does not compare metadata. Throws the errors of
// convert_in_memory().
[[nodiscard]] LOADSTONE_API VerifyReport compare_with_conversion(const Conversion& conversion,
                                                                 const Catalog& output,
                                                                 const VerifyOptions& options = {});

// Compares files with their receipt. A tensor with different bytes is a difference, and so is a
// tensor that only the files or only the receipt has, or a file that is too short. `output`: the
// folder or file that was written, or one part of a split GGUF, which means all parts; empty:
// not checked. `sources`: the folder or file of each checkpoint, in the order of the conversion; if
// some are given, each omitted one is finding "verify.not_compared". Throws Error "usage" for an
// output or source that the receipt lacks, and if neither an output nor a source is given.
[[nodiscard]] LOADSTONE_API VerifyReport verify_receipt(const Receipt& receipt,
                                                        const std::string& output,
                                                        const std::vector<std::string>& sources,
                                                        const VerifyOptions& options = {});

// Compares the files of a checkpoint in a Hugging Face cache with the digests in their file names,
// SHA-256 or git's SHA-1. A file with different bytes is a difference, and a file without a digest
// is warning "verify.no_digest". Throws Error "receipt.digest" if loadstone was built without
// OpenSSL.
[[nodiscard]] LOADSTONE_API VerifyReport verify_digests(const Catalog& catalog,
                                                        const VerifyOptions& options = {});

[[nodiscard]] LOADSTONE_API std::string to_json(const VerifyReport& report);
[[nodiscard]] LOADSTONE_API std::string to_table(const VerifyReport& report);

}  // namespace loadstone

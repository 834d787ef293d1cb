// Checks of the values of a checkpoint, and comparisons of two. Opening one reads headers only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/export.h"
#include "loadstone/finding.h"
#include "loadstone/observer.h"
#include "loadstone/receipt.h"
#include "loadstone/storage.h"

namespace loadstone {

// Values of one tensor that are legal but worth knowing.
struct NotFinite {
  std::string name;
  std::uint64_t nan = 0;
  std::uint64_t infinite = 0;

  friend bool operator==(const NotFinite&, const NotFinite&) = default;
};

enum class DifferenceKind : std::uint8_t { missing, unexpected, encoding, shape, bytes, values };

[[nodiscard]] LOADSTONE_API std::string_view name(DifferenceKind kind) noexcept;

struct Difference {
  std::string name;
  DifferenceKind kind = DifferenceKind::bytes;
  std::string found;     // in the second checkpoint
  std::string expected;  // in the first

  friend bool operator==(const Difference&, const Difference&) = default;
};

// A value that is quantized in one of two checkpoints, or in both but differently: how far the
// numbers are from each other, by samples. The root of the mean square of their difference, over
// that of the first one's numbers.
struct QuantizationError {
  std::string name;
  std::string encoding;  // "nvfp4"
  double relative = 0;

  friend bool operator==(const QuantizationError&, const QuantizationError&) = default;
};

// A value that the second checkpoint has in another dtype: a wider one with the same numbers, or
// one to which they are rounded.
struct Widened {
  std::string name;
  std::string found;     // in the second checkpoint: "F32"
  std::string expected;  // in the first: "BF16"

  friend bool operator==(const Widened&, const Widened&) = default;
};

struct VerifyReport {
  std::vector<NotFinite> not_finite;  // floating tensors that hold such values, in file order
  // Values that are wrong: findings "st.bool_value", "gg.scale_nan", "q.nan" and "q.scale_value" of
  // scales; a config that contradicts the tensors: finding "q.config"; weights that cannot be read:
  // finding "q.scale_missing" and others.
  std::vector<Finding> findings;
  std::vector<QuantizationError> quantized;  // of two checkpoints, in the order of names
  std::vector<Widened> widened;              // of two checkpoints: no differences
  std::vector<Widened> rounded;              // neither are these
  std::vector<Difference>
      differences;  // in the first checkpoint's order, then those without a match
  std::uint64_t bytes_read = 0;

  // Findings of severity info do not count.
  [[nodiscard]] bool ok() const noexcept {
    return differences.empty() && std::ranges::all_of(findings, [](const Finding& finding) {
             return finding.severity == Severity::info;
           });
  }
};

struct VerifyOptions {
  Storage* storage = nullptr;  // null: each catalog's own
  unsigned threads = 0;        // 0: one a core, at most defaults::verify_threads_max. Each: 8 MiB.
  Observer* observer = nullptr;
  bool is_folder = false;  // verify_digests(): all files of the checkpoint's folder
  bool is_finite = false;  // verify_values(): NaN and infinities are findings "verify.not_finite"
};

// Reads every tensor once. A shard that is no longer as it was opened is Error "io.changed".
[[nodiscard]] LOADSTONE_API VerifyReport verify_values(const Catalog& catalog,
                                                       const VerifyOptions& options = {});

// The same names with the same encodings, shapes and bytes, whatever the files look like: a sharded
// checkpoint equals its single file. Reads both once, up to the first difference of a tensor. Also
// equal are values that convert() makes of the first one without changing a number: experts that
// were joined or taken apart, codes in another layout, floats in another dtype whose numbers are
// those of the first one, rounded to the nearest. What is quantized in one of them only is compared
// as numbers: an error that its encoding does not explain is a difference. The findings are those
// of verify_values() about the config and the ties of each.
[[nodiscard]] LOADSTONE_API VerifyReport compare(const Catalog& first, const Catalog& second,
                                                 const VerifyOptions& options = {});

// Reads the files of a receipt, and compares: every tensor with different bytes is a difference, as
// is a tensor that only one of the two has. `output`: the folder or the one file that was written,
// or a part of a split GGUF, which means all of them; empty: not looked at. `sources`: the folder
// or file of each checkpoint, in the order of the conversion; each that is left out is finding
// "verify.not_compared" if others are given. A file that is too short is a difference too. Throws
// Error "usage" for an output, or a source, that the receipt does not have.
[[nodiscard]] LOADSTONE_API VerifyReport verify_receipt(const Receipt& receipt,
                                                        const std::string& output,
                                                        const std::vector<std::string>& sources,
                                                        const VerifyOptions& options = {});

// Reads the files of a checkpoint in a hub's cache, and compares them with the digest that is their
// name there, SHA-256 or git's SHA-1: a file with other bytes is a difference, one without a digest
// a warning "verify.no_digest", so that nothing passes unseen. Throws Error "receipt.digest" where
// loadstone was built without OpenSSL.
[[nodiscard]] LOADSTONE_API VerifyReport verify_digests(const Catalog& catalog,
                                                        const VerifyOptions& options = {});

[[nodiscard]] LOADSTONE_API std::string to_json(const VerifyReport& report);
[[nodiscard]] LOADSTONE_API std::string to_table(const VerifyReport& report);

}  // namespace loadstone

// Origins of values, and policies for tensors that the checkpoint lacks: a row each, which has all
// that is decided by them.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "boxes/value.h"
#include "loadstone/plan.h"

namespace loadstone {

enum class GivenBy : std::uint8_t {
  execute,  // execute() writes the value
  caller,   // the caller writes it in the same load
  model,    // the model at hand has it
  nobody,
};

// The evidence that an audit asks for before it counts a target as real.
enum class Proof : std::uint8_t {
  sources,  // ranges of the checkpoint, and all bytes written or a view of the file
  bytes,    // all bytes written
  memory,   // a device that is not "meta"
  reason,   // the reason for having no value
};

struct OriginRow {
  std::string_view name{};
  GivenBy given_by = GivenBy::nobody;
  Proof proof = Proof::memory;
  // The words for a target that the checkpoint lacks: in the finding of the plan, and in the
  // warning of the package.
  std::string_view planned{};
  std::string_view filled{};
  Fill fill = fill_zeros;  // of values that execute() writes without a source
};

[[nodiscard]] constexpr OriginRow origin_row(Origin origin) noexcept {
  switch (origin) {
    case Origin::checkpoint:
      return {"checkpoint", GivenBy::execute, Proof::sources};
    case Origin::constructor:
      return {"constructor", GivenBy::model, Proof::memory, "the constructor's value is kept",
              "with the constructor's values"};
    case Origin::initialiser:
      return {"initialiser", GivenBy::caller, Proof::memory,
              "the model's initialiser sets the value", "by the model's initialisers"};
    case Origin::zeros:
      return {"zeros", GivenBy::execute, Proof::bytes, "filled with zeros", "with zeros"};
    case Origin::constant:
      return {"constant", GivenBy::execute, Proof::bytes};
    case Origin::kept:
      return {"kept", GivenBy::model, Proof::memory};
    case Origin::tie:
      return {"tie", GivenBy::nobody, Proof::memory};
    case Origin::excluded:
      return {"excluded", GivenBy::nobody, Proof::reason};
  }
  return {};
}

// Returns true if execute() brings values of this origin to their places.
[[nodiscard]] constexpr bool is_delivered(Origin origin) noexcept {
  return origin_row(origin).given_by == GivenBy::execute;
}

struct MissingRow {
  std::string_view name{};
  std::optional<Origin> gives{};  // of a target without a value; none: it is an error
  bool needs_model = false;       // a model at hand, which the command has not
};

[[nodiscard]] constexpr MissingRow missing_row(MissingPolicy policy) noexcept {
  switch (policy) {
    case MissingPolicy::error:
      return {"error"};
    case MissingPolicy::initialise:
      return {"initialise", Origin::initialiser, true};
    case MissingPolicy::zeros:
      return {"zeros", Origin::zeros};
    case MissingPolicy::keep:
      return {"keep", std::nullopt, true};
  }
  return {};
}

}  // namespace loadstone

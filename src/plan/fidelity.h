// Foretells from encodings, shapes and boxes whether the values of a target survive.
#pragma once

#include <map>
#include <utility>

#include "codec/block_grid.h"
#include "loadstone/plan.h"

namespace loadstone {

// Remembers how sets of codes are related, so it is quick for many targets. Not thread-safe.
class Fidelities {
 public:
  // The plan must outlive the object.
  explicit Fidelities(const Plan& plan) : plan_(plan) {}

  // Compares the target's values with those of its sources. Sums of tensors are lossy.
  [[nodiscard]] Fidelity of(const PlannedTarget& target);
  // Does the same for a target that would get this quantization. Its sources are codes.
  [[nodiscard]] Fidelity of(PlannedTarget target, Quantization quantization);

 private:
  [[nodiscard]] Fidelity of_codes(const PlannedTarget& target);
  [[nodiscard]] Fidelity of_floats(const PlannedTarget& target) const;

  struct Relation {
    bool is_contained = false;  // see contains_codes()
    bool has_headroom = false;  // see has_headroom()
  };
  [[nodiscard]] const Relation& relation(const BlockGrid& to, const BlockGrid& from);

  const Plan& plan_;
  // By addresses of code sets. Sets of integers overlap, so the second address is their end.
  using Codes = std::pair<const float*, const float*>;
  std::map<std::pair<Codes, Codes>, Relation> relations_;
};

}  // namespace loadstone

// Foretells which values a conversion would keep if it separated the experts (--experts separate).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/plan.h"
#include "loadstone/quantization.h"
#include "plan/fidelity.h"

namespace loadstone {

// Plans separate experts when it is first asked. Not thread-safe. The options must outlive it.
class SeparateExperts {
 public:
  SeparateExperts(std::shared_ptr<const Catalog> catalog, const ConvertOptions& options);

  // Compares the values of the experts in this stack with those in an encoding. Returns "lossy" if
  // the target is not a stack, or if its experts cannot be separated.
  [[nodiscard]] Fidelity fidelity(const PlannedTarget& stack, const Quantization& quantization);
  // Returns true if GGUF blocks can store the codes of all experts in this stack.
  [[nodiscard]] bool keep_blocks(const PlannedTarget& stack);
  // Returns the advice to separate the experts, and whether libraries read them then.
  [[nodiscard]] std::string advice() const;

 private:
  void make_plan();
  // Returns the weights of the stack's experts; empty if they cannot be separated.
  [[nodiscard]] std::set<const PlannedTarget*> experts_of(const PlannedTarget& stack);

  const ConvertOptions& options_;
  Plan plan_;  // of the values of separate experts
  Fidelities fidelities_;
  bool is_planned_ = false;
  std::map<std::uint32_t, std::vector<const PlannedTarget*>> by_source_;
};

}  // namespace loadstone

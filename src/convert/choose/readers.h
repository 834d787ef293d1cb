// Reports quantized tensors that transformers or diffusers would misread ("convert.unread").
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "codec/encode.h"
#include "convert/choose/chooser.h"
#include "convert/choose/quantize_rules.h"
#include "loadstone/convert.h"
#include "loadstone/finding.h"
#include "loadstone/plan.h"

namespace loadstone {

// Collects the quantized tensors of an output, then reports them. Not thread-safe. The options, the
// chooser and the findings must outlive it.
class Readers {
 public:
  Readers(const ConvertOptions& options, const Chooser& chooser, std::vector<Finding>& findings);

  // Adds a quantized tensor. `unread`: the reason why its layer is not linear, or nullopt.
  void add(const std::string& name, const Shape& shape, const WrittenEncoding& written,
           std::optional<std::string_view> unread);
  // Reports all problems. `names`: the tensors of the output, quantized or not.
  void report(const std::vector<std::string>& names);

 private:
  // Tensors that libraries do not read, for one reason.
  struct Unread {
    std::string_view advice = PlainRule().advice;
    std::vector<std::string> codes;
    std::vector<std::string> plain;
  };

  [[nodiscard]] const PlainRule* rule_for(const std::string& name, const WrittenEncoding& written,
                                          NamingStyle naming) const;
  [[nodiscard]] bool has_single_experts(const std::string& stack) const;
  void warn(std::vector<std::string> names, std::string message, std::string_view suggestion);
  void add_lost(const std::vector<std::string>& names);
  void report_unread();
  void report_mixed(const std::vector<std::string>& names);
  void report_mixed_dense();
  void report_stacks();

  const Chooser& chooser_;
  std::vector<Finding>& findings_;
  const QuantizeStyle style_;
  const bool is_of_diffusers_;
  bool has_reader_ = false;                       // transformers reads the codes of the style
  std::vector<std::string> stacks_;               // stacks that the style has no layout for
  std::map<std::string, std::string> quantized_;  // encodings by name
  std::map<std::string_view, Unread> unread_;     // by the reason
};

// Returns true if transformers reads all codes and other tensors of the plan in this style.
[[nodiscard]] bool is_style_read(QuantizeStyle style, const Plan& plan, ConvertOptions options);

}  // namespace loadstone

#include "convert/lossless.h"

#include <fmt/format.h>

#include <map>
#include <string>
#include <utility>

#include "base/text.h"
#include "convert/choose/choose.h"
#include "convert/kept_blocks.h"
#include "convert/quantize_rows.h"
#include "loadstone/error.h"
#include "plan/fidelity.h"

namespace loadstone {

namespace {

struct Lossy {
  Alike tensors;
  bool separate = true;  // separate experts keep the values of all tensors
};

}  // namespace

void tell_losses(Conversion& conversion, SeparateExperts& separate) {
  Plan& plan = conversion.plan;
  Fidelities fidelities(plan);
  std::map<std::pair<std::string, std::string>, Lossy> pairs;
  for (const PlannedTarget& target : plan.targets) {
    if (fidelities.of(target) != Fidelity::lossy) continue;
    const std::string before = target.recipe.merge != nullptr ? std::string("a sum of tensors")
                                                              : source_encodings(plan, target);
    Lossy& lossy = pairs[{before, std::string(output_encoding(conversion, target))}];
    lossy.tensors.add(target.name);
    lossy.separate = lossy.separate && target.quantization &&
                     separate.fidelity(target, *target.quantization) != Fidelity::lossy;
  }
  for (const auto& [pair, lossy] : pairs) {
    const auto& [before, after] = pair;
    const auto& [count, first] = lossy.tensors;
    plan.findings.push_back(
        {.severity = Severity::error,
         .code = "convert.lossy",
         .target = first,
         .message = fmt::format("{} (the first is '{}') would change from {} to {}, which cannot "
                                "represent all of {} values, but the conversion must be lossless",
                                counted(count, "tensor"), printable(first), before, after,
                                count == 1 ? "its" : "their"),
         .suggestion =
             fmt::format("exclude the tensors, choose another encoding, omit --require-lossless "
                         "(require_lossless=){}",
                         lossy.separate ? ", or " + separate.advice() : std::string()),
         .found = before,
         .expected = after});
  }
}

void check_loss(const Conversion& conversion, std::uint32_t target, const EncodingLoss& loss) {
  const bool is_lossless = conversion.require_lossless || keeps_source_codes(conversion);
  if (!is_lossless || loss.exact_blocks == loss.blocks) return;
  const PlannedTarget& planned = conversion.plan.targets[target];
  throw Error(
      "convert.lossy",
      fmt::format("{} cannot represent the scales of this tensor: {} of {} blocks would "
                  "change, but the conversion must be lossless",
                  planned.quantization->encoding, loss.blocks - loss.exact_blocks, loss.blocks),
      {.tensor = planned.name,
       .found = source_encodings(conversion.plan, planned),
       .expected = planned.quantization->encoding});
}

void report_losses(const Conversion& conversion,
                   const std::map<std::uint32_t, EncodingLoss>& losses, ConvertReport& report) {
  struct Zeroed {
    std::uint64_t blocks = 0;
    Alike tensors;
  };
  std::map<std::string, RequantizedTensors> requantized;
  std::map<std::string, Zeroed> zeroed;
  for (const auto& [target, loss] : losses) {
    const PlannedTarget& planned = conversion.plan.targets[target];
    const std::string& encoding = planned.quantization->encoding;
    if (loss.blocks > 0) {
      RequantizedTensors& all = requantized[encoding];
      all.encoding = encoding;
      ++all.tensors;
      all.loss.join(loss);
    }
    if (loss.zeroed_blocks > 0) {
      zeroed[encoding].blocks += loss.zeroed_blocks;
      zeroed[encoding].tensors.add(planned.name);
    }
  }
  for (auto& [encoding, all] : requantized) report.requantized.push_back(std::move(all));
  for (const auto& [encoding, found] : zeroed) {
    const auto& [blocks, tensors] = found;
    report.findings.push_back(
        {.severity = Severity::warning,
         .code = "convert.underflow",
         .target = tensors.first,
         .message =
             fmt::format("all values of {} of {} in {} (the first is '{}') became 0, because "
                         "they are too small for the scales of this encoding",
                         counted(blocks, "block"), encoding, counted(tensors.count, "tensor"),
                         printable(tensors.first)),
         .suggestion =
             "exclude the tensors (--exclude), or choose an encoding whose scales are F32",
         .found = encoding});
  }
}

}  // namespace loadstone

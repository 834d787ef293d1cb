#include "convert/quantize_rows.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "base/text.h"
#include "boxes/merges.h"
#include "codec/decode.h"
#include "codec/encode.h"
#include "convert/kept_blocks.h"
#include "convert/lossless.h"
#include "loadstone/quantized_tensors.h"
#include "plan/fidelity.h"
#include "plan/fold.h"

namespace loadstone {

namespace {

using Numbers = std::vector<std::set<std::uint64_t>>;  // by the position of their * in a name

struct Group {
  QuantizeRow row;
  Numbers numbers;
};

// Returns the quantized tensor that a box decodes; null if the box copies other values.
const QuantizedTensor* decoded_by(const Catalog& catalog, const Box& box) {
  return box.decoding == no_decoding ? nullptr : catalog.quantized().find(box.source);
}

std::string_view encoding_of(const Catalog& catalog, const Box& box) {
  const QuantizedTensor* const stored = decoded_by(catalog, box);
  return stored != nullptr ? stored->encoding : catalog.tensors()[box.source].encoding.name();
}

// Returns the bytes of the source that a box reads, with its share of the scales.
double bytes_of(const Plan& plan, const Box& box) {
  const auto& tensors = plan.catalog->tensors();
  double elements = 1;
  for (const BoxDim& dim : box.dims) elements *= static_cast<double>(dim.extent);
  const TensorInfo& tensor = tensors[box.source];
  const Decoding* const decoding =
      box.decoding == no_decoding ? nullptr : &plan.decodings[box.decoding];
  double bytes = static_cast<double>(tensor.byte_count());
  if (decoding != nullptr) {
    bytes = 0;
    for (const std::uint32_t each : decoding->sources) {
      bytes += static_cast<double>(tensors[each].byte_count());
    }
  }
  const Shape& shape = decoding != nullptr ? decoding->shape : tensor.shape;
  const auto all = static_cast<double>(shape.numel().value_or(0));
  return all > 0 ? bytes * elements / all : 0;
}

// The effect of a conversion on the values of a target.
struct Loss {
  Fidelity fidelity = Fidelity::exact;
  double typical_error = 0;  // see QuantizeRow
};

// Returns the losses of all targets. `inverted`: targets with a component that is stored as its
// reciprocal, which may be the only scale that does not fit.
std::vector<Loss> losses_of(const Conversion& conversion, Fidelities& known,
                            const std::set<std::uint32_t>& inverted) {
  std::vector<Loss> losses;
  for (const PlannedTarget& target : conversion.plan.targets) {
    Loss& loss = losses.emplace_back();
    if (!target.quantization) continue;
    loss.fidelity = known.of(target);
    if (loss.fidelity != Fidelity::exact) {
      loss.typical_error = written_encoding(*target.quantization).typical_error;
    }
  }
  for (const std::uint32_t target : inverted) {
    if (losses[target].fidelity != Fidelity::exact) continue;
    losses[target] = {Fidelity::exact_where_scales_fit, inverse_error};
  }
  return losses;
}

QuantizeRow row_of(const Conversion& conversion, const PlannedTarget& target,
                   std::string_view reason) {
  QuantizeRow row;
  row.shape = stored_type(conversion, target).shape.text();
  row.after = output_encoding(conversion, target);
  row.reason = reason;
  row.bytes_after = target.byte_count();
  if (target.recipe.merge != nullptr) {
    row.before = name(target.dtype);
    const std::uint64_t elements = target.shape.numel().value_or(0);
    row.bytes_before = Encoding(target.dtype).byte_count(elements).value_or(0);
    return row;
  }
  row.before = source_encodings(conversion.plan, target);
  double bytes = 0;
  for (const Box& box : target.recipe.boxes) bytes += bytes_of(conversion.plan, box);
  row.bytes_before = static_cast<std::uint64_t>(bytes);
  return row;
}

// Replaces each * of a name by its numbers, if they differ from the numbers of another group:
// "layers.{0-3,5}.mlp.up_proj.weight".
std::string numbered(std::string_view names, const Numbers& numbers,
                     const std::vector<bool>& differs) {
  constexpr std::size_t runs_max = 16;
  std::string text;
  std::size_t at = 0;
  for (const char each : names) {
    const bool is_replaced = each == '*' && at < numbers.size() && differs[at];
    text += is_replaced ? "{" + ranges_text(numbers[at], runs_max) + "}" : std::string(1, each);
    if (each == '*') ++at;
  }
  return text;
}

// Distinguishes groups whose names have the same pattern.
void tell_apart(std::vector<Group>& groups) {
  for (auto first = groups.begin(); first != groups.end();) {
    const std::string names = first->row.names;
    const auto last = std::find_if(first, groups.end(),
                                   [&](const Group& each) { return each.row.names != names; });
    std::vector<bool> differs(first->numbers.size(), false);
    for (auto each = first; each != last; ++each) {
      for (std::size_t i = 0; i < differs.size(); ++i) {
        if (each->numbers[i] != first->numbers[i]) differs[i] = true;
      }
    }
    for (; first != last; ++first) first->row.names = numbered(names, first->numbers, differs);
  }
}

// Returns the targets with a component that is stored as its reciprocal, which may be rounded.
std::set<std::uint32_t> inverted_targets(const Conversion& conversion) {
  std::set<std::uint32_t> targets;
  for (const OutputFile& file : conversion.files) {
    for (const OutputTensor& tensor : file.tensors) {
      if (tensor.is_inverted) targets.insert(tensor.target);
    }
  }
  return targets;
}

// Adds one row per group of similar tensors. `losses`: of the plan's targets.
void add_rows(Conversion& conversion, const Choices& choices, const std::vector<Loss>& losses) {
  std::map<std::tuple<std::string, std::string, std::string, std::string, std::string, Fidelity>,
           Group>
      known;
  for (std::size_t at = 0; at < losses.size(); ++at) {
    const PlannedTarget& target = conversion.plan.targets[at];
    const auto plain = choices.plain.find(target.name);
    if (!target.quantization && plain == choices.plain.end()) continue;
    const bool is_plain = !target.quantization;
    QuantizeRow made = row_of(conversion, target, is_plain ? plain->second : std::string_view());
    made.fidelity = losses[at].fidelity;
    made.typical_error = losses[at].typical_error;
    std::vector<std::uint64_t> numbers;
    made.names = folded_name(target.name, &numbers);
    Group& group =
        known[{made.names, made.shape, made.before, made.after, made.reason, made.fidelity}];
    made.tensors = group.row.tensors + 1;
    made.typical_error = std::max(made.typical_error, group.row.typical_error);
    made.bytes_before += group.row.bytes_before;
    made.bytes_after += group.row.bytes_after;
    group.row = std::move(made);
    group.numbers.resize(numbers.size());
    for (std::size_t i = 0; i < numbers.size(); ++i) group.numbers[i].insert(numbers[i]);
  }
  std::vector<Group> groups;
  for (auto& [key, group] : known) groups.push_back(std::move(group));
  tell_apart(groups);
  for (Group& group : groups) conversion.quantize_rows.push_back(std::move(group.row));
}

struct Pair {
  Alike tensors;
  bool is_inverted = false;  // the output stores the inverse of the source's global scale
  double typical_error = 0;
  // The fidelity of the new encoding, or of the one before if the tensors get no encoding.
  Fidelity kept = Fidelity::exact;
  bool separates = false;  // `kept` needs separate experts
};
// By encodings before and after.
using Pairs = std::map<std::tuple<std::string, std::string, Fidelity>, Pair>;

// Returns the quantization of a target to the encoding of its codes. Tensors that the output stores
// with one scale may have different scales in the source.
Quantization own_quantization(const PlannedTarget& target, const std::string& encoding) {
  Quantization own = {.encoding = encoding};
  QuantizedLayout form;
  const auto problem = prepare_quantization(own, target.shape, target.dtype, form);
  if (!problem && form.needs_amax) own.group = target.name;
  return own;
}

// Sorts the quantized tensors that a conversion decodes. Not thread-safe. The arguments must
// outlive it.
class DecodedTensors {
 public:
  DecodedTensors(const Conversion& conversion, const std::vector<Loss>& losses,
                 const std::set<std::uint32_t>& inverted, Fidelities& known,
                 SeparateExperts& separate)
      : conversion_(conversion),
        losses_(losses),
        inverted_(inverted),
        known_(known),
        separate_(separate) {}

  // `is_quantized`: selects tensors that are quantized again, or those whose values are written.
  [[nodiscard]] Pairs pairs(bool is_quantized) {
    Pairs pairs;
    for (std::size_t at = 0; at < losses_.size(); ++at) {
      const PlannedTarget& target = conversion_.plan.targets[at];
      if (target.quantization.has_value() != is_quantized) continue;
      const std::string before = encodings_before(target);
      const bool keeps_blocks =
          !is_quantized && !stored_type(conversion_, target).encoding.is_dtype();
      if (before.empty() || keeps_blocks) continue;
      const std::string after(output_encoding(conversion_, target));
      Pair& pair = pairs[{before, after, losses_[at].fidelity}];
      pair.tensors.add(target.name);
      pair.typical_error = std::max(pair.typical_error, losses_[at].typical_error);
      const bool is_inverted = inverted_.contains(static_cast<std::uint32_t>(at));
      pair.is_inverted |= before == after && is_inverted != divides(target);
      if (is_quantized) {
        add_kept(target, *target.quantization, pair);
      } else if (find_written_encoding(before) != nullptr) {
        add_kept(target, own_quantization(target, before), pair);
      } else {
        pair.kept = Fidelity::lossy;
      }
    }
    return pairs;
  }

 private:
  // Returns the encodings of the codes that a target decodes; empty if it decodes none.
  [[nodiscard]] std::string encodings_before(const PlannedTarget& target) const {
    const Catalog& catalog = *conversion_.plan.catalog;
    std::set<std::string_view> before;
    for_each_box(target.recipe, [&](const Box& box) {
      const bool is_block = !catalog.tensors()[box.source].encoding.is_dtype();
      if (is_block || decoded_by(catalog, box)) before.insert(encoding_of(catalog, box));
    });
    return fmt::format("{}", fmt::join(before, ", "));
  }

  // Returns true if the scales of the source are divided by a global scale.
  [[nodiscard]] bool divides(const PlannedTarget& target) const {
    bool divides = false;
    for_each_box(target.recipe, [&](const Box& box) {
      const QuantizedTensor* const stored = decoded_by(*conversion_.plan.catalog, box);
      const DecodeKernel* const kernel =
          stored == nullptr ? nullptr : find_decode_kernel(stored->decoding.kernel);
      divides |= kernel != nullptr && kernel->divides_by_outer;
    });
    return divides;
  }

  void add_kept(const PlannedTarget& target, const Quantization& quantization, Pair& pair) {
    Fidelity kept = known_.of(target, quantization);
    if (kept == Fidelity::lossy) {
      kept = separate_.fidelity(target, quantization);
      pair.separates = true;
    }
    pair.kept = std::max(pair.kept, kept);
  }

  const Conversion& conversion_;
  const std::vector<Loss>& losses_;
  const std::set<std::uint32_t>& inverted_;
  Fidelities& known_;
  SeparateExperts& separate_;
};

// Describes the loss of values whose codes fit, but whose global scale is inverted.
std::string inverse_text(const Pair& pair, Fidelity fidelity) {
  if (!pair.is_inverted || fidelity == Fidelity::lossy) return {};
  constexpr std::string_view text = "; the output stores the inverse of the global scale";
  if (pair.typical_error <= inverse_error) return std::string(text);
  return fmt::format("{}, and values change by about {:.2g} % if F32 has no exact inverse", text,
                     100 * inverse_error);
}

// Reports quantized tensors that are quantized again, once per pair of encodings and fidelity. A
// conversion that must be lossless fails if scales do not fit, so it does not warn of them.
void tell_requantized(Conversion& conversion, const SeparateExperts& separate, const Pairs& pairs) {
  for (const auto& [key, found] : pairs) {
    const auto& [before, after, fidelity] = key;
    const bool is_exact =
        fidelity == Fidelity::exact || (conversion.require_lossless && fidelity != Fidelity::lossy);
    const bool separates = found.separates && found.kept != Fidelity::lossy;
    const std::string_view are = found.tensors.count == 1 ? "is" : "are";
    conversion.plan.findings.push_back(
        {.severity = is_exact ? Severity::info : Severity::warning,
         .code = "convert.requantized",
         .target = found.tensors.first,
         .message = fmt::format("{} {} already quantized to {} and {} quantized again to {}: {}{}",
                                counted(found.tensors.count, "tensor"), are, before, are, after,
                                fidelity_text(fidelity, found.typical_error),
                                inverse_text(found, fidelity)),
         .suggestion = is_exact    ? ""
                       : separates ? "to keep the values, " + separate.advice()
                                   : "quantize the original checkpoint, if there is one",
         .found = before,
         .expected = after});
  }
}

// Returns advice for tensors that a conversion decodes because it quantizes others. If loadstone
// writes their encoding in the output's style, its encoder finds the scales of the codes again.
// `are_kept`: the output stores all their values.
std::string advice_on_decoded(const Conversion& conversion, const SeparateExperts& separate,
                              const std::string& encoding, const Pair& pair, bool are_kept) {
  const auto style = conversion.options.find("style");
  const bool is_compressed =
      style != conversion.options.end() && style->second == name(QuantizeStyle::compressed_tensors);
  const WrittenEncoding* const written = find_written_encoding(encoding);
  const NamingStyle naming = conversion.format == FileFormat::gguf ? NamingStyle::gguf
                             : is_compressed                       ? NamingStyle::compressed
                                                                   : NamingStyle::unified;
  if (written == nullptr || written->names(naming).empty() || pair.kept == Fidelity::lossy) {
    if (are_kept) return {};
    return "choose an encoding for them too: one conversion cannot quantize other tensors and "
           "keep these codes";
  }
  return fmt::format("to keep their {}{}, choose {} for them too{}", are_kept ? "codes" : "values",
                     pair.kept == Fidelity::exact ? "" : " if the scales fit", encoding,
                     pair.separates ? ", and " + separate.advice() : std::string());
}

std::string advice_on_merge(bool are_kept) {
  constexpr std::string_view quantize =
      "to quantize the output, pass an encoding (--quantize, quantize=)";
  return fmt::format(
      "{}{}", are_kept ? "" : "to add to their exact values, pass --dtype float32 (dtype=); ",
      quantize);
}

// Compares the decoded values that a merge reads with the dtype of its output.
Fidelity fidelity_before_merge(const Plan& plan, const PlannedTarget& target, Fidelities& known) {
  PlannedTarget decoded;
  decoded.dtype = target.dtype;
  for_each_box(target.recipe, [&](const Box& box) {
    const bool is_block = !plan.catalog->tensors()[box.source].encoding.is_dtype();
    if (is_block || decoded_by(*plan.catalog, box)) decoded.recipe.boxes.push_back(box);
  });
  return known.of(decoded);
}

// Reports quantized tensors whose values the output stores, once per pair of encodings.
void tell_decoded(Conversion& conversion, const SeparateExperts& separate, bool is_merge,
                  const Pairs& pairs) {
  for (const auto& [key, found] : pairs) {
    const auto& [before, after, fidelity] = key;
    const bool are_kept = fidelity == Fidelity::exact;
    conversion.plan.findings.push_back(
        {.severity = is_merge || are_kept ? Severity::info : Severity::warning,
         .code = "convert.decoded",
         .target = found.tensors.first,
         .message =
             fmt::format("the {} decodes {} from {} to {}, which {} their values",
                         is_merge ? "merge" : "conversion", counted(found.tensors.count, "tensor"),
                         before, after, are_kept ? "keeps" : "may round"),
         .suggestion = is_merge ? advice_on_merge(are_kept)
                                : advice_on_decoded(conversion, separate, before, found, are_kept),
         .found = after,
         .expected = before});
  }
}

}  // namespace

std::string source_encodings(const Plan& plan, const PlannedTarget& target) {
  if (target.recipe.constant) return "constant";
  std::set<std::string_view> names;
  for_each_box(target.recipe,
               [&](const Box& box) { names.insert(encoding_of(*plan.catalog, box)); });
  if (names.empty()) return std::string(name(target.dtype));
  return fmt::format("{}", fmt::join(names, ", "));
}

std::string_view output_encoding(const Conversion& conversion, const PlannedTarget& target) {
  return target.quantization ? std::string_view(target.quantization->encoding)
                             : stored_type(conversion, target).encoding.name();
}

std::string fidelity_text(Fidelity fidelity, double typical_error) {
  if (fidelity == Fidelity::exact || typical_error == 0) return std::string(name(fidelity));
  return fmt::format("{}, {} about {:.2g} % error", name(fidelity),
                     fidelity == Fidelity::lossy ? "with" : "otherwise", 100 * typical_error);
}

void tell_quantized(Conversion& conversion, const Choices& choices, Decoded decoded,
                    SeparateExperts& separate) {
  Fidelities known(conversion.plan);
  const std::set<std::uint32_t> inverted = inverted_targets(conversion);
  std::vector<Loss> losses = losses_of(conversion, known, inverted);
  DecodedTensors tensors(conversion, losses, inverted, known, separate);
  if (!keeps_source_codes(conversion)) {
    add_rows(conversion, choices, losses);
    tell_requantized(conversion, separate, tensors.pairs(true));
  }
  if (decoded == Decoded::on_request) return;
  const bool is_merge = decoded == Decoded::by_merge;
  for (std::size_t at = 0; at < losses.size(); ++at) {
    const PlannedTarget& target = conversion.plan.targets[at];
    Fidelity& fidelity = losses[at].fidelity;
    fidelity = std::max(fidelity, is_merge ? fidelity_before_merge(conversion.plan, target, known)
                                           : known.of(target));
  }
  tell_decoded(conversion, separate, is_merge, tensors.pairs(false));
}

}  // namespace loadstone

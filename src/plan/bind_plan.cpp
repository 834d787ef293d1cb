// Checks every target and box of a saved plan against the catalog with which the plan will be used.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "base/text.h"
#include "base/version_text.h"
#include "boxes/cast_kind.h"
#include "boxes/check_boxes.h"
#include "boxes/decodings.h"
#include "boxes/merges.h"
#include "catalog/reading_threads.h"
#include "codec/encode.h"
#include "codec/tensor_table.h"
#include "kernels/quantize.h"
#include "loadstone/error.h"
#include "loadstone/name_hash.h"
#include "plan/codes.h"
#include "plan/costs.h"
#include "plan/devices.h"
#include "plan/plan_json.h"
#include "plan/tie_checks.h"

namespace loadstone {

namespace {

[[noreturn]] void changed(const Shard& shard, const char* field, std::string found,
                          std::string expected) {
  throw Error("io.changed", "the shard differs from the one that the plan was made for",
              {.path = shard.path,
               .field = field,
               .found = std::move(found),
               .expected = std::move(expected)});
}

// Returns a warning, not an error, because copying a checkpoint also changes modification times.
Finding other_times(const std::vector<const Shard*>& shards) {
  std::string message = fmt::format(
      "'{}' has a different modification time than when the plan was made; its size and header are "
      "the same, and loadstone does not compare its values",
      printable(shards.front()->path, 400));
  const std::size_t more = shards.size() - 1;
  if (more > 0) message += fmt::format(" (and {} more {})", more, more == 1 ? "shard" : "shards");
  return {.severity = Severity::warning,
          .code = "io.time",
          .message = std::move(message),
          .suggestion = "if the shards were not merely copied, make the plan again"};
}

// Appends the shards whose modification time has changed to `other_time`.
void check_shards(const std::vector<SavedShard>& saved, const Catalog& catalog,
                  std::vector<const Shard*>& other_time) {
  const auto& shards = catalog.shards();
  if (shards.size() != saved.size()) {
    throw Error("io.changed", "the checkpoint has a different number of shards than the plan",
                {.path = catalog.root(),
                 .found = std::to_string(shards.size()),
                 .expected = std::to_string(saved.size())});
  }
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const FileIdentity& now = shards[i].identity;
    const FileIdentity& then = saved[i].identity;
    if (now.bytes != then.bytes) {
      changed(shards[i], "bytes", std::to_string(now.bytes), std::to_string(then.bytes));
    }
    // A copy of the shard, remote or local, may have no version.
    if (!now.version.empty() && !then.version.empty() && now.version != then.version) {
      changed(shards[i], "version", version_text(now.version), version_text(then.version));
    }
    if (shards[i].header_digest != saved[i].header_digest) {
      changed(shards[i], "header_digest", shards[i].header_digest,
              printable(saved[i].header_digest));
    }
    if (now.modified_ns != then.modified_ns) other_time.push_back(&shards[i]);
  }
}

// Returns true if the modification time of every shard is unchanged.
bool check_checkpoints(const std::vector<SavedCheckpoint>& saved, const Catalog& catalog,
                       std::vector<Finding>& findings) {
  std::vector<const Shard*> other_time;
  for (std::size_t c = 0; c < saved.size(); ++c) {
    const auto& joined = catalog.checkpoints();
    check_shards(saved[c].shards, joined.empty() ? catalog : *joined.at(c), other_time);
  }
  if (other_time.empty()) return true;
  findings.push_back(other_times(other_time));
  sort_findings(findings);
  return false;
}

class Binder {
 public:
  Binder(SavedPlan saved, std::shared_ptr<const Catalog> catalog)
      : plan_(std::move(saved.plan)),
        sources_(std::move(saved.sources)),
        tie_checks_(std::move(saved.tie_checks)) {
    plan_.catalog = std::move(catalog);
    std::size_t position = 0;
    for (const PlannedTarget& each : plan_.targets) index_.emplace(each.name, position++);
  }

  Plan run() && {
    bind_tie_checks(tie_checks_, index_, plan_);
    bind_sources();
    bind_decodings();
    for (std::size_t i = 0; i < plan_.targets.size(); ++i) {
      if (index_.at(plan_.targets[i].name) != i) refuse(i, "name", {"the name is repeated"});
    }
    for (std::size_t i = 0; i < plan_.targets.size(); ++i) {
      check_target(i);
      check_origin(i);
      check_delivery(i);
    }
    check_codes();
    check_totals();
    return std::move(plan_);
  }

 private:
  [[noreturn]] void refuse(std::size_t target, std::string_view field,
                           const Problem& problem) const {
    throw_problem("plan.json", problem,
                  {.tensor = plan_.targets[target].name,
                   .field = fmt::format("targets[{}].{}", target, field)});
  }

  void bind_sources() {
    for (std::size_t i = 0; i < sources_.size(); ++i) {
      const SavedSource& saved = sources_[i];
      const auto fail = [&](const char* field, const Problem& problem) {
        throw_problem("plan.json", problem,
                      {.path = plan_.catalog->root(),
                       .tensor = saved.name,
                       .field = fmt::format("sources[{}].{}", i, field)});
      };
      const std::size_t checkpoints = std::max<std::size_t>(plan_.catalog->checkpoints().size(), 1);
      if (saved.checkpoint >= checkpoints) {
        fail("checkpoint", {"unknown checkpoint number", std::to_string(saved.checkpoint),
                            fmt::format("one of {}", checkpoints)});
      }
      const auto found = plan_.catalog->find(saved.name, saved.checkpoint);
      if (!found) fail("name", {"the checkpoint contains no tensor of this name", saved.name});
      const TensorInfo& source = plan_.catalog->tensors()[*found];
      if (source.encoding != saved.encoding) {
        fail("encoding", {"the tensor's encoding has changed", std::string(source.encoding.name()),
                          std::string(saved.encoding.name())});
      }
      if (source.shape != saved.shape) {
        fail("shape", {"the tensor's shape has changed", source.shape.text(), saved.shape.text()});
      }
      bound_.push_back(*found);
    }
  }

  void bind_decodings() {
    for (std::size_t i = 0; i < plan_.decodings.size(); ++i) {
      Decoding& decoding = plan_.decodings[i];
      const auto fail = [&](Problem problem) {
        problem.found = printable(problem.found);
        throw_problem("plan.json", problem, {.field = fmt::format("decodings[{}]", i)});
      };
      for (std::uint32_t& source : decoding.sources) {
        if (source >= bound_.size()) {
          fail({"the decoding's source does not exist", fmt::format("source {}", source),
                fmt::format("one of {}", bound_.size())});
        }
        source = bound_[source];
      }
      PreparedDecoder form;
      if (auto problem = check_decoding(plan_.catalog->tensors(), decoding, form)) fail(*problem);
      const QuantizedTensor* const quantized =
          plan_.catalog->quantized().find(decoding.sources.front());
      // Group orders and zero points were validated only for the catalog's own decoding.
      if (decoding.group_size == 0) continue;
      Decoding sound = quantized != nullptr ? quantized->decoding : Decoding();
      sound.dtype = decoding.dtype;
      if (sound == decoding) continue;
      if (quantized != nullptr && !quantized->defect.code.empty()) {
        throw Error(quantized->defect.code, quantized->defect.message,
                    {.path = plan_.catalog->root(),
                     .tensor = quantized->name,
                     .found = quantized->defect.found,
                     .expected = quantized->defect.expected});
      }
      fail({"the checkpoint's quantized tensor needs a different decoding than planned",
            decoding.kernel, sound.kernel.empty() ? "a quantized tensor" : sound.kernel});
    }
  }

  void check_quantization(std::size_t i) const {
    const PlannedTarget& target = plan_.targets[i];
    QuantizedLayout form;
    auto problem = prepare_quantization(*target.quantization, target.shape, target.dtype, form);
    if (!problem && target.recipe.origin != Origin::checkpoint) {
      problem = Problem{"only tensors with origin checkpoint can be quantized",
                        std::string(name(target.recipe.origin))};
    }
    if (problem) {
      problem->found = printable(problem->found);
      refuse(i, "quantization", *problem);
    }
  }

  void check_target(std::size_t i) const {
    const PlannedTarget& target = plan_.targets[i];
    if (!Encoding(target.dtype).byte_count(target.shape.numel().value_or(0))) {
      refuse(i, "shape", {"the size in bytes is not a whole 64-bit number", target.shape.text()});
    }
    if (!is_device_name(target.device)) {
      refuse(i, "device", {"the device is unknown", printable(target.device), device_examples});
    }
    if (target.quantization) check_quantization(i);
    const bool is_excluded = target.recipe.origin == Origin::excluded;
    if (target.device == "meta" && !is_excluded && target.recipe.origin != Origin::tie) {
      refuse(i, "device", {"only a target with origin excluded can be on meta"});
    }
    if (target.recipe.reason.empty() == is_excluded) {
      refuse(i, "recipe.reason", {"only the origin 'excluded' has a reason"});
    }
  }

  void check_origin(std::size_t i) {
    PlannedTarget& target = plan_.targets[i];
    if (target.recipe.origin != Origin::checkpoint && !target.recipe.boxes.empty()) {
      refuse(i, "recipe.boxes",
             {"only origin checkpoint can have boxes", std::string(name(target.recipe.origin))});
    }
    if (target.recipe.merge != nullptr && target.recipe.boxes.empty()) {
      refuse(i, "recipe.merge", {"a merge needs boxes, to which its terms are added"});
    }
    check_constant(i);
    if ((target.recipe.origin == Origin::tie) == target.recipe.tie_of.empty()) {
      refuse(i, "recipe.tie_of", {"only origin tie needs tie_of"});
    }
    if (target.recipe.origin == Origin::tie) check_tie(i);
    if (target.recipe.origin == Origin::checkpoint) check_target_boxes(i);
    bind_decided_by(i);
  }

  void bind_decided_by(std::size_t i) {
    for (std::uint32_t& source : plan_.targets[i].recipe.decided_by) {
      if (source >= bound_.size()) {
        refuse(i, "recipe.decided_by",
               {"the source does not exist", std::to_string(source),
                fmt::format("one of {}", bound_.size())});
      }
      source = bound_[source];
    }
  }

  void check_constant(std::size_t i) {
    const PlannedTarget& target = plan_.targets[i];
    const Constant& constant = target.recipe.constant;
    if ((target.recipe.origin == Origin::constant) != (constant != nullptr)) {
      refuse(i, "recipe.constant",
             {"only origin constant needs a constant", std::string(name(target.recipe.origin))});
    }
    if (constant == nullptr) return;
    if (constant->size() != target.byte_count()) {
      refuse(i, "recipe.constant",
             {"a constant must have its target's size", counted(constant->size(), "byte"),
              counted(target.byte_count(), "byte")});
    }
    constant_bytes_ += constant->size();
    if (constant_bytes_ > constant_bytes_max) {
      refuse(i, "recipe.constant",
             {"the constants together are too large", human_bytes(constant_bytes_),
              human_bytes(constant_bytes_max)});
    }
  }

  void check_tie(std::size_t i) const {
    const PlannedTarget& target = plan_.targets[i];
    const auto found = index_.find(target.recipe.tie_of);
    if (found == index_.end()) refuse(i, "recipe.tie_of", {"unknown target", target.recipe.tie_of});
    const PlannedTarget& root = plan_.targets[found->second];
    if (root.recipe.origin == Origin::tie)
      refuse(i, "recipe.tie_of", {"a target cannot be tied to another tied target", root.name});
    if (root.quantization) refuse(i, "recipe.tie_of", {"tied to a quantized target", root.name});
    if (root.shape != target.shape || root.dtype != target.dtype || root.device != target.device) {
      refuse(i, "recipe.tie_of",
             {"tied targets must have the same shape, dtype and device",
              fmt::format("{} {} {}", target.shape.text(), name(target.dtype), target.device),
              fmt::format("{} {} {}", root.shape.text(), name(root.dtype), root.device)});
    }
  }

  [[noreturn]] void refuse_box(std::size_t target, std::string_view field,
                               const Problem& problem) const {
    std::string place = fmt::format("targets[{}].recipe.{}", target, field);
    if (problem.box) place += fmt::format("[{}]", *problem.box);
    throw_problem("plan.box", problem,
                  {.tensor = plan_.targets[target].name, .field = std::move(place)});
  }

  // Converts the file's source numbers to catalog indices.
  void bind_boxes(std::size_t i, std::string_view field, std::vector<Box>& boxes) const {
    for (std::size_t b = 0; b < boxes.size(); ++b) {
      Box& box = boxes[b];
      if (box.decoding != no_decoding) {
        if (box.decoding >= plan_.decodings.size()) {
          refuse_box(i, field,
                     {.message = "the box's decoding does not exist",
                      .found = fmt::format("decoding {}", box.decoding),
                      .expected = fmt::format("one of {}", plan_.decodings.size()),
                      .box = b});
        }
        box.source = plan_.decodings[box.decoding].sources.front();
        continue;
      }
      if (box.source >= bound_.size()) {
        refuse_box(i, field,
                   {.message = "the box's source does not exist",
                    .found = fmt::format("source {}", box.source),
                    .expected = fmt::format("one of {}", bound_.size()),
                    .box = b});
      }
      box.source = bound_[box.source];
    }
  }

  void bind_merge(std::size_t i) {
    PlannedTarget& target = plan_.targets[i];
    Merge merge = *target.recipe.merge;
    for (std::size_t t = 0; t < merge.terms.size(); ++t) {
      Term& term = merge.terms[t];
      const std::string field = fmt::format("merge.terms[{}].", t);
      bind_boxes(i, field + "boxes", term.boxes);
      if (!term.low_rank) continue;
      bind_boxes(i, field + "low_rank.left", term.low_rank->left);
      bind_boxes(i, field + "low_rank.right", term.low_rank->right);
      bind_boxes(i, field + "low_rank.magnitudes", term.low_rank->magnitudes);
    }
    const auto problem = check_merge(merge, target.shape.numel().value_or(0),
                                     plan_.catalog->tensors(), plan_.decodings);
    if (problem) refuse_box(i, "merge." + problem->field, *problem);
    target.recipe.merge = std::make_shared<const Merge>(std::move(merge));
  }

  void check_target_boxes(std::size_t i) {
    PlannedTarget& target = plan_.targets[i];
    bind_boxes(i, "boxes", target.recipe.boxes);
    const auto& tensors = plan_.catalog->tensors();
    const auto problem = check_boxes(target.recipe.boxes, target.shape.numel().value_or(0), tensors,
                                     plan_.decodings);
    if (problem) refuse_box(i, "boxes", *problem);
    const bool is_merged = target.recipe.merge != nullptr;
    if (is_merged) {
      bind_merge(i);
      require_sum(i);
    }
    const Dtype read_as = is_merged ? Dtype::f32 : target.dtype;
    for (std::size_t b = 0; b < target.recipe.boxes.size(); ++b) {
      const Box& box = target.recipe.boxes[b];
      const Encoding encoding = encoding_of(box, tensors, plan_.decodings);
      const CastKind way = cast_kind(encoding, read_as);
      const bool is_sound = is_merged ? way == CastKind::same || way == CastKind::cast
                                      : way != CastKind::mismatch && way != CastKind::no_cast;
      if (!is_sound) {
        refuse_box(i, "boxes",
                   {.message = "loadstone cannot cast this encoding to the target's dtype",
                    .found = std::string(encoding.name()),
                    .expected = std::string(name(read_as)),
                    .box = b});
      }
      if (!moves_whole_bytes(box, bits(read_as))) {
        refuse_box(
            i, "boxes",
            {.message = "elements smaller than a byte can only be moved as whole bytes", .box = b});
      }
    }
  }

  void require_sum(std::size_t i) const {
    const Dtype dtype = plan_.targets[i].dtype;
    const CastKind way = cast_kind(Dtype::f32, dtype);
    if (way == CastKind::same || way == CastKind::cast) return;
    refuse(i, "dtype", {"a merge needs a float dtype with whole bytes", std::string(name(dtype))});
  }

  // Applies make_plan()'s check of codes without scales to the boxes of the saved plan.
  void check_codes() const {
    const Codes codes(*plan_.catalog);
    const std::vector<bool> delivered = delivered_codes(plan_);
    for (const PlannedTarget& target : plan_.targets) {
      const auto lone = codes.find_lone(target, delivered);
      if (!lone) continue;
      const Finding& error = lone->error;
      throw Error(error.code, error.message + "; " + error.suggestion,
                  {.path = plan_.catalog->root(),
                   .tensor = target.name,
                   .found = error.found,
                   .expected = error.expected});
    }
  }

  void check_delivery(std::size_t i) const {
    const PlannedTarget& target = plan_.targets[i];
    const Origin origin = target.recipe.origin;
    const bool has_bytes = is_delivered(origin);
    const bool is_disk = target.device == "disk";
    bool fits = false;
    switch (target.delivery) {
      case Delivery::none:
        fits = !has_bytes;
        break;
      case Delivery::memory:
        fits = has_bytes && !is_disk;
        break;
      case Delivery::file_view:
        fits = target.device == "cpu" && can_view_file(plan_, target);
        break;
      case Delivery::disk_write:
        fits = has_bytes && is_disk;
        break;
      case Delivery::disk_keep:
        fits = is_disk && can_keep_on_disk(plan_, target);
        break;
    }
    if (!fits) {
      const bool has_moved =
          target.delivery == Delivery::file_view && comes_over_network(plan_, target);
      refuse(i, "delivery",
             {has_moved ? "the plan views a file on another machine: make the plan again"
                        : "the target's origin and device do not allow this delivery",
              fmt::format("{} of {} to {}", name(target.delivery), name(origin), target.device)});
    }
    if (target.delivery == Delivery::disk_write && !is_offload_name(target.name)) {
      refuse(i, "name", {"the offload folder cannot have a file of this name"});
    }
    // A plan that lacks a folder already has an error finding, so execute() rejects it.
    if (target.delivery == Delivery::disk_write && plan_.offload_folder.empty() && plan_.ok()) {
      refuse(i, "delivery", {"the plan has no offload folder"});
    }
  }

  // Computes the totals again instead of trusting the file, because execute() relies on them.
  void check_totals() {
    const std::uint64_t bytes_to_read = plan_.bytes_to_read;
    const std::uint64_t bytes_to_write = plan_.bytes_to_write;
    const auto peak_bytes = plan_.peak_bytes;
    const auto fail = [](const char* field, std::uint64_t found, std::uint64_t expected) {
      throw Error(
          "plan.json", "the total differs from the sum of the targets",
          {.field = field, .found = std::to_string(found), .expected = std::to_string(expected)});
    };
    if (plan_.staging_bytes_max == 0) fail("staging_bytes_max", 0, 1);
    count_costs(plan_);
    if (bytes_to_read != plan_.bytes_to_read) {
      fail("bytes_to_read", bytes_to_read, plan_.bytes_to_read);
    }
    if (bytes_to_write != plan_.bytes_to_write) {
      fail("bytes_to_write", bytes_to_write, plan_.bytes_to_write);
    }
    if (peak_bytes != plan_.peak_bytes && !differs_by_place(peak_bytes)) {
      fail("peak_bytes", peak_bytes.contains("cpu") ? peak_bytes.at("cpu") : 0,
           plan_.peak_bytes.at("cpu"));
    }
    for (const auto& [path, device] : plan_.device_map) {
      if (is_device_name(device) || !plan_.ok()) continue;
      throw Error("plan.json", "the device is unknown",
                  {.field = "device_map", .found = printable(device)});
    }
  }

  // Returns true if only the memory for remote reads differs: the shards were remote when the plan
  // was saved and are local now, or the reverse.
  [[nodiscard]] bool differs_by_place(std::map<std::string, std::uint64_t> peak_bytes) const {
    const std::uint64_t now = plan_.peak_bytes.at("cpu");
    const std::uint64_t saved = std::exchange(peak_bytes["cpu"], now);
    const std::uint64_t difference = now > saved ? now - saved : saved - now;
    return peak_bytes == plan_.peak_bytes && plan_.bytes_to_read > 0 &&
           difference == reading_bytes_if_remote(*plan_.catalog, plan_.threads);
  }

  Plan plan_;
  std::vector<SavedSource> sources_;
  std::vector<SavedTieCheck> tie_checks_;
  std::uint64_t constant_bytes_ = 0;
  std::vector<std::uint32_t> bound_;  // indices into the catalog, by position in sources_
  NameMap<std::size_t> index_;        // target name -> index; the first one of a repeated name
};

}  // namespace

Plan bind_plan(SavedPlan saved, std::shared_ptr<const Catalog> catalog) {
  const bool is_same = check_checkpoints(saved.checkpoints, *catalog, saved.plan.findings);
  Plan plan = Binder(std::move(saved), std::move(catalog)).run();
  // In a modified checkpoint, the values of the tensors in `decided_by` may have changed.
  for (PlannedTarget& target : plan.targets) {
    if (!is_same) target.recipe.decided_by.clear();
  }
  return plan;
}

}  // namespace loadstone

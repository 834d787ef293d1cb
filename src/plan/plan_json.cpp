#include "plan/plan_json.h"

#include <fmt/format.h>

#include <utility>

#include "base/finding_json.h"
#include "base/json_writer.h"
#include "base/only_errors.h"
#include "base/text.h"
#include "boxes/decodings.h"
#include "boxes/merges.h"
#include "loadstone/error.h"
#include "plan/catalog_of.h"
#include "plan/merge_json.h"
#include "plan/tie_checks.h"
#include "plan/values.h"

namespace loadstone {

namespace {

constexpr std::size_t plan_bytes_max = std::size_t{2} << 30;

template <typename Visitor>
void visit_shape(Visitor& visitor, auto& shape) {
  visitor.member("shape", shape);
  if constexpr (Visitor::is_reading) {
    if (!shape.numel()) visitor.refuse("shape", "the size does not fit in 64 bits", shape.text());
  }
}

void visit_source(auto& visitor, auto& name, auto&& checkpoint, auto& encoding, auto& shape) {
  visitor.member("name", name);
  visitor.optional("checkpoint", checkpoint);
  visitor.member("encoding", encoding);
  visit_shape(visitor, shape);
}

// Visits the totals and options of a plan.
template <typename Visitor>
void visit_totals(Visitor& visitor, Like<Plan> auto& plan) {
  visitor.member("bytes_to_read", plan.bytes_to_read);
  visitor.member("bytes_to_write", plan.bytes_to_write);
  visitor.member("staging_bytes_max", plan.staging_bytes_max);
  visitor.member("allow_non_finite", plan.allow_non_finite);
  visitor.member("peak_bytes", plan.peak_bytes);
  std::uint64_t threads = plan.threads;
  visitor.member("threads", threads);
  std::uint64_t ranks = plan.local_ranks > 1 ? plan.local_ranks : 0;
  const bool has_ranks = visitor.optional("local_ranks", ranks);
  visitor.member("offload_folder", plan.offload_folder);
  visitor.member("device_map", plan.device_map);
  visitor.member("findings", plan.findings);
  if constexpr (Visitor::is_reading) {
    const auto count = [&](const char* field, std::uint64_t found, unsigned most) {
      if (found == 0 || found > most) {
        visitor.refuse(field, fmt::format("no number of {}", field), std::to_string(found),
                       "1 to " + std::to_string(most));
      }
      return static_cast<unsigned>(found);
    };
    plan.threads = count("threads", threads, defaults::threads_most);
    if (has_ranks) plan.local_ranks = count("local_ranks", ranks, UINT32_MAX);
  }
}

// Returns the index of the checkpoint that contains the source.
std::uint32_t checkpoint_of(const Catalog& catalog, std::uint32_t source) {
  std::uint32_t checkpoint = 0;
  while (source >= catalog.tensors_of(checkpoint).end) ++checkpoint;
  return checkpoint;
}

SavedCheckpoint saved_checkpoint(const Catalog& catalog) {
  SavedCheckpoint saved = {catalog.root(), catalog.quantization_claim().digest, {}};
  for (const Shard& shard : catalog.shards()) {
    saved.shards.push_back({shard.relative_path, shard.identity, shard.header_digest});
  }
  return saved;
}

PlanNumbers write_plan_sources(JsonWriter& json, const Plan& plan) {
  PlanNumbers numbers = number_boxes(values_of(plan));
  json.key("sources");
  json.begin_array();
  for (const std::uint32_t index : numbers.sources_used) {
    const TensorInfo& source = plan.catalog->tensors()[index];
    json.begin_object();
    visit_source(json, source.name, checkpoint_of(*plan.catalog, index), source.encoding,
                 source.shape);
    json.end_object();
  }
  json.end_array();
  std::vector<const Decoding*> decodings;
  for (const std::uint32_t used : numbers.decodings_used) {
    decodings.push_back(&plan.decodings[used]);
  }
  json.optional("decodings", decodings, numbers);
  return numbers;
}

}  // namespace

void visit_fields(auto& visitor, Like<SavedShard> auto& shard) {
  visitor.member("path", shard.path);
  visitor.member("bytes", shard.identity.bytes);
  visitor.member("modified_ns", shard.identity.modified_ns);
  visitor.optional("inode", shard.identity.inode);
  visitor.optional("version", shard.identity.version);
  visitor.member("header_digest", shard.header_digest);
}

void visit_fields(auto& visitor, Like<SavedCheckpoint> auto& checkpoint) {
  visitor.member("root", checkpoint.root);
  visitor.optional("config_digest", checkpoint.config_digest);
  visitor.member("shards", checkpoint.shards);
}

void visit_fields(auto& visitor, Like<SavedSource> auto& source) {
  visit_source(visitor, source.name, source.checkpoint, source.encoding, source.shape);
}

void visit_fields(auto& visitor, Like<SavedTieCheck> auto& saved) {
  visitor.member("name", saved.check.name);
  visitor.member("tied_to", saved.check.tied_to);
  visitor.member("taken", saved.taken);
  visitor.member("other", saved.other);
  visitor.member("is_error", saved.check.is_error);
}

void visit_fields(auto& visitor, Like<Decoding> auto& decoding, const PlanNumbers& numbers) {
  visitor.member("kernel", decoding.kernel);
  visitor.member("sources", JsonIndices(decoding.sources, numbers.sources));
  visit_shape(visitor, decoding.shape);
  visitor.member("dtype", decoding.dtype);
  visitor.optional("offset_bits",
                   JsonBits(decoding.offset, "the number does not fit in the 32 bits of an F32"));
  visitor.optional("group_size", decoding.group_size);
}

template <typename Visitor>
void visit_fields(Visitor& visitor, Like<Quantization> auto& quantization) {
  visitor.member("encoding", quantization.encoding);
  visitor.member("dialect", quantization.dialect);
  visitor.member("block_size", quantization.block_size);
  visitor.member("nested", quantization.nested);
  visitor.optional("nested_offset_bits", JsonBits(quantization.nested_offset));
  visitor.optional("group", quantization.group);
  visitor.optional("exact_first", quantization.exact_first);
  // The plan does not contain the values of the importance matrix, so loadstone rejects a saved
  // plan that needs them.
  if constexpr (!Visitor::is_reading) {
    if (quantization.importance) visitor.member("importance", quantization.importance->size());
  } else if (visitor.optional("importance")) {
    visitor.refuse("importance",
                   "a saved plan does not contain an importance matrix: make the plan again",
                   "an importance");
  }
}

void visit_fields(auto& visitor, Like<Recipe> auto& recipe, const PlanNumbers& numbers) {
  visitor.optional("boxes", recipe.boxes, numbers);
  visitor.optional("merge", recipe.merge, numbers);
  visitor.optional("constant", recipe.constant);
  visitor.optional("tie_of", recipe.tie_of);
  visitor.optional("reason", recipe.reason);
  visitor.optional("decided_by", JsonIndices(recipe.decided_by, numbers.sources));
}

template <typename Visitor>
void visit_fields(Visitor& visitor, Like<PlannedTarget> auto& target, const PlanNumbers& numbers) {
  visitor.member("name", target.name);
  visitor.member("kind", target.kind);
  visit_shape(visitor, target.shape);
  for (const auto& [field, of] : {std::pair("slice_begin", &target.slice_begin),
                                  std::pair("slice_groups", &target.slice_groups)}) {
    if (!visitor.optional(field, *of)) continue;
    if constexpr (Visitor::is_reading) {
      if (of->size() == target.shape.rank()) continue;
      visitor.refuse(field, "there must be one number for each dimension", {}, target.shape.text());
    }
  }
  visitor.member("dtype", target.dtype);
  visitor.member("origin", target.recipe.origin);
  visitor.member("device", target.device);
  visitor.member("delivery", target.delivery);
  visitor.optional("quantization", target.quantization);
  visitor.member("recipe", target.recipe, numbers);
}

static std::string plan_json(const Plan& plan) {
  JsonWriter json(1, 2);
  json.begin_object();
  json.member("version", plan_json_version);
  std::vector<SavedCheckpoint> checkpoints;
  for (const auto& each : catalog_of(plan).checkpoints()) {
    checkpoints.push_back(saved_checkpoint(*each));
  }
  if (checkpoints.empty()) checkpoints.push_back(saved_checkpoint(*plan.catalog));
  visit_fields(json, checkpoints.front());
  checkpoints.erase(checkpoints.begin());
  json.optional("other_checkpoints", checkpoints);  // adapters
  visit_totals(json, plan);
  const PlanNumbers numbers = write_plan_sources(json, plan);
  json.member("targets", plan.targets, numbers);
  std::vector<SavedTieCheck> checks;
  const auto& tensors = plan.catalog->tensors();
  for (const TieCheck& check : plan.tie_checks) {
    checks.push_back({check, tensors[check.taken].name, tensors[check.other].name});
  }
  json.optional("tie_checks", checks);
  json.end_object();
  if (json.is_lossy()) {
    throw Error("plan.json", "a path or name in the plan is not UTF-8, so JSON cannot represent it",
                {.path = plan.catalog->root(), .expected = "paths and names in UTF-8"});
  }
  return json.take() + "\n";
}

std::string to_json(const Plan& plan) {
  return only_errors([&] { return plan_json(plan); });
}

SavedPlan read_plan(std::string_view text) {
  const JsonDocument document(text, "plan.json", plan_bytes_max);
  const JsonReader reader("plan.json");
  const JsonPlace top;
  JsonObject fields(reader, document.root(), top);
  fields.require_version(plan_json_version);
  SavedPlan saved;
  const PlanNumbers numbers;
  visit_fields(fields, saved.checkpoints.emplace_back());
  fields.optional("other_checkpoints", saved.checkpoints);
  fields.member("sources", saved.sources);
  fields.optional("decodings", saved.plan.decodings, numbers);
  fields.member("targets", saved.plan.targets, numbers);
  fields.optional("tie_checks", saved.tie_checks);
  visit_totals(fields, saved.plan);
  // `loadstone plan --json` also prints findings and a duration for the machine that it ran on.
  static_cast<void>(fields.optional("duration"));
  std::erase_if(saved.plan.findings, [](const Finding& finding) {
    return finding.code == "memory.host" || finding.code == "io.no_space";
  });
  fields.done();
  return saved;
}

}  // namespace loadstone

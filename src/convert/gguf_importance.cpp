#include "convert/gguf_importance.h"

#include <fmt/format.h>

#include <functional>
#include <utility>

#include "base/text.h"

namespace loadstone {

namespace {

// llama-quantize keeps so many bytes of a text in 128, with a NUL.
constexpr std::size_t importance_text_bytes_max = 127;

Finding finding(Severity severity, const std::string& target, std::string message) {
  return {.severity = severity,
          .code = "convert.importance",
          .target = target,
          .message = std::move(message)};
}

std::uint64_t columns_of(const Shape& shape) noexcept { return shape.extents().back(); }

// Matrices of a stack have columns of their own.
std::uint64_t matrices_of(const Shape& shape) noexcept {
  std::uint64_t matrices = 1;
  for (std::size_t i = 0; i + 2 < shape.rank(); ++i) matrices *= shape.extents()[i];
  return matrices;
}

std::string size_text(const Shape& shape) {
  const std::uint64_t matrices = matrices_of(shape);
  const std::uint64_t columns = columns_of(shape);
  if (matrices == 1) return fmt::format("{} columns", columns);
  return fmt::format("{} columns of {} matrices", columns, matrices);
}

// "'blk.0.attn_q.weight' and 6 others"
std::string others_of(const Alike& some) {
  const std::string name = fmt::format("'{}'", printable(some.first));
  return some.count == 1 ? name : fmt::format("{} and {}", name, counted(some.count - 1, "other"));
}

}  // namespace

std::shared_ptr<const std::vector<float>> Importances::take(std::optional<Mix> mix,
                                                            const TargetRecipe& recipe,
                                                            BlockFormat type) {
  const std::string& name = recipe.target;
  if (matrix_ != nullptr) {
    const auto found = matrix_->entries.find(name);
    if (found != matrix_->entries.end()) {
      const std::uint64_t numbers = found->second->size();
      if (numbers == columns_of(recipe.shape) * matrices_of(recipe.shape)) return found->second;
      if (!is_token_embedding(name)) {
        misfits_[{numbers, size_text(recipe.shape)}].add(name);
        return nullptr;
      }
    }
    without_.add(name);
  }
  if (mix_needs_importance(mix, name, type)) needing_[Encoding(type).name()].add(name);
  return nullptr;
}

void Importances::report(const Recipes& recipes, std::vector<Finding>& findings) const {
  for (const auto& [type, tensors] : needing_) {
    Finding& made = findings.emplace_back(finding(
        Severity::error, tensors.first,
        fmt::format("{} would become {}, which needs an importance matrix{}", others_of(tensors),
                    type, matrix_ == nullptr ? "" : ", and this one has no entry for that")));
    made.suggestion =
        matrix_ == nullptr
            ? "--imatrix FILE (imatrix= in Python), as llama-imatrix writes it; or more bits"
            : "measure it with this model, or give these tensors more bits by a pattern";
    made.found = type;
  }
  for (const auto& [sizes, tensors] : misfits_) {
    const auto& [numbers, expected] = sizes;
    Finding& made = findings.emplace_back(
        finding(Severity::error, tensors.first,
                fmt::format("{} in '{}': the entry has {}, and the tensor {}", others_of(tensors),
                            printable(matrix_->path, 400), counted(numbers, "number"), expected)));
    made.suggestion = "measure the importance matrix with this model";
    made.found = std::to_string(numbers);
    made.expected = expected;
  }
  if (matrix_ != nullptr) report_unused(recipes, findings);
}

// Entries of tensors that stay as they are say nothing; those of no tensor may be of another model.
void Importances::report_unused(const Recipes& recipes, std::vector<Finding>& findings) const {
  std::set<std::string_view> names;
  for (const TargetRecipe& recipe : recipes.targets) names.insert(recipe.target);
  Alike unused;
  for (const auto& [name, numbers] : matrix_->entries) {
    if (!names.contains(name)) unused.add(name);
  }
  if (unused.count > 0) {
    findings.push_back(finding(
        Severity::warning, {},
        fmt::format("{} of {} entries in '{}' fit the name of no tensor: {}", unused.count,
                    matrix_->entries.size(), printable(matrix_->path, 400), others_of(unused))));
    findings.back().suggestion = "check that the importance matrix was measured with this model";
  }
  if (without_.count == 0) return;
  findings.push_back(finding(
      Severity::info, without_.first,
      fmt::format("the importance matrix has no entry for {}, so their numbers alone decide",
                  others_of(without_))));
}

void erase_importance(const Metadata& given, Metadata& metadata) {
  std::erase_if(metadata, [&](const auto& each) {
    return each.first.starts_with("quantize.imatrix.") && !given.contains(each.first);
  });
}

void Importances::describe(Metadata& metadata) const {
  if (matrix_ == nullptr) return;
  const auto set_text = [&](const char* key, const std::string& text) {
    metadata.insert_or_assign(key,
                              MetadataValue{.value = text.substr(0, importance_text_bytes_max)});
  };
  const auto set_number = [&](const char* key, std::uint64_t number) {
    metadata.insert_or_assign(key, MetadataValue{.value = number, .type = MetadataType::u32});
  };
  set_text("quantize.imatrix.file", matrix_->path);
  if (matrix_->dataset) set_text("quantize.imatrix.dataset", *matrix_->dataset);
  set_number("quantize.imatrix.entries_count", matrix_->entries.size());
  if (matrix_->chunks > 0) set_number("quantize.imatrix.chunks_count", matrix_->chunks);
}

}  // namespace loadstone

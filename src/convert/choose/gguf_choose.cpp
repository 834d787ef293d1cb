#include "convert/choose/gguf_choose.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "base/refuse_option.h"
#include "base/text.h"
#include "codec/encode.h"
#include "convert/choose/choose.h"
#include "convert/choose/chooser.h"
#include "convert/choose/gguf_image.h"
#include "convert/choose/gguf_language.h"
#include "convert/choose/gguf_mix.h"
#include "convert/kept_blocks.h"
#include "formats/gguf_keys.h"
#include "formats/metadata.h"

namespace loadstone {

namespace {

constexpr std::string_view not_mixed = "llama.cpp does not quantize it";

// Value of "general.quantization_version" that ggml currently writes.
constexpr std::uint64_t quantization_version = 2;

// Returns the dtype that a name requests; nullopt for block formats.
std::optional<Dtype> plain_type(std::string_view name) {
  const Mix* const mix = find_mix(name);
  return mix && mix->type.is_dtype() ? std::optional(mix->type.dtype()) : std::nullopt;
}

// Returns the block format that an encoding writes; nullopt if it does not write GGUF blocks.
std::optional<BlockFormat> block_format_of(const WrittenEncoding& encoding) {
  if (!encoding.is_gguf()) return std::nullopt;
  constexpr std::uint64_t columns = 256;  // a multiple of every format's block size
  static const auto any = std::make_shared<const std::vector<float>>(columns, 1.0f);
  Quantization quantization;
  quantization.encoding = encoding.name;
  quantization.importance = any;  // some formats need it, all accept it
  QuantizedLayout form;
  const Shape row = {1, columns};
  if (prepare_quantization(quantization, row, Dtype::f32, form)) return std::nullopt;
  return form.block;
}

// Returns the encoding that writes these blocks; null if this version has none.
const WrittenEncoding* encoding_of(BlockFormat format) {
  for (const WrittenEncoding* const each : written_encodings()) {
    if (block_format_of(*each) == format) return each;
  }
  return nullptr;
}

// Returns the type that a format requests; nullopt for "none".
std::optional<Encoding> asked_type(const std::string& name) {
  if (name == no_encoding) return std::nullopt;
  if (const auto dtype = plain_type(name)) return *dtype;
  const WrittenEncoding* const encoding = find_written_encoding(name);
  if (const auto block = encoding != nullptr ? block_format_of(*encoding) : std::nullopt)
    return *block;
  refuse_option("quantize", "a GGUF file cannot store this encoding", printable(name),
                "a block format such as q8_0, bf16, f16 or f32");
}

// Returns the file type of the mix with this name, or of the mix that gives most tensors the
// encoding with this name.
std::optional<std::uint32_t> file_type_of(const std::string& name) {
  for (const std::string& mix : {name, name + "_s", name + "_moe"}) {
    if (const Mix* const found = find_mix(mix)) return found->file_type;
  }
  return std::nullopt;
}

// llama-quantize stores a string in 128 bytes, including the final NUL.
constexpr std::size_t importance_text_bytes_max = 127;

Finding finding(Severity severity, const std::string& target, std::string message) {
  return {.severity = severity,
          .code = "convert.importance",
          .target = target,
          .message = std::move(message)};
}

std::uint64_t columns_of(const Shape& shape) noexcept { return shape.extents().back(); }

// Returns the number of matrices in a stack: an importance matrix has separate values for the
// columns of each matrix.
std::uint64_t matrices_of(const Shape& shape) noexcept {
  std::uint64_t matrices = 1;
  for (std::size_t i = 0; i + 2 < shape.rank(); ++i) matrices *= shape.extents()[i];
  return matrices;
}

std::string size_text(const Shape& shape) {
  const std::uint64_t matrices = matrices_of(shape);
  const std::uint64_t columns = columns_of(shape);
  if (matrices == 1) return counted(columns, "column");
  return fmt::format("{} columns of {} matrices", columns, matrices);
}

// Returns a string such as "'blk.0.attn_q.weight' and 6 others".
std::string others_of(const Alike& some) {
  const std::string name = fmt::format("'{}'", printable(some.first));
  return some.count == 1 ? name : fmt::format("{} and {}", name, counted(some.count - 1, "other"));
}

// Assigns entries of an importance matrix to tensors, by llama.cpp's rules.
// Not thread-safe. The matrix, which may be null, outlives it.
class Importances {
 public:
  explicit Importances(const ImportanceMatrix* matrix) : matrix_(matrix) {}

  [[nodiscard]] bool are_given() const noexcept { return matrix_ != nullptr; }

  // Returns the matrix's entry for a tensor that becomes blocks of this type; null if no entry
  // fits.
  [[nodiscard]] std::shared_ptr<const std::vector<float>> take(const Mix* mix,
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

  // Reports errors for tensors that need an entry but have none, and for entries whose size does
  // not fit their tensor. Also lists unused entries and tensors without an entry.
  void report(const Recipes& recipes, std::vector<Finding>& findings) const {
    for (const auto& [type, tensors] : needing_) {
      Finding& made = findings.emplace_back(finding(
          Severity::error, tensors.first,
          fmt::format(
              "{} would be quantized to {}, which needs an importance matrix{}", others_of(tensors),
              type,
              matrix_ == nullptr ? "" : ", but the one that was passed has no entry for it")));
      made.suggestion = matrix_ == nullptr
                            ? "pass a file of llama-imatrix (--imatrix FILE, imatrix= in Python), "
                              "or choose a type with more bits"
                            : "measure the importance matrix with this model, or choose a type "
                              "with more bits for these tensors with a pattern";
      made.found = type;
    }
    for (const auto& [sizes, tensors] : misfits_) {
      const auto& [numbers, expected] = sizes;
      Finding& made = findings.emplace_back(finding(
          Severity::error, tensors.first,
          fmt::format("{} in '{}': the entry has {}, but the tensor has {}", others_of(tensors),
                      printable(matrix_->path, 400), counted(numbers, "number"), expected)));
      made.suggestion = "measure the importance matrix with this model";
      made.found = std::to_string(numbers);
      made.expected = expected;
    }
    if (matrix_ != nullptr) report_unused(recipes, findings);
  }

  // Sets the metadata keys with which llama-quantize describes an importance matrix.
  void describe(Metadata& metadata) const {
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

 private:
  // Number of values in an entry, and a text with the size that the entry's tensor needs.
  using Sizes = std::pair<std::size_t, std::string>;

  // Warns of entries that match no tensor, because the matrix may belong to a different model.
  // Does not warn of entries for tensors that stay unchanged.
  void report_unused(const Recipes& recipes, std::vector<Finding>& findings) const {
    std::set<std::string_view> names;
    for (const TargetRecipe& recipe : recipes.targets) names.insert(recipe.target);
    Alike unused;
    for (const auto& [name, numbers] : matrix_->entries) {
      if (!names.contains(name)) unused.add(name);
    }
    if (unused.count > 0) {
      findings.push_back(finding(
          Severity::warning, {},
          fmt::format("{} of {} entries in '{}' have names that no tensor has: {}", unused.count,
                      matrix_->entries.size(), printable(matrix_->path, 400), others_of(unused))));
      findings.back().suggestion = "check that the importance matrix was measured with this model";
    }
    if (without_.count == 0) return;
    findings.push_back(finding(
        Severity::info, without_.first,
        fmt::format(
            "the importance matrix has no entry for {}; loadstone quantizes them without weights",
            others_of(without_))));
  }

  const ImportanceMatrix* matrix_;
  std::map<std::string_view, Alike> needing_;  // tensors that lack a required entry, by type name
  std::map<Sizes, Alike> misfits_;
  Alike without_;
};

// Not thread-safe.
class BlockChooser {
 public:
  BlockChooser(const ConvertOptions& options, const Catalog& catalog, const Metadata& metadata,
               std::vector<Finding>& findings)
      : options_(options),
        catalog_(catalog),
        chooser_(options.quantize, options.folder.config),
        model_(mix_model(metadata)),
        image_(model_ ? nullptr : image_model(metadata)),
        importances_(options.quantize.importance.get()),
        findings_(findings) {
    for (const QuantizeFormat& format : options.quantize.formats) {
      const std::string& name = format.quantization.encoding;
      if (!format.pattern.empty()) {
        static_cast<void>(asked_type(name));
        continue;
      }
      usual_ = name;
      mix_ = find_mix(name);
      if (!has_mixes()) mix_ = nullptr;
      if (!mix_ && find_mix(name) && !plain_type(name) && !find_written_encoding(name)) {
        refuse_mix(metadata);
      }
      if (!mix_) static_cast<void>(asked_type(name));
    }
  }

  Choices run(Recipes& recipes) {
    decodings_ = &recipes.decodings;
    std::vector<TargetRecipe*> chosen;
    std::vector<MixTensor> tensors;
    for (TargetRecipe& recipe : recipes.targets) {
      if (const auto why = reason(recipe)) {
        if (recipe.shape.rank() >= 2) choices_.plain.emplace(recipe.target, *why);
        widen(recipe);
        continue;
      }
      Chooser::Format* const format = chooser_.format_for(recipe.target);
      if (format != nullptr) ++format->made;
      const bool is_usual = format != nullptr && format->pattern == nullptr;
      if (format == nullptr || format->quantization->encoding == no_encoding) {
        choices_.plain.emplace(recipe.target, "no requested format applies");
        continue;
      }
      MixTensor& tensor = tensors.emplace_back(MixTensor{recipe.target, &recipe.shape, {}});
      if (!mix_ || !is_usual) tensor.asked = asked_type(format->quantization->encoding);
      chosen.push_back(&recipe);
    }
    const std::vector<Encoding> types = types_of(tensors);
    for (std::size_t i = 0; i < chosen.size(); ++i) apply(types[i], tensors[i].asked, *chosen[i]);
    report_fallbacks();
    report_idle_mix(tensors);
    report_left_alone(recipes);
    importances_.report(recipes, findings_);
    const auto is_made = [&](const std::string& name) {
      return choices_.quantize.contains(name) || choices_.numbers.contains(name) ||
             choices_.kept.contains(name);
    };
    chooser_.report(names_of(recipes), is_made, findings_);
    return std::move(choices_);
  }

  // Sets the metadata keys that declare the file's types.
  void describe(Metadata& metadata) const {
    const auto set = [&](const char* key, std::uint64_t number) {
      metadata.insert_or_assign(key, MetadataValue{.value = number, .type = MetadataType::u32});
    };
    if (const auto type = file_type_of(usual_)) set("general.file_type", *type);
    set("general.quantization_version", quantization_version);
    importances_.describe(metadata);
  }

 private:
  // Returns the reason to keep the tensor unchanged; nullopt if it gets a type.
  [[nodiscard]] std::optional<std::string_view> reason(const TargetRecipe& recipe) const {
    if (!has_mixes()) return chooser_.reason(recipe);
    if (recipe.shape.rank() < 2) return "not a matrix";
    if (const auto why = reason_of_value(recipe)) return why;
    if (chooser_.is_excluded(recipe.target)) return "excluded";
    if (chooser_.is_included(recipe.target)) return std::nullopt;
    if (image_ != nullptr) {
      if (is_image_mixed(*image_, recipe.target, recipe.shape)) return std::nullopt;
      return "image models keep it unchanged";
    }
    if (is_mixed(recipe.target, recipe.shape, model_->architecture)) return std::nullopt;
    return not_mixed;
  }

  // Widens vectors and norms to F32, because llama.cpp and ComfyUI-GGUF add and multiply them in
  // F32 only. ComfyUI-GGUF also accepts tensors that are F16 in the source.
  void widen(TargetRecipe& recipe) const {
    if (recipe.constant != nullptr) return;
    const bool is_bf16 = recipe.dtype == Dtype::bf16;
    if (image_ != nullptr && is_bf16 && is_wide(*image_, recipe.target, recipe.shape)) {
      recipe.dtype = Dtype::f32;
    }
    const bool is_vector = recipe.shape.rank() <= 1 || recipe.target.ends_with("_norm.weight");
    const bool is_narrow = is_bf16 || recipe.dtype == Dtype::f16;
    if (model_ && is_vector && is_narrow) recipe.dtype = Dtype::f32;
  }

  [[nodiscard]] bool has_mixes() const noexcept { return model_ || image_ != nullptr; }

  [[nodiscard]] std::vector<Encoding> types_of(const std::vector<MixTensor>& tensors) const {
    if (mix_ && image_ != nullptr) return image_types(*mix_, tensors);
    if (mix_) return mixed_types(*mix_, *model_, importances_.are_given(), tensors);
    std::vector<Encoding> types;
    for (const MixTensor& tensor : tensors) {
      types.push_back(fitting_type(*tensor.asked, *tensor.shape));
    }
    return types;
  }

  void apply(Encoding type, std::optional<Encoding> asked, TargetRecipe& recipe) {
    const Encoding wanted = asked.value_or(mix_ ? mix_->type : type);
    if (type != wanted && fitting_type(wanted, recipe.shape) != wanted) {
      fallbacks_[{recipe.shape.text(), wanted.name(), type.name()}].add(recipe.target);
    } else {
      met_.insert(wanted.name());
    }
    const auto source = source_blocks(catalog_, recipe);
    if (type.is_dtype()) {
      recipe.dtype = type.dtype();
      choices_.numbers.insert(recipe.target);
      return;
    }
    const bool may_keep = !options_.dtype && !options_.dequantize;
    if (may_keep && blocks_to_keep(catalog_, *decodings_, recipe) == type.block_format()) {
      choices_.plain.emplace(recipe.target, "it has this type already");
      choices_.kept.insert(recipe.target);
      return;
    }
    const WrittenEncoding* const encoding = encoding_of(type.block_format());
    if (encoding == nullptr) {
      refuse_option(
          "quantize",
          fmt::format("'{}' would get the type {}, which this version of loadstone does not write",
                      printable(recipe.target), type.name()),
          printable(usual_), "another format");
    }
    if (encoding->gguf_names.size() > 1 && !recipe.target.ends_with(".weight")) {
      choices_.plain.emplace(recipe.target, "readers expect a scale only for names with .weight");
      return;
    }
    // F32 keeps the exact values that the source's codes decode to.
    if (source) recipe.dtype = options_.dtype.value_or(Dtype::f32);
    if (decodes_to_f32(recipe)) recipe.dtype = Dtype::f32;
    Quantization quantization;
    quantization.encoding = encoding->name;
    quantization.importance = importances_.take(mix_, recipe, type.block_format());
    choices_.quantize.emplace(recipe.target, std::move(quantization));
  }

  // Returns true if all values come from codes: the converter's dtype would round them first.
  [[nodiscard]] bool decodes_to_f32(const TargetRecipe& recipe) const {
    return std::ranges::all_of(recipe.boxes, [&](const Box& box) {
      return box.decoding != no_decoding && decodings_->at(box.decoding).dtype == Dtype::f32;
    });
  }

  // Rejects a mix for a model that is neither a language model nor an image model.
  [[noreturn]] void refuse_mix(const Metadata& metadata) const {
    refuse_option("quantize",
                  "a mix of types needs the metadata and the names of a GGUF model, but " +
                      lacking_for_mix(catalog_, metadata),
                  printable(usual_));
  }

  // Warns if the rules of a mix apply to no tensor, because its names are not llama.cpp's.
  void report_idle_mix(const std::vector<MixTensor>& tensors) {
    const bool is_mix_only = mix_ != nullptr && model_ && !find_written_encoding(usual_);
    if (!is_mix_only || mix_->type.is_dtype() || tensors.empty()) return;
    const auto is_known = [](const MixTensor& each) { return is_in_mixes(each.name); };
    if (std::ranges::any_of(tensors, is_known)) return;
    findings_.push_back(
        {.severity = Severity::warning,
         .code = "convert.architecture",
         .target = std::string(tensors.front().name),
         .message = fmt::format(
             "the rules of the mix '{}' apply to no tensor, so all of them get the type {}: the "
             "rules need llama.cpp's names, and the first tensor is '{}'",
             printable(usual_), mix_->type.name(), printable(tensors.front().name)),
         .suggestion = own_converter});
  }

  // Warns if a large part of the model stays unquantized only because of names, such as fused
  // experts with the names of transformers.
  void report_left_alone(const Recipes& recipes) {
    std::uint64_t all = 0;
    std::uint64_t left = 0;
    Alike tensors;
    for (const TargetRecipe& recipe : recipes.targets) {
      const std::uint64_t elements = recipe.shape.numel().value_or(0);
      const std::uint64_t bytes = Encoding(recipe.dtype).byte_count(elements).value_or(0);
      all += bytes;
      const auto plain = choices_.plain.find(recipe.target);
      const bool is_left = plain != choices_.plain.end() && plain->second == not_mixed;
      if (!is_left || recipe.target.ends_with("weight")) continue;
      left += bytes;
      tensors.add(recipe.target);
    }
    if (left <= all / 10) return;
    findings_.push_back(
        {.severity = Severity::warning,
         .code = "convert.left_alone",
         .target = tensors.first,
         .message = fmt::format("{} of {} are not quantized, because llama.cpp quantizes only "
                                "tensors whose names end with 'weight': {}",
                                human_bytes(left), human_bytes(all), others_of(tensors)),
         .suggestion = "to quantize them too, pass --include (include= in Python)"});
  }

  void report_fallbacks() {
    for (const auto& [key, tensors] : fallbacks_) {
      const auto& [shape, wanted, type] = key;
      findings_.push_back(
          {.severity = met_.contains(wanted) ? Severity::info : Severity::warning,
           .code = "convert.fallback",
           .target = tensors.first,
           .message =
               fmt::format("{} {} gets the type {}: its rows do not consist of whole blocks of {}",
                           tensors.text(), shape, type, wanted),
           .found = std::string(type),
           .expected = std::string(wanted)});
    }
  }

  const ConvertOptions& options_;
  const Catalog& catalog_;
  Chooser chooser_;
  std::optional<MixModel> model_;  // null if this is not a language model with llama.cpp's names
  const ImageModel* image_;        // null if this is not an image or video model
  const Mix* mix_ = nullptr;
  std::string usual_;  // format of tensors that match no pattern; may be empty
  Importances importances_;
  Choices choices_;
  const std::vector<Decoding>* decodings_ = nullptr;  // valid only during run()
  std::vector<Finding>& findings_;
  // Tensors that get a fallback type, by shape, requested type and fallback type.
  std::map<std::tuple<std::string, std::string_view, std::string_view>, Alike> fallbacks_;
  std::set<std::string_view> met_;  // requested types that at least one tensor gets
};

}  // namespace

Choices choose_blocks(const ConvertOptions& options, const Catalog& catalog, Metadata& metadata,
                      Recipes& recipes, std::vector<Finding>& findings) {
  if (options.quantize.style) {
    refuse_option("style", "a GGUF file has a fixed style: omit it",
                  std::string(name(*options.quantize.style)));
  }
  BlockChooser chooser(options, catalog, metadata, findings);
  Choices choices = chooser.run(recipes);
  chooser.describe(metadata);
  return choices;
}

void erase_importance(const Metadata& given, Metadata& metadata) {
  std::erase_if(metadata, [&](const auto& each) {
    return each.first.starts_with("quantize.imatrix.") && !given.contains(each.first);
  });
}

}  // namespace loadstone

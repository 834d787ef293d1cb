// Compares loads and conversions with a copier that moves one element at a time. The inputs are
// tensors of every dtype and of ranks 0 to 9, views with arbitrary strides, chains of operations,
// boxes cut at random, casts, and FP8 weights with scales, with arbitrary staging, chunks and
// threads. The bytes must be equal. Quantized targets must have the same bytes for any staging and
// threads.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "fuzz/known_input.h"
#include "fuzz/require.h"
#include "loadstone/convert.h"
#include "loadstone/error.h"
#include "loadstone/execute.h"
#include "loadstone/plan.h"
#include "loadstone/recipe_builder.h"
#include "support/files.h"

namespace loadstone::fuzz {

namespace {

constexpr std::uint64_t elements_max = 1 << 13;

// Minimum staging for any plan: one element and its scales.
constexpr std::uint64_t staging_bytes_least = 4096;

using Bytes = std::vector<std::uint8_t>;

struct Expected {
  NaiveTensor value;
  bool is_cast = false;  // after a cast, NaN payloads may differ
};

// Not thread-safe.
class Generator {
 public:
  Generator(Input& input, const KnownCheckpoint& known)
      : input_(input), sources_(known.sources), weights_(known.weights) {}

  void make_targets(const std::shared_ptr<const Catalog>& catalog) {
    RecipeBuilder builder(catalog);
    for (std::uint64_t count = 1 + input_.below(4); count > 0; --count) {
      if (input_.chance(60)) add_chain(builder, "t" + std::to_string(count));
    }
    recipes = builder.finish();
    for (std::uint64_t count = input_.below(3); count > 0; --count) {
      add_boxes(*catalog, "b" + std::to_string(count));
    }
    // Drop targets that do not fill whole bytes: 4-bit dtypes with an odd number of elements.
    std::erase_if(recipes.targets, [](const TargetRecipe& target) {
      return !Encoding(target.dtype).byte_count(target.shape.numel().value());
    });
    for (const TargetRecipe& target : recipes.targets) add_target(target);
  }

  [[nodiscard]] Input& input() noexcept { return input_; }

  Recipes recipes;
  Skeleton skeleton;
  std::map<std::string, Expected> expected;

 private:
  // Applies an operation through the builder and to the expected elements. An operation that the
  // builder rejects leaves both unchanged.
  void change(RecipeBuilder& builder, RecipeBuilder::Value& value, Expected& known) {
    const NaiveTensor before = known.value;
    const std::size_t rank = before.shape.rank();
    const std::size_t dim = rank == 0 ? 0 : input_.below(rank);
    const auto signed_dim =
        static_cast<std::int64_t>(dim) - (input_.chance(30) ? static_cast<std::int64_t>(rank) : 0);
    switch (input_.below(7)) {
      case 0: {
        if (rank < 2) return;
        std::vector<std::size_t> order(rank);
        std::vector<std::int64_t> dims;
        for (std::size_t d = 0; d < rank; ++d) order[d] = d;
        for (std::size_t d = rank; d > 1; --d) std::swap(order[d - 1], order[input_.below(d)]);
        for (const std::size_t d : order) dims.push_back(static_cast<std::int64_t>(d));
        value = builder.permute(value, dims);
        known.value = naive_permute(before, order);
        return;
      }
      case 1: {
        if (rank == 0 || before.shape[dim] == 0) return;
        const std::uint64_t start = input_.below(before.shape[dim]);
        const std::uint64_t step = 1 + input_.below(3);
        const std::uint64_t size = 1 + input_.below((before.shape[dim] - start - 1) / step + 1);
        value = builder.slice(value, signed_dim, start, size, step);
        known.value = naive_slice(before, dim, start, size, step);
        return;
      }
      case 2: {
        if (before.numel() * 2 > 4 * elements_max || before.shape.rank() >= 9) return;
        value = builder.stack({value, value}, static_cast<std::int64_t>(dim));
        known.value = naive_stack({before, before}, dim);
        return;
      }
      case 3: {
        if (rank == 0 || before.numel() * 3 > 4 * elements_max) return;
        value = builder.concat({value, value, value}, signed_dim);
        known.value = naive_concat({before, before, before}, dim);
        return;
      }
      case 4: {
        static constexpr auto targets =
            std::to_array<Dtype>({Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::f64});
        const Dtype dtype = input_.pick(targets);
        if (!naive_can_cast(before.dtype, dtype) || known.is_cast) return;
        value = builder.cast(value, dtype);
        known = {naive_cast(before, dtype), true};
        return;
      }
      case 5: {
        const Shape flat = {before.numel()};
        value = builder.reshape(value, flat);
        known.value.shape = flat;
        return;
      }
      default: {
        if (rank == 0 || before.shape[dim] % 2 != 0 || rank >= 9) return;
        auto extents = before.shape.extents();
        extents[dim] /= 2;
        extents.insert(extents.begin() + static_cast<std::ptrdiff_t>(dim), 2);
        value = builder.reshape(value, Shape(extents));
        known.value.shape = Shape(extents);
      }
    }
  }

  void add_chain(RecipeBuilder& builder, const std::string& name) {
    try {
      const KnownSource& source = input_.pick(sources_);
      Expected known = {source.value};
      RecipeBuilder::Value value = 0;
      if (!weights_.empty() && input_.chance(30)) {
        known = decoded(builder, value);
      } else {
        value = builder.source(source.name);
      }
      for (std::uint64_t steps = input_.below(7); steps > 0; --steps) {
        try {
          change(builder, value, known);
        } catch (const Error& error) {
          require(error.code() == "plan.recipe");
        }
      }
      builder.add(name, value);
      expected[name] = std::move(known);
    } catch (const Error& error) {
      require(error.code() == "plan.recipe");
    }
  }

  Expected decoded(RecipeBuilder& builder, RecipeBuilder::Value& value) {
    const auto named = [&](const std::string& name) -> const NaiveTensor& {
      for (const KnownSource& source : sources_) {
        if (source.name == name) return source.value;
      }
      std::abort();
    };
    const NaiveTensor& weights = named(weights_);
    const NaiveTensor& scales = named(weights_ + "_scales");
    static constexpr auto dtypes = std::to_array<Dtype>({Dtype::f32, Dtype::bf16, Dtype::f16});
    const Dtype dtype = input_.pick(dtypes);
    value = builder.decode("fp8_block",
                           {builder.source(weights_), builder.source(weights_ + "_scales")},
                           weights.shape, dtype);
    NaiveTensor product = {weights.shape, Dtype::f32, {}};
    const std::uint64_t columns = weights.shape[1];
    const std::uint64_t block_rows = weights.shape[0] / scales.shape[0];
    const std::uint64_t block_columns = columns / scales.shape[1];
    for (std::uint64_t i = 0; i < weights.numel(); ++i) {
      const std::uint64_t scale =
          i / columns / block_rows * scales.shape[1] + i % columns / block_columns;
      const float number =
          static_cast<float>(naive_number(weights.bytes.data() + i, weights.dtype)) *
          static_cast<float>(naive_number(scales.bytes.data() + 4 * scale, scales.dtype));
      const auto* begin = reinterpret_cast<const std::uint8_t*>(&number);
      product.bytes.insert(product.bytes.end(), begin, begin + sizeof number);
    }
    return {naive_cast(product, dtype), true};
  }

  // Cuts a target into parts, and copies each part from a source at any offset with any strides.
  void add_boxes(const Catalog& catalog, const std::string& name) {
    const KnownSource& source = input_.pick(sources_);
    if (source.range.numel() == 0) return;
    TargetRecipe target = {.target = name,
                           .shape = Shape(random_extents(input_, 5)),
                           .dtype = source.value.dtype,
                           .boxes = {},
                           .constant = {}};
    if (target.shape.numel() == 0u) return;
    NaiveTensor value = {target.shape, target.dtype, {}};
    value.bytes.assign(value.numel() * value.width(), 0);
    Box whole = {
        .source = *catalog.find(source.name), .source_offset = 0, .target_offset = 0, .dims = {}};
    std::uint64_t stride = 1;
    for (std::size_t d = target.shape.rank(); d-- > 0;) {
      whole.dims.insert(whole.dims.begin(), {target.shape[d], 0, stride});
      stride *= target.shape[d];
    }
    for (Box& box : cut(whole)) {
      std::uint64_t room = source.range.numel() - 1;
      box.source_offset = input_.below(std::min<std::uint64_t>(room + 1, 64));
      room -= box.source_offset;
      for (std::size_t d = box.dims.size(); d-- > 0;) {
        BoxDim& dim = box.dims[d];
        if (dim.extent < 2) continue;
        const std::uint64_t stride_max = room / (dim.extent - 1);
        dim.source_stride = input_.chance(60)
                                ? std::min(dim.target_stride, stride_max)
                                : input_.below(std::min<std::uint64_t>(stride_max, 99) + 1);
        room -= dim.source_stride * (dim.extent - 1);
      }
      naive_copy(box, source.range, value);
      target.boxes.push_back(box);
    }
    recipes.targets.push_back(std::move(target));
    expected[name] = {std::move(value)};
  }

  std::vector<Box> cut(const Box& whole) {
    std::vector<Box> boxes = {whole};
    for (std::uint64_t cuts = whole.dims.empty() ? 0 : input_.below(5); cuts > 0; --cuts) {
      Box& box = boxes[input_.below(boxes.size())];
      const std::size_t dim = input_.below(box.dims.size());
      if (box.dims[dim].extent < 2) continue;
      const std::uint64_t first = 1 + input_.below(box.dims[dim].extent - 1);
      Box rest = box;
      rest.target_offset += first * box.dims[dim].target_stride;
      rest.dims[dim].extent -= first;
      box.dims[dim].extent = first;
      boxes.push_back(std::move(rest));
    }
    return boxes;
  }

  // Keeps the target's dtype, or picks a new one if the target has not been cast yet.
  void add_target(const TargetRecipe& recipe) {
    Expected& known = expected.at(recipe.target);
    Dtype dtype = recipe.dtype;
    if (!known.is_cast && kind(dtype) == DtypeKind::floating && input_.chance(30)) {
      static constexpr auto targets =
          std::to_array<Dtype>({Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::f64});
      const Dtype other = input_.pick(targets);
      if (naive_can_cast(dtype, other)) {
        known.is_cast = other != dtype;
        known.value = naive_cast(known.value, other);
        dtype = other;
      }
    }
    skeleton.targets.push_back({.name = recipe.target,
                                .shape = recipe.shape,
                                .dtype = dtype,
                                .kind = TargetKind::parameter,
                                .tie_of = {},
                                .has_value = false});
  }

  Input& input_;
  const std::vector<KnownSource>& sources_;
  const std::string& weights_;
};

// Returns all bytes of a target, in order.
Bytes bytes_of(const Destination& destination) {
  Bytes bytes;
  const auto add = [&](std::span<const std::byte> part) {
    const auto* begin = reinterpret_cast<const std::uint8_t*>(part.data());
    bytes.insert(bytes.end(), begin, begin + part.size());
  };
  if (destination.data != nullptr) add({destination.data, destination.byte_count});
  for (const auto part : destination.parts) add(part);
  return bytes;
}

bool equal(const Expected& known, const Bytes& found) {
  const Bytes bytes = packed(known.value);
  return known.is_cast ? same_numbers(found, bytes, known.value.dtype) : found == bytes;
}

ExecuteOptions options_of(Input& input, test::MemoryStorage& storage) {
  return {.threads = static_cast<unsigned>(1 + input.below(4)),
          .chunk_bytes = std::uint64_t{1} << input.below(23),
          .storage = &storage};
}

// Loads into memory that ends exactly at the targets' ends, so a sanitizer detects any overrun.
void load_into_exact_memory(const Generator& generator, const Plan& plan,
                            const ExecuteOptions& options) {
  std::vector<std::vector<std::byte>> memory;
  std::vector<Destination> destinations(plan.targets.size());
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    const PlannedTarget& target = plan.targets[i];
    if (target.delivery != Delivery::memory || target.quantization) continue;
    auto& bytes = memory.emplace_back(target.byte_count() + 1);
    destinations[i] = {.data = bytes.data() + 1,
                       .byte_count = target.byte_count(),
                       .dtype = target.dtype,
                       .parts = {}};
  }
  execute(plan, destinations, options);
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    if (destinations[i].data == nullptr) continue;
    require(equal(generator.expected.at(plan.targets[i].name), bytes_of(destinations[i])));
  }
}

void load(Generator& generator, test::MemoryStorage& storage, const Plan& plan) {
  const HostMemory first(plan);
  const HostMemory second(plan);
  const Report report = execute(plan, first.destinations(), options_of(generator.input(), storage));
  std::uint64_t held = 0;
  for (const PlannedTarget& target : plan.targets) {
    const bool is_here = target.delivery == Delivery::memory && target.device == "cpu";
    if (is_here) held += target.byte_count();
  }
  require(held <= plan.peak_bytes.at("cpu"));
  // Quantizing needs at least one window of staging, which the plan's peak includes.
  const std::uint64_t promised = plan.peak_bytes.at("cpu") - held;
  require(report.staging_bytes_peak <=
          std::max({plan.staging_bytes_max, promised, staging_bytes_least}));
  const Plan again = plan_from_json(to_json(plan), {.storage = &storage}, {.root = "/m"});
  execute(again, second.destinations(), options_of(generator.input(), storage));
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    const Bytes found = bytes_of(first.destinations()[i]);
    require(found == bytes_of(second.destinations()[i]));
    if (plan.targets[i].delivery != Delivery::memory || plan.targets[i].quantization) continue;
    require(equal(generator.expected.at(plan.targets[i].name), found));
    require(report.provenance[i].bytes_written == found.size());
  }
  load_into_exact_memory(generator, plan, options_of(generator.input(), storage));
}

void convert_with(const Generator& generator, const std::shared_ptr<const Catalog>& catalog,
                  Input& input, test::MemoryStorage& storage) {
  static const test::TemporaryFolder folder;
  ConvertOptions options;
  options.recipes = generator.recipes;
  options.unexpected = UnexpectedPolicy::ignore;
  options.staging_bytes_max = std::uint64_t{1} << input.below(24);
  options.threads = static_cast<unsigned>(1 + input.below(3));
  const Conversion conversion = make_conversion(catalog, options);
  if (!conversion.ok()) return;  // safetensors files cannot contain complex128
  const std::string target = folder / "target.safetensors";
  convert(conversion, target, {.storage = &storage});
  const auto made = open_checkpoint(target);
  const std::string file = test::read_file(target);
  for (const TargetRecipe& recipe : generator.recipes.targets) {
    const auto index = made->find(recipe.target);
    require(index.has_value());
    const TensorInfo& tensor = made->tensors()[*index];
    require(tensor.shape == recipe.shape && tensor.encoding == Encoding(recipe.dtype));
    const Expected& known = generator.expected.at(recipe.target);
    if (known.value.dtype != recipe.dtype) continue;  // only the skeleton casts this target
    const auto bytes = std::span(file).subspan(tensor.offset_begin, tensor.byte_count());
    require(equal(known, Bytes(bytes.begin(), bytes.end())));
  }
}

void run(Input& input) {
  test::MemoryStorage storage;
  const bool converts = input.chance(30);
  const KnownCheckpoint known = add_known_checkpoint(input, storage);
  const auto catalog = open_checkpoint(known.paths, {.storage = &storage});
  Generator generator(input, known);
  generator.make_targets(catalog);
  PlanOptions options;
  options.recipes = recipes_from_json(*catalog, to_json(generator.recipes, *catalog));
  options.unexpected = UnexpectedPolicy::ignore;
  options.staging_bytes_max = std::uint64_t{8} << input.below(18);
  options.mmap = input.chance(10);
  static constexpr auto encodings = std::to_array<const char*>(
      {"nf4", "fp8", "nvfp4", "int8", "fp8-block", "mxfp8", "int8-channel", "fp4"});
  for (const Target& target : generator.skeleton.targets) {
    if (!input.chance(10)) continue;
    options.quantize[target.name] = {.encoding = input.pick(encodings),
                                     .dialect = {},
                                     .block_size = 64,
                                     .nested = input.chance(30),
                                     .nested_offset = {},
                                     .group = {}};
  }
  const Plan plan = make_plan(catalog, generator.skeleton, options);
  if (plan.ok()) load(generator, storage, plan);
  if (converts) convert_with(generator, catalog, input, storage);
}

}  // namespace

}  // namespace loadstone::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // Every generated plan can be loaded, except that a load may reject values to quantize.
  return loadstone::fuzz::run_input({data, size}, loadstone::fuzz::run, [](const auto& error) {
    return error.code().starts_with("q.") || error.code().starts_with("plan.");
  });
}

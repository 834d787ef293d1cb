// Merges joined checkpoints: values and products in any layout, dtype and rectangle. Sums must
// equal a loop over single elements, and all other merges must give the same bytes for any staging,
// chunks and threads. A plan must be the same after it is saved and read, and a changed plan must
// be accepted or rejected with a known code.
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "fuzz/input.h"
#include "fuzz/mutate.h"
#include "fuzz/naive.h"
#include "fuzz/require.h"
#include "loadstone/execute.h"
#include "loadstone/merge.h"
#include "loadstone/plan.h"
#include "support/files.h"
#include "support/memory_storage.h"

namespace loadstone::fuzz {

namespace {

constexpr auto float_dtypes =
    std::to_array<Dtype>({Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::f64});
// A changed plan may request more than a test can allocate.
constexpr std::uint64_t bytes_max = 64u << 20;

using Numbers = std::vector<float>;

// A matrix that is stored in a file.
struct Matrix {
  std::uint64_t rows = 0;
  std::uint64_t columns = 0;
  Numbers numbers;
  bool is_transposed = false;  // true if the file stores the transpose

  [[nodiscard]] float at(std::uint64_t row, std::uint64_t column) const {
    return numbers[row * columns + column];
  }
};

// Not thread-safe.
class Checkpoint {
 public:
  // Adds a matrix with values around 1 that use all significand bits of their dtype.
  Matrix add(Input& input, const std::string& name, std::uint64_t rows, std::uint64_t columns) {
    Matrix matrix = {rows, columns, Numbers(rows * columns), input.chance(30)};
    std::uint64_t state = input.number();
    NaiveTensor tensor = {
        {matrix.is_transposed ? columns : rows, matrix.is_transposed ? rows : columns},
        Dtype::f32,
        std::vector<std::uint8_t>(rows * columns * sizeof(float))};
    for (std::uint64_t i = 0; i < rows * columns; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const float number = static_cast<float>(static_cast<std::int32_t>(state >> 32)) * 0x1p-30F;
      std::memcpy(tensor.bytes.data() + i * sizeof number, &number, sizeof number);
    }
    tensor = naive_cast(tensor, input.pick(float_dtypes));
    for (std::uint64_t i = 0; i < rows * columns; ++i) {
      const std::uint64_t at = matrix.is_transposed ? i % rows * columns + i / rows : i;
      matrix.numbers[at] =
          static_cast<float>(naive_number(tensor.bytes.data() + i * tensor.width(), tensor.dtype));
    }
    tensors_.push_back({name,
                        std::string(loadstone::name(tensor.dtype)),
                        tensor.shape.extents(),
                        {tensor.bytes.begin(), tensor.bytes.end()}});
    return matrix;
  }

  [[nodiscard]] std::string bytes() const { return test::safetensors_bytes(tensors_); }

 private:
  std::vector<test::FileTensor> tensors_;
};

// A merge, with the expected sums if it is a sum.
struct Known {
  Merge merge;
  std::shared_ptr<const Catalog> catalog;
  std::vector<Box> boxes;
  std::vector<std::string> roots;
  std::uint64_t rows = 0;
  std::uint64_t columns = 0;
  Numbers sums;
  bool has_sums = true;
};

std::vector<Box> boxes_of(const Catalog& catalog, const std::string& name, std::uint32_t checkpoint,
                          const Matrix& matrix) {
  const std::uint32_t source = catalog.find(name, checkpoint).value();
  Box box = {.source = source, .dims = {}};
  if (matrix.is_transposed) {
    box.dims = {{matrix.rows, 1, matrix.columns}, {matrix.columns, matrix.rows, 1}};
  } else {
    box.dims = {{matrix.rows * matrix.columns, 1, 1}};
  }
  return {box};
}

float factor_of(Input& input) {
  static constexpr auto factors = std::to_array<float>({1, 0.5F, -0.3F, 2, 0, 0.1F});
  return input.pick(factors);
}

void choose_form(Input& input, std::size_t values, Known& known) {
  Merge& merge = known.merge;
  merge.factor = factor_of(input);
  if (values == 1 && input.chance(30)) merge.op = MergeOp::slerp;
  if (merge.op == MergeOp::sum && values > 0 && input.chance(50)) {
    static constexpr auto prunings =
        std::to_array<Pruning>({Pruning::none, Pruning::random, Pruning::smallest});
    merge.op = MergeOp::differences;
    merge.pruning = input.pick(prunings);
    merge.density = static_cast<double>(1 + input.below(10)) / 10;
    merge.seed = input.number();
    merge.elects_signs = input.chance(50);
    merge.is_mean = input.chance(50);
  }
  known.has_sums = merge.op == MergeOp::sum;
}

// Two factors, whose product the merge adds to the target.
struct Product {
  Matrix left;
  Matrix right;
};

void add_to_sums(const LowRank& place, const Product& product, float factor, Known& known) {
  for (std::uint64_t i = 0; i < place.rows; ++i) {
    for (std::uint64_t j = 0; j < place.columns; ++j) {
      float sum = product.left.at(i, 0) * product.right.at(0, j);
      for (std::uint64_t k = 1; k < place.rank; ++k) {
        sum = sum + product.left.at(i, k) * product.right.at(k, j);
      }
      float& number = known.sums[(place.row_begin + i) * known.columns + place.column_begin + j];
      number = number + factor * sum;
    }
  }
}

LowRank place_of(Input& input, const Known& known) {
  LowRank place;
  place.row_begin = input.below(known.rows);
  place.rows = 1 + input.below(known.rows - place.row_begin);
  place.column_begin = input.below(known.columns);
  place.columns = 1 + input.below(known.columns - place.column_begin);
  place.rank = 1 + input.below(20);
  return place;
}

Known known_merge(Input& input, test::MemoryStorage& storage) {
  Known known;
  known.rows = 1 + input.below(40);
  known.columns = 1 + input.below(300);
  const std::uint64_t values = input.below(3);
  const std::uint64_t products = input.below(3);
  std::vector<Checkpoint> files(1 + values + products);
  std::vector<Matrix> added;
  std::vector<LowRank> places;
  std::vector<Product> matrices;
  for (std::uint64_t i = 0; i <= values; ++i) {
    added.push_back(files[i].add(input, "w", known.rows, known.columns));
  }
  std::vector<Matrix> magnitudes;
  for (std::uint64_t i = 0; i < products; ++i) {
    const LowRank& place = places.emplace_back(place_of(input, known));
    Checkpoint& file = files[1 + values + i];
    Product& product = matrices.emplace_back();
    product.left = file.add(input, "left", place.rows, place.rank);
    product.right = file.add(input, "right", place.rank, place.columns);
    magnitudes.push_back(file.add(input, "magnitudes", place.rows, 1));
  }
  std::vector<std::shared_ptr<const Catalog>> opened;
  for (std::size_t i = 0; i < files.size(); ++i) {
    const std::string path = "/m" + std::to_string(i) + "/x.safetensors";
    storage.add_file(path, files[i].bytes());
    opened.push_back(open_checkpoint(path, {.storage = &storage}));
    known.roots.push_back(path);
  }
  known.catalog = std::make_shared<const Catalog>(std::move(opened));
  choose_form(input, values, known);
  known.boxes = boxes_of(*known.catalog, "w", 0, added[0]);
  known.sums = added[0].numbers;
  for (float& number : known.sums) number = known.merge.factor * number;
  for (std::uint32_t i = 1; i <= values; ++i) {
    const float factor = factor_of(input);
    known.merge.terms.push_back(
        {.factor = factor, .boxes = boxes_of(*known.catalog, "w", i, added[i]), .low_rank = {}});
    for (std::size_t e = 0; e < known.sums.size(); ++e) {
      known.sums[e] = known.sums[e] + factor * added[i].numbers[e];
    }
  }
  for (std::uint32_t i = 0; i < products; ++i) {
    const auto checkpoint = static_cast<std::uint32_t>(1 + values + i);
    LowRank& place = places[i];
    place.left = boxes_of(*known.catalog, "left", checkpoint, matrices[i].left);
    place.right = boxes_of(*known.catalog, "right", checkpoint, matrices[i].right);
    if (input.chance(20)) {
      place.magnitudes = boxes_of(*known.catalog, "magnitudes", checkpoint, magnitudes[i]);
      known.has_sums = false;
    }
    const float factor = factor_of(input);
    add_to_sums(place, matrices[i], factor, known);
    known.merge.terms.push_back({.factor = factor, .boxes = {}, .low_rank = place});
    known.merge.row_elements = known.columns;
  }
  return known;
}

std::vector<std::uint8_t> loaded(const Plan& plan, Input& input, test::MemoryStorage& storage) {
  const HostMemory memory(plan);
  const Report report = execute(plan, memory.destinations(),
                                {.threads = static_cast<unsigned>(1 + input.below(4)),
                                 .chunk_bytes = std::uint64_t{1} << input.below(23),
                                 .storage = &storage});
  const Destination& target = memory.destinations()[0];
  const auto* const begin = reinterpret_cast<const std::uint8_t*>(target.data);
  require(report.staging_bytes_peak <= plan.peak_bytes.at("cpu") - target.byte_count);
  return {begin, begin + target.byte_count};
}

// Reads and executes a changed plan, or expects an error with a known code.
void read_changed(const Plan& plan, const PlanPaths& paths, Input& input,
                  test::MemoryStorage& storage) {
  try {
    const std::string text = mutated_json(to_json(plan), input, 3);
    const Plan changed = plan_from_json(text, {.storage = &storage}, paths);
    (void)to_table(changed);
    for (const auto& [device, bytes] : changed.peak_bytes) {
      if (bytes > bytes_max) return;
    }
    require_ok(changed);
    const HostMemory memory(changed);
    (void)execute(changed, memory.destinations(), {.storage = &storage});
  } catch (const Error& error) {
    require_allowed(error, error.code() != "internal" && find_code(error.code()) != nullptr);
  }
}

void run(Input& input) {
  test::MemoryStorage storage;
  const Known known = known_merge(input, storage);
  if (known.merge.terms.empty() && known.merge.factor == 1) return;
  const Dtype dtype = input.pick(float_dtypes);
  const Shape shape = {known.rows, known.columns};
  PlanOptions options;
  options.recipes.targets.push_back({.target = "w",
                                     .shape = shape,
                                     .dtype = Dtype::f32,
                                     .boxes = known.boxes,
                                     .constant = {},
                                     .merge = std::make_shared<const Merge>(known.merge)});
  options.unexpected = UnexpectedPolicy::ignore;
  options.staging_bytes_max = std::uint64_t{8} << input.below(18);
  Skeleton skeleton;
  skeleton.targets.push_back({.name = "w",
                              .shape = shape,
                              .dtype = dtype,
                              .kind = TargetKind::parameter,
                              .tie_of = {},
                              .has_value = false});
  const Plan plan = make_plan(known.catalog, skeleton, options);
  require(plan.ok());
  const auto first = loaded(plan, input, storage);
  if (known.has_sums) {
    NaiveTensor sums = {shape, Dtype::f32, std::vector<std::uint8_t>(known.sums.size() * 4)};
    std::memcpy(sums.bytes.data(), known.sums.data(), sums.bytes.size());
    require(same_numbers(first, naive_cast(sums, dtype).bytes, dtype));
  }
  const PlanPaths paths = {.root = known.roots.front(),
                           .other_roots = {known.roots.begin() + 1, known.roots.end()}};
  const Plan again = plan_from_json(to_json(plan), {.storage = &storage}, paths);
  require(to_json(again) == to_json(plan));
  require(loaded(again, input, storage) == first);
  options.staging_bytes_max = std::uint64_t{8} << input.below(18);
  require(loaded(make_plan(known.catalog, skeleton, options), input, storage) == first);
  read_changed(plan, paths, input, storage);
}

}  // namespace

}  // namespace loadstone::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return loadstone::fuzz::run_input({data, size}, loadstone::fuzz::run,
                                    [](const auto&) { return false; });
}

#include "fuzz/known_input.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "fuzz/checkpoint_input.h"
#include "support/files.h"
#include "support/torch_file.h"

namespace loadstone::fuzz {

namespace {

constexpr std::uint64_t elements_max = 1 << 13;

using Bytes = std::vector<std::uint8_t>;

// Writes one checkpoint. Not thread-safe.
class Writer {
 public:
  Writer(Input& input, test::MemoryStorage& storage) : input_(input), storage_(storage) {}

  KnownCheckpoint run() {
    const bool is_torch = input_.chance(30);
    for (std::uint64_t files = 1 + input_.below(2); files > 0; --files) {
      made_.paths.push_back("/m/" + std::to_string(files) + (is_torch ? ".pt" : ".safetensors"));
      storage_.add_file(made_.paths.back(), is_torch ? torch_file() : safetensors_file());
    }
    return std::move(made_);
  }

 private:
  Bytes bytes(std::uint64_t count) {
    const std::string text = values(input_, count);
    return {text.begin(), text.end()};
  }

  std::string safetensors_file() {
    static constexpr auto dtypes = std::to_array<Dtype>(
        {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::f64, Dtype::u8, Dtype::i64, Dtype::i32,
         Dtype::i16, Dtype::i8, Dtype::c64, Dtype::f8_e4m3, Dtype::f8_e5m2, Dtype::f4,
         Dtype::f6_e2m3, Dtype::u16, Dtype::u64, Dtype::boolean, Dtype::f8_e8m0});
    std::vector<test::FileTensor> tensors;
    const auto add = [&](std::string name, Dtype dtype, std::vector<std::uint64_t> shape) {
      auto size = Encoding(dtype).byte_count(Shape(shape).numel().value());
      if (!size) {  // the tensor does not fill whole bytes
        shape.push_back(8);
        size = Encoding(dtype).byte_count(Shape(shape).numel().value());
      }
      const Bytes data = bytes(*size);
      tensors.push_back({name, std::string(loadstone::name(dtype)), shape,
                         std::string(data.begin(), data.end())});
      const NaiveTensor value = unpacked(data, Shape(shape), dtype);
      made_.sources.push_back({std::move(name), value, value});
    };
    for (std::uint64_t count = 1 + input_.below(4); count > 0; --count) {
      const Dtype dtype = input_.pick(dtypes);
      add("s" + std::to_string(made_.sources.size()), dtype, random_extents(input_, 9));
    }
    if (made_.weights.empty() && input_.chance(30)) {
      const std::uint64_t rows = 1 + input_.below(9);
      const std::uint64_t columns = 1 + input_.below(9);
      made_.weights = "w" + std::to_string(made_.sources.size());
      add(made_.weights, Dtype::f8_e4m3,
          {rows * (1 + input_.below(20)), columns * (1 + input_.below(20))});
      add(made_.weights + "_scales", Dtype::f32, {rows, columns});
    }
    return test::safetensors_bytes(tensors);
  }

  struct TorchType {
    const char* name;
    Dtype dtype;
  };

  std::string torch_file() {
    static constexpr auto types = std::to_array<TorchType>({{"ComplexDoubleStorage", Dtype::c128},
                                                            {"FloatStorage", Dtype::f32},
                                                            {"BFloat16Storage", Dtype::bf16},
                                                            {"DoubleStorage", Dtype::f64},
                                                            {"ComplexFloatStorage", Dtype::c64},
                                                            {"ByteStorage", Dtype::u8},
                                                            {"HalfStorage", Dtype::f16},
                                                            {"LongStorage", Dtype::i64},
                                                            {"ShortStorage", Dtype::i16},
                                                            {"IntStorage", Dtype::i32},
                                                            {"CharStorage", Dtype::i8},
                                                            {"BoolStorage", Dtype::boolean}});
    std::vector<test::ZipEntry> entries;
    std::vector<std::string> items;
    for (std::uint64_t count = 1 + input_.below(3); count > 0; --count) {
      const TorchType& type = input_.pick(types);
      add_view(type, std::to_string(count), entries, items);
    }
    entries.insert(entries.begin(),
                   {{"archive/data.pkl", test::pickle::whole(test::pickle::dict(items))},
                    {"archive/byteorder", "little"}});
    return test::zip_bytes(entries);
  }

  // Adds a storage and a view of it, whose dims are in any order, some expanded, some with steps.
  void add_view(const TorchType& type, const std::string& key, std::vector<test::ZipEntry>& entries,
                std::vector<std::string>& items) {
    const std::vector<std::uint64_t> shape = random_extents(input_, 6);
    std::vector<std::size_t> order(shape.size());
    for (std::size_t d = 0; d < order.size(); ++d) order[d] = order.size() - 1 - d;
    if (input_.chance(60) && !order.empty()) std::swap(order[0], order[input_.below(order.size())]);
    test::pickle::View view = {.type = type.name,
                               .key = key,
                               .numel = 0,
                               .offset = static_cast<std::int32_t>(input_.below(4)),
                               .size = {},
                               .stride = {}};
    Box box;  // copies the view from the range to the value
    box.dims.resize(shape.size());
    std::uint64_t stride = 1;
    for (const std::size_t d : order) {
      const std::uint64_t step = input_.chance(20) ? 1 + input_.below(3) : 1;
      const bool is_expanded = input_.chance(10);
      box.dims[d].source_stride = is_expanded ? 0 : stride * step;
      if (!is_expanded) stride *= std::max<std::uint64_t>(1, shape[d]) * step;
    }
    std::uint64_t target_stride = 1;
    std::uint64_t last = 0;
    for (std::size_t d = shape.size(); d-- > 0;) {
      box.dims[d].extent = shape[d];
      box.dims[d].target_stride = target_stride;
      target_stride *= shape[d];
      if (shape[d] > 0) last += (shape[d] - 1) * box.dims[d].source_stride;
    }
    for (std::size_t d = 0; d < shape.size(); ++d) {
      view.size.push_back(static_cast<std::int32_t>(shape[d]));
      view.stride.push_back(static_cast<std::int32_t>(box.dims[d].source_stride));
    }
    const std::uint64_t range = target_stride == 0 ? 0 : last + 1;
    view.numel = view.offset + static_cast<std::int32_t>(range + input_.below(3));
    const std::size_t width = bits(type.dtype) / 8;
    const Bytes storage = bytes(static_cast<std::size_t>(view.numel) * width);
    entries.push_back({"archive/data/" + key, std::string(storage.begin(), storage.end())});
    items.push_back(test::pickle::text("s" + std::to_string(made_.sources.size())));
    items.push_back(test::pickle::tensor(view));
    const auto begin = storage.begin() + view.offset * static_cast<std::ptrdiff_t>(width);
    KnownSource source = {
        .name = "s" + std::to_string(made_.sources.size()),
        .value = {Shape(shape), type.dtype, Bytes(target_stride * width)},
        .range = {Shape({range}), type.dtype,
                  Bytes(begin, begin + static_cast<std::ptrdiff_t>(range * width))}};
    naive_copy(box, source.range, source.value);
    made_.sources.push_back(std::move(source));
  }

  Input& input_;
  test::MemoryStorage& storage_;
  KnownCheckpoint made_;
};

}  // namespace

KnownCheckpoint add_known_checkpoint(Input& input, test::MemoryStorage& storage) {
  return Writer(input, storage).run();
}

std::vector<std::uint64_t> random_extents(Input& input, std::size_t rank_max) {
  static constexpr auto sizes = std::to_array<std::uint64_t>({2, 1, 3, 4, 5, 8, 17, 33, 64});
  std::vector<std::uint64_t> extents(input.below(rank_max + 1));
  std::uint64_t elements = 1;
  for (auto& extent : extents) {
    extent = input.pick(sizes);
    if (elements * extent > elements_max) extent = 1;
    elements *= extent;
  }
  if (extents.size() == 1 && input.chance(20)) extents[0] = 1 + input.number() % 70000;
  if (!extents.empty() && input.chance(3)) extents[input.below(extents.size())] = 0;
  return extents;
}

}  // namespace loadstone::fuzz

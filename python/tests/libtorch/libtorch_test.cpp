// Tests loadstone/torch.h: ties, buffers, dtypes, and modules that a failed load leaves unchanged.
// Does not use GoogleTest, whose C++ ABI may differ from LibTorch's. Prints the failed checks; the
// exit status is their number.
#include <cstdio>
#include <functional>
#include <string>

#include "loadstone/torch.h"

namespace {

int failed = 0;

void check(bool holds, const std::string& what) {
  if (holds) return;
  std::printf("FAILED: %s\n", what.c_str());
  ++failed;
}

std::string code_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const loadstone::Error& error) {
    return error.code();
  }
  return "";
}

// A linear layer whose weight is tied to the head's, and a norm with buffers.
struct Net : torch::nn::Module {
  Net() {
    first = register_module("first", torch::nn::Linear(4, 4));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    head = register_parameter("head", first->weight);
    half = register_parameter("half", torch::zeros({3, 2}, torch::kHalf).t());
  }

  torch::nn::Linear first = nullptr;
  torch::nn::BatchNorm1d norm = nullptr;
  torch::Tensor head, half;
};

void check_load(const std::string& path) {
  Net net;
  const auto catalog = loadstone::open_checkpoint(path);
  const loadstone::Skeleton skeleton = loadstone::skeleton_of(net);
  for (const loadstone::Target& target : skeleton.targets) {
    check(target.tie_of == (target.name == "first.weight" ? "head" : ""), target.name + " tie");
  }
  const void* const object = net.first->weight.unsafeGetTensorImpl();
  const loadstone::Report report = loadstone::load_into(net, catalog);
  check(report.provenance.size() == 9, "nine tensors");
  check(net.first->weight.unsafeGetTensorImpl() == object, "parameters stay the objects");
  for (const auto& item : net.named_parameters()) {
    const std::string name = item.key() == "head" ? "first.weight" : item.key();
    const auto expected = loadstone::read_tensor(catalog, name, item.value().scalar_type());
    check(torch::equal(item.value(), expected), item.key());
    check(item.value().requires_grad(), item.key() + " can be trained");
  }
  for (const auto& item : net.named_buffers()) {
    check(torch::equal(item.value(), loadstone::read_tensor(catalog, item.key())), item.key());
  }
  net.head.data().fill_(7);
  check(net.first->weight[0][0].item<float>() == 7, "ties share their memory");
  check(loadstone::read_tensor(catalog, "half").scalar_type() == torch::kBFloat16, "the file's");
}

void check_failures(const std::string& path) {
  struct More : Net {
    More() { extra = register_parameter("extra", torch::ones({2})); }
    torch::Tensor extra;
  } more;
  const auto catalog = loadstone::open_checkpoint(path);
  const torch::Tensor before = more.first->weight.clone();
  check(code_of([&] { loadstone::load_into(more, catalog); }) == "plan.missing", "is missing");
  check(torch::equal(more.first->weight, before), "the module is as it was");
  torch::nn::Linear meta(4, 4);
  meta->weight = meta->register_parameter(
      "weight2", torch::empty({4, 4}, torch::TensorOptions().device(torch::kMeta)));
  loadstone::PlanOptions zeros;
  zeros.missing = loadstone::MissingPolicy::zeros;
  check(code_of([&] { loadstone::load_into(*meta, catalog, zeros); }) == "memory.device", "meta");
  check(code_of([&] { (void)loadstone::read_tensor(catalog, "none"); }) == "plan.missing", "none");
  check(code_of([&] { (void)loadstone::dtype_of(at::kQInt8); }) == "plan.dtype", "quantized");
}

}  // namespace

int main(int, char** argv) {
  check_load(argv[1]);
  check_failures(argv[1]);
  check(code_of([&] { (void)loadstone::open_checkpoint("nowhere"); }) == "io.not_found", "control");
  return failed;
}

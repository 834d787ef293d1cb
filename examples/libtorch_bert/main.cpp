// Computes a sentence embedding with all-MiniLM-L6-v2 in LibTorch: loads the checkpoint with
// loadstone, runs it on token ids, and prints the mean of the last hidden states.
//
//   libtorch_bert MODEL_FOLDER 101 2023 2003 102
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "bert.h"
#include "loadstone/torch.h"

namespace {

int run(const std::string& folder, const std::vector<std::int64_t>& tokens) {
  const auto bert = std::make_shared<Bert>();
  const auto catalog = loadstone::open_checkpoint(folder);
  const loadstone::Report report = loadstone::load_into(*bert, catalog);
  std::fprintf(stderr, "%zu tensors, %llu bytes read\n", report.provenance.size(),
               static_cast<unsigned long long>(report.bytes_read));

  // read_tensor() loads one tensor alone and gives the same values.
  const std::string name = "embeddings.word_embeddings.weight";
  if (!torch::equal(loadstone::read_tensor(catalog, name), bert->embeddings->words->weight)) {
    std::fprintf(stderr, "%s differs\n", name.c_str());
    return 1;
  }
  bert->eval();
  const torch::NoGradGuard no_grad;
  const torch::Tensor states = bert->forward(torch::tensor(tokens).unsqueeze(0));
  const torch::Tensor mean = states.mean(1).squeeze(0).contiguous();
  for (std::int64_t i = 0; i < mean.numel(); ++i) std::printf("%.9g\n", mean[i].item<float>());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: libtorch_bert MODEL_FOLDER TOKEN_ID...\n");
    return 2;
  }
  std::vector<std::int64_t> tokens;
  for (int i = 2; i < argc; ++i) tokens.push_back(std::atoll(argv[i]));
  try {
    return run(argv[1], tokens);
  } catch (const std::exception& error) {  // loadstone::Error, c10::Error
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

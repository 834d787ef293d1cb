// Prints a tensor of any checkpoint as floats: read_tensor model-Q4_K_M.gguf blk.0.attn_q.weight
#include <loadstone/loadstone.h>

#include <cstdio>

int main(int argc, char** argv) try {
  if (argc != 3) return 2;
  const auto catalog = loadstone::open_checkpoint(argv[1]);
  for (const float number : loadstone::read_numbers(catalog, argv[2])) {
    std::printf("%.9g\n", static_cast<double>(number));
  }
} catch (const loadstone::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

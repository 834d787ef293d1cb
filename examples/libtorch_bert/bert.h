// Declares BERT in plain LibTorch, with transformers' module names.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <string>

struct BertSize {
  std::int64_t hidden = 384;
  std::int64_t intermediate = 1536;
  std::int64_t layers = 6;
  std::int64_t heads = 12;
  std::int64_t vocabulary = 30522;
  std::int64_t positions = 512;
  std::int64_t types = 2;
  double norm_epsilon = 1e-12;
};

inline torch::nn::LayerNorm make_norm(const BertSize& size) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({size.hidden}).eps(size.norm_epsilon));
}

struct Embeddings : torch::nn::Module {
  explicit Embeddings(const BertSize& size) {
    words = register_module("word_embeddings", torch::nn::Embedding(size.vocabulary, size.hidden));
    positions =
        register_module("position_embeddings", torch::nn::Embedding(size.positions, size.hidden));
    types = register_module("token_type_embeddings", torch::nn::Embedding(size.types, size.hidden));
    norm = register_module("LayerNorm", make_norm(size));
  }

  torch::Tensor forward(const torch::Tensor& tokens) {
    const torch::Tensor places = torch::arange(tokens.size(1), torch::kLong);
    return norm(words(tokens) + positions(places) + types(torch::zeros_like(tokens)));
  }

  torch::nn::Embedding words = nullptr, positions = nullptr, types = nullptr;
  torch::nn::LayerNorm norm = nullptr;
};

// The attention has submodules "self" and "output", like the names of the checkpoint.
struct SelfAttention : torch::nn::Module {
  explicit SelfAttention(const BertSize& size) : heads(size.heads) {
    query = register_module("query", torch::nn::Linear(size.hidden, size.hidden));
    key = register_module("key", torch::nn::Linear(size.hidden, size.hidden));
    value = register_module("value", torch::nn::Linear(size.hidden, size.hidden));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const auto split = [&](const torch::Tensor& y) {
      return y.view({y.size(0), y.size(1), heads, -1}).transpose(1, 2);
    };
    const torch::Tensor mixed =
        torch::scaled_dot_product_attention(split(query(x)), split(key(x)), split(value(x)));
    return mixed.transpose(1, 2).reshape(x.sizes());
  }

  std::int64_t heads;
  torch::nn::Linear query = nullptr, key = nullptr, value = nullptr;
};

// A linear layer, a residual connection and a norm.
struct Output : torch::nn::Module {
  Output(const BertSize& size, std::int64_t inputs) {
    dense = register_module("dense", torch::nn::Linear(inputs, size.hidden));
    norm = register_module("LayerNorm", make_norm(size));
  }

  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& residual) {
    return norm(dense(x) + residual);
  }

  torch::nn::Linear dense = nullptr;
  torch::nn::LayerNorm norm = nullptr;
};

struct Layer : torch::nn::Module {
  explicit Layer(const BertSize& size) {
    // LibTorch rejects names with a dot, so a plain module is the parent of the two submodules.
    auto attention = std::make_shared<torch::nn::Module>();
    self = attention->register_module("self", std::make_shared<SelfAttention>(size));
    attended = attention->register_module("output", std::make_shared<Output>(size, size.hidden));
    register_module("attention", attention);
    auto intermediate = std::make_shared<torch::nn::Module>();
    wide =
        intermediate->register_module("dense", torch::nn::Linear(size.hidden, size.intermediate));
    register_module("intermediate", intermediate);
    output = register_module("output", std::make_shared<Output>(size, size.intermediate));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor y = attended->forward(self->forward(x), x);
    return output->forward(torch::gelu(wide(y)), y);
  }

  std::shared_ptr<SelfAttention> self;
  std::shared_ptr<Output> attended, output;
  torch::nn::Linear wide = nullptr;
};

// The encoder without the pooler, as used for sentence embeddings.
struct Bert : torch::nn::Module {
  explicit Bert(const BertSize& size = {}) {
    embeddings = register_module("embeddings", std::make_shared<Embeddings>(size));
    auto encoder = std::make_shared<torch::nn::Module>();
    for (std::int64_t i = 0; i < size.layers; ++i) layers->push_back(std::make_shared<Layer>(size));
    encoder->register_module("layer", layers);
    register_module("encoder", encoder);
  }

  // Maps token ids [batch, tokens] to hidden states [batch, tokens, hidden].
  torch::Tensor forward(const torch::Tensor& tokens) {
    torch::Tensor x = embeddings->forward(tokens);
    for (const auto& layer : *layers) x = layer->as<Layer>()->forward(x);
    return x;
  }

  std::shared_ptr<Embeddings> embeddings;
  torch::nn::ModuleList layers;
};

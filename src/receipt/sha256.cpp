// SHA-256 by OpenSSL, which uses the instructions that the machine has for it.
#include <openssl/evp.h>

#include <algorithm>

#include "loadstone/error.h"
#include "receipt/block_hash.h"

namespace loadstone {

namespace {

[[noreturn]] void fail() { throw Error("receipt.digest", "OpenSSL cannot compute SHA-256"); }

// Looked up once: it costs more than a small block.
const EVP_MD* sha256() {
  static EVP_MD* const method = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  if (method == nullptr) fail();
  return method;
}

class Sha256 final : public BlockHash {
 public:
  explicit Sha256(HashOf what) : context_(EVP_MD_CTX_new()) {
    if (context_ == nullptr || EVP_DigestInit_ex2(context_.get(), sha256(), nullptr) != 1) fail();
    if (what == HashOf::file) return;
    const auto tag = static_cast<std::byte>(what == HashOf::tree ? 1 : 0);
    update({&tag, 1});
  }
  void update(std::span<const std::byte> bytes) override {
    if (EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()) != 1) fail();
  }
  [[nodiscard]] BlockDigest finish() override {
    BlockDigest digest = {};
    unsigned size = 0;
    auto* const to = reinterpret_cast<unsigned char*>(digest.data());
    if (EVP_DigestFinal_ex(context_.get(), to, &size) != 1 || size != digest.size()) fail();
    return digest;
  }

 private:
  struct Free {
    void operator()(EVP_MD_CTX* context) const noexcept { EVP_MD_CTX_free(context); }
  };
  std::unique_ptr<EVP_MD_CTX, Free> context_;
};

}  // namespace

std::unique_ptr<BlockHash> make_sha256(HashOf what) { return std::make_unique<Sha256>(what); }

bool has_sha256() noexcept { return true; }

}  // namespace loadstone

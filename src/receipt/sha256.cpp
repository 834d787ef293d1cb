// Computes SHA-256 and SHA-1 with OpenSSL, which uses the machine's instructions for them.
#include <fmt/format.h>
#include <openssl/evp.h>

#include <algorithm>

#include "loadstone/error.h"
#include "receipt/block_hash.h"

namespace loadstone {

namespace {

[[noreturn]] void fail() { throw Error("receipt.digest", "OpenSSL cannot compute the digest"); }

// Looks up the method once, because a lookup takes longer than hashing a small block.
const EVP_MD* sha256() {
  static EVP_MD* const method = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  return method;
}

const EVP_MD* sha1() {
  static EVP_MD* const method = EVP_MD_fetch(nullptr, "SHA1", nullptr);
  return method;
}

class EvpDigest final : public BlockHash {
 public:
  explicit EvpDigest(const EVP_MD* method) : context_(EVP_MD_CTX_new()) {
    if (method == nullptr || context_ == nullptr ||
        EVP_DigestInit_ex2(context_.get(), method, nullptr) != 1) {
      fail();
    }
  }
  void update(std::span<const std::byte> bytes) override {
    if (EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()) != 1) fail();
  }
  [[nodiscard]] BlockDigest finish() override {
    BlockDigest digest = {};
    unsigned size = 0;
    auto* const to = reinterpret_cast<unsigned char*>(digest.data());
    if (EVP_DigestFinal_ex(context_.get(), to, &size) != 1 || size > digest.size()) fail();
    return digest;
  }

 private:
  struct Free {
    void operator()(EVP_MD_CTX* context) const noexcept { EVP_MD_CTX_free(context); }
  };
  std::unique_ptr<EVP_MD_CTX, Free> context_;
};

}  // namespace

std::unique_ptr<BlockHash> make_sha256(HashOf what) {
  auto made = std::make_unique<EvpDigest>(sha256());
  const auto tag = static_cast<std::byte>(what == HashOf::tree ? 1 : 0);
  if (what != HashOf::file) made->update({&tag, 1});
  return made;
}

std::unique_ptr<BlockHash> make_git_hash(std::uint64_t bytes) {
  auto made = std::make_unique<EvpDigest>(sha1());
  const std::string header = fmt::format("blob {}", bytes);
  made->update(std::as_bytes(std::span(header.c_str(), header.size() + 1)));
  return made;
}

bool has_sha256() noexcept { return true; }

}  // namespace loadstone

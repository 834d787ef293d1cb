#include "loadstone/remote.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>

#include "catalog/paths.h"
#include "loadstone/error.h"
#include "storage/remote_environment.h"
#include "storage/remote_path.h"

namespace loadstone {

namespace {

std::string code_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  return {};
}

TEST(RemotePath, KnowsUrls) {
  for (const char* path : {"https://h/x", "HTTP://h", "hf://org/name", "s3://b/k"}) {
    EXPECT_TRUE(is_remote(path)) << path;
  }
  for (const char* path :
       {"", "x", "/https://h", "https:/h", "file:///etc", "ftp://h/x", "./s3://"}) {
    EXPECT_FALSE(is_remote(path)) << path;
  }
}

TEST(RemotePath, HidesSecrets) {
  EXPECT_EQ(public_url("https://h/x?sig=s#f"), "https://h/x");
  EXPECT_EQ(public_url("https://user:pass@h/x"), "https://h/x");
  EXPECT_EQ(public_url("https://h/x@y"), "https://h/x@y");
  EXPECT_EQ(public_url("s3://b/k?v"), "s3://b/k?v");
}

TEST(RemotePath, NamesAreEncodedInUrlsAndNowhereElse) {
  const std::string name = "a b?/c%2F\u00e9";
  const std::string url = join_path("https://h/d", name);
  EXPECT_EQ(url, "https://h/d/a%20b%3F/c%252F%C3%A9");
  EXPECT_EQ(name_below("https://h/d", url.substr(12)), name);
  EXPECT_EQ(join_path("s3://b/d", name), "s3://b/d/" + name);
}

TEST(RemotePath, Hub) {
  const HubPath path = parse_hub_path("hf://org/name@refs%2Fpr%2F1/a/b.gguf");
  EXPECT_EQ(path.repository, "org/name");
  EXPECT_EQ(path.revision, "refs/pr/1");
  EXPECT_EQ(path.file, "a/b.gguf");
  EXPECT_FALSE(path.is_pinned());
  EXPECT_TRUE(parse_hub_path("hf://o/n@0123456789abcdef0123456789abcdef01234567").is_pinned());
  EXPECT_EQ(parse_hub_path("hf://o/n").text(), "hf://o/n@main");
  for (const char* wrong : {"hf://", "hf://o", "hf:///n", "hf://o/", "hf://o/n@", "hf://../n"}) {
    EXPECT_EQ(code_of([&] { static_cast<void>(parse_hub_path(wrong)); }), "io.remote") << wrong;
  }
}

TEST(RemotePath, LocalStorageContactsNobody) {
  EXPECT_EQ(code_of([] { static_cast<void>(local_storage().kind("https://h/x?s")); }), "io.remote");
  EXPECT_EQ(code_of([] { static_cast<void>(local_storage().open("s3://b/k")); }), "io.remote");
}

TEST(RemoteEnvironment, TakesTheUsualVariables) {
  const RemoteOptions options = remote_options_from([](const std::string& variable) {
    if (variable == "HTTPS_PROXY") return std::string("http://proxy");
    if (variable == "HF_TOKEN") return std::string("token");
    if (variable == "AWS_DEFAULT_REGION") return std::string("eu-west-1");
    return std::string();
  });
  EXPECT_EQ(options.proxy, "http://proxy");
  EXPECT_EQ(options.hub_token, "token");
  EXPECT_EQ(options.hub_endpoint, "https://huggingface.co");
  EXPECT_EQ(options.s3_region, "eu-west-1");
}

TEST(RemoteStorage, ReadsLocalFilesAsWell) {
  const auto storage = make_remote_storage({});
  EXPECT_EQ(storage->kind("/"), EntryKind::folder);
  EXPECT_EQ(code_of([&] { static_cast<void>(storage->kind("/no/such/file")); }), "io.not_found");
  EXPECT_EQ(code_of([&] { static_cast<void>(storage->list("https://h/")); }), "io.remote");
}

}  // namespace

}  // namespace loadstone

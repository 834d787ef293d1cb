// Tests that a document may replace an older document of its kind, but no other file.
#include "formats/document.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <string>

#include "support/errors.h"
#include "support/files.h"

namespace loadstone::test {

namespace {

TEST(Document, ReplacesDocumentsOnly) {
  const TemporaryFolder folder;
  const auto write = [&](const std::string& name, const std::string& old) {
    const std::string path = folder.write(name, old);
    return code_of([&] { write_document(path, "new"); });
  };
  EXPECT_EQ(write("a.json", "{\n \"version\": 1}"), "");
  EXPECT_EQ(write("a.html", "<!doctype html>"), "");
  EXPECT_EQ(write("empty", ""), "");
  EXPECT_EQ(write("short", "old"), "");
  EXPECT_EQ(write("config.json", "{\"a\": \"version 1\"}"), "io.exists");
  EXPECT_EQ(write("model.safetensors.index.json", "{\"weight_map\": {}}"), "io.exists");
  EXPECT_EQ(write("a.dat", std::string(64, '\x9c')), "io.exists");
  EXPECT_EQ(write("zeros", std::string(64, '\0')), "io.exists");
  EXPECT_EQ(write("gguf", "GGUF" + std::string(20, '\0')), "io.exists");
}

TEST(Document, LinksHaveTheNameOfTheirFileToo) {
  const TemporaryFolder folder;
  const std::string config = folder.write("config.json", "{\"a\": \"version 1\"}");
  const std::string link = (folder.path() / "plan").string();
  std::filesystem::create_symlink(config, link);
  EXPECT_EQ(code_of([&] { write_document(link, "new"); }), "io.exists");
  EXPECT_EQ(code_of([&] { require_document(link); }), "io.exists");
  EXPECT_EQ(code_of([&] { require_document(""); }), "");
}

}  // namespace

}  // namespace loadstone::test

// Tests that open_checkpoint() examines all files, also after a malformed one.
#include <gmock/gmock.h>

#include "loadstone/catalog.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/memory_storage.h"

namespace loadstone::test {

namespace {

using namespace ::testing;

std::string shard(const std::string& name) { return safetensors_bytes({{name, "U8", {2}, "ab"}}); }

class DamagedShards : public ::testing::Test {
 protected:
  std::optional<Error> error(const std::string& path) {
    return error_of([&] { (void)open_checkpoint(path, {.storage = &storage}); });
  }

  MemoryStorage storage;
};

// Two of four shards are cut off, and one is missing.
TEST_F(DamagedShards, OfAnIndexAreAllNamed) {
  const std::string cut = shard("c").substr(0, shard("c").size() - 1);
  storage.add_file("/m/1.safetensors", shard("a"));
  storage.add_file("/m/2.safetensors", cut);
  storage.add_file("/m/3.safetensors", cut);
  storage.add_file("/m/model.safetensors.index.json",
                   R"({"weight_map":{"a":"1.safetensors","b":"2.safetensors",)"
                   R"("c":"3.safetensors","d":"4.safetensors"}})");
  const auto missing = error("/m");
  ASSERT_TRUE(missing);
  EXPECT_EQ(missing->code(), "ix.missing_shard");
  EXPECT_THAT(missing->message(),
              HasSubstr("(2 more of 4 files cannot be opened: '2.safetensors', '3.safetensors')"));
  ASSERT_EQ(missing->others().size(), 2u);
  EXPECT_EQ(missing->others()[1].where().path, "/m/3.safetensors");
  storage.add_file("/m/4.safetensors", shard("d"));
  const auto damaged = error("/m");
  ASSERT_TRUE(damaged);
  EXPECT_EQ(damaged->where().path, "/m/2.safetensors");
  ASSERT_EQ(damaged->others().size(), 1u);
  EXPECT_EQ(damaged->others()[0].code(), damaged->code());
  storage.add_file("/m/3.safetensors", shard("c"));  // control
  EXPECT_THAT(error("/m")->others(), IsEmpty());
}

TEST_F(DamagedShards, WithoutAnIndexAreAllNamed) {
  storage.add_file("/f/a.safetensors", "x");
  storage.add_file("/f/b.safetensors", shard("b"));
  storage.add_file("/f/c.safetensors", "x");
  const auto found = error("/f");
  ASSERT_TRUE(found);
  EXPECT_EQ(found->where().path, "/f/a.safetensors");
  ASSERT_EQ(found->others().size(), 1u);
  EXPECT_EQ(found->others()[0].where().path, "/f/c.safetensors");
}

}  // namespace

}  // namespace loadstone::test

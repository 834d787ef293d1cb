// Tests which files open_checkpoint() opens for a path: a file, a folder, a pattern, a list, an
// index or a split file.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <functional>
#include <map>

#include "loadstone/catalog.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/memory_storage.h"
#include "support/torch_file.h"
#include "support/watched_storage.h"

namespace loadstone::test {

namespace {

using namespace ::testing;

std::string one(const std::string& name) { return safetensors_bytes({{name, "U8", {2}, "ab"}}); }

std::string gguf(const std::string& name) {
  return GgufWriter().entry_text("general.architecture", "x").tensor(name, {1}, 0, "1234").bytes();
}

std::vector<std::string> names(const Catalog& catalog) {
  std::vector<std::string> all;
  for (const TensorInfo& tensor : catalog.tensors()) all.push_back(tensor.name);
  return all;
}

std::vector<std::string> shards(const Catalog& catalog) {
  std::vector<std::string> all;
  for (const Shard& shard : catalog.shards()) all.push_back(shard.relative_path);
  return all;
}

std::vector<std::string> codes(const Catalog& catalog) {
  std::vector<std::string> all;
  for (const Finding& finding : catalog.findings()) all.push_back(finding.code);
  return all;
}

class Open : public ::testing::Test {
 protected:
  std::shared_ptr<const Catalog> open(const std::string& path, bool allow_links = false) {
    return open_checkpoint(path, {.allow_links = allow_links, .storage = &storage});
  }
  std::string code(const std::string& path, bool allow_links = false) {
    return code_of([&] { (void)open(path, allow_links); });
  }
  std::optional<Error> error(const std::string& path) {
    return error_of([&] { (void)open(path); });
  }

  MemoryStorage storage;
};

// ---- folders

TEST_F(Open, AFolderWithOneFile) {
  storage.add_file("/m/anything.safetensors", one("a"));
  storage.add_file("/m/config.json", "{}");
  const auto catalog = open("/m");
  EXPECT_THAT(names(*catalog), ElementsAre("a"));
  EXPECT_EQ(catalog->root(), "/m");
  EXPECT_EQ(catalog->shards()[0].path, "/m/anything.safetensors");
  EXPECT_EQ(catalog->shards()[0].relative_path, "anything.safetensors");
  EXPECT_THAT(names(*open("/m/")), ElementsAre("a"));
}

TEST_F(Open, TheUsualFileBeforeOthersBesideIt) {
  storage.add_file("/m/model.safetensors", one("a"));
  storage.add_file("/m/model.fp16.safetensors", one("a"));
  storage.add_file("/m/adapter.safetensors", one("lora"));
  const auto catalog = open("/m");
  EXPECT_THAT(shards(*catalog), ElementsAre("model.safetensors"));
  ASSERT_THAT(codes(*catalog), ElementsAre("format.ignored"));
  EXPECT_EQ(catalog->findings()[0].severity, Severity::info);
  EXPECT_THAT(catalog->findings()[0].sources,
              ElementsAre("adapter.safetensors", "model.fp16.safetensors"));
}

TEST_F(Open, AUsualFileNextToAnIndexThatDoesNotNameItIsAWarning) {
  storage.add_file("/m/model.safetensors", one("a"));
  storage.add_file("/m/x.safetensors", one("a"));
  storage.add_file("/m/model.safetensors.index.json", R"({"weight_map":{"a":"x.safetensors"}})");
  const auto catalog = open("/m");
  EXPECT_THAT(shards(*catalog), ElementsAre("x.safetensors"));
  ASSERT_THAT(codes(*catalog), ElementsAre("format.ignored"));
  EXPECT_EQ(catalog->findings()[0].severity, Severity::warning);
  EXPECT_THAT(catalog->findings()[0].sources, ElementsAre("model.safetensors"));
}

TEST_F(Open, OtherFilesNextToAnIndexAreListed) {
  storage.add_file("/m/model.safetensors", one("a"));
  storage.add_file("/m/adapter.safetensors", one("lora"));
  storage.add_file("/m/model.safetensors.index.json",
                   R"({"weight_map":{"a":"model.safetensors"}})");
  const auto catalog = open("/m");
  ASSERT_THAT(codes(*catalog), ElementsAre("format.ignored"));
  EXPECT_EQ(catalog->findings()[0].severity, Severity::info);
  EXPECT_THAT(catalog->findings()[0].sources, ElementsAre("adapter.safetensors"));
}

TEST_F(Open, FilesWithoutAnIndexTogetherInNaturalOrder) {
  for (const char* name : {"w-10", "w-9", "w-1"}) {
    storage.add_file(fmt::format("/m/{}.safetensors", name), one(name));
  }
  EXPECT_THAT(shards(*open("/m")),
              ElementsAre("w-1.safetensors", "w-9.safetensors", "w-10.safetensors"));
}

TEST_F(Open, AVariantIsNotMixedIn) {
  storage.add_file("/m/unet-00001-of-00002.safetensors", one("a"));
  storage.add_file("/m/unet-00002-of-00002.safetensors", one("b"));
  storage.add_file("/m/unet.bf16.safetensors", one("a"));
  const auto catalog = open("/m");
  EXPECT_THAT(names(*catalog), ElementsAre("a", "b"));
  EXPECT_THAT(codes(*catalog), ElementsAre("format.ignored"));
}

TEST_F(Open, AllMissingShardsAreNamed) {
  const auto shard = [](int number) {
    return fmt::format("model-{:05}-of-00004.safetensors", number);
  };
  storage.add_file("/m/" + shard(2), one("b"));
  storage.add_file("/m/" + std::string("model.safetensors.index.json"),
                   fmt::format(R"({{"weight_map":{{"a":"{}","b":"{}","c":"{}","d":"{}"}}}})",
                               shard(1), shard(2), shard(3), shard(4)));
  const auto problem = error("/m");
  ASSERT_TRUE(problem);
  EXPECT_EQ(problem->code(), "ix.missing_shard");
  EXPECT_EQ(problem->where().found,
            fmt::format("no files '{}', '{}', '{}'", shard(1), shard(3), shard(4)));
}

TEST_F(Open, AllMissingPartsOfAFolderAreNamed) {
  storage.add_file("/m/model-00002-of-00004.safetensors", one("a"));
  storage.add_file("/m/model-00003-of-00004.safetensors", one("b"));
  const auto problem = error("/m");
  ASSERT_TRUE(problem);
  EXPECT_EQ(problem->code(), "ix.missing_shard");
  EXPECT_EQ(problem->where().found,
            "no files 'model-00001-of-00004.safetensors', 'model-00004-of-00004.safetensors'");
}

TEST_F(Open, ANumberMissingFromAFolderIsAMissingShard) {
  storage.add_file("/m/model-00001-of-00003.safetensors", one("a"));
  storage.add_file("/m/model-00003-of-00003.safetensors", one("b"));
  const auto problem = error("/m");
  ASSERT_TRUE(problem);
  EXPECT_EQ(problem->code(), "ix.missing_shard");
  EXPECT_THAT(problem->what(), HasSubstr("model-00002-of-00003.safetensors"));
}

// Only the number in the file name shows that other shards exist.
TEST_F(Open, OneOfSeveralNumberedFilesIsNoWholeModel) {
  const std::string pickled = torch_bytes(pickle::dict({pickle::text("a"), pickle::tensor()}));
  const std::map<std::string, std::string> files = {
      {"model-0000{}-of-00003.safetensors", one("a")},
      {"diffusion_pytorch_model-0000{}-of-00002.safetensors", one("a")},
      {"pytorch_model-0000{}-of-00002.bin", pickled}};
  for (const auto& [pattern, content] : files) {
    for (const int number : {1, 2}) {
      const std::string name = fmt::format(fmt::runtime(pattern), number);
      const std::string folder = fmt::format("/{}{}", number, pattern.substr(0, 5));
      storage.add_file(folder + "/" + name, content);
      EXPECT_EQ(code(folder), "ix.missing_shard") << name;
      const auto named = open(folder + "/" + name);
      ASSERT_THAT(codes(*named), ElementsAre("ix.gap")) << name;
      const std::string absent = fmt::format(fmt::runtime(pattern), number == 1 ? 2 : 1);
      EXPECT_THAT(named->findings()[0].sources, Contains(absent)) << name;
    }
  }
  storage.add_file("/all/model-00001-of-00001.safetensors", one("a"));  // control
  EXPECT_THAT(open("/all")->findings(), IsEmpty());
  EXPECT_THAT(open("/all/model-00001-of-00001.safetensors")->findings(), IsEmpty());
}

TEST_F(Open, FilesOfTheSystemBesideTheCheckpointAreNoPart) {
  storage.add_file("/m/x.safetensors", one("a"));
  storage.add_file("/m/._x.safetensors", "rubbish");
  EXPECT_THAT(names(*open("/m")), ElementsAre("a"));
}

TEST_F(Open, FoldersWithoutAChoiceAreRefused) {
  storage.add_folder("/empty");
  EXPECT_EQ(code("/empty"), "format.no_checkpoint");
  storage.add_file("/both/a.safetensors", one("a"));
  storage.add_file("/both/a.gguf", gguf("a"));
  EXPECT_EQ(code("/both"), "format.no_checkpoint");
  storage.add_file("/two/q4.gguf", gguf("a"));
  storage.add_file("/two/q8.gguf", gguf("a"));
  EXPECT_EQ(code("/two"), "format.no_checkpoint");
  EXPECT_THAT(error("/two")->what(), HasSubstr("q8.gguf"));
  storage.add_file("/torch/pytorch_model.bin", "x");
  EXPECT_EQ(code("/torch"), "pt.file_too_small");
  storage.add_file("/pipeline/model_index.json", "{}");
  EXPECT_EQ(code("/pipeline"), "format.no_checkpoint");
  EXPECT_THAT(error("/pipeline")->what(), HasSubstr("pipeline"));
  EXPECT_EQ(code("/none"), "io.not_found");
}

TEST_F(Open, ContentTellsWhereTheNameDoesNot) {
  storage.add_file("/b/one", one("a"));
  storage.add_file("/b/two", gguf("g"));
  storage.add_file("/b/zip.pt", std::string("PK\3\4\x14\0\0\0\x08\0abcdefghijkl", 22));
  storage.add_file("/b/pickle.bin", std::string("\x80\2}q\0X\6\0\0\0weight", 16));
  storage.add_file("/b/other", "some text, not a checkpoint");
  storage.add_file("/b/nothing", "");
  storage.add_file("/b/x.bin.index.json", "{}");
  EXPECT_THAT(names(*open("/b/one")), ElementsAre("a"));
  EXPECT_THAT(names(*open("/b/two")), ElementsAre("g"));
  EXPECT_EQ(code("/b/zip.pt"), "pt.zip");
  EXPECT_EQ(code("/b/pickle.bin"), "pt.truncated");
  EXPECT_EQ(code("/b/x.bin.index.json"), "ix.weight_map");
  EXPECT_EQ(code("/b/other"), "format.unknown");
  EXPECT_EQ(code("/b/nothing"), "format.unknown");
}

// ---- torch's files

std::string torch(const std::string& name) {
  return torch_bytes(pickle::dict({pickle::text(name), pickle::tensor()}));
}

TEST_F(Open, TorchFilesOfAFolderAreTakenWhereNothingElseIs) {
  storage.add_file("/t/pytorch_model.bin", torch("a"));
  storage.add_file("/t/training_args.bin", "x");
  storage.add_file("/t/optimizer.pt", "x");
  EXPECT_THAT(names(*open("/t")), ElementsAre("a"));
  storage.add_file("/one/net.pth", torch("n"));
  storage.add_file("/one/rng_state.pth", "x");
  EXPECT_THAT(names(*open("/one")), ElementsAre("n"));
  storage.add_file("/one/other.ckpt", torch("n"));
  EXPECT_EQ(code("/one"), "format.no_checkpoint");
  storage.add_file("/t/model.safetensors", one("s"));
  EXPECT_THAT(names(*open("/t")), ElementsAre("s"));
}

TEST_F(Open, WeightsOfOtherFormatsAreListed) {
  const std::map<std::string, std::string> taken = {
      {"model.safetensors", one("a")},
      {"x.safetensors", one("a")},
      {"x.gguf", gguf("a")},
      {"model.safetensors.index.json", R"({"weight_map":{"a":"x.safetensors"}})"}};
  for (const auto& [name, content] : taken) {
    const std::string folder = "/with " + name;
    storage.add_file(folder + "/" + name, content);
    if (name.ends_with(".json")) storage.add_file(folder + "/x.safetensors", one("a"));
    for (const char* const other : {"training_args.bin", "optimizer.pt", "rng_state.pth"}) {
      storage.add_file(fmt::format("{}/{}", folder, other), "x");
    }
    EXPECT_THAT(open(folder)->findings(), IsEmpty()) << name;  // control
    storage.add_file(folder + "/pytorch_model.bin", "x");
    const auto catalog = open(folder);
    ASSERT_THAT(codes(*catalog), ElementsAre("format.ignored")) << name;
    const bool is_usual = name.starts_with("model.");  // transformers reads these names too
    EXPECT_EQ(catalog->findings()[0].severity, is_usual ? Severity::info : Severity::warning);
    EXPECT_THAT(catalog->findings()[0].sources, ElementsAre("pytorch_model.bin")) << name;
  }
}

TEST_F(Open, ACheckpointThatALibraryReadsInsteadIsAWarning) {
  const std::map<std::string, std::string> read = {
      {"model.fp16.safetensors", one("a")},
      {"model.safetensors.index.fp16.json", R"({"weight_map":{"a":"s.fp16.safetensors"}})"},
      {"learned_embeds.safetensors", one("a")},
      {"x.gguf", gguf("a")}};
  for (const std::string prefix : {"", "diffusion_"}) {
    for (const std::string end : {"", ".index.json"}) {
      const std::string instead = prefix + "pytorch_model.bin" + end;
      for (const auto& [name, content] : read) {
        const std::string folder = fmt::format("/{} with {}", instead, name);
        storage.add_file(folder + "/" + name, content);
        if (name.ends_with(".json")) storage.add_file(folder + "/s.fp16.safetensors", one("a"));
        EXPECT_THAT(open(folder)->findings(), IsEmpty()) << folder;  // control
        storage.add_file(folder + "/" + instead, "x");
        const auto catalog = open(folder);
        EXPECT_THAT(names(*catalog), ElementsAre("a"));
        ASSERT_THAT(codes(*catalog), ElementsAre("format.ignored")) << folder;
        EXPECT_EQ(catalog->findings()[0].severity, Severity::warning) << folder;
        EXPECT_THAT(
            catalog->findings()[0].message,
            HasSubstr(fmt::format("{} reads '{}', but loadstone reads '{}'",
                                  prefix.empty() ? "transformers" : "diffusers", instead, name)));
        EXPECT_THAT(open(folder + "/" + name)->findings(), IsEmpty()) << folder;
      }
    }
  }
}

// transformers loads the model that the adapter's config names.
TEST_F(Open, AModelNextToAnAdapterIsListed) {
  storage.add_file("/a/adapter_model.safetensors", one("lora"));
  storage.add_file("/a/pytorch_model.bin", torch("a"));
  EXPECT_EQ(open("/a")->findings().at(0).severity, Severity::warning);  // control
  storage.add_file("/a/adapter_config.json", "{}");
  EXPECT_EQ(open("/a")->findings().at(0).severity, Severity::info);
}

TEST_F(Open, AnIndexOfTorchFilesNamesTheirTensors) {
  storage.add_file("/i/pytorch_model.bin.index.json",
                   index_json({{"a", "x-00001-of-00002.bin"}, {"b", "x-00002-of-00002.bin"}}, 32));
  storage.add_file("/i/x-00001-of-00002.bin", torch("a"));
  EXPECT_EQ(code("/i"), "ix.missing_shard");
  storage.add_file("/i/x-00002-of-00002.bin", torch("b"));
  EXPECT_THAT(names(*open("/i")), ElementsAre("a", "b"));
  EXPECT_THAT(open("/i")->findings(), IsEmpty());
  storage.add_file("/i/pytorch_model.bin", torch("a"));
  EXPECT_THAT(codes(*open("/i")), ElementsAre("format.ignored"));
  EXPECT_EQ(open("/i")->findings()[0].severity, Severity::warning);
  storage.add_file("/i/x-00002-of-00002.bin", torch("c"));
  EXPECT_EQ(code("/i"), "ix.tensor_missing");
}

// ---- patterns and lists

TEST_F(Open, APatternTakesWhatMatches) {
  storage.add_file("/m/part-2.safetensors", one("b"));
  storage.add_file("/m/part-10.safetensors", one("c"));
  storage.add_file("/m/other.safetensors", one("a"));
  storage.add_file("/m/part-1.json", "{}");
  EXPECT_THAT(names(*open("/m/part-*")), ElementsAre("b", "c"));
  EXPECT_THAT(names(*open("/*/part-[0-9].safetensors")), ElementsAre("b"));
  EXPECT_THAT(names(*open("/m/othe?.safetensors")), ElementsAre("a"));
  EXPECT_EQ(code("/m/nothing*"), "io.not_found");
  EXPECT_EQ(code("/x*/nothing"), "io.not_found");
}

TEST_F(Open, ANameWithAStarIsANameFirst) {
  storage.add_file("/m/a*.safetensors", one("star"));
  storage.add_file("/m/ab.safetensors", one("b"));
  EXPECT_THAT(names(*open("/m/a*.safetensors")), ElementsAre("star"));
}

TEST_F(Open, AListIsTakenAsItIs) {
  storage.add_file("/m/x/b.safetensors", one("b"));
  storage.add_file("/m/y/a.safetensors", one("a"));
  const auto catalog = open_checkpoint(
      std::vector<std::string>{"/m/y/a.safetensors", "/m/x/b.safetensors"}, {.storage = &storage});
  EXPECT_EQ(catalog->root(), "/m");
  EXPECT_THAT(shards(*catalog), ElementsAre("y/a.safetensors", "x/b.safetensors"));
  EXPECT_EQ(catalog->tensors()[*catalog->find("b")].shard, 1u);
  EXPECT_EQ(catalog->total_bytes(), 4u);
  EXPECT_FALSE(catalog->find("c"));
  const auto open_twice = [&] {
    (void)open_checkpoint(std::vector<std::string>{"/m/y/a.safetensors", "/m/y/a.safetensors"},
                          {.storage = &storage});
  };
  EXPECT_EQ(code_of(open_twice), "ix.duplicate");
  EXPECT_EQ(code_of([&] { (void)open_checkpoint(std::vector<std::string>{}); }),
            "format.no_checkpoint");
}

TEST_F(Open, ANumberMissingFromAListIsTold) {
  storage.add_file("/m/model-00001-of-00003.safetensors", one("a"));
  storage.add_file("/m/model-00003-of-00003.safetensors", one("b"));
  const auto catalog = open("/m/model-*.safetensors");
  EXPECT_THAT(codes(*catalog), ElementsAre("ix.gap"));
}

// ---- links and other special files

TEST_F(Open, AHubCacheOpens) {
  const std::string snapshot = "/hub/models--a--b/snapshots/0123abc";
  storage.add_file("/hub/models--a--b/blobs/aaa", one("a"));
  storage.add_file("/hub/models--a--b/blobs/bbb", one("b"));
  storage.add_file("/hub/models--a--b/blobs/ccc",
                   index_json({{"a", "model-00001-of-00002.safetensors"},
                               {"b", "model-00002-of-00002.safetensors"}}));
  storage.add_link(snapshot + "/model-00001-of-00002.safetensors", "../../blobs/aaa");
  storage.add_link(snapshot + "/model-00002-of-00002.safetensors", "../../blobs/bbb");
  storage.add_link(snapshot + "/model.safetensors.index.json", "../../blobs/ccc");
  storage.add_link(snapshot + "/unet/diffusion_pytorch_model.safetensors", "../../../blobs/aaa");
  EXPECT_THAT(names(*open(snapshot)), ElementsAre("a", "b"));
  EXPECT_THAT(names(*open(snapshot + "/model.safetensors.index.json")), ElementsAre("a", "b"));
  EXPECT_THAT(names(*open(snapshot + "/model-00001-of-00002.safetensors")), ElementsAre("a"));
  EXPECT_THAT(names(*open(snapshot + "/unet")), ElementsAre("a"));
  storage.add_link("/short", snapshot);
  EXPECT_THAT(names(*open("/short")), ElementsAre("a", "b"));
  // Links may lead only to the blobs of the same model.
  storage.add_file("/hub/models--other/blobs/zzz", one("z"));
  storage.add_link(snapshot + "/z.safetensors", "../../../models--other/blobs/zzz");
  EXPECT_EQ(code(snapshot + "/z.safetensors"), "ix.path_escape");
}

TEST_F(Open, LinksStayInTheFolderUnlessAllowed) {
  storage.add_file("/secret/x.safetensors", one("a"));
  storage.add_file("/m/sub/real.safetensors", one("b"));
  storage.add_link("/m/inside.safetensors", "sub/real.safetensors");
  storage.add_link("/m/outside.safetensors", "../secret/x.safetensors");
  storage.add_link("/m/absolute.safetensors", "/secret/x.safetensors");
  storage.add_link("/m/twice.safetensors", "absolute.safetensors");
  storage.add_link("/m/nowhere.safetensors", "gone.safetensors");
  EXPECT_THAT(names(*open("/m/inside.safetensors")), ElementsAre("b"));
  for (const char* name : {"outside", "absolute", "twice"}) {
    const std::string path = fmt::format("/m/{}.safetensors", name);
    const auto problem = error(path);
    ASSERT_TRUE(problem) << name;
    EXPECT_EQ(problem->code(), "ix.path_escape");
    EXPECT_THAT(problem->what(), HasSubstr(path));
    EXPECT_THAT(names(*open(path, true)), ElementsAre("a"));
  }
  EXPECT_EQ(code("/m/nowhere.safetensors"), "io.not_found");
  // A folder whose name merely begins with the checkpoint's name is outside the checkpoint.
  storage.add_file("/m-other/x.safetensors", one("a"));
  storage.add_link("/m/neighbour.safetensors", "../m-other/x.safetensors");
  EXPECT_EQ(code("/m/neighbour.safetensors"), "ix.path_escape");
}

TEST_F(Open, WhatIsNoFileIsRefused) {
  storage.add_pipe("/m/model.safetensors");
  EXPECT_EQ(code("/m"), "ix.not_regular");
  EXPECT_EQ(code("/m/model.safetensors"), "ix.not_regular");
  storage.add_folder("/f/model.safetensors");
  EXPECT_EQ(code("/f"), "ix.not_regular");
}

TEST_F(Open, AccessDeniedIsTold) {
  storage.add_file("/m/model.safetensors", one("a"));
  storage.deny("/m/model.safetensors");
  EXPECT_EQ(code("/m"), "io.denied");
}

// ---- reads while opening

TEST_F(Open, AnIndexedCheckpointReadsHeadersOnly) {
  storage.add_file("/m/model-00001-of-00002.safetensors", one("a"));
  storage.add_file("/m/model-00002-of-00002.safetensors", one("b"));
  storage.add_file("/m/model.safetensors.index.json",
                   index_json({{"a", "model-00001-of-00002.safetensors"},
                               {"b", "model-00002-of-00002.safetensors"}},
                              4));
  LoggingStorage logged(storage);
  const auto catalog = open_checkpoint("/m", {.storage = &logged});
  EXPECT_THAT(codes(*catalog), IsEmpty());
  std::size_t of_shards = 0;
  for (const Access& access : logged.accesses()) {
    for (const Shard& shard : catalog->shards()) {
      if (access.path != shard.path) continue;
      ++of_shards;
      EXPECT_LE(access.offset + access.bytes, shard.data_begin) << access.path;
    }
  }
  EXPECT_GE(of_shards, 2u);
  // Control: the log records a read of data.
  std::vector<std::byte> byte(1);
  logged.open(catalog->shards()[0].path)->read(catalog->shards()[0].data_begin, byte);
  EXPECT_EQ(logged.accesses().back().offset, catalog->shards()[0].data_begin);
}

TEST_F(Open, AReadErrorInAHeaderNamesFileAndOffset) {
  storage.add_file("/m/model.safetensors", one("a"));
  FaultyStorage faulty(storage, {.path_end = "model.safetensors", .offset_begin = 9});
  const auto problem = error_of([&] { (void)open_checkpoint("/m", {.storage = &faulty}); });
  ASSERT_TRUE(problem);
  EXPECT_EQ(problem->code(), "io.read");
  EXPECT_EQ(problem->where().path, "/m/model.safetensors");
  EXPECT_TRUE(problem->where().byte_offset);
}

// ---- text

TEST_F(Open, ShownAsJsonAndAsATable) {
  storage.add_file("/m/model.safetensors",
                   safetensors_bytes({{"w\n1", "BF16", {2, 1}, "abcd"}}, {{"format", "pt"}}));
  const auto catalog = open("/m");
  const std::string json = to_json(*catalog);
  const TensorInfo& tensor = catalog->tensors()[0];
  EXPECT_THAT(json, HasSubstr(R"("w\u000a1": {"dtype": "BF16","shape": [2,1])"));
  EXPECT_THAT(json, HasSubstr(fmt::format(R"("offsets": [{},{}],"bytes": 4)", tensor.offset_begin,
                                          tensor.offset_end)));
  EXPECT_THAT(json, HasSubstr(R"("format": "pt")"));
  EXPECT_THAT(json, HasSubstr(R"("total_bytes": 4)"));
  const std::string table = to_table(*catalog, true);
  EXPECT_THAT(table, HasSubstr("w\\x0a1"));
  EXPECT_THAT(table, HasSubstr("[2, 1]"));
  EXPECT_THAT(to_table(*catalog, false), Not(HasSubstr("[2, 1]")));
}

}  // namespace

}  // namespace loadstone::test

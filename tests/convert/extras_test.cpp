// Tests the companion files that a conversion copies or writes.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "loadstone/convert.h"
#include "loadstone/storage.h"
#include "support/errors.h"
#include "support/faulty_files.h"
#include "support/files.h"
#include "support/samples.h"

namespace loadstone::test {

namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::SizeIs;

class Extras : public ::testing::Test {
 protected:
  [[nodiscard]] Conversion plan(std::vector<ExtraFile> extras) const {
    Conversion conversion = make_conversion(open_checkpoint(source), {.one_file = false});
    conversion.extras = std::move(extras);
    return conversion;
  }
  [[nodiscard]] std::string code(const ExtraFile& extra) const {
    const Conversion conversion = plan({extra});
    const std::string dry = code_of([&] { check_target(conversion, target); });
    const std::string real = code_of([&] { convert(conversion, target); });
    EXPECT_EQ(dry, real);
    return real;
  }

  TemporaryFolder folder;
  std::string source = folder.write("in/source.safetensors", mixed_file());
  std::string tokenizer = folder.write("in/tokenizer.json", some_bytes(3'000'000));
  std::string target = folder / "out";
  std::vector<ExtraFile> both = {{.name = "config.json", .text = "{\"new\": 1}"},
                                 {.name = "tokenizer.json", .copy_of = tokenizer}};
};

TEST_F(Extras, StandBesideTheModel) {
  const auto report = convert(plan(both), target);
  EXPECT_THAT(report.outputs, SizeIs(3));
  EXPECT_THAT(names_in(target), ElementsAre("config.json", "model.safetensors", "tokenizer.json"));
  EXPECT_EQ(read_file(target + "/config.json"), "{\"new\": 1}");
  EXPECT_TRUE(read_file(target + "/tokenizer.json") == read_file(tokenizer));
  EXPECT_EQ(report.bytes_written, fs::file_size(target + "/model.safetensors") + 3'000'010);
}

TEST_F(Extras, ReplaceOlderOnesAndNothingElse) {
  folder.write("out/config.json", "{\"old\": 1}");
  folder.write("out/notes.md", "text");
  for (const bool with_folder : {false, true}) {
    if (with_folder) {
      fs::remove(target + "/model.safetensors");
      folder.write("out/sub/file", "x");
    }
    folder.write("out/config.json", "{\"old\": 1}");
    convert(plan(both), target);
    EXPECT_EQ(read_file(target + "/config.json"), "{\"new\": 1}");
    EXPECT_EQ(read_file(target + "/notes.md"), "text");
    EXPECT_EQ(fs::exists(target + "/sub/file"), with_folder);
  }
  EXPECT_THAT(names_in(folder.path()), SizeIs(1 + 3 + 1 + 6));  // and a record
}

TEST_F(Extras, AreRegularFilesAndNoLinks) {
  const auto copy = [&](const std::string& path) {
    return code({.name = "tokenizer.json", .copy_of = path});
  };
  fs::create_symlink(tokenizer, folder / "link");
  EXPECT_EQ(copy(folder / "link"), "convert.extra");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0666), 0);
  EXPECT_EQ(copy(folder / "pipe"), "convert.extra");
  EXPECT_EQ(copy("/dev/zero"), "convert.extra");
  EXPECT_EQ(copy("/dev/null"), "convert.extra");
  EXPECT_EQ(copy(folder / "in"), "convert.extra");
  EXPECT_EQ(copy(folder / "none"), "io.not_found");
  folder.write("large", "");
  fs::resize_file(folder / "large", (1u << 30) + 1);
  EXPECT_EQ(copy(folder / "large"), "convert.extra");
  EXPECT_FALSE(fs::exists(target));
  EXPECT_EQ(copy(tokenizer), "");  // control
}

TEST_F(Extras, HaveNamesOfTheirOwn) {
  for (const std::string& name :
       {std::string(), std::string("."), std::string(".."), std::string("../up"),
        std::string("/file"), std::string("sub/"), std::string("sub//file"),
        std::string("sub/../file"), std::string("model.safetensors/file"), std::string("a\0b", 3),
        std::string(256, 'x'), std::string(".loadstone-out.part"), std::string("model.safetensors"),
        std::string("other.safetensors"), std::string("model.safetensors.index.json")}) {
    EXPECT_EQ(code({.name = name, .text = "x"}), "convert.extra") << name;
  }
  EXPECT_EQ(code_of([&] { convert(plan({both[0], both[0]}), target); }), "convert.extra");
  const ExtraFile below = {.name = "config.json/file", .text = "x"};
  EXPECT_EQ(code_of([&] { convert(plan({both[0], below}), target); }), "convert.extra");
  Conversion one = make_conversion(open_checkpoint(source));
  one.extras = both;
  EXPECT_EQ(code_of([&] { convert(one, folder / "one.safetensors"); }), "convert.extra");
  EXPECT_FALSE(fs::exists(target));
}

TEST_F(Extras, MayBeInFolders) {
  const std::string weights = folder.write("in/2_Dense/model.safetensors", mixed_file());
  std::vector<ExtraFile> modules = both;
  modules.push_back({.name = "2_Dense/model.safetensors", .copy_of = weights});
  modules.push_back({.name = "1_Pooling/a/config.json", .text = "{}"});
  const auto expect_all = [&](const std::string& what) {
    EXPECT_TRUE(read_file(target + "/2_Dense/model.safetensors") == mixed_file()) << what;
    EXPECT_EQ(read_file(target + "/1_Pooling/a/config.json"), "{}") << what;
    EXPECT_THAT(local_storage().list(folder.path()),
                ElementsAre(".loadstone-out.done", "in", "out"))
        << what;  // no temporary file remains
  };
  const auto report = convert(plan(modules), target, {.receipt = DigestKind::xxh3_128});
  EXPECT_THAT(report.outputs, ::testing::Contains(target + "/2_Dense/model.safetensors"));
  expect_all("new");
  // The conversion replaces the older output and its folders in one step.
  folder.write("out/2_Dense/model.safetensors", "older");
  folder.write("out/notes.md", "text");
  EXPECT_THAT(error_of([&] { convert(plan(modules), target); })->message(),
              ::testing::HasSubstr("a file has changed since: '2_Dense/model.safetensors'"));
  convert(plan(modules), target, {.overwrite = true});
  expect_all("again");
  EXPECT_EQ(read_file(target + "/notes.md"), "text");
  // The conversion replaces the files one at a time if an output folder has an unknown file.
  folder.write("out/2_Dense/notes.md", "text");
  convert(plan(modules), target);
  expect_all("one at a time");
  EXPECT_EQ(read_file(target + "/2_Dense/notes.md"), "text");
  // The conversion adds its files to an existing folder that contains no model.
  fs::remove(target + "/model.safetensors");
  fs::remove_all(target + "/1_Pooling");
  convert(plan(modules), target);
  expect_all("among others");
  EXPECT_EQ(read_file(target + "/2_Dense/notes.md"), "text");
  fs::remove_all(target);
  folder.write("out/2_Dense", "a file");
  EXPECT_EQ(code(modules[2]), "convert.target");
}

// Returns the error code of `work` when calls named `name` fail for paths that end with `path_end`.
template <typename Work>
std::string code_of_fault(std::string_view name, std::string_view path_end, const Work& work) {
  FaultyFiles files([&](const FileCall& call) {
    const bool fails = call.name == name && call.path.ends_with(path_end);
    return FileFault{.problem = fails ? EACCES : 0};
  });
  return code_of([&] { work(files); });
}

TEST_F(Extras, AreReadThroughTheCatalogsStorage) {
  const auto merge = [&](Storage& storage) {
    const OpenOptions open = {.storage = &storage};
    std::vector<std::shared_ptr<const Catalog>> models;
    for (const std::string name : {"a", "b"}) {
      const std::string weights = folder.write(name + "/model.safetensors", mixed_file());
      folder.write(name + "/tokenizer.json", "{\"model\": {\"vocab\": [1]}}");
      models.push_back(open_checkpoint(weights, open));
    }
    ConvertOptions options = {.merge = MergeOptions{.weights = {1, 1}}, .one_file = false};
    options.folder = read_model_folder(*models.front(), models.front()->root());
    (void)make_conversion(std::make_shared<const Catalog>(models), options);
  };
  EXPECT_EQ(code_of_fault("open", "/c/tokenizer.json", merge), "");
  EXPECT_EQ(code_of_fault("open", "/b/tokenizer.json", merge), "io.denied");
  EXPECT_EQ(code_of_fault("list", "/a", merge), "io.read");
}

TEST_F(Extras, BesideTheTargetAreReadThroughTheCallsStorage) {
  folder.write("out/config.json", "{}");
  const Conversion conversion = plan({});
  const auto write = [&](Storage& storage) { convert(conversion, target, {.storage = &storage}); };
  EXPECT_EQ(code_of_fault("open", "out/config.json", write), "io.denied");
}

TEST_F(Extras, TheSourcesOwnWeightsAreNoFilesLeftOut) {
  const std::string root = folder / "in";
  folder.write("in/pytorch_model.bin", "other weights");
  ConvertOptions options = {.one_file = false};
  options.folder = read_model_folder(root);
  const Conversion conversion = make_conversion(open_checkpoint(root), options);
  std::vector<Finding> found = conversion.plan.findings;
  std::erase_if(found, [](const Finding& each) { return each.code != "convert.not_copied"; });
  ASSERT_EQ(found.size(), 1u);
  EXPECT_THAT(found[0].sources, ElementsAre("pytorch_model.bin"));
}

TEST_F(Extras, ComeWithTheLastStep) {
  const ConvertRun part = {.part = ConvertPart{.index = 1, .count = 1}};
  convert(plan(both), target, part);
  for (const std::string& name : names_in(folder / ".loadstone-out.part/files")) {
    EXPECT_EQ(name, "model.safetensors");
  }
  const ConvertRun finish = {.finish = true};
  const auto finished = [&](const std::vector<ExtraFile>& extras) {
    return code_of([&] { convert(plan(extras), target, finish); });
  };
  auto other = both;
  other[0].text = "{}";
  EXPECT_EQ(finished(other), "convert.state");
  // A change of the companion file's bytes matters. A change of its modification time does not.
  const std::string bytes = read_file(tokenizer);
  std::ofstream(tokenizer, std::ios::app) << ' ';
  EXPECT_EQ(finished(both), "convert.state");
  std::ofstream(tokenizer, std::ios::trunc) << bytes;
  fs::last_write_time(tokenizer, fs::last_write_time(tokenizer) + std::chrono::seconds(1));
  EXPECT_EQ(finished(both), "");
  EXPECT_THAT(names_in(target), ElementsAre("config.json", "model.safetensors", "tokenizer.json"));
}

}  // namespace

}  // namespace loadstone::test

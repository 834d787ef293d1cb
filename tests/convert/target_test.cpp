// Tests which targets a conversion accepts, and the state of a target after a conversion that ended
// early.
#include <gmock/gmock.h>
#include <sys/mount.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>

#include "loadstone/convert.h"
#include "loadstone/verify.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/samples.h"
#include "support/watched_storage.h"

namespace loadstone::test {

namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class Target : public ::testing::Test {
 protected:
  std::string code(const std::string& target, const std::string& from = {}) {
    const std::string start = from.empty() ? source : from;
    const ConvertOptions options = {.one_file = target.ends_with(".safetensors")};
    const auto conversion = make_conversion(open_checkpoint(start), options);
    return code_of([&] { convert(conversion, target); });
  }

  TemporaryFolder folder;
  std::string bytes = mixed_file();
  std::string source = folder.write("in/source.safetensors", bytes);
};

TEST_F(Target, TheSourceIsNeverWritten) {
  EXPECT_EQ(code(source), "convert.target");
  fs::create_hard_link(source, folder / "hard.safetensors");
  EXPECT_EQ(code(folder / "hard.safetensors"), "convert.target");
  fs::create_symlink(source, folder / "link.safetensors");
  EXPECT_EQ(code(folder / "link.safetensors"), "convert.target");
  EXPECT_EQ(code(folder / "in"), "convert.target");
  EXPECT_EQ(code((folder / "in") + "/../in/."), "convert.target");
  EXPECT_TRUE(read_file(source) == bytes);
  // A different file next to a single source file is allowed.
  EXPECT_EQ(code(folder / "in/other.safetensors"), "");
}

// The library's functions accept any name, but not that of a file of the other format.
TEST_F(Target, ItsNameHasTheFormatOfTheConversion) {
  const auto catalog = open_checkpoint(
      folder.write("plain.safetensors",
                   safetensors_bytes({{"a.weight", "F32", {2, 2}, std::string(16, '\0')}})));
  const auto refused = [&](const ConvertOptions& options, const std::string& name) {
    const Conversion conversion = make_conversion(catalog, options);
    const std::string target = folder / name;
    const std::string text = error_of([&] { convert(conversion, target); }).value().what();
    EXPECT_EQ(error_of([&] { check_target(conversion, target); }).value().what(), text);
    EXPECT_FALSE(fs::exists(target));
    return text;
  };
  const ConvertOptions gguf = {.format = FileFormat::gguf,
                               .metadata = {{"general.architecture", {.value = "llama"}}}};
  EXPECT_THAT(refused({}, "out.gguf"), HasSubstr("expected NAME.safetensors, or "));
  EXPECT_THAT(refused(gguf, "out.safetensors"), HasSubstr("expected NAME.gguf, or "));
  EXPECT_THAT(refused({.one_file = false}, "out.safetensors"), HasSubstr("one_file"));
  EXPECT_EQ(code_of([&] { convert(make_conversion(catalog, gguf), folder / "out.gguf"); }), "");
  EXPECT_EQ(code_of([&] { convert(make_conversion(catalog, {}), folder / "no suffix"); }), "");
}

TEST(EmptyConversion, IsRejected) {
  const Conversion none;
  const auto code = [](const auto& work) { return code_of([&] { (void)work(); }); };
  EXPECT_EQ(code([&] { return convert(none, "out"); }), "usage");
  EXPECT_EQ(code([&] { return check_target(none, "out"); }), "usage");
  EXPECT_EQ(code([&] { return convert_in_memory(none, 0, {}); }), "usage");
  EXPECT_EQ(code([&] { return compare_with_conversion(none, Catalog({}, {}, {}, {}, {})); }),
            "usage");
  EXPECT_EQ(code([&] { return to_json(none); }), "");
  EXPECT_EQ(code([&] { return to_table(none, true); }), "");
}

TEST_F(Target, AFolderOfShardsStaysAsItIs) {
  converted(source, folder / "many", {.one_file = false, .shard_bytes_max = 150000});
  const auto before = names_in(folder / "many");
  EXPECT_EQ(code(folder / "many/out.safetensors", folder / "many"), "convert.target");
  EXPECT_EQ(code(folder / "many/deeper", folder / "many"), "convert.target");
  fs::create_symlink(folder / "many", folder / "alias");
  EXPECT_EQ(code(folder / "alias/out.safetensors", folder / "many"), "convert.target");
  EXPECT_EQ(names_in(folder / "many"), before);
}

TEST_F(Target, AFileIsReplacedWholeAndAFolderIsJoined) {
  folder.write("old.safetensors", "something else");
  EXPECT_EQ(code(folder / "old.safetensors"), "convert.target");
  EXPECT_EQ(read_file(folder / "old.safetensors"), "something else");
  convert(make_conversion(open_checkpoint(source)), folder / "old.safetensors",
          {.overwrite = true});
  EXPECT_EQ(open_checkpoint(folder / "old.safetensors")->tensors().size(), 11u);
  folder.write("joined/config.json", "{}");
  EXPECT_EQ(code(folder / "joined"), "");
  EXPECT_THAT(names_in(folder / "joined"), ElementsAre("config.json", "model.safetensors"));
  fs::create_directory(folder / "empty");
  EXPECT_EQ(code(folder / "empty"), "");
  EXPECT_THAT(names_in(folder / "empty"), ElementsAre("model.safetensors"));
  converted(source, folder / "named", {.one_file = false, .stem = "diffusion_pytorch_model"});
  EXPECT_THAT(names_in(folder / "named"), ElementsAre("diffusion_pytorch_model.safetensors"));
}

// The conversion replaces the older output atomically and keeps other files in the folder.
TEST_F(Target, AnOlderOutputIsReplacedWhole) {
  converted(source, folder / "out", {.one_file = false, .shard_bytes_max = 150000});
  folder.write("out/config.json", "{}");
  folder.write("out/model.md", "text");
  fs::permissions(folder / "out", fs::perms::owner_all);
  FaultyStorage faulty(local_storage(),
                       {.path_end = "source.safetensors", .offset_begin = 300'000});
  const auto before = names_in(folder / "out");
  const Conversion conversion = make_conversion(open_checkpoint(source), {.one_file = false});
  EXPECT_EQ(code_of([&] { convert(conversion, folder / "out", {.storage = &faulty}); }), "io.read");
  EXPECT_EQ(names_in(folder / "out"), before);
  // Files that other programs add to the folder during the conversion are kept.
  LoggingStorage watched(local_storage());
  watched.watch().before_read = [&](const Access& access) {
    if (access.offset > 10'000) folder.write("out/late.txt", "late");
  };
  convert(conversion, folder / "out", {.storage = &watched});
  EXPECT_EQ(read_file(folder / "out/late.txt"), "late");
  fs::remove(folder / "out/late.txt");
  EXPECT_EQ(code(folder / "out"), "");
  EXPECT_THAT(names_in(folder / "out"),
              ElementsAre("config.json", "model.md", "model.safetensors"));
  EXPECT_EQ(read_file(folder / "out/config.json"), "{}");
  EXPECT_EQ(fs::status(folder / "out").permissions(), fs::perms::owner_all);
  EXPECT_TRUE(compare(*open_checkpoint(source), *open_checkpoint(folder / "out")).ok());
  EXPECT_THAT(names_in(folder.path()), SizeIs(1 + 2 + 1 + 3));  // and a record
}

TEST_F(Target, AModelOfSomebodyElseStays) {
  folder.write("out/other.safetensors", "x");
  EXPECT_EQ(code(folder / "out"), "convert.target");
  folder.write("deep/model.safetensors", "x");
  folder.write("deep/sub/file", "x");
  EXPECT_EQ(code(folder / "deep"), "convert.target");
  folder.write("plain/model.safetensors", "x");
  fs::create_symlink(folder / "plain", folder / "alias");
  EXPECT_EQ(code(folder / "alias"), "convert.target");
  EXPECT_EQ(read_file(folder / "plain/model.safetensors"), "x");
  fs::create_directory(folder / "empty");
  fs::create_symlink(folder / "empty", folder / "link");
  EXPECT_EQ(code(folder / "link"), "");
  EXPECT_THAT(names_in(folder / "empty"), ElementsAre("model.safetensors"));
}

TEST_F(Target, WhatIsNoFileAndNoFolderIsLeftAlone) {
  fs::create_directory(folder / "folder.safetensors");
  EXPECT_EQ(code(folder / "folder.safetensors"), "convert.target");
  folder.write("file", "x");
  EXPECT_EQ(code(folder / "file"), "convert.target");
  EXPECT_EQ(code(folder / "file/out.safetensors"), "io.not_found");
  const std::string none = folder / "none of 'these'";
  const auto error = error_of(
      [&] { convert(make_conversion(open_checkpoint(source)), none + "/deep/out.safetensors"); });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), "io.not_found");
  const std::string command = error->message().substr(error->message().find("mkdir"));
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
  EXPECT_EQ(code(none + "/deep/out.safetensors"), "");
}

// The record is next to the folder, with the name of the folder, however the caller writes it.
TEST_F(Target, AFolderWithoutANameIsResolved) {
  const fs::path before = fs::current_path();
  for (const char* const text : {".", "./", "../out", "sub/..", "../out/."}) {
    fs::create_directories(folder / "out/sub");
    fs::current_path(folder / "out");
    EXPECT_EQ(code(text), "") << text;
    EXPECT_EQ(code(text), "") << text;  // replaces the files
    fs::current_path(before);
    EXPECT_TRUE(fs::exists(folder / ".loadstone-out.done")) << text;
    EXPECT_THAT(names_in(folder / "out"), ElementsAre("model.safetensors", "sub")) << text;
    EXPECT_EQ(code(folder / "out/."), "") << text;
    fs::remove_all(folder / "out");
    EXPECT_EQ(code(folder / "new/."), "");
    EXPECT_THAT(names_in(folder / "new"), ElementsAre("model.safetensors"));
    fs::remove_all(folder / "new");
    fs::remove(folder / ".loadstone-new.done");
    fs::remove(folder / ".loadstone-out.done");
  }
}

// If the working folder of a shell were replaced, the shell would be in a removed folder.
TEST_F(Target, TheWorkingFolderIsNotExchanged) {
  const fs::path before = fs::current_path();
  fs::create_directories(folder / "out");
  fs::current_path(folder / "out");
  EXPECT_EQ(code("."), "");
  EXPECT_EQ(code(folder / "out"), "");
  EXPECT_TRUE(fs::exists("model.safetensors"));
  fs::current_path(before);
}

TEST_F(Target, FilesOfADifferentSplitAreReplaced) {
  const std::string plain =
      folder.write("plain.safetensors",
                   safetensors_bytes({{"a.weight", "F32", {100, 2}, std::string(800, '\0')},
                                      {"b.weight", "F32", {100, 2}, std::string(800, '\1')},
                                      {"c.weight", "F32", {100, 2}, std::string(800, '\2')}}));
  ConvertOptions options = {.format = FileFormat::gguf,
                            .metadata = {{"general.architecture", {.value = "llama"}}},
                            .one_file = false,
                            .is_split = true,
                            .stem = "x",
                            .shard_bytes_max = 1900};
  const std::string target = folder / "out/x.gguf";
  fs::create_directories(folder / "out");
  convert(make_conversion(open_checkpoint(plain), options), target);
  const auto older = names_in(folder / "out");
  folder.write("out/y-00001-of-00002.gguf", "of somebody");
  options.shard_bytes_max = 900;
  const auto conversion = make_conversion(open_checkpoint(plain), options);
  const auto findings = check_target(conversion, target);
  ASSERT_THAT(findings, SizeIs(1));
  EXPECT_EQ(findings[0].code, "convert.replaced");
  for (const std::string& name : older) {
    if (!name.ends_with(".gguf")) continue;
    EXPECT_THAT(findings[0].message, HasSubstr(name));
  }
  convert(conversion, target);
  EXPECT_THAT(
      names_in(folder / "out"),
      ElementsAre(".loadstone-x.gguf.done", "x-00001-of-00003.gguf", "x-00002-of-00003.gguf",
                  "x-00003-of-00003.gguf", "y-00001-of-00002.gguf"));
  // Files of the source in the same folder are not replaced.
  const std::string first = folder / "out/x-00001-of-00003.gguf";
  const auto again = make_conversion(open_checkpoint(first), options);
  EXPECT_EQ(code_of([&] { convert(again, target, {.overwrite = true}); }), "convert.target");
}

// A bind mount has the device number of its parent's file system.
TEST_F(Target, AMountPointIsNotReplaced) {
  fs::create_directories(folder / "real");
  folder.write("real/notes.txt", "text");
  fs::create_directories(folder / "out");
  folder.write("out.safetensors", "x");
  const auto bind = [&](const std::string& from, const std::string& to) {
    return ::mount(from.c_str(), to.c_str(), nullptr, MS_BIND, nullptr) == 0;
  };
  if (!bind(folder / "real", folder / "out")) GTEST_SKIP() << "no permission to mount";
  EXPECT_EQ(code(folder / "out"), "");
  EXPECT_EQ(code(folder / "out"), "");  // replaces the files
  EXPECT_THAT(names_in(folder / "real"), ElementsAre("model.safetensors", "notes.txt"));
  ::umount((folder / "out").c_str());
  ASSERT_TRUE(bind(folder / "real/notes.txt", folder / "out.safetensors"));
  const auto error = error_of([&] {
    convert(make_conversion(open_checkpoint(source)), folder / "out.safetensors",
            {.overwrite = true});
  });
  ::umount((folder / "out.safetensors").c_str());
  EXPECT_THAT(error.value().what(), HasSubstr("mount point"));
}

class Stopper final : public Observer {
 public:
  bool on_progress(const Progress& /*progress*/) override { return false; }
};

// A conversion that ends early must leave no new file and must not change an old target.
TEST_F(Target, AFailureLeavesNothing) {
  folder.write("old.safetensors", "old");
  folder.write("joined/config.json", "{}");
  const auto before = names_in(folder.path());
  FaultyStorage faulty(
      local_storage(),
      {.path_end = "source.safetensors", .offset_begin = 300'000, .skip = 0, .code = "io.read"});
  Stopper stopper;
  for (const char* name : {"old.safetensors", "new.safetensors", "joined", "new"}) {
    const std::string target = folder / name;
    for (const std::uint64_t shard : {100'000u, 5'000'000u}) {
      const Conversion conversion =
          make_conversion(open_checkpoint(source),
                          {.one_file = target.ends_with(".safetensors"), .shard_bytes_max = shard});
      const auto error =
          error_of([&] { convert(conversion, target, {.overwrite = true, .storage = &faulty}); });
      ASSERT_TRUE(error.has_value());
      EXPECT_EQ(error->code(), "io.read");
      EXPECT_FALSE(error->where().tensor.empty());
      const ConvertRun stopped = {.overwrite = true, .observer = &stopper};
      EXPECT_EQ(code_of([&] { convert(conversion, target, stopped); }), "cancelled");
    }
  }
  EXPECT_EQ(names_in(folder.path()), before);
  EXPECT_EQ(read_file(folder / "old.safetensors"), "old");
}

TEST_F(Target, AChangedSourceIsFound) {
  const Conversion conversion = make_conversion(open_checkpoint(source));
  fs::last_write_time(source, fs::file_time_type::clock::now() + std::chrono::hours(1));
  EXPECT_EQ(code_of([&] { convert(conversion, folder / "out.safetensors"); }), "io.changed");
  // The source changes during the conversion.
  const Conversion again = make_conversion(open_checkpoint(source));
  LoggingStorage watched(local_storage());
  std::atomic<int> reads = 0;
  watched.watch().before_read = [&](const Access& access) {
    if (access.offset < 10'000 || reads++ > 0) return;
    fs::last_write_time(source, fs::file_time_type::clock::now() + std::chrono::hours(2));
  };
  EXPECT_EQ(code_of([&] { convert(again, folder / "out.safetensors", {.storage = &watched}); }),
            "io.changed");
  EXPECT_THAT(names_in(folder.path()), ElementsAre("in", "in/source.safetensors"));
}

TEST_F(Target, AFullDiskIsFoundBeforeAnythingIsWritten) {
  fs::create_directory(folder / "disk");
  if (::mount("tmpfs", (folder / "disk").c_str(), "tmpfs", 0, "size=512k") != 0) {
    GTEST_SKIP() << "no permission to mount a small disk";
  }
  EXPECT_EQ(code(folder / "disk/out.safetensors"), "io.no_space");
  EXPECT_EQ(code(folder / "disk/out"), "io.no_space");
  EXPECT_THAT(names_in(folder / "disk"), IsEmpty());
  // Control: a smaller model fits on the disk.
  const std::string small =
      folder.write("small.safetensors", safetensors_bytes({{"a", "U8", {9}, some_bytes(9)}}));
  EXPECT_EQ(code(folder / "disk/out.safetensors", small), "");
  ::umount((folder / "disk").c_str());
}

}  // namespace

}  // namespace loadstone::test

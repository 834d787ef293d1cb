// Tests conversions that are interrupted and resumed, or made in parts.
#include <gmock/gmock.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <map>

#include "loadstone/convert.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/samples.h"
#include "support/watched_storage.h"

namespace loadstone::test {

namespace {

namespace fs = std::filesystem;
using namespace ::testing;

constexpr ConvertRun resume = {.resume = true};
constexpr ConvertRun finish = {.finish = true};
constexpr const char* index_file = "/model.safetensors.index.json";
constexpr ConvertRun replace = {.finish = true, .overwrite = true};

ConvertRun on(Storage& storage, ConvertRun run) {
  run.storage = &storage;
  return run;
}

constexpr ConvertRun part(std::uint32_t index, std::uint32_t count) {
  return {.part = ConvertPart{.index = index, .count = count}};
}

// Ten tensors of 60,000 bytes.
std::string even_file() {
  std::vector<FileTensor> tensors;
  for (unsigned i = 0; i < 10; ++i) {
    tensors.push_back({"layers." + std::to_string(i), "F32", {100, 150}, some_bytes(60'000, i)});
  }
  return safetensors_bytes(tensors, {{"format", "pt"}});
}

class Resume : public ::testing::Test {
 protected:
  void SetUp() override { convert(plan(), folder / "whole"); }

  // Writes five shards in sequence.
  [[nodiscard]] ConvertOptions options() const {
    return {.one_file = false, .shard_bytes_max = 130'000, .threads = 1};
  }
  [[nodiscard]] Conversion plan() const { return plan(options()); }
  [[nodiscard]] Conversion plan(const ConvertOptions& options) const {
    return make_conversion(open_checkpoint(source), options);
  }

  // Simulates kill -9 after the conversion has read `bytes` bytes of the source.
  void killed(const Conversion& conversion, std::uint64_t bytes, const ConvertRun& run = {}) const {
    const pid_t child = ::fork();
    if (child == 0) {
      LoggingStorage watched(local_storage());
      std::atomic<std::uint64_t> sum = 0;
      watched.watch().before_read = [&](const Access& access) {
        if (access.offset > 10'000 && (sum += access.bytes) > bytes) ::_exit(9);
      };
      try {
        convert(conversion, target, on(watched, run));
      } catch (...) {
        ::_exit(1);
      }
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_EQ(WEXITSTATUS(status), 9);
  }

  void expect_whole() const { expect_whole(target); }
  void expect_whole(const std::string& path) const {
    ASSERT_EQ(names_in(path), names_in(folder / "whole"));
    for (const std::string& name : names_in(path)) {
      EXPECT_TRUE(read_file(path + "/" + name) == read_file(folder / ("whole/" + name))) << name;
    }
    EXPECT_FALSE(fs::exists(work));
  }

  std::string code(const ConvertRun& run) const { return code(plan(), run); }
  std::string code(const Conversion& conversion, const ConvertRun& run) const {
    return code_of([&] { convert(conversion, target, run); });
  }

  TemporaryFolder folder;
  std::string source = folder.write("in/source.safetensors", even_file());
  std::string target = folder / "out";
  std::string work = folder / ".loadstone-out.part";
  std::string files = work + "/files/";
};

TEST_F(Resume, FinishedShardsAreKept) {
  for (const std::uint64_t bytes : {0u, 100'000u, 300'000u, 500'000u}) {
    killed(plan(), bytes);
    EXPECT_FALSE(fs::exists(target));
    std::uint64_t finished = 0;
    for (const auto& entry : fs::directory_iterator(files)) {
      finished += entry.file_size();
      EXPECT_TRUE(read_file(entry.path()) ==
                  read_file(folder / ("whole/" + entry.path().filename().string())));
    }
    const auto report = convert(plan(), target, resume);
    EXPECT_EQ(report.bytes_kept, finished);
    EXPECT_EQ(report.bytes_kept == 0, bytes == 0);
    EXPECT_LT(report.bytes_read + report.bytes_kept, 610'000u);
    expect_whole();
    fs::remove_all(target);
  }
}

TEST_F(Resume, WithNothingToResumeItJustRuns) {
  EXPECT_EQ(code(resume), "");
  expect_whole();
  EXPECT_EQ(code(resume), "");  // an older output is replaced
  expect_whole();
}

TEST_F(Resume, ARunThatBeginsAnewRemovesWhatWasLeft) {
  killed(plan(), 300'000);
  ASSERT_TRUE(fs::exists(work));
  const auto other =
      make_conversion(open_checkpoint(source), {.one_file = false, .stem = "other", .threads = 1});
  convert(other, target);
  EXPECT_THAT(names_in(target), ElementsAre("other.safetensors"));
  EXPECT_FALSE(fs::exists(work));
  // A single output file has its own work folder.
  const auto one = make_conversion(open_checkpoint(source), {.threads = 1});
  target = folder / "one.safetensors";
  killed(one, 300'000);
  EXPECT_TRUE(fs::exists(folder / ".loadstone-one.safetensors.part"));
  EXPECT_EQ(convert(one, target, resume).bytes_kept, 0u);
  EXPECT_FALSE(fs::exists(folder / ".loadstone-one.safetensors.part"));
}

// After a failure, a run with `resume` keeps the shards that it finished. Other runs keep nothing.
TEST_F(Resume, AFailureKeepsWhatItWasToldToKeep) {
  FaultyStorage faulty(local_storage(),
                       {.path_end = "source.safetensors", .offset_begin = 300'000});
  for (const ConvertRun& run : {ConvertRun{}, resume}) {
    EXPECT_EQ(code_of([&] { convert(plan(), target, on(faulty, run)); }), "io.read");
    EXPECT_EQ(fs::exists(work), run.resume);
  }
  for (const auto& entry : fs::directory_iterator(work)) {
    EXPECT_THAT(entry.path().string(), Not(HasSubstr("unfinished")));
  }
  EXPECT_GT(convert(plan(), target, resume).bytes_kept, 0u);
  expect_whole();
}

TEST_F(Resume, AnotherConversionIsRefusedAndNothingIsDeleted) {
  killed(plan(), 300'000);
  const auto before = names_in(files);
  const auto refused = [&](const Conversion& conversion, const char* word) {
    for (const ConvertRun& run : {resume, part(1, 2), finish}) {
      const auto error = error_of([&] { convert(conversion, target, run); });
      EXPECT_EQ(error.value().code(), "convert.state") << word;
      EXPECT_THAT(error->message(), HasSubstr(word));
      EXPECT_THAT(error->where().path, HasSubstr(".loadstone-out.part"));
      const auto dry = error_of([&] { (void)check_target(conversion, target, run); });
      EXPECT_STREQ(dry.value().what(), error->what());
    }
  };
  ConvertOptions other = options();
  other.dtype = Dtype::f16;
  refused(plan(other), "dtypes");
  other = options();
  other.rules = {{.sources = {"layers.3"}, .targets = {"other"}}};
  refused(plan(other), "names");
  other.rules = {{.sources = {"layers.0"}, .targets = {"layers.1"}},
                 {.sources = {"layers.1"}, .targets = {"layers.0"}}};
  refused(plan(other), "rules");
  other = options();
  other.shard_bytes_max = 190'000;
  refused(plan(other), "shards");
  Conversion more = plan();
  more.metadata.emplace("more", MetadataValue{.value = "text"});
  refused(more, "metadata");
  more = plan();
  more.extras.push_back({.name = "config.json", .text = "{}"});
  refused(more, "different companion files");
  EXPECT_EQ(names_in(files), before);
}

TEST_F(Resume, ACopyOfTheSourceGoesOn) {
  killed(plan(), 300'000);
  fs::copy_file(source, folder / "in/copy");
  fs::rename(folder / "in/copy", source);
  const ConvertReport report = convert(plan(), target, resume);
  EXPECT_GT(report.bytes_kept, 0u);
  EXPECT_TRUE(report.findings.empty());
  expect_whole();
}

TEST_F(Resume, AShardThatIsNotWholeIsMadeAgain) {
  killed(plan(), 500'000);
  const std::string shard = files + "model-00001-of-00005.safetensors";
  const std::string bytes = read_file(shard);
  const auto kept = [&] {
    killed(plan(), 330'000, resume);  // also reads the kept shards, and ends before the last shard
    return fs::exists(shard) && read_file(shard) == bytes;
  };
  fs::resize_file(shard, bytes.size() - 1);
  EXPECT_TRUE(kept());
  std::string other = bytes;
  other[20] = static_cast<char>(other[20] ^ 1);  // in the header
  folder.write(".loadstone-out.part/files/model-00001-of-00005.safetensors", other);
  EXPECT_TRUE(kept());
  fs::remove(shard);
  fs::create_symlink(folder / "whole/model-00001-of-00005.safetensors", shard);
  EXPECT_EQ(code(resume), "");
  expect_whole();
}

TEST_F(Resume, AStateThatIsNoneIsRefused) {
  killed(plan(), 300'000);
  const std::string state = read_file(work + "/state.json");
  for (const std::string& text : {std::string("{"), std::string(), state + "x",
                                  "{\"version\": 2" + state.substr(state.find(','))}) {
    folder.write(".loadstone-out.part/state.json", text);
    EXPECT_EQ(code(resume), "convert.state") << text;
    EXPECT_EQ(code(finish), "convert.state");
  }
  folder.write(".loadstone-out.part/state.json", state);  // control
  EXPECT_EQ(code(resume), "");
  expect_whole();
  killed(plan(), 300'000);
  folder.write(".loadstone-out.part/state.json", "{");
  EXPECT_EQ(code({}), "");  // a run without `resume` ignores the state
  expect_whole();
}

TEST_F(Resume, PartsTogetherAreTheWhole) {
  for (const std::uint32_t count : {1u, 2u, 4u, 9u}) {
    std::uint64_t bytes = 0;
    for (std::uint32_t index = count; index > 0; --index) {
      EXPECT_EQ(code(finish), "convert.incomplete");
      const auto report = convert(plan(), target, part(index, count));
      for (const std::string& path : report.outputs) bytes += fs::file_size(path);
      EXPECT_EQ(report.outputs.empty(), index > 5);
      EXPECT_FALSE(fs::exists(target));
    }
    EXPECT_EQ(bytes, plan().bytes_to_write);
    // A second run of a finished part reads nothing.
    const auto again = convert(plan(), target, part(1, count));
    EXPECT_EQ(again.bytes_read, 0u);
    EXPECT_GT(again.bytes_kept, 0u);
    EXPECT_EQ(convert(plan(), target, finish).outputs, [&] {
      auto paths = convert(plan(), folder / "again").outputs;
      for (std::string& path : paths) path.replace(0, (folder / "again").size(), target);
      return paths;
    }());
    expect_whole();
    fs::remove_all(target);
  }
}

TEST_F(Resume, SharesAreEvenAndEveryFileHasOne) {
  Conversion conversion;
  for (std::uint64_t i = 0; i < 40; ++i) conversion.files.push_back({.data_bytes = 1000 + i * 10});
  std::map<std::uint32_t, int> seen;
  for (std::uint32_t index = 1; index <= 4; ++index) {
    std::uint64_t bytes = 0;
    for (const std::uint32_t file : files_of_part(conversion, {index, 4})) {
      bytes += conversion.files[file].data_bytes;
      ++seen[file];
    }
    EXPECT_NEAR(static_cast<double>(bytes), 47'800 / 4., 250);
  }
  EXPECT_THAT(seen, SizeIs(40));
  EXPECT_EQ(code_of([&] { (void)files_of_part(conversion, {0, 4}); }), "plan.options");
  EXPECT_EQ(code_of([&] { (void)files_of_part(conversion, {5, 4}); }), "plan.options");
}

TEST_F(Resume, WhatIsMissingIsNamedByItsPart) {
  convert(plan(), target, part(1, 3));
  const auto message = [&] {
    const auto error = error_of([&] { convert(plan(), target, finish); });
    EXPECT_EQ(error ? error->code() : "", "convert.incomplete");
    return error ? error->message() : "";
  };
  EXPECT_THAT(message(), HasSubstr("run parts 2, 3 of 3 again"));
  convert(plan(), target, part(2, 3));
  EXPECT_THAT(message(), HasSubstr("run part 3 of 3 again"));
  const auto third = convert(plan(), target, part(3, 3));
  fs::resize_file(third.outputs.front(), 100);
  EXPECT_THAT(message(), HasSubstr("run part 3 of 3 again"));
  EXPECT_EQ(code({}), "convert.state");  // a plain run must not discard finished parts
  killed(plan(), 0, part(3, 3));
  EXPECT_EQ(code(part(3, 3)), "");
  EXPECT_EQ(code(finish), "");
  expect_whole();
  // An ordinary resumed run can also use parts that are finished.
  convert(plan(), folder / "out", part(2, 3));
  EXPECT_GT(convert(plan(), target, resume).bytes_kept, 0u);
  expect_whole();
}

TEST_F(Resume, PartsCanBeDividedAnewWhenNobodyIsAtThem) {
  killed(plan(), 100'000, part(1, 2));
  std::uint64_t kept = 0;
  for (std::uint32_t index = 1; index <= 3; ++index) {
    kept += convert(plan(), target, part(index, 3)).bytes_kept;
  }
  EXPECT_GT(kept, 120'000u);
  EXPECT_EQ(code(finish), "");
  expect_whole();
}

TEST_F(Resume, WhatMakesNoSenseIsRefused) {
  const auto one = make_conversion(open_checkpoint(source), {});
  target = folder / "one.safetensors";
  EXPECT_EQ(code(one, part(1, 2)), "plan.options");
  EXPECT_EQ(code(one, finish), "plan.options");
  target = folder / "out";
  EXPECT_EQ(code(part(3, 2)), "plan.options");
  EXPECT_EQ(code({.part = ConvertPart{}, .finish = true}), "plan.options");
  folder.write(".loadstone-out.part", "a file");
  for (const ConvertRun& run : {ConvertRun{}, resume, part(1, 2)}) {
    EXPECT_EQ(code(run), "convert.target");
  }
  EXPECT_EQ(code(finish), "convert.incomplete");
  fs::remove(work);
  fs::create_directory_symlink(folder / "in", work);
  EXPECT_EQ(code(resume), "convert.target");
  EXPECT_THAT(names_in(folder / "in"), ElementsAre("source.safetensors"));
}

// Starts other runs from inside the first one, and expects the errors that processes would get.
TEST_F(Resume, TwoDoNotDoTheSame) {
  LoggingStorage watched(local_storage());
  std::atomic<int> reads = 0;
  std::map<std::string, std::string> codes;
  watched.watch().before_read = [&](const Access& access) {
    if (access.offset < 10'000 || reads++ != 2) return;
    codes["plain"] = code({});
    codes["resume"] = code(resume);
    codes["finish"] = code(finish);
    codes["part 1"] = code(part(1, 2));
    codes["part 2"] = code(part(2, 2));
    codes["part of 3"] = code(part(2, 3));
  };
  convert(plan(), target, on(watched, resume));
  for (const char* run : {"plain", "resume", "finish", "part 1", "part 2"}) {
    EXPECT_EQ(codes[run], "convert.locked") << run;
  }
  expect_whole();
  fs::remove_all(target);
  reads = 0;
  convert(plan(), target, on(watched, part(1, 2)));
  for (const char* run : {"plain", "resume", "finish", "part 1"}) {
    EXPECT_EQ(codes[run], "convert.locked") << run;
  }
  EXPECT_EQ(codes["part 2"], "");
  EXPECT_EQ(codes["part of 3"], "convert.state");
  EXPECT_EQ(code(finish), "");
  expect_whole();
}

TEST_F(Resume, EndedWhenANewTargetHadItsName) {
  convert(plan(), target, part(1, 1));
  fs::copy_file(folder / "whole" + index_file, files + index_file);
  fs::rename(work + "/files", target);
  fs::resize_file(target + index_file, 10);
  EXPECT_EQ(code(replace), "convert.incomplete");  // control
  fs::copy_file(folder / "whole" + index_file, target + index_file,
                fs::copy_options::overwrite_existing);
  const auto report = convert(plan(), target, replace);
  EXPECT_THAT(report.outputs, SizeIs(6));
  EXPECT_EQ(report.bytes_kept, plan().bytes_to_write);
  expect_whole();
}

TEST_F(Resume, EndedAroundTheExchange) {
  const auto inode = [](const std::string& path) {
    struct stat status {};
    ::stat(path.c_str(), &status);
    return std::to_string(status.st_ino);
  };
  for (const bool exchanged : {false, true}) {
    // The same names, sizes and headers, but different values.
    fs::copy(folder / "whole", target);
    const std::string first = "/model-00001-of-00005.safetensors";
    std::string older = read_file(target + first);
    older.back() = static_cast<char>(older.back() ^ 1);
    folder.write("out" + first, older);
    const ConvertRun whole = {.part = ConvertPart{1, 1}, .overwrite = true};
    convert(plan(), target, whole);
    fs::copy_file(target + index_file, files + index_file);
    folder.write(".loadstone-out.part/exchange",
                 inode(work + "/files") + " " + inode(target) + "\n");
    EXPECT_EQ(code(whole), "convert.state");
    if (exchanged) {
      fs::rename(target, folder / "aside");
      fs::rename(work + "/files", target);
      fs::rename(folder / "aside", work + "/files");
    }
    EXPECT_EQ(convert(plan(), target, replace).bytes_kept > 0, exchanged);
    expect_whole();
    fs::remove_all(target);
  }
}

// A folder that contains folders cannot be exchanged atomically: loadstone renames each file.
TEST_F(Resume, EndedWhileNamesWereGiven) {
  work = target + "/.loadstone-out.part";
  files = work + "/files/";
  const std::string first = "model-00001-of-00005.safetensors";
  const auto begin = [&](bool all) {
    fs::remove_all(target);
    folder.write("out/sub/file", "x");
    convert(plan(), target, part(1, 1));
    fs::copy_file(folder / "whole" + index_file, files + index_file);
    for (const std::string& name : names_in(folder / "whole")) {
      if (all || name == first) fs::create_hard_link(files + name, target + "/" + name);
    }
  };
  const auto expect_named = [&] {
    EXPECT_FALSE(fs::exists(work));
    fs::remove_all(target + "/sub");
    expect_whole();
  };
  begin(false);
  EXPECT_EQ(convert(plan(), target, finish).bytes_kept, 0u);
  expect_named();
  begin(true);
  EXPECT_GT(convert(plan(), target, resume).bytes_kept, 0u);
  expect_named();
  // A new run removes an incomplete output and keeps a complete one.
  for (const bool all : {false, true}) {
    begin(all);
    std::string state = read_file(work + "/state.json");
    state.replace(state.find("\"parts\": 1"), 10, "\"parts\": 0");
    folder.write("out/.loadstone-out.part/state.json", state);
    EXPECT_EQ(code({}), all ? "convert.target" : "");
    expect_named();
  }
}

TEST_F(Resume, WhatNobodyKnowsOfIsSetAside) {
  killed(plan(), 300'000);
  folder.write(".loadstone-out.part/files/letter.txt", "mine");
  EXPECT_EQ(code({}), "");
  expect_whole();
  const auto names = names_in(folder.path());
  EXPECT_THAT(names, Contains(AllOf(HasSubstr(".loadstone-"), HasSubstr("letter.txt"))));
}

// ---- sources and space

TEST_F(Resume, ASourceThatIsReplacedMeanwhileIsFound) {
  const auto time = fs::last_write_time(source);
  LoggingStorage watched(local_storage());
  std::atomic<int> reads = 0;
  watched.watch().before_read = [&](const Access& access) {
    if (access.offset < 10'000 || reads++ != 2) return;
    fs::copy_file(source, folder / "in/copy");
    fs::rename(folder / "in/copy", source);
    fs::last_write_time(source, time);
  };
  EXPECT_EQ(code_of([&] { convert(plan(), target, {.storage = &watched}); }), "io.changed");
  EXPECT_FALSE(fs::exists(target));
  EXPECT_FALSE(fs::exists(work));
}

TEST_F(Resume, RoomIsAskedForWhatIsStillToCome) {
  fs::create_directory(folder / "disk");
  if (::mount("tmpfs", (folder / "disk").c_str(), "tmpfs", 0, "size=720k") != 0) {
    GTEST_SKIP() << "no permission to mount a small disk";
  }
  target = folder / "disk/out";
  killed(plan(), 300'000);
  EXPECT_EQ(check_target(plan(), target, resume).at(0).code, "convert.resumed");
  EXPECT_EQ(code(resume), "");
  expect_whole(target);
  EXPECT_EQ(code(resume), "");  // nothing is left to do
  // Control: the disk cannot store a second output next to the old one.
  EXPECT_EQ(code({}), "io.no_space");
  fs::remove(folder / "disk/.loadstone-out.done");
  EXPECT_EQ(code(resume), "convert.target");
  EXPECT_EQ(code({.resume = true, .overwrite = true}), "io.no_space");
  EXPECT_EQ(code({.part = ConvertPart{1, 9}, .overwrite = true}), "io.no_space");
  ::umount((folder / "disk").c_str());
}

}  // namespace

}  // namespace loadstone::test

// Tests that a finished job which is run again is recognised, and that a run reports the files that
// it replaces.
#include <gmock/gmock.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <tuple>

#include "loadstone/convert.h"
#include "loadstone/verify.h"
#include "support/errors.h"
#include "support/faulty_files.h"
#include "support/files.h"
#include "support/samples.h"
#include "support/watched_storage.h"

namespace loadstone::test {

namespace {

namespace fs = std::filesystem;
using namespace ::testing;

constexpr ConvertRun resume = {.resume = true};
constexpr ConvertRun finish = {.finish = true};
constexpr ConvertRun overwrite = {.resume = true, .overwrite = true};
constexpr const char* record = ".loadstone-out.done";

constexpr ConvertRun part(std::uint32_t index) {
  return {.part = ConvertPart{.index = index, .count = 2}};
}

std::string six_tensors(unsigned seed) {
  std::vector<FileTensor> tensors;
  for (unsigned i = 0; i < 6; ++i) {
    tensors.push_back(
        {"layers." + std::to_string(i), "F32", {100, 150}, some_bytes(60'000, seed + i)});
  }
  return safetensors_bytes(tensors, {{"format", "pt"}});
}

class Finished : public ::testing::Test {
 protected:
  [[nodiscard]] static ConvertOptions options() {
    return {.one_file = false, .shard_bytes_max = 130'000, .threads = 1};
  }
  [[nodiscard]] Conversion plan(const ConvertOptions& options) const {
    return make_conversion(open_checkpoint(source), options);
  }

  // Runs the conversion, and returns the number of bytes that it read from the source.
  std::uint64_t run(const Conversion& conversion, ConvertRun run) {
    report = convert(conversion, target, run);
    return report.bytes_read;
  }
  std::uint64_t run(const ConvertRun& how) { return run(plan(options()), how); }

  // Returns the message of the finding; empty without one.
  [[nodiscard]] std::string message(const char* code) const {
    const auto found = std::ranges::find(report.findings, code, &Finding::code);
    return found == report.findings.end() ? "" : found->message;
  }

  [[nodiscard]] std::vector<std::string> hidden() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder.path())) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with(".")) names.push_back(name);
    }
    return names;
  }

  TemporaryFolder folder;
  std::string source = folder.write("in/source.safetensors", six_tensors(1));
  std::string target = folder / "out";
  ConvertReport report;
};

TEST_F(Finished, AResumedJobDoesNothing) {
  EXPECT_GT(run(resume), 0u);
  EXPECT_THAT(hidden(), ElementsAre(record));
  const auto outputs = report.outputs;
  const auto before = read_file(target + "/model-00001-of-00003.safetensors");
  EXPECT_EQ(run(resume), 0u);
  EXPECT_THAT(message("convert.complete"), HasSubstr("is already complete"));
  EXPECT_EQ(report.outputs, outputs);
  EXPECT_EQ(report.bytes_written, 0u);
  EXPECT_EQ(report.bytes_kept,
            plan(options()).files.size() * plan(options()).files[0].byte_count());
  const auto dry = check_target(plan(options()), target, resume);
  ASSERT_EQ(dry.size(), 1u);
  EXPECT_EQ(dry[0].code, "convert.complete");
  // A run without `resume` starts from the beginning, as it always does.
  EXPECT_GT(run({}), 0u);
  EXPECT_EQ(message("convert.complete"), "");
  EXPECT_EQ(read_file(target + "/model-00001-of-00003.safetensors"), before);
  EXPECT_THAT(hidden(), ElementsAre(record));
  EXPECT_EQ(run(resume), 0u);
}

TEST_F(Finished, PartsAfterTheFinishDoNothing) {
  for (const std::uint32_t index : {1u, 2u}) run(part(index));
  run(finish);
  for (const ConvertRun& again : {part(1), part(2), finish, resume}) {
    EXPECT_EQ(run(again), 0u);
    EXPECT_NE(message("convert.complete"), "");
    EXPECT_THAT(hidden(), ElementsAre(record));
  }
  run(part(1));
  EXPECT_THAT(report.outputs, Each(StartsWith(target + "/model-0000")));
  EXPECT_LT(report.bytes_kept, plan(options()).bytes_to_write);
}

TEST_F(Finished, AnOrphanOfTheSameConversionIsRemoved) {
  run(part(1));
  const std::string work = folder / ".loadstone-out.part";
  fs::copy(work, folder / "copy", fs::copy_options::recursive);
  run(part(2));
  run(finish);
  fs::copy(folder / "copy", work, fs::copy_options::recursive);
  EXPECT_EQ(run(resume), 0u);
  EXPECT_NE(message("convert.complete"), "");
  EXPECT_FALSE(fs::exists(work));
  // The shards of a different conversion stay.
  fs::rename(folder / record, folder / "record");
  ConvertOptions other = options();
  other.dtype = Dtype::f64;
  run(plan(other), {.part = ConvertPart{.index = 1, .count = 2}, .overwrite = true});
  fs::rename(folder / "record", folder / record);
  EXPECT_EQ(run(resume), 0u);
  EXPECT_TRUE(fs::exists(work));
}

TEST_F(Finished, ASingleFileIsRecognised) {
  target = folder / "out.safetensors";
  const Conversion one = plan({.threads = 1});
  EXPECT_GT(run(one, resume), 0u);
  EXPECT_EQ(run(one, resume), 0u);
  EXPECT_NE(message("convert.complete"), "");
  const Conversion other = plan({.dtype = Dtype::f64, .threads = 1});
  EXPECT_EQ(code_of([&] { run(other, resume); }), "convert.state");
  EXPECT_EQ(run(other, {}), 360'000u);
  EXPECT_THAT(message("convert.replaced"), HasSubstr("different options"));
  run(one, {});
  run(one, {});
  EXPECT_EQ(message("convert.replaced"),
            "the conversion replaces 1 file of an earlier output: 'out.safetensors'");
}

TEST_F(Finished, ADryRunTellsWhatAResumedRunKeeps) {
  run(part(1));
  const auto findings = check_target(plan(options()), target, resume);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].code, "convert.resumed");
  EXPECT_THAT(findings[0].message, StartsWith("an earlier run finished 2 of 3 files"));
  EXPECT_THAT(check_target(plan(options()), target, part(2)).at(0).message,
              StartsWith("an earlier run finished 0 of 1 file"));
  folder.write(".loadstone-out.part/files/foreign", "");
  EXPECT_EQ(code_of([&] { std::ignore = check_target(plan(options()), target, resume); }),
            "convert.state");
  EXPECT_THAT(check_target(plan({.threads = 1}), folder / "one.safetensors", resume).at(0).message,
              HasSubstr("starts from the beginning"));
}

TEST_F(Finished, ALostFileIsNamedWithTheReasonForTheWholeRun) {
  run(resume);
  fs::remove(target + "/model-00002-of-00003.safetensors");
  fs::remove(target + "/model.safetensors.index.json");
  run(resume);
  EXPECT_THAT(message("convert.replaced"),
              StartsWith("the conversion replaces 2 files of an earlier output, in which "
                         "'model-00002-of-00003.safetensors', 'model.safetensors.index.json' are "
                         "missing or changed (the run writes all files again"));
  EXPECT_EQ(run(resume), 0u);
}

TEST_F(Finished, ADifferentOutputIsNotReplacedAndWhatDiffersIsNamed) {
  run(resume);
  const auto before = read_file(target + "/model-00001-of-00003.safetensors");
  ConvertOptions other = options();
  other.rules = {{.sources = {"layers.3"}, .targets = {"layers.9"}}};
  other.dtype = Dtype::f64;
  const std::string difference =
      "different options: names, shapes, dtypes or encodings of tensors differ; the first is "
      "'layers.0'; dtype was the default, and is now F64; rules was the default, and is now 1 rule";
  for (const ConvertRun& again : {resume, part(1), finish}) {
    const auto error = error_of([&] { run(plan(other), again); });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), "convert.state");
    EXPECT_THAT(error->message(),
                AllOf(HasSubstr("out' was finished by an earlier run with " + difference),
                      HasSubstr("nothing was changed")));
    EXPECT_EQ(check_target(plan(other), target, again).at(0).code, "convert.state");
  }
  const ConvertRun with_receipt = {.resume = true, .receipt = DigestKind::xxh3_128};
  EXPECT_THAT(error_of([&] { run(with_receipt); })->message(),
              HasSubstr("no receipt of this kind"));
  EXPECT_EQ(read_file(target + "/model-00001-of-00003.safetensors"), before);
  EXPECT_EQ(run(resume), 0u);
  // A run without `resume` replaces the output.
  EXPECT_GT(run(plan(other), {}), 0u);
  EXPECT_THAT(message("convert.replaced"),
              StartsWith("the conversion replaces 4 files of an earlier output, which was made "
                         "with different options: names"));
  EXPECT_EQ(code_of([&] { run(resume); }), "convert.state");
  EXPECT_GT(run({.resume = true, .overwrite = true, .receipt = DigestKind::xxh3_128}), 0u);
  EXPECT_THAT(message("convert.replaced"), HasSubstr("was made with different options"));
  EXPECT_EQ(run(resume), 0u);  // a receipt is more than this run asks for
}

// A receipt of a different kind is computed from the shards and the source, which are read again.
TEST_F(Finished, ShardsAreKeptForAReceiptOfADifferentKind) {
  const auto contents = [&] {
    std::map<std::string, std::string> files;
    for (const std::string& name : names_in(target)) files[name] = read_file(target + "/" + name);
    fs::remove_all(target);
    fs::remove(folder / record);
    return files;
  };
  run({.receipt = DigestKind::sha256_tree});
  const auto whole = contents();
  run(part(1));
  run({.resume = true, .receipt = DigestKind::sha256_tree});
  EXPECT_GT(report.bytes_kept, 0u);
  EXPECT_THAT(report.findings, IsEmpty());
  EXPECT_EQ(contents(), whole);
  // Without a receipt, shards of any kind are kept.
  run({.part = ConvertPart{1, 2}, .receipt = DigestKind::sha256_tree});
  run(resume);
  EXPECT_GT(report.bytes_kept, 0u);
  EXPECT_FALSE(fs::exists(target + "/receipt.json"));
}

TEST_F(Finished, AChangedSourceOrOutputIsMadeAgain) {
  run(resume);
  folder.write("in/source.safetensors", six_tensors(9));  // the same header
  EXPECT_GT(run(resume), 0u);
  EXPECT_THAT(message("convert.replaced"), HasSubstr("source files that have been modified"));
  EXPECT_THAT(message("convert.replaced"),
              HasSubstr("(size and header are the same): 'source.saf"));
  const auto found = std::ranges::find(report.findings, "convert.replaced", &Finding::code);
  EXPECT_EQ(found->severity, Severity::warning);
  EXPECT_EQ(run(resume), 0u);
  std::string shard = read_file(target + "/model-00002-of-00003.safetensors");
  shard.back() = static_cast<char>(shard.back() ^ 1);
  folder.write("out/model-00002-of-00003.safetensors", shard);
  const auto error = error_of([&] { run(resume); });
  EXPECT_EQ(error->code(), "convert.target");
  EXPECT_THAT(error->message(), HasSubstr("has changed since: 'model-00002-of-00003.safeten"));
  EXPECT_GT(run(overwrite), 0u);
  EXPECT_NE(read_file(target + "/model-00002-of-00003.safetensors"), shard);
  EXPECT_EQ(run(resume), 0u);
  fs::remove(target + "/model.safetensors.index.json");
  EXPECT_GT(run(resume), 0u);
  folder.write(record, "{");
  EXPECT_EQ(code_of([&] { run(resume); }), "convert.target");
  EXPECT_GT(run(overwrite), 0u);
  EXPECT_EQ(run(resume), 0u);
}

TEST_F(Finished, ALostCompanionIsMadeAgain) {
  Conversion conversion = plan(options());
  conversion.extras.push_back({.name = "config.json", .text = "{}"});
  run(conversion, resume);
  EXPECT_EQ(run(conversion, resume), 0u);
  fs::remove(target + "/config.json");
  EXPECT_GT(run(conversion, resume), 0u);
  EXPECT_THAT(message("convert.replaced"), HasSubstr("in which 'config.json' is missing"));
  EXPECT_TRUE(fs::exists(target + "/config.json"));
}

TEST_F(Finished, AFolderThatCannotBeReplacedIsComplete) {
  fs::create_directory(folder / "real");
  fs::create_directory_symlink(folder / "real", target);
  EXPECT_GT(run(resume), 0u);
  EXPECT_EQ(run(resume), 0u);
  EXPECT_NE(message("convert.complete"), "");
  EXPECT_GT(run({}), 0u);
  EXPECT_THAT(message("convert.replaced"), HasSubstr("of an earlier output"));
}

// A folder that cannot be exchanged gets the files of the new output, and loses those of the older
// one.
TEST_F(Finished, FilesAreReplacedOneAtATime) {
  run({});
  fs::create_directory(target + "/sub");
  ConvertOptions two = options();
  two.shard_bytes_max = 200'000;
  const Conversion fewer = plan(two);
  ASSERT_LT(fewer.files.size(), plan(options()).files.size());
  EXPECT_GT(run(fewer, {}), 0u);
  EXPECT_EQ(report.findings.front().sources.size(), plan(options()).files.size() + 1);
  EXPECT_THAT(names_in(target), SizeIs(fewer.files.size() + 1 + 1));
  EXPECT_TRUE(compare(*open_checkpoint(source), *open_checkpoint(target)).ok());
  EXPECT_EQ(run(fewer, resume), 0u);
  // Without a record, the files need --overwrite.
  fs::remove(folder / record);
  const auto findings = check_target(plan(options()), target);
  EXPECT_EQ(findings.at(0).code, "convert.target");
  EXPECT_THAT(findings.at(0).suggestion, HasSubstr("--overwrite"));
  EXPECT_EQ(code_of([&] { run({.overwrite = true}); }), "");
  EXPECT_THAT(hidden(), ElementsAre(record));
}

// A file that someone adds after a kill is not replaced by the older output.
TEST_F(Finished, AFileInThePlaceOfAMovedOneStays) {
  fs::create_directories(target + "/sub");
  run({});
  const std::string first = names_in(target).front();
  bool is_dead = false;  // every call fails after the older files have been moved
  FaultyFiles dying([&](const FileCall& call) -> FileFault {
    is_dead = is_dead || (call.name == "link" && call.path == target + "/" + first);
    return {.problem = is_dead ? EIO : 0};
  });
  EXPECT_EQ(code_of([&] { run({.storage = &dying}); }), "io.write");
  EXPECT_FALSE(fs::exists(target + "/" + first));
  folder.write("out/" + first, "mine");
  EXPECT_EQ(code_of([&] { run({.overwrite = true}); }), "convert.target");
  EXPECT_EQ(read_file(target + "/" + first), "mine");
  fs::remove(target + "/" + first);
  EXPECT_EQ(code_of([&] { run({}); }), "");
  EXPECT_TRUE(compare(*open_checkpoint(source), *open_checkpoint(target)).ok());
}

TEST_F(Finished, ARecordThatCannotBeWrittenFailsNoRun) {
  fs::create_directory(folder / record);
  EXPECT_GT(run(resume), 0u);
  EXPECT_EQ(code_of([&] { run(resume); }), "convert.target");
  EXPECT_GT(run(overwrite), 0u);
  EXPECT_THAT(hidden(), ElementsAre(record));
}

// ---- progress

class Shares final : public Observer {
 public:
  bool on_progress(const Progress& progress) override {
    const double share = progress.bytes_total == 0 ? 1
                                                   : static_cast<double>(progress.bytes_done) /
                                                         static_cast<double>(progress.bytes_total);
    EXPECT_GE(share, last);
    EXPECT_LE(share, 1);
    EXPECT_GE(progress.bytes_checked, checked);
    checked = progress.bytes_checked;
    last = share;
    totals.push_back(progress.bytes_total);
    return true;
  }

  double last = 0;
  std::uint64_t checked = 0;
  std::vector<std::uint64_t> totals;
};

TEST_F(Finished, TheProgressOfAResumedRunNeverFalls) {
  run(part(1));
  run(part(2));
  fs::remove(folder / ".loadstone-out.part/files/model-00003-of-00003.safetensors");
  Shares shares;
  run({.resume = true, .observer = &shares});
  EXPECT_GT(report.bytes_kept, 0u);
  EXPECT_EQ(shares.last, 1);
  EXPECT_THAT(shares.totals, Each(shares.totals.front()));
  EXPECT_EQ(shares.checked, report.bytes_kept);
  EXPECT_EQ(shares.totals.front(), report.bytes_kept + plan(options()).files[2].byte_count());
}

TEST_F(Finished, TheProgressOfAnyRunCountsTheOutput) {
  Shares shares;
  run({.observer = &shares});
  std::uint64_t bytes = 0;
  for (const OutputFile& file : plan(options()).files) bytes += file.byte_count();
  EXPECT_THAT(shares.totals, Each(bytes));
  EXPECT_EQ(shares.checked, 0u);
}

}  // namespace

}  // namespace loadstone::test

// Tests that saved plans are read back unchanged, and that the reader trusts nothing in the file.
#include "plan/plan_json.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <array>
#include <cctype>
#include <filesystem>

#include "loadstone/plan.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/memory_storage.h"
#include "support/plans.h"

namespace loadstone::test {
namespace {

using ::testing::HasSubstr;

FileTensor tensor(const std::string& name, const std::string& dtype,
                  std::vector<std::uint64_t> shape, std::size_t bytes) {
  return {name, dtype, std::move(shape), some_bytes(bytes)};
}

// Saves a plan that uses all fields of plans, for a checkpoint of two shards.
class SavedPlans : public testing::Test {
 protected:
  SavedPlans() {
    storage_.add_file("/m/a.safetensors", safetensors_bytes({tensor("e.0.w", "F32", {3, 2}, 24),
                                                             tensor("e.1.w", "F32", {3, 2}, 24),
                                                             tensor("half", "BF16", {4, 4}, 32)}));
    storage_.add_file("/m/b.safetensors", safetensors_bytes({tensor("kept", "F32", {5}, 20),
                                                             tensor("flipped", "F32", {2, 3}, 24),
                                                             tensor("small", "F4", {4}, 2)}));
    options_.storage = &storage_;
    catalog_ =
        open_checkpoint(std::vector<std::string>{"/m/a.safetensors", "/m/b.safetensors"}, options_);
    skeleton_ = skeleton_of({target_of("experts", {3, 2, 2}), target_of("half", {4, 4}),
                             target_of("kept", {5}), target_of("flipped", {3, 2}),
                             target_of("small", {4}, Dtype::f4), target_of("gone", {7}),
                             target_of("left", {2})});
    Target tied = target_of("tied", {5});
    tied.tie_of = "kept";
    skeleton_.targets.push_back(tied);
    Target buffer = target_of("n\"\\\n<b>", {2}, Dtype::f32, TargetKind::non_persistent_buffer);
    buffer.has_value = true;
    skeleton_.targets.push_back(buffer);
    plan_options_.rules = rules_from_json(R"j([
        {"op": "stack", "sources": ["e\\.(\\d+)\\.w"], "targets": ["experts"], "dim": 2},
        {"op": "transpose", "sources": ["half"], "targets": ["half"], "dims": [0, 1]},
        {"op": "transpose", "sources": ["flipped"], "targets": ["flipped"], "dims": [0, 1]}])j");
    plan_options_.missing = MissingPolicy::zeros;
    plan_options_.device_map.entries = {
        {"", "cpu"}, {"half", "disk"}, {"kept", "disk"}, {"left", "meta"}};
    plan_options_.offload_folder = "/tmp/offload";
    plan_ = make_plan(catalog_, skeleton_, plan_options_);
    text_ = to_json(plan_);
  }

  Plan read(const std::string& text, const std::string& root = "") {
    return plan_from_json(text, options_, {.root = root, .offload_folder = "/tmp/offload"});
  }

  // Copies all files of /m to a folder of the same or a different storage.
  void copy_to(MemoryStorage& other, const std::string& folder) {
    for (const std::string& name : storage_.list("/m")) {
      const auto source = storage_.open("/m/" + name);
      std::string bytes(source->identity().bytes, '\0');
      source->read(0, std::as_writable_bytes(std::span(bytes)));
      other.add_file(folder + "/" + name, bytes);
      other.set_modified_ns(folder + "/" + name, source->identity().modified_ns);
    }
  }

  std::string changed(const std::string& from, const std::string& to) const {
    std::string text = text_;
    const auto at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return at == std::string::npos ? text : text.replace(at, from.size(), to);
  }

  MemoryStorage storage_;
  OpenOptions options_;
  std::shared_ptr<const Catalog> catalog_;
  Skeleton skeleton_;
  PlanOptions plan_options_;
  Plan plan_;
  std::string text_;
};

void expect_same(const Plan& a, const Plan& b) {
  ASSERT_EQ(a.targets.size(), b.targets.size());
  for (std::size_t i = 0; i < a.targets.size(); ++i) {
    const PlannedTarget& x = a.targets[i];
    const PlannedTarget& y = b.targets[i];
    EXPECT_EQ(x.name, y.name);
    EXPECT_EQ(x.kind, y.kind);
    EXPECT_EQ(x.shape, y.shape);
    EXPECT_EQ(x.slice_begin, y.slice_begin);
    EXPECT_EQ(x.slice_groups, y.slice_groups);
    EXPECT_EQ(x.dtype, y.dtype);
    EXPECT_EQ(x.device, y.device);
    EXPECT_EQ(x.delivery, y.delivery);
    EXPECT_EQ(x.recipe.origin, y.recipe.origin);
    EXPECT_EQ(x.recipe.boxes, y.recipe.boxes);
    EXPECT_EQ(x.recipe.tie_of, y.recipe.tie_of);
    EXPECT_EQ(x.recipe.reason, y.recipe.reason);
  }
  EXPECT_EQ(a.findings, b.findings);
  EXPECT_EQ(a.offload_folder, b.offload_folder);
  EXPECT_EQ(a.staging_bytes_max, b.staging_bytes_max);
  EXPECT_EQ(a.local_ranks, b.local_ranks);
  EXPECT_EQ(a.bytes_to_read, b.bytes_to_read);
  EXPECT_EQ(a.bytes_to_write, b.bytes_to_write);
  EXPECT_EQ(a.peak_bytes, b.peak_bytes);
  EXPECT_EQ(a.device_map, b.device_map);
}

TEST_F(SavedPlans, ReadsWhatItWrites) {
  EXPECT_TRUE(plan_.ok());
  EXPECT_EQ(plan_.targets[1].delivery, Delivery::disk_write);
  EXPECT_EQ(plan_.targets[2].delivery, Delivery::disk_keep);
  const Plan again = read(text_);
  expect_same(plan_, again);
  EXPECT_EQ(to_json(again), text_);
  EXPECT_EQ(again.catalog->shards().size(), 2u);
}

TEST_F(SavedPlans, ReadWhereSlicesBegin) {
  skeleton_.targets[3].slice = Slice{{1, 0}, {2, 2}, {1, 1}};
  const Plan plan = make_plan(catalog_, skeleton_, plan_options_);
  EXPECT_THAT(plan.targets[3].slice_begin, testing::ElementsAre(1, 0));
  EXPECT_THAT(plan.targets[3].slice_groups, testing::ElementsAre(1, 1));
  text_ = to_json(plan);
  const Plan again = read(text_);
  expect_same(plan, again);
  EXPECT_EQ(to_json(again), text_);
  const auto code =
      code_of([&] { (void)read(changed("\"slice_begin\": [1,0]", "\"slice_begin\": [1]")); });
  EXPECT_EQ(code, "plan.json");
}

TEST_F(SavedPlans, KnowHowManyRanksShareAMachine) {
  EXPECT_THAT(text_, testing::Not(HasSubstr("local_ranks")));
  plan_options_.local_ranks = 8;
  const Plan plan = make_plan(catalog_, skeleton_, plan_options_);
  text_ = to_json(plan);
  expect_same(plan, read(text_));
  for (const char* value : {"0", "-1", "4294967296", "\"8\""}) {
    const std::string text =
        changed("\"local_ranks\": 8", std::string("\"local_ranks\": ") + value);
    EXPECT_EQ(code_of([&] { (void)read(text); }), "plan.json") << value;
  }
}

TEST_F(SavedPlans, TheOldWordForExcludedIsRead) {
  const std::string text = changed("\"origin\": \"excluded\"", "\"origin\": \"exception\"");
  EXPECT_EQ(to_json(read(text)), text_);
}

TEST_F(SavedPlans, AnotherRoot) {
  MemoryStorage other;
  copy_to(other, "/elsewhere");
  options_.storage = &other;
  expect_same(plan_, read(text_, "/elsewhere"));
  EXPECT_EQ(code_of([&] { (void)read(text_); }), "io.not_found");
}

TEST_F(SavedPlans, AShardOfAnotherTimeIsAWarning) {
  EXPECT_EQ(read(text_).findings, plan_.findings);
  storage_.set_modified_ns("/m/b.safetensors", 12345);
  Plan plan = read(text_);
  EXPECT_TRUE(plan.ok());
  const auto found = std::ranges::find(plan.findings, "io.time", &Finding::code);
  ASSERT_NE(found, plan.findings.end());
  EXPECT_EQ(found->severity, Severity::warning);
  EXPECT_THAT(found->message, HasSubstr("/m/b.safetensors"));
  plan.findings.erase(found);
  expect_same(plan_, plan);
  // The plan that was read belongs to this version of the file.
  EXPECT_EQ(plan.catalog->shards()[1].identity.modified_ns, 12345);
  storage_.set_modified_ns("/m/a.safetensors", 1);
  EXPECT_EQ(std::ranges::count(read(text_).findings, "io.time", &Finding::code), 1);
}

TEST_F(SavedPlans, AShardOfAnotherSizeIsRefused) {
  std::string bytes = safetensors_bytes({tensor("kept", "F32", {5}, 20)});
  storage_.add_file("/m/b.safetensors", bytes);
  const auto error = error_of([&] { (void)read(text_); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), "io.changed");
  EXPECT_EQ(error->where().field, "bytes");
  EXPECT_THAT(error->where().path, HasSubstr("b.safetensors"));
  EXPECT_EQ(error->where().found, std::to_string(bytes.size()) + " bytes");
  // The caller chose this folder, but the file has changed.
  EXPECT_EQ(code_of([&] { (void)read(text_, "/m"); }), "io.changed");
}

// ---- paths in plans

// A hostile plan names a folder of the victim as its offload folder.
TEST_F(SavedPlans, TheOffloadFolderIsTheCallersAlone) {
  const auto read_with = [&](const std::string& text, const std::string& folder) {
    return plan_from_json(text, options_, {.offload_folder = folder});
  };
  const auto error = error_of([&] { (void)read_with(text_, ""); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), "plan.offload_folder");
  EXPECT_EQ(error->where().path, "/tmp/offload");
  EXPECT_EQ(read_with(text_, "/tmp/other").offload_folder, "/tmp/other");
  const std::string edited = changed("/tmp/offload", "/somebody/else");
  EXPECT_EQ(code_of([&] { (void)read_with(edited, ""); }), "plan.offload_folder");
  EXPECT_EQ(read_with(edited, "/tmp/offload").offload_folder, "/tmp/offload");
  // If a plan has no offload, the folder's name does not matter.
  plan_options_.device_map.entries.clear();
  const Plan plan = make_plan(catalog_, skeleton_, plan_options_);
  EXPECT_EQ(plan.offload_folder, "/tmp/offload");
  EXPECT_EQ(read_with(to_json(plan), "").offload_folder, "");
}

// Files in a real folder, which have inodes.
class LeadingElsewhere : public testing::Test {
 protected:
  LeadingElsewhere() {
    folder_.write("made/model/a.safetensors", bytes_);
    text_ = saved(folder_ / "made/model/a.safetensors");
  }

  static std::string saved(const std::string& path) {
    const auto catalog = open_checkpoint(path);
    return to_json(make_plan(catalog, Skeleton::from_catalog(*catalog)));
  }

  // Returns the plan's JSON with a different root folder.
  std::string leading_to(const std::string& root) const {
    std::string text = text_;
    const std::string from = folder_ / "made/model";
    return text.replace(text.find(from), from.size(), root);
  }

  static std::string code(const std::string& text, const PlanPaths& paths) {
    return code_of([&] { EXPECT_TRUE(plan_from_json(text, {}, paths).ok()); });
  }

  const std::string bytes_ = safetensors_bytes({tensor("w", "F32", {6}, 24)});
  TemporaryFolder folder_;
  std::string text_;
};

TEST_F(LeadingElsewhere, TheVeryFilesThatWerePlannedForNeedNoWord) {
  EXPECT_EQ(code(text_, {}), "");
  EXPECT_EQ(code(text_, {.plan_folder = "/somewhere"}), "");
  std::filesystem::last_write_time(folder_ / "made/model/a.safetensors", {});
  EXPECT_EQ(code(text_, {}), "");
}

TEST_F(LeadingElsewhere, OtherFilesNeedTheCallersWord) {
  // The file is unrelated to the plan, but has the same header.
  folder_.write("private/a.safetensors", bytes_);
  std::filesystem::last_write_time(
      folder_ / "private/a.safetensors",
      std::filesystem::last_write_time(folder_ / "made/model/a.safetensors"));
  const std::string text = leading_to(folder_ / "private");
  const auto error = error_of([&] { (void)plan_from_json(text); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), "io.changed");
  EXPECT_EQ(error->where().field, "inode");
  EXPECT_THAT(error->where().path, HasSubstr("private/a.safetensors"));
  EXPECT_EQ(code(text, {.plan_folder = folder_ / "made"}), "io.changed");
  EXPECT_EQ(code(leading_to((folder_ / "made") + "/../private"), {.plan_folder = folder_ / "made"}),
            "io.changed");
  EXPECT_EQ(code(text, {.root = folder_ / "private"}), "");
}

TEST_F(LeadingElsewhere, APlanThatMovedWithItsCheckpointWorks) {
  std::filesystem::create_directory(folder_.path() / "copied");
  std::filesystem::copy(folder_.path() / "made/model", folder_.path() / "copied/model");
  std::filesystem::remove_all(folder_.path() / "made");
  EXPECT_EQ(code(text_, {}), "io.not_found");
  EXPECT_EQ(code(text_, {.root = folder_ / "copied/model"}), "");
  EXPECT_EQ(code(text_, {.plan_folder = folder_ / "copied/model"}), "");
  EXPECT_EQ(code(leading_to(folder_ / "copied/model"), {.plan_folder = folder_ / "copied"}), "");
}

// The plan cannot prove that a link in the checkpoint's folder may be followed.
TEST_F(LeadingElsewhere, AShardBehindALinkThatLeavesTheFolderIsRefused) {
  folder_.write("private/a.safetensors", bytes_);
  std::filesystem::create_directory_symlink("../../private", folder_.path() / "made/model/sub");
  std::string text = text_;
  text.replace(text.find("\"a.safetensors"), 1, "\"sub/");
  EXPECT_EQ(code(text, {.root = folder_ / "made/model"}), "ix.path_escape");
  EXPECT_EQ(code_of([&] {
              (void)plan_from_json(text, {.allow_links = true}, {.root = folder_ / "made/model"});
            }),
            "");
}

TEST_F(SavedPlans, AnotherHeaderOfTheSameSizeIsRefused) {
  const auto source = storage_.open("/m/a.safetensors");
  std::string bytes(source->identity().bytes, '\0');
  source->read(0, std::as_writable_bytes(std::span(bytes)));
  const std::int64_t modified_ns = source->identity().modified_ns;
  bytes.replace(bytes.find("half"), 4, "halb");
  storage_.add_file("/m/a.safetensors", bytes);
  storage_.set_modified_ns("/m/a.safetensors", modified_ns);
  const auto error = error_of([&] { (void)read(text_); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), "io.changed");
  EXPECT_EQ(error->where().field, "header_digest");
}

// The changed box writes every second element from 2 on, so its last is 12, outside of the target.
TEST_F(SavedPlans, ABoxThatLeavesItsTargetIsRefused) {
  const auto error =
      error_of([&] { (void)read(changed("\"target_offset\": 1", "\"target_offset\": 2")); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), "plan.box");
  EXPECT_EQ(error->where().tensor, "experts");
  EXPECT_EQ(error->where().field, "targets[0].recipe.boxes[1]");
  EXPECT_EQ(error->where().found, "element 12");
  EXPECT_EQ(error->where().expected, "one of 12 elements");
}

TEST_F(SavedPlans, ABoxThatOverlapsAnotherIsRefused) {
  // The boxes write the even elements twice and the odd elements never.
  const auto error =
      error_of([&] { (void)read(changed("\"target_offset\": 1", "\"target_offset\": 0")); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), "plan.box");
}

TEST_F(SavedPlans, OtherLiesAreRefused) {
  const auto code = [&](const std::string& from, const std::string& to) {
    return code_of([&] { (void)read(changed(from, to)); });
  };
  EXPECT_EQ(code("\"version\": 1", "\"version\": 2"), "plan.json");
  EXPECT_EQ(code("\"path\": \"a.safetensors\"", "\"path\": \"../m/a.safetensors\""), "plan.json");
  EXPECT_EQ(code("\"path\": \"a.safetensors\"", "\"path\": \"/m/a.safetensors\""), "plan.json");
  EXPECT_EQ(code("\"name\": \"e.0.w\"", "\"name\": \"e.9.w\""), "plan.json");
  EXPECT_EQ(code("\"encoding\": \"BF16\"", "\"encoding\": \"F16\""), "plan.json");
  EXPECT_EQ(code("\"name\": \"gone\"", "\"name\": \"left\""), "plan.json");
  EXPECT_EQ(code("\"tie_of\": \"kept\"", "\"tie_of\": \"nobody\""), "plan.json");
  EXPECT_EQ(code("\"tie_of\": \"kept\"", "\"tie_of\": \"tied\""), "plan.json");
  EXPECT_EQ(code("\"tie_of\": \"kept\"", "\"tie_of\": \"half\""), "plan.json");
  EXPECT_EQ(code("\"device\": \"disk\"", "\"device\": \"floppy\""), "plan.json");
  EXPECT_EQ(code("\"delivery\": \"disk_write\"", "\"delivery\": \"disk_keep\""), "plan.json");
  EXPECT_EQ(code("\"delivery\": \"disk_write\"", "\"delivery\": \"memory\""), "plan.json");
  EXPECT_EQ(code("\"delivery\": \"memory\"", "\"delivery\": \"none\""), "plan.json");
  EXPECT_EQ(code("\"delivery\": \"memory\"", "\"delivery\": \"file_view\""), "plan.json");
  EXPECT_EQ(code("\"dtype\": \"F32\",\"origin\": \"checkpoint\"",
                 "\"dtype\": \"I32\",\"origin\": \"checkpoint\""),
            "plan.box");
  EXPECT_EQ(code("\"origin\": \"zeros\"", "\"origin\": \"tie\""), "plan.json");
  EXPECT_EQ(code("\"origin\": \"zeros\"", "\"origin\": \"checkpoint\""), "plan.box");
  EXPECT_EQ(code("\"origin\": \"excluded\"", "\"origin\": \"zeros\""), "plan.json");
  const std::string folderless =
      changed("\"offload_folder\": \"/tmp/offload\"", "\"offload_folder\": \"\"");
  EXPECT_EQ(code_of([&] { (void)plan_from_json(folderless, options_); }), "plan.json");
  EXPECT_EQ(code("\"findings\"", "\"finding\""), "plan.json");
  EXPECT_EQ(code("\"threads\": ", "\"threads\": 90"), "plan.json");  // hundreds
  EXPECT_EQ(code("\"bytes_to_read\"", "\"x\": 1, \"bytes_to_read\""), "plan.json");
  EXPECT_EQ(code_of([&] { (void)read(text_.substr(0, text_.size() / 2)); }), "plan.json");
  EXPECT_EQ(code_of([&] { (void)read("{}"); }), "plan.json");
}

TEST_F(SavedPlans, AnOffloadedNameThatIsAPathIsRefused) {
  std::string text = changed("\"name\": \"half\",\"kind\"", "\"name\": \"../half\",\"kind\"");
  EXPECT_EQ(code_of([&] { (void)read(text); }), "plan.json");
}

// Replaces each integer of the plan by hostile integers. If the reader accepts a changed plan, it
// must equal the original except for the cost estimates.
TEST_F(SavedPlans, EveryNumberReplacedIsRefusedOrChangesNothing) {
  std::size_t refused = 0;
  std::size_t accepted = 0;
  const auto is_digit = [&](std::size_t at) { return text_[at] >= '0' && text_[at] <= '9'; };
  bool in_string = false;
  for (std::size_t position = 1; position < text_.size(); ++position) {
    if (text_[position] == '"' && text_[position - 1] != '\\') in_string = !in_string;
    if (in_string || !is_digit(position) || is_digit(position - 1)) continue;
    std::size_t end = position;
    while (is_digit(end)) ++end;
    const std::string old = text_.substr(position, end - position);
    std::vector<std::string> hostile = {"0",
                                        "1",
                                        "2",
                                        "3",
                                        "7",
                                        "64",
                                        "4294967296",
                                        "9223372036854775807",
                                        "9223372036854775808",
                                        "18446744073709551615",
                                        "18446744073709551616",
                                        "-1",
                                        "1e3",
                                        "0.5",
                                        "null",
                                        "\"1\"",
                                        "[]",
                                        "true"};
    if (old.size() < 19) {
      hostile.push_back(std::to_string(std::stoull(old) + 1));
      hostile.push_back(std::to_string(std::stoull(old) - 1));
    }
    for (const std::string& value : hostile) {
      if (value == old) continue;
      std::string text = text_;
      text.replace(position, old.size(), value);
      SCOPED_TRACE(fmt::format("{} instead of {} in ...{}...", value, old,
                               text_.substr(position < 60 ? 0 : position - 60, 80)));
      try {
        Plan plan = read(text);
        ++accepted;
        plan.staging_bytes_max = plan_.staging_bytes_max;
        std::erase_if(plan.findings, [](const Finding& finding) {
          return finding.code == "io.time";  // this finding reports the elapsed time
        });
        // The stride of a dimension with one step has no meaning.
        for (std::size_t i = 0; i < plan.targets.size(); ++i) {
          // If a load skips a target, no shard confirms the target's shape.
          if (plan.targets[i].delivery == Delivery::none)
            plan.targets[i].shape = plan_.targets[i].shape;
          ASSERT_EQ(written(plan.targets[i].recipe.boxes, plan.targets[i].shape).ids,
                    written(plan_.targets[i].recipe.boxes, plan_.targets[i].shape).ids);
          plan.targets[i].recipe.boxes = plan_.targets[i].recipe.boxes;
        }
        expect_same(plan, plan_);
        if (HasFailure()) return;
      } catch (const Error& error) {
        ++refused;
        EXPECT_THAT((std::vector<std::string>{"plan.json", "plan.box", "io.changed"}),
                    testing::Contains(error.code()));
      }
    }
  }
  EXPECT_GT(refused, 1000u);
  EXPECT_LT(accepted, 80u);
}

// Randomly damaged text must give an Error or a valid plan.
TEST_F(SavedPlans, DamagedTextNeverCrashes) {
  std::uint64_t state = 42;
  const auto random = [&](std::uint64_t bound) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % bound;
  };
  for (int round = 0; round < 3000; ++round) {
    std::string text = text_;
    for (std::uint64_t i = 1 + random(4); i > 0; --i) {
      const std::size_t at = random(text.size());
      switch (random(4)) {
        case 0:
          text[at] = static_cast<char>(random(256));
          break;
        case 1:
          text.erase(at, random(20));
          break;
        case 2:
          text.insert(at, text.substr(random(text.size()), random(30)));
          break;
        default:
          if (std::isdigit(static_cast<unsigned char>(text[at])) != 0) {
            text[at] = static_cast<char>('0' + random(10));
          }
      }
    }
    try {
      const Plan plan = read(text);
      for (const PlannedTarget& target : plan.targets) {
        if (target.recipe.origin != Origin::checkpoint) continue;
        const auto ids = written(target.recipe.boxes, target.shape).ids;
        for (const std::uint64_t id : ids) ASSERT_LT(id, UINT64_MAX - 1);
      }
    } catch (const Error&) {
    }
  }
}

TEST_F(SavedPlans, APlanWithErrorsCanBeReadAndIsNotOk) {
  plan_options_.missing = MissingPolicy::error;
  plan_options_.offload_folder.clear();
  const Plan plan = make_plan(catalog_, skeleton_, plan_options_);
  EXPECT_FALSE(plan.ok());
  const Plan again = plan_from_json(to_json(plan), options_);
  expect_same(plan, again);
  EXPECT_FALSE(again.ok());
}

}  // namespace
}  // namespace loadstone::test

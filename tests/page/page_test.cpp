// Tests the HTML page without its script, and the data that the script reads.
#include "loadstone/page.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <simdjson.h>

#include <string>

#include "page/page_data.h"
#include "support/plans.h"

namespace loadstone::test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::string_view evil = "</script><script>alert('&\"')</script>\x1b[31m\xe2\x80\xae";

Plan layered(MissingPolicy missing = MissingPolicy::zeros) {
  return plan_of_layers(std::string(evil), missing);
}

// Parses the page's data in the same way as the browser's JSON.parse().
class Data {
 public:
  explicit Data(const std::string& text) : text_(text) { root_ = parser_.parse(text_); }
  simdjson::dom::element operator[](std::string_view pointer) {
    return root_.at_pointer(pointer).value();
  }

 private:
  std::string text_;
  simdjson::dom::parser parser_;
  simdjson::dom::element root_;
};

TEST(Page, NamesNeverBecomeMarkup) {
  const std::string page = to_html(layered(), {.model = std::string(evil),
                                               .max_memory = {{std::string(evil), 5}},
                                               .held_bytes = {{std::string(evil), 7}},
                                               .loaded = {}});
  EXPECT_THAT(page, HasSubstr("&lt;/script&gt;&lt;script&gt;alert(&#39;&amp;&quot;&#39;)"));
  EXPECT_THAT(page, HasSubstr("\\u003c/script>"));
  EXPECT_THAT(page, Not(HasSubstr("<script>alert")));
  EXPECT_THAT(page, Not(HasSubstr("\x1b")));
  EXPECT_THAT(page, Not(HasSubstr("\xe2\x80\xae")));
  // The page has two script elements: one with the data and one with the code.
  std::size_t ends = 0;
  for (std::size_t at = 0; (at = page.find("</script>", at)) != std::string::npos; ++at) ++ends;
  EXPECT_EQ(ends, 2u);
}

TEST(Page, NeedsNoNetwork) {
  const std::string page = to_html(layered());
  EXPECT_THAT(page, Not(HasSubstr("://")));
  EXPECT_THAT(page, HasSubstr("default-src 'none'"));
}

TEST(Page, BeginsWithTheVerdict) {
  EXPECT_THAT(to_html(layered(MissingPolicy::error)),
              HasSubstr("class=\"verdict error\" role=\"status\"><p class=\"first\">1 error: this "
                        "plan cannot be executed"));
  EXPECT_THAT(to_html(layered()), HasSubstr("class=\"verdict warning\""));
  const std::string name = "w";
  const Plan sound = make_plan(fake_catalog({{name, {4}}}), skeleton_of({target_of(name, {4})}));
  EXPECT_THAT(to_html(sound), HasSubstr("class=\"verdict ok\""));
  PageOptions loaded;
  loaded.loaded = {.seconds = 0.5, .bytes_read = 1000, .staging_bytes_peak = 64, .progress = {}};
  const std::string page = to_html(sound, loaded);
  EXPECT_THAT(page, HasSubstr("Loaded: 1.0 kB in 0.5 s"));
  EXPECT_THAT(page, HasSubstr("2.0 kB/s"));
  EXPECT_THAT(page, Not(HasSubstr("id=\"speed\"")));
  loaded.loaded->progress = {{0.1, 100}, {0.2, 300}};
  EXPECT_THAT(to_html(sound, loaded), HasSubstr("id=\"speed\""));
}

TEST(Page, FoldsWhatIsPrinted) {
  EXPECT_THAT(to_html(layered()), HasSubstr("layer.{0-11}.q.weight"));
}

TEST(Page, GroupsFindings) {
  std::vector<FakeTensor> sources;
  for (int i = 0; i < 305; ++i) sources.push_back({fmt::format("only.here.{}", i), {1}});
  const Plan plan = make_plan(fake_catalog(sources), skeleton_of({target_of("w", {1})}));
  const std::string page = to_html(plan);
  EXPECT_THAT(page, HasSubstr("<span class=\"badge error\">error</span> 1 <code>plan.missing"));
  // Errors are expanded; warnings are collapsed.
  EXPECT_THAT(page, HasSubstr("<details class=\"finding\" open>"));
  EXPECT_THAT(page, HasSubstr("<details class=\"finding\"><summary>"));
}

TEST(PageData, HoldsEachTargetAndWhatItIsMadeOf) {
  const Plan plan = layered();
  PageOptions options;
  options.max_memory = {{"cpu", 5000}};
  options.held_bytes = {{"cpu", 10}, {"cuda:0", 20}};
  options.loaded = {.seconds = 1, .bytes_read = 2, .staging_bytes_peak = 3, .progress = {{0.5, 7}}};
  Data data(page_data(plan, options));
  EXPECT_EQ(data["/targets"].get_array().value().size(), 25u);
  EXPECT_EQ(data["/targets/0/0"].get_string().value(), "layer.0.q.weight");
  const std::uint64_t dtype = data["/targets/0/3"];
  EXPECT_EQ(data[fmt::format("/words/{}", dtype)].get_string().value(), "BF16 -> F32");
  EXPECT_EQ(std::uint64_t(data["/targets/0/6"]), 256u);
  // The target has one box, which takes all elements from the named source.
  EXPECT_EQ(std::uint64_t(data["/targets/0/9/0/3"]), 64u);
  const std::uint64_t source = data["/targets/0/9/0/0"];
  EXPECT_EQ(data[fmt::format("/sources/{}/0", source)].get_string().value(), "layer.0.q.weight");
  EXPECT_EQ(std::int64_t(data["/targets/24/7"]), -1);  // zeros are not stored in a shard
  EXPECT_EQ(std::uint64_t(data["/limits/cpu"]), 5000u);
  EXPECT_EQ(std::uint64_t(data["/peaks/cpu"]), plan.peak_bytes.at("cpu") + 10);
  EXPECT_EQ(std::uint64_t(data["/peaks/cuda:0"]), 20u);
  EXPECT_EQ(std::uint64_t(data["/progress/0/1"]), 7u);
}

TEST(PageData, GrowsWithTargetsAndNotWithBoxes) {
  // A stack of 4,000 experts has 4,000 boxes. The page contains only the first boxes and the total.
  std::vector<FakeTensor> sources;
  for (int e = 0; e < 4000; ++e) sources.push_back({fmt::format("e.{}.w", e), {2}});
  PlanOptions options;
  options.rules = rules_from_json(
      R"([{"op": "stack", "sources": ["e\\.(\\d+)\\.w"], "targets": ["w"], "dim": 0}])");
  const Plan plan =
      make_plan(fake_catalog(sources), skeleton_of({target_of("w", {4000, 2})}), options);
  ASSERT_TRUE(plan.ok());
  const std::string text = page_data(plan, {});
  EXPECT_LT(text.size(), 3000u);
  Data data(text);
  EXPECT_EQ(std::uint64_t(data["/targets/0/10"]), 4000u);
  EXPECT_EQ(data["/targets/0/9"].get_array().value().size(), 12u);
}

}  // namespace
}  // namespace loadstone::test

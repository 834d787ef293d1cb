#include "convert/choose/nearest_names.h"

#include <gtest/gtest.h>

namespace loadstone::test {
namespace {

TEST(NearestNames, FindsComponentsWithAnError) {
  const std::vector<std::string> names = {
      "lm_head.weight", "model.layers.0.self_attn.q_proj.weight",
      "model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.gate.weight"};
  EXPECT_EQ(nearest_names("lm_haed", names), "similar names: 'lm_head.weight'");
  for (const char* const pattern :
       {"self_atn", R"(^model\.layers\.\d+\.self_atn\..*$)", R"(layers\.1\.self_atn\.q_proj)"}) {
    EXPECT_EQ(nearest_names(pattern, names),
              "similar names: 'model.layers.*.self_attn.q_proj.weight'")
        << pattern;
  }
}

TEST(NearestNames, OtherwiseGivesTheFirstNames) {
  EXPECT_EQ(nearest_names("vision_tower", {"b", "a", "c.0", "c.1", "d"}),
            "the names of the tensors: 'a', 'b', 'c.*' and 1 more");
  EXPECT_EQ(nearest_names(".*", {"a"}), "the names of the tensors: 'a'");
  EXPECT_EQ(nearest_names("x", {}), "the names of the tensors: ");
}

}  // namespace
}  // namespace loadstone::test

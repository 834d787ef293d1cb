#include "convert/choose/quantize_patterns.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "base/pattern.h"

namespace loadstone::test {

namespace {

using Names = std::vector<std::string>;

bool matches(const std::string& pattern, const std::string& name) {
  const Pattern compiled =
      compile_pattern("^(?:" + pattern + ")", "plan.options", "test", pattern_memory(1));
  return is_in(*compiled, name);
}

Names patterns_of_plain(const Names& plain, const Names& others) {
  return select_plain(plain, others).patterns;
}

Names patterns_of_modules(const Names& modules, const Names& others) {
  return select_modules(modules, others).patterns;
}

bool any_matches(const Names& patterns, const std::string& name) {
  return std::ranges::any_of(patterns, [&](const auto& each) { return matches(each, name); });
}

const Names quantized = {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj",
                         "model.layers.1.mlp.up_proj"};

TEST(ModulePatterns, FindModulesUnderOtherNames) {
  const Names plain = {"lm_head",
                       "multi_modal_projector.linear_1",
                       "vit.layers.0.mlp.dense_h_to_4h",
                       "model.layers.0.block_sparse_moe.gate",
                       "model.layers.0.mlp.up_proj",
                       "model.layers.0.mlp.down_proj",
                       "model.layers.1.mlp.down_proj"};
  const Names patterns = patterns_of_plain(plain, quantized);
  for (const char* const name :
       {"model.lm_head", "model.projector.linear", "model.vision_tower.blocks.3.fc1",
        "model.language_model.layers.0.mlp.router", "model.language_model.layers.0.mlp.up_proj",
        "model.language_model.layers.7.mlp.down_proj"}) {
    EXPECT_TRUE(any_matches(patterns, name)) << name;
  }
  for (const std::string& name : plain) EXPECT_TRUE(any_matches(patterns, name)) << name;
  for (const std::string& name : quantized) {
    EXPECT_FALSE(any_matches(patterns, name)) << name;
    EXPECT_FALSE(any_matches(patterns, "model.language_" + name)) << name;
  }
}

TEST(ModulePatterns, ARuleThatQuantizedModulesBreakIsNotWritten) {
  const Names plain = {"lm_head", "visual.blocks.0.attn.qkv", "visual.blocks.1.attn.qkv"};
  const Names with_head = {"score", "visual.blocks.0.mlp.fc1"};
  const Names patterns = patterns_of_plain(plain, with_head);
  for (const std::string& name : plain) EXPECT_TRUE(any_matches(patterns, "model." + name)) << name;
  for (const std::string& name : with_head) EXPECT_FALSE(any_matches(patterns, name)) << name;
}

TEST(ModulePatterns, ANameThatEndsLikeAQuantizedOneIsFoundByAPartBeforeIt) {
  const std::string plain = "model.draft.layers.0.self_attn.q_proj";
  const Names patterns = patterns_of_plain({plain}, quantized);
  EXPECT_TRUE(any_matches(patterns, plain));
  EXPECT_TRUE(any_matches(patterns, "draft.model.layers.0.self_attn.q_proj"));
  for (const std::string& name : quantized) EXPECT_FALSE(any_matches(patterns, name)) << name;
  EXPECT_TRUE(patterns_of_plain({"model.model.layers.0.self_attn.q_proj"}, quantized).empty());
  EXPECT_EQ(patterns_of_modules({"draft.layers.2.self_attn.q_proj"}, quantized),
            Names({R"((.*\.)?layers.2.self_attn.q_proj$)"}));
}

struct InPart {
  Names plain;
  Names quantized;
  Names same_plain;      // other names that the modules in `plain` may have
  Names same_quantized;  // other names that the modules in `quantized` may have
};

// Models in which only some layers of a list are quantized.
const InPart in_part[] = {
    {{"model.encoder.layers.0.q_proj", "model.encoder.layers.0.fc1"},
     {"model.encoder.layers.1.q_proj", "model.encoder.layers.1.fc1",
      "model.decoder.layers.0.q_proj", "model.decoder.layers.0.fc1"},
     {"encoder.layers.0.q_proj", "model.base.encoder.layers.0.fc1"},
     {"encoder.layers.1.q_proj", "decoder.layers.0.fc1", "encoder.layers.10.fc1"}},
    {{"bert.encoder.layer.0.self.query"},
     {"bert.encoder.layer.1.self.query"},
     {"encoder.layer.0.self.query", "text.encoder.layers.0.self.query"},
     {"encoder.layer.1.self.query", "text.encoder.layers.1.self.query"}},
    {{"text.encoder.layer.0.q_proj"},
     {"vision.encoder.layers.0.q_proj"},
     {"model.text.encoder.layers.0.q_proj"},
     {"encoder.layers.0.q_proj", "model.vision.encoder.layer.0.q_proj"}},
    {{"text.encoder.layers.0.q_proj"},
     {"vision.encoder.layer.0.q_proj"},
     {"model.text.model.encoder.layers.0.q_proj"},
     {"encoder.layers.0.q_proj", "model.vision.encoder.layers.0.q_proj"}},
    {{"tracker.decoder.mlps.0.proj_in", "tracker.decoder.mlps.1.proj_in"},
     {"tracker.decoder.layers.0.proj_in"},
     {"decoder.mlps.0.proj_in", "model.decoder.mlps.3.proj_in"},
     {"decoder.layers.0.proj_in"}},
    {{"model.stages.0.blocks.1.fc"},
     {"model.stages.1.blocks.1.fc", "model.stages.0.blocks.0.fc"},
     {"stages.0.blocks.1.fc"},
     {"stages.1.blocks.1.fc", "vision.stages.0.blocks.0.fc"}},
    // Only two parts of the name together identify the plain module.
    {{"a.x.layers.0.fc"},
     {"a.y.layers.0.fc", "b.x.layers.0.fc"},
     {"model.a.model.x.layers.0.fc"},
     {"a.y.model.layers.0.fc", "model.b.x.layers.0.fc"}},
};

TEST(ModulePatterns, ListsThatArePlainInPartAreFoundUnderOtherNames) {
  for (const InPart& each : in_part) {
    for (const Names& patterns : {patterns_of_plain(each.plain, each.quantized),
                                  patterns_of_modules(each.plain, each.quantized)}) {
      for (const Names& names : {each.plain, each.same_plain}) {
        for (const auto& name : names) EXPECT_TRUE(any_matches(patterns, name)) << name;
      }
      for (const Names& names : {each.quantized, each.same_quantized}) {
        for (const auto& name : names) EXPECT_FALSE(any_matches(patterns, name)) << name;
      }
    }
  }
}

TEST(ModulePatterns, LayersWithTheSameModulesHaveOnePattern) {
  Names plain;
  Names others;
  for (int layer = 0; layer < 4; ++layer) {
    for (int expert = 0; expert < 8; ++expert) {
      Names& names = layer < 2 ? plain : others;
      names.push_back("model.layers." + std::to_string(layer) + ".mlp.experts." +
                      std::to_string(expert) + ".up_proj");
    }
  }
  EXPECT_EQ(patterns_of_plain(plain, others),
            Names({R"((.*\.)?layers.(?:0|1).mlp.experts.\d+.up_proj$)"}));
  // Each plain expert gets its own pattern.
  EXPECT_EQ(patterns_of_modules({plain[0], plain[9]}, {plain[1], plain[8]}).size(), 2u);
}

TEST(ModulePatterns, EmptyPartsOfNamesAreNoTrap) {
  const Names odd = {".layers.0.q_proj", "model.layers.1..q_proj", "layers.2.q_proj.", "..", ""};
  for (const std::string& name : odd) {
    const Names patterns = patterns_of_plain({name, "layers.3.k_proj"}, {"layers.0.x"});
    EXPECT_TRUE(any_matches(patterns, "model.layers.3.k_proj"));
    EXPECT_FALSE(any_matches(patterns_of_plain({"layers.3.k_proj"}, odd), ".layers.0.q_proj"));
  }
}

TEST(ModulePatterns, StacksMatchTheirPartsAndNoOthers) {
  const Names stacks = {"model.layers.0.mlp.experts", "mtp.layers.1.mlp"};
  const Names patterns = patterns_inside(stacks, quantized);
  ASSERT_EQ(patterns.size(), 2u);
  EXPECT_TRUE(matches(patterns[0], "model.language_model.layers.0.mlp.experts.0.up_proj"));
  EXPECT_FALSE(matches(patterns[0], "model.layers.10.mlp.experts.0.up_proj"));
  EXPECT_TRUE(matches(patterns[1], "mtp.layers.1.mlp.up_proj"));
  EXPECT_FALSE(matches(patterns[1], "model.layers.1.mlp.up_proj"));
}

// Modules of 24 layers with 12 experts each. Numbers of layers and experts are prefixes of others.
Names grid(std::size_t layers, std::size_t experts) {
  Names names;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    const std::string before = "model.layers." + std::to_string(layer);
    for (const char* const each : {".self_attn.q_proj", ".self_attn.o_proj", ".mlp.gate"}) {
      names.push_back(before + each);
    }
    for (std::size_t expert = 0; expert < experts; ++expert) {
      for (const char* const each : {".w1", ".w2", ".w3"}) {
        names.push_back(before + ".mlp.experts." + std::to_string(expert) + each);
      }
    }
  }
  return names;
}

struct Split {
  Names names;
  Names others;
};

template <typename Choose>
Split split(const Names& all, const Choose& choose) {
  Split result;
  for (const std::string& each : all) (choose(each) ? result.names : result.others).push_back(each);
  return result;
}

// Expects that the patterns and the unmatched names select exactly the names.
void expect_exact(const Split& split, const Selection& selection) {
  std::vector<Pattern> compiled;
  for (const std::string& each : selection.patterns) {
    compiled.push_back(
        compile_pattern("^(?:" + each + ")", "plan.options", "test", pattern_memory(100)));
  }
  const auto is_matched = [&](const std::string& name) {
    return std::ranges::any_of(compiled, [&](const auto& each) { return is_in(*each, name); });
  };
  for (const std::string& each : split.others) EXPECT_FALSE(is_matched(each)) << each;
  Names unmatched;
  std::ranges::remove_copy_if(split.names, std::back_inserter(unmatched), is_matched);
  EXPECT_EQ(unmatched, selection.unmatched);
}

TEST(ModulePatterns, PatternsSelectExactlyRandomSubsets) {
  std::mt19937 random(7);
  const Names all = grid(24, 12);
  for (int i = 0; i < 40; ++i) {
    const auto odds = random() % 9 + 1;
    // Layers, then single modules, then layers and experts are chosen at random.
    std::map<std::string, bool> chosen;
    const auto choose = [&](const std::string& name) {
      const std::size_t length = i % 3 == 0   ? name.find('.', 13)
                                 : i % 3 == 1 ? name.size()
                                              : name.rfind('.');
      const auto [known, is_new] = chosen.try_emplace(name.substr(0, length));
      if (is_new) known->second = random() % 10 < odds;
      return known->second;
    };
    const Split both = split(all, choose);
    const Selection selection = select_modules(both.names, both.others);
    expect_exact(both, selection);
    EXPECT_TRUE(selection.unmatched.empty());
    if (i % 3 == 0) {
      EXPECT_LE(selection.patterns.size(), 3u);
    }
    EXPECT_EQ(select_modules(both.names, both.others).patterns, selection.patterns);
  }
}

TEST(ModulePatterns, ManyNamesNeedFewPatterns) {
  const Split both = split(grid(186, 896), [](std::string_view name) {
    return name.find("layers.17") == name.npos && name.find("experts") != name.npos &&
           !name.ends_with("w2");
  });
  const Selection selection = select_modules(both.names, both.others);
  expect_exact(both, selection);
  EXPECT_EQ(selection.patterns.size(), 1u);
  EXPECT_TRUE(selection.unmatched.empty());
}

TEST(ModulePatterns, OddNamesAreListed) {
  const Names odd = {"model.layers.0.a+b",
                     "model.layers.0.a(b",
                     "model.layers.1.line\n",
                     "model.layers.0.caf\xc3\xa9",
                     "model.layers.01.q_proj",
                     "x",
                     "x.",
                     ".x"};
  const Names others = {"model.layers.0.aab",
                        "model.layers.1.line",
                        "model.layers.0.ab",
                        "model.layers.1.q_proj",
                        "xx",
                        "y.x..x"};
  const Split both = {odd, others};
  expect_exact(both, select_modules(odd, others));
  expect_exact({others, odd}, select_modules(others, odd));
  // Python's \d matches digits of other alphabets, and its $ matches before a newline.
  const Names names = {"layers.0.fc", "layers.1.fc"};
  EXPECT_EQ(patterns_of_modules(names, {"layers.\xd9\xa3.fc"}),
            Names({R"((.*\.)?layers\.(?:0|1)\.fc$)"}));
  EXPECT_EQ(patterns_of_modules(names, {"model.layers.3.fc\n"}),
            Names({R"((.*\.)?layers.(?:0|1).fc$)"}));
  EXPECT_TRUE(patterns_of_modules({"layers.3.fc"}, {"layers.3.fc\n"}).empty());
}

TEST(ModulePatterns, DotsAreEscapedIfTheyCouldMatchOtherCharacters) {
  const Names names = {"layers.0.attn.q", "layers.1.attn.q"};
  const std::string plain = R"((.*\.)?layers.\d+.attn.q$)";
  const std::string escaped = R"((.*\.)?layers\.\d+\.attn\.q$)";
  for (const char* const other : {"layers.0.attn.qk", "layers.0.attnq", "layers1", "attn"}) {
    EXPECT_EQ(patterns_of_modules(names, {other}), Names({plain})) << other;
  }
  for (const char* const other :
       {"layers.0.attn_q", "layers.0.xattn0qx", "layers_0.x", "layers107", "layers.0_attn.q"}) {
    EXPECT_EQ(patterns_of_modules(names, {other}), Names({escaped})) << other;
  }
  EXPECT_EQ(patterns_inside({"layers.0.experts"}, {"layers.0.experts_x"}),
            Names({R"((.*\.)?layers.0.experts\..*)"}));
}

TEST(ModulePatterns, EntriesAreNotReadAsClassesOrPatterns) {
  const Names names = {"Linear", "re:x", "lm_head"};
  EXPECT_EQ(select_modules(names, {"a.Linear", "a.re:x", "a.lm_head"}).entries(names),
            Names({"re:Linear$", R"(re:re\:x$)", "lm_head"}));
}

TEST(ModulePatterns, LongListsOmitNamesThatPatternsMatch) {
  const Names names =
      split(grid(9, 0), [](const auto& each) { return each.ends_with("gate"); }).names;
  const Names few(names.begin(), names.begin() + 8);
  EXPECT_EQ(select_modules(names, {}).entries(names), Names({R"(re:(.*\.)?layers.\d+.mlp.gate$)"}));
  EXPECT_EQ(select_modules(few, {}).entries(few).size(), 9u);
  // Under other prefixes, the patterns would also match these names.
  Names others = names;
  for (std::string& each : others) each = "draft." + each;
  EXPECT_EQ(select_modules(names, others).entries(names),
            Names({R"(re:model.layers.\d+.mlp.gate$)"}));
}

}  // namespace

}  // namespace loadstone::test

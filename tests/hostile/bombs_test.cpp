// Tests small inputs that claim much memory. Memory use must stay proportional to the input's size.
#include <gmock/gmock.h>

#include <random>

#include "hostile/allocations.h"
#include "loadstone/catalog.h"
#include "plan/rules.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/hostile_cases.h"
#include "support/memory_storage.h"

namespace loadstone::test {

namespace {

using ::testing::StartsWith;

constexpr std::size_t constant_bytes = 1 << 20;
// One opcode byte may create a node, a stack slot and a list item, and growing arrays double their
// size.
constexpr std::size_t per_file_byte = 128;

std::vector<HostileCase> bombs() {
  std::vector<HostileCase> bombs;
  for (const HostileCase& each : hostile_cases()) {
    if (each.name.starts_with("pt_bomb_")) bombs.push_back(each);
  }
  return bombs;
}

class Bomb : public ::testing::TestWithParam<HostileCase> {};

TEST_P(Bomb, TakesMemoryInProportionToTheFile) {
  const std::string bytes = read_file(GetParam().path);
  MemoryStorage storage;
  storage.add_file("/m/model.pt", bytes);
  AllocationPeak::reset();
  static_cast<void>(error_of([&] { (void)open_checkpoint("/m/model.pt", {.storage = &storage}); }));
  EXPECT_LE(AllocationPeak::bytes(), per_file_byte * bytes.size() + constant_bytes);
}

INSTANTIATE_TEST_SUITE_P(Manifest, Bomb, ::testing::ValuesIn(bombs()),
                         [](const auto& each) { return each.param.name; });

// Without a shared budget, the cache of each pattern would take 4 MiB.
TEST(RuleBomb, ManyPatternsShareOneBudget) {
  std::mt19937_64 random(1);
  std::string name;
  for (int i = 0; i < 20'000; ++i) name += random() % 2 == 0 ? 'a' : 'b';
  Rules rules;
  for (int i = 0; i < 100; ++i) {
    Rule rule;
    rule.sources = {"(?:a|b)*a(?:a|b){14}" + std::to_string(i)};
    rule.targets = {"t"};
    rules.push_back(rule);
  }
  AllocationPeak::reset();
  const CompiledRules compiled(rules);
  RuleMatch match;
  EXPECT_FALSE(compiled.match(name, match));
  EXPECT_LE(AllocationPeak::bytes(), patterns_memory_max + constant_bytes);
  // Control: each pattern alone uses the full budget.
  AllocationPeak::reset();
  const CompiledRules one({rules.front()});
  EXPECT_FALSE(one.match(name, match));
  EXPECT_GE(AllocationPeak::bytes(), static_cast<std::size_t>(pattern_memory(1)) / 4);
}

TEST(RuleBomb, MorePatternsThanAnyoneWritesAreRefused) {
  Rule rule;
  rule.targets = {"t"};
  rule.sources.assign(50, "a");
  const auto error = error_of([&] { (void)CompiledRules(Rules(201, rule)); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), "plan.rules");
  EXPECT_FALSE(error_of([&] { (void)CompiledRules(Rules(200, rule)); }));
}

}  // namespace

}  // namespace loadstone::test

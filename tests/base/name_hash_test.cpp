#include "loadstone/name_hash.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace loadstone {
namespace {

// colliding_names() returns names with equal hashes in libstdc++, whose hash has a constant seed.
// Names differ in two 8-byte words, and the second difference cancels the first in the hash state.
constexpr std::uint64_t factor = 0xc6a4a7935bd1e995u;

std::uint64_t inverse(std::uint64_t odd) {
  std::uint64_t found = odd;
  for (int i = 0; i < 6; ++i) found *= 2 - odd * found;
  return found;
}

std::uint64_t mixed(std::uint64_t word) {
  word *= factor;
  word ^= word >> 47;
  return word * factor;
}

std::uint64_t unmixed(std::uint64_t word) {
  word *= inverse(factor);
  word ^= word >> 47;
  return word * inverse(factor);
}

std::string twin(const std::string& words) {
  std::string other = words;
  for (std::size_t at = 0; at < words.size(); at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, words.data() + at, 8);
    word = unmixed(mixed(word) ^ (std::uint64_t{1} << 63));
    std::memcpy(other.data() + at, &word, 8);
  }
  return other;
}

std::vector<std::string> colliding_names(unsigned bits) {
  std::mt19937_64 random(1);
  std::vector<std::string> names = {""};
  for (unsigned i = 0; i < bits; ++i) {
    std::string words;
    for (int k = 0; k < 16; ++k) words += static_cast<char>(1 + random() % 255);
    std::vector<std::string> longer;
    for (const std::string& name : names) {
      longer.push_back(name + words);
      longer.push_back(name + twin(words));
    }
    names = std::move(longer);
  }
  return names;
}

TEST(NameHash, NamesThatCollideElsewhereDoNotHere) {
  const auto names = colliding_names(10);
  std::set<std::size_t> library;
  std::set<std::size_t> ours;
  for (const std::string& name : names) {
    library.insert(std::hash<std::string>()(name));
    ours.insert(NameHash()(name));
  }
  EXPECT_EQ(library.size(), 1u);  // control: the names collide in libstdc++
  EXPECT_EQ(ours.size(), names.size());
}

TEST(NameHash, ATableFindsWhatItHolds) {
  const std::string name = "model.layers.0.weight";
  NameMap<int> map;
  map.emplace(name, 1);
  EXPECT_EQ(map.count(std::string_view(std::string(name))), 1u);
  EXPECT_EQ(map.count("model.layers.1.weight"), 0u);
}

}  // namespace
}  // namespace loadstone

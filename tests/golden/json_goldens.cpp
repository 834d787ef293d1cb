#include "golden/json_goldens.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <simdjson.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <set>
#include <utility>
#include <vector>

#include "loadstone/error.h"
#include "support/files.h"

namespace loadstone::test {

namespace {

struct Node {
  std::string text;  // of a scalar
  char bracket = 0;
  std::vector<std::pair<std::string, Node>> items;  // keys are JSON; empty for arrays
};

Node node_of(simdjson::dom::element value) {
  Node node;
  if (simdjson::dom::object object; value.get(object) == simdjson::SUCCESS) {
    node.bracket = '{';
    for (const auto field : object) {
      node.items.emplace_back(json_string(field.key), node_of(field.value));
    }
  } else if (simdjson::dom::array array; value.get(array) == simdjson::SUCCESS) {
    node.bracket = '[';
    for (const auto item : array) node.items.emplace_back("", node_of(item));
  } else {
    node.text = simdjson::minify(value);
  }
  return node;
}

void write(const Node& node, std::string& text) {
  if (node.bracket == 0) {
    text += node.text;
    return;
  }
  text += node.bracket;
  for (std::size_t i = 0; i < node.items.size(); ++i) {
    if (i > 0) text += ',';
    if (node.bracket == '{') text += node.items[i].first + ':';
    write(node.items[i].second, text);
  }
  text += node.bracket == '{' ? '}' : ']';
}

class Changes {
 public:
  Changes(Node root, std::string_view code, const std::function<void(const std::string&)>& read)
      : root_(std::move(root)), code_(code), read_(read) {}

  std::string all() {
    replace(root_, "");
    walk(root_, "");
    return std::move(lines_);
  }

 private:
  void walk(Node& node, const std::string& path) {
    if (node.bracket == 0) return;
    auto& items = node.items;
    if (node.bracket == '{') {
      items.emplace_back("\"new\"", Node{.text = "1", .items = {}});
      note("new", path);
      items.pop_back();
      end_line(path);
    }
    for (std::size_t i = 0; i < items.size(); ++i) {
      const std::string key = items[i].first;
      const std::string dot = path.empty() ? "" : ".";
      const std::string place =
          key.empty() ? fmt::format("{}[{}]", path, i) : path + dot + key.substr(1, key.size() - 2);
      const auto at = items.begin() + static_cast<std::ptrdiff_t>(i);
      const auto saved = *at;
      items.erase(at);
      note("removed", place);
      items.insert(items.begin() + static_cast<std::ptrdiff_t>(i), 2, saved);
      note("twice", place);
      items.erase(items.begin() + static_cast<std::ptrdiff_t>(i));
      replace(items[i].second, place);
      walk(items[i].second, place);
    }
  }

  void replace(Node& node, const std::string& path) {
    for (const char* other :
         {"null", "true", "-1", "1.5", "7", "4294967296", "\"x\"", "[]", "{}"}) {
      const Node saved = std::exchange(node, Node{.text = other, .items = {}});
      note(other, path);
      node = saved;
    }
    end_line(path);
  }

  void note(const std::string& change, const std::string& path) {
    std::string text;
    write(root_, text);
    const std::string outcome = outcome_of(text, change, path);
    for (auto& [known, changes] : outcomes_) {
      if (known != outcome) continue;
      changes += " " + change;
      return;
    }
    outcomes_.emplace_back(outcome, change);
  }

  std::string outcome_of(const std::string& text, const std::string& change,
                         const std::string& path) {
    try {
      read_(text);
    } catch (const Error& error) {
      const Where& where = error.where();
      std::string outcome = error.code() == code_ ? "" : error.code() + ": ";
      outcome += error.message();
      if (where.field != path) outcome += fmt::format("; field {}", where.field);
      if (!where.tensor.empty()) outcome += fmt::format("; tensor {}", where.tensor);
      const bool is_said = where.found == change || (where.found == "an array" && change == "[]") ||
                           (where.found == "an object" && change == "{}");
      if (!where.found.empty() && !is_said) {
        outcome += fmt::format("; found {}", where.found);
      }
      if (!where.expected.empty()) outcome += fmt::format("; expected {}", where.expected);
      return outcome;
    }
    return "is read";
  }

  // Omits items equal to an earlier one.
  void end_line(const std::string& path) {
    std::string line = path.empty() ? "(root)\n" : path + "\n";
    for (const auto& [outcome, changes] : outcomes_) {
      line += fmt::format("  {}: {}\n", changes, outcome);
    }
    outcomes_.clear();
    std::string like = line;
    for (std::size_t at = 0; (at = like.find('[', at)) != std::string::npos;) {
      const std::size_t end = like.find_first_not_of("0123456789", ++at);
      if (end != std::string::npos && like[end] == ']') like.erase(at, end - at);
    }
    if (seen_.insert(like).second) lines_ += line;
  }

  Node root_;
  std::string_view code_;
  const std::function<void(const std::string&)>& read_;
  std::string lines_;
  std::set<std::string> seen_;
  std::vector<std::pair<std::string, std::string>> outcomes_;
};

}  // namespace

void expect_golden(const std::string& name, const std::string& text) {
  const std::string path = std::string(LOADSTONE_GOLDEN_DIR) + "/json/" + name;
  if (std::getenv("LOADSTONE_WRITE_GOLDENS") != nullptr) {
    std::ofstream(path, std::ios::binary) << text;
  }
  EXPECT_EQ(text, read_file(path)) << name;
}

std::string errors_of(std::string_view text, std::string_view code,
                      const std::function<void(const std::string&)>& read) {
  simdjson::dom::parser parser;
  Node root = node_of(parser.parse(text.data(), text.size()).value());
  return Changes(std::move(root), code, read).all();
}

}  // namespace loadstone::test

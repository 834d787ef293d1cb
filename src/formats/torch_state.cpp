#include "formats/torch_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <unordered_map>
#include <utility>

#include "base/checked.h"
#include "base/text.h"
#include "formats/torch.h"
#include "formats/torch_view.h"
#include "loadstone/name_hash.h"

namespace loadstone {

namespace {

// Keys under which training programs store the state dict, in the order of the search.
constexpr auto wrapper_names =
    std::to_array<std::string_view>({"state_dict", "model_state_dict", "model", "module"});
constexpr int state_wrappers_max = 4;
constexpr std::size_t depth_max = 100;
constexpr std::size_t visits_max = 2'000'000;
constexpr std::size_t ignored_shown_max = 8;
constexpr std::uint64_t view_bytes_per_file_byte = 64;
constexpr std::uint64_t view_bytes_least = std::uint64_t{1} << 30;
constexpr std::string_view lone_tensor_name = "tensor";

// The first few names, and the number of all names.
struct Names {
  std::vector<std::string> first;
  std::size_t count = 0;

  void add(std::string_view name) {
    if (first.size() < ignored_shown_max) first.emplace_back(name);
    ++count;
  }
  [[nodiscard]] std::string text() const { return name_list(first, count); }
};

// Not thread-safe; used once.
class StateReader {
 public:
  StateReader(const TorchFile& file, Warnings& warnings)
      : file_(file), path_(file.path), pickle_(file.pickle), warnings_(warnings) {}

  std::vector<TensorInfo> read(std::vector<Finding>& findings) {
    std::uint32_t root = pickle_.root;
    const PickleKind kind = pickle_.kind(root);
    if (kind == PickleKind::call && is_tensor_maker(pickle_.callee(root))) {
      warn_top_level();
      add_tensor(root, lone_tensor_name, root);
      return std::move(tensors_);
    }
    if (kind == PickleKind::call || kind == PickleKind::object) refuse_foreign(root, "");
    if (kind == PickleKind::dict) {
      root = unwrapped(root);
      tell_ignored(findings);
    } else if (kind == PickleKind::list || kind == PickleKind::tuple) {
      warn_top_level();
    } else {
      refuse(path_, {"pt.top_level", "the pickle does not contain a state dict", "data.pkl",
                     pickle_.describe(root), "a dict of tensors"});
    }
    // Limits the walk, which visits a container again at each place that refers to it. Valid files
    // refer to each value only a few times.
    for (const auto& items : pickle_.lists) visits_left_ += 4 * items.size();
    visits_left_ = std::min(visits_left_ + 1000, visits_max);
    std::string prefix;
    on_path_.resize(pickle_.nodes.size());
    walk(root, prefix, 0);
    tell_extra_states(findings);
    return std::move(tensors_);
  }

 private:
  void warn_top_level() {
    warnings_.add("pt.top_level", "data.pkl", "-", "the pickle does not contain a dict of tensors",
                  pickle_.describe(pickle_.root), "a state dict");
  }

  // ---- choice of the state dict

  [[nodiscard]] bool is_tensor(std::uint32_t node) const {
    return pickle_.kind(node) == PickleKind::call && is_tensor_maker(pickle_.callee(node));
  }

  // Returns true if `is_meant` accepts the key of a tensor at or below `node` (an empty key if the
  // tensor has none). Skips containers that an earlier call has visited: if that call returned
  // false, they contain no such tensor.
  template <typename IsMeant>
  [[nodiscard]] bool finds_tensor(std::uint32_t node, const IsMeant& is_meant) {
    std::vector<std::pair<std::string_view, std::uint32_t>> todo = {{"", node}};
    while (!todo.empty()) {
      const auto [key, at] = todo.back();
      todo.pop_back();
      if (is_tensor(at) && is_meant(key)) return true;
      const PickleKind kind = pickle_.kind(at);
      const bool is_container =
          kind == PickleKind::dict || kind == PickleKind::list || kind == PickleKind::tuple;
      if (!is_container || seen_[at]) continue;
      seen_[at] = true;
      const auto& items = pickle_.items(at);
      for (std::size_t i = 0; i < items.size(); ++i) {
        const bool has_key = kind == PickleKind::dict && i % 2 == 1 &&
                             pickle_.kind(items[i - 1]) == PickleKind::text;
        todo.emplace_back(has_key ? pickle_.text(items[i - 1]) : std::string_view(), items[i]);
      }
    }
    return false;
  }

  void forget_seen() { seen_.assign(pickle_.nodes.size(), false); }

  // Forgets the visited containers after a result of true, because some are only partly visited.
  // This happens at most once per wrapper.
  [[nodiscard]] bool holds_tensors(std::uint32_t node) {
    const bool holds = finds_tensor(node, [](std::string_view) { return true; });
    if (holds) forget_seen();
    return holds;
  }

  // Records the keys in `items`, except the key of the state dict `inner`, for a finding.
  void ignore_others(const std::vector<std::uint32_t>& items, std::uint32_t inner) {
    NameSet own;
    static_cast<void>(finds_tensor(inner, [&](std::string_view key) {
      if (!key.empty()) own.insert(key);
      return false;
    }));
    forget_seen();
    const auto is_own = [&](std::string_view key) { return own.contains(key); };
    for (std::size_t at = 0; at + 1 < items.size(); at += 2) {
      if (items[at + 1] == inner || pickle_.kind(items[at]) != PickleKind::text) continue;
      ignored_.add(pickle_.text(items[at]));
      if (finds_tensor(items[at + 1], is_own)) rivals_.add(pickle_.text(items[at]));
    }
    forget_seen();
  }

  [[nodiscard]] std::uint32_t unwrapped(std::uint32_t node) {
    forget_seen();
    for (int i = 0; i < state_wrappers_max; ++i) {
      const auto& items = pickle_.items(node);
      std::uint32_t inner = node;
      for (std::size_t at = 1; at < items.size(); at += 2) {
        if (is_tensor(items[at])) return node;
      }
      for (const std::string_view wrapper : wrapper_names) {
        for (std::size_t at = 0; at + 1 < items.size() && inner == node; at += 2) {
          const bool is_wrapper = pickle_.kind(items[at]) == PickleKind::text &&
                                  pickle_.text(items[at]) == wrapper &&
                                  pickle_.kind(items[at + 1]) == PickleKind::dict;
          if (!is_wrapper || !holds_tensors(items[at + 1])) continue;
          inner = items[at + 1];
          taken_ = wrapper;
        }
      }
      if (inner == node) return node;
      ignore_others(items, inner);
      node = inner;
    }
    return node;
  }

  void tell_ignored(std::vector<Finding>& findings) const {
    if (ignored_.count == 0) return;
    std::string message =
        fmt::format("{}: loadstone does not read values outside the state dict: {}",
                    printable(path_, 400), ignored_.text());
    if (rivals_.count > 0) {
      message +=
          fmt::format("; loadstone reads '{}' instead of the tensors with the same names in {}",
                      taken_, rivals_.text());
    }
    findings.push_back({.severity = rivals_.count > 0 ? Severity::warning : Severity::info,
                        .code = "pt.ignored",
                        .message = std::move(message)});
  }

  void tell_extra_states(std::vector<Finding>& findings) {
    if (extra_states_.count == 0) return;
    findings.push_back(
        {.severity = Severity::info,
         .code = "pt.ignored",
         .sources = extra_states_.first,
         .message = fmt::format("{}: loadstone does not read extra state that is not a tensor: {}",
                                printable(path_, 400), extra_states_.text())});
  }

  // ---- tensors of the state dict

  void walk(std::uint32_t node, std::string& prefix, std::size_t depth) {
    const auto& items = pickle_.items(node);
    const bool is_dict = pickle_.kind(node) == PickleKind::dict;
    on_path_[node] = true;
    const std::size_t length = prefix.size();
    const std::size_t step = is_dict ? 2 : 1;
    for (std::size_t at = 0; at + step <= items.size() && !spent_; at += step) {
      if (visits_left_ == 0) {
        spend("the pickle repeats the same values too often", "each value a few times at most");
        break;
      }
      --visits_left_;
      if (length > 0) prefix += '.';
      if (!is_dict) prefix += std::to_string(at);
      if (!is_dict || append_key(prefix, items[at], items[at + 1])) {
        if (is_dict && is_lost_state(items[at], items[at + 1])) extra_states_.add(prefix);
        visit(items[at + step - 1], prefix, node, depth);
      }
      prefix.resize(length);
    }
    on_path_[node] = false;
  }

  [[nodiscard]] bool is_lost_state(std::uint32_t key, std::uint32_t value) const {
    return pickle_.kind(key) == PickleKind::text && is_extra_state(pickle_.text(key)) &&
           pickle_.kind(value) != PickleKind::none && !is_tensor(value);
  }

  // Returns false for a key that cannot be part of a name.
  bool append_key(std::string& prefix, std::uint32_t key, std::uint32_t value) {
    if (pickle_.kind(key) == PickleKind::text) {
      spend_copy(pickle_.text(key).size());
      prefix += pickle_.text(key);
      return true;
    }
    const bool is_integer = pickle_.kind(key) == PickleKind::integer;
    if (is_integer) prefix += std::to_string(pickle_.node(key).number);
    if (is_tensor(value) || !is_integer) {
      warnings_.add("pt.key", prefix, "SETITEMS", "a key is not a string", pickle_.describe(key),
                    "a string");
    }
    return is_integer;
  }

  void visit(std::uint32_t value, std::string& name, std::uint32_t owner, std::size_t depth) {
    switch (pickle_.kind(value)) {
      case PickleKind::call:
        if (!is_tensor(value)) refuse_foreign(value, name);
        add_tensor(value, name, owner);
        return;
      case PickleKind::object:
        warnings_.add("pt.global_refused", name, "NEWOBJ",
                      "a value is an object instead of a tensor", pickle_.describe(value),
                      "a tensor");
        return;
      case PickleKind::global:
        if (!pickle_.text(value).starts_with("torch.")) {
          warnings_.add("pt.global_refused", name, "GLOBAL",
                        "a value is a global instead of a tensor", pickle_.describe(value),
                        "a tensor");
        }
        return;
      case PickleKind::dict:
      case PickleKind::list:
      case PickleKind::tuple:
        if (on_path_[value]) {
          warnings_.add("pt.cycle", name, "BINGET", "a container contains itself",
                        pickle_.describe(value), "a tree");
        } else if (depth >= depth_max) {
          spend("containers are nested too deeply", counted(depth_max, "level"));
        } else {
          walk(value, name, depth + 1);
        }
        return;
      case PickleKind::none:
      case PickleKind::boolean:
      case PickleKind::integer:
      case PickleKind::big_integer:
      case PickleKind::real:
      case PickleKind::text:
      case PickleKind::bytes:
      case PickleKind::set:
      case PickleKind::storage:
        return;  // not a tensor, and users expect no tensor of this name
    }
  }

  void spend(std::string_view message, std::string_view found) {
    warnings_.add("pt.budget", "data.pkl", "BINGET", message, "more than " + std::string(found),
                  "fewer; the rest is left out");
    spent_ = true;
  }

  void spend_copy(std::uint64_t bytes) { budget_.take(path_, bytes, pickle_.bytes); }

  [[noreturn]] void refuse_foreign(std::uint32_t node, std::string_view name) const {
    const std::uint32_t global = pickle_.items(node)[0];
    refuse(path_,
           {"pt.global_refused", "the value can only be made by calling Python code",
            pickle_.node(global).from_stack ? "STACK_GLOBAL" : "GLOBAL", pickle_.describe(node),
            "a tensor (loadstone never calls code named in a file)"},
           name);
  }

  void add_tensor(std::uint32_t node, std::string_view name, std::uint32_t owner) {
    if (!is_utf8(name)) {
      refuse(path_,
             {"pt.utf8", "the tensor's name is not UTF-8", "SETITEMS", "'" + printable(name) + "'",
              "UTF-8"},
             name);
    }
    spend_copy(name.size());
    TensorInfo tensor = read_torch_view(file_, budget_, node, name);
    add_view_bytes(tensor);
    const auto [found, is_new] = places_.emplace(tensor.name, Place{tensors_.size(), owner});
    if (is_new) {
      tensors_.push_back(std::move(tensor));
      return;
    }
    if (found->second.owner != owner) {
      refuse(
          path_,
          {"pt.duplicate", "two tensors get the same name", "SETITEMS", "a second tensor", "one"},
          name);
    }
    warnings_.add("pt.duplicate", name, "SETITEMS",
                  "a name occurs twice; loadstone reads the last tensor of that name",
                  "a second tensor", "one");
    tensors_[found->second.tensor] = std::move(tensor);
  }

  // Limits the total size of all tensors, which overlapping views can make much larger than the
  // file, for callers that write or compare all tensors.
  void add_view_bytes(const TensorInfo& tensor) {
    const std::uint64_t elements = tensor.shape.numel().value_or(0);
    const auto sum = checked_add(view_bytes_, tensor.encoding.byte_count(elements).value_or(0));
    view_bytes_ = sum.value_or(UINT64_MAX);
    const std::uint64_t most = std::max(
        checked_mul(file_.bytes, view_bytes_per_file_byte).value_or(UINT64_MAX), view_bytes_least);
    if (view_bytes_ <= most) return;
    refuse(path_,
           {"pt.budget", "too many tensors are views of the same values", "size",
            fmt::format("more than {} in a file of {}", bytes_text(most), bytes_text(file_.bytes)),
            fmt::format("at most {} times the file's bytes, or {}", view_bytes_per_file_byte,
                        bytes_text(view_bytes_least))},
           tensor.name);
  }

  struct Place {
    std::size_t tensor;
    std::uint32_t owner;
  };

  const TorchFile& file_;
  const std::string& path_;
  const Pickle& pickle_;
  Warnings& warnings_;
  CopyBudget budget_;
  Names ignored_;
  Names rivals_;            // ignored keys whose tensors have names that the state dict has too
  Names extra_states_;      // extra states that are not tensors
  std::string_view taken_;  // key of the state dict
  std::vector<bool> seen_;  // nodes that finds_tensor() has visited
  std::vector<bool> on_path_;
  std::size_t visits_left_ = 0;
  std::uint64_t view_bytes_ = 0;
  bool spent_ = false;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string, Place, NameHash, std::equal_to<>> places_;
};

}  // namespace

std::vector<TensorInfo> read_state(const TorchFile& file, Warnings& warnings,
                                   std::vector<Finding>& findings) {
  return StateReader(file, warnings).read(findings);
}

}  // namespace loadstone

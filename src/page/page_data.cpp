#include "page/page_data.h"

#include <algorithm>
#include <limits>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/json_writer.h"
#include "base/text.h"
#include "boxes/merges.h"
#include "loadstone/merge.h"
#include "plan/costs.h"
#include "plan/fold.h"

namespace loadstone {

namespace {

// Maximum boxes shown per recipe. Further boxes are only counted.
constexpr std::size_t boxes_shown_max = 12;
constexpr std::size_t name_length_max = 1000;

// Assigns numbers to keys in the order of first use.
template <typename Key>
class Numbering {
 public:
  std::size_t of(const Key& key) {
    const auto [found, is_new] = numbers_.emplace(key, keys_.size());
    if (is_new) keys_.push_back(key);
    return found->second;
  }
  [[nodiscard]] const std::vector<Key>& keys() const noexcept { return keys_; }

 private:
  std::unordered_map<Key, std::size_t> numbers_;
  std::vector<Key> keys_;
};

class DataWriter {
 public:
  explicit DataWriter(const Plan& plan) : plan_(plan) {
    std::uint64_t begin = 0;
    for (const Shard& shard : plan.catalog->shards()) {
      shard_begins_.push_back(begin);
      begin += shard.identity.bytes;
    }
  }

  std::string write(const PageOptions& options) {
    json_.begin_object();
    json_.key("targets");
    json_.begin_array();
    for (const PlannedTarget& target : plan_.targets) write_target(target);
    json_.end_array();
    write_sources();
    std::vector<std::string> shards;
    for (const Shard& shard : plan_.catalog->shards()) {
      shards.push_back(printable(shard.relative_path, name_length_max));
    }
    json_.member("shards", shards);
    json_.member("decodings", decoded_);
    json_.member("words", words_.keys());
    write_sizes("peaks", peaks_of(plan_, options));
    write_sizes("limits", options.max_memory);
    json_.key("progress");
    json_.begin_array();
    if (options.loaded) {
      for (const auto& sample : options.loaded->progress) {
        json_.array(sample.seconds, sample.bytes_done);
      }
    }
    json_.end_array();
    json_.end_object();
    return json_.take();
  }

 private:
  void write_target(const PlannedTarget& target) {
    const PlanRow row = row_of(plan_, target);
    const Recipe& recipe = target.recipe;
    json_.begin_array();
    json_.value(printable(row.name, name_length_max));
    json_.value(words_.of(row.kind));
    json_.value(row.shape);
    json_.value(words_.of(row.dtype));
    json_.value(words_.of(printable(row.device)));
    json_.value(words_.of(std::string(name(recipe.origin))));
    json_.value(row.bytes);
    write_position(recipe);
    json_.value(
        printable(recipe.origin == Origin::excluded ? recipe.reason : row.from, name_length_max));
    write_boxes(recipe);
    json_.value(recipe.boxes.size());
    json_.value(bytes_placed(target));
    if (recipe.merge != nullptr) write_terms(*recipe.merge);
    json_.end_array();
  }

  // Writes the position of the source in the order of a load, which processes the shards in order.
  void write_position(const Recipe& recipe) {
    std::uint64_t position = std::numeric_limits<std::uint64_t>::max();
    for_each_box(recipe, [&](const Box& box) {
      const TensorInfo& source = plan_.catalog->tensors()[box.source];
      position = std::min(position, shard_begins_[source.shard] + source.offset_begin);
    });
    if (position == std::numeric_limits<std::uint64_t>::max()) {
      json_.value(-1);
    } else {
      json_.value(position);
    }
  }

  void write_boxes(const Recipe& recipe) {
    json_.begin_array();
    for (const Box& box :
         std::span(recipe.boxes).first(std::min(recipe.boxes.size(), boxes_shown_max))) {
      std::uint64_t elements = 1;
      for (const BoxDim& dim : box.dims) elements *= dim.extent;
      const std::size_t source = sources_.of(box.source);
      const std::int64_t decoding = box.decoding == no_decoding ? -1 : decoding_of(box.decoding);
      json_.array(source, box.source_offset, box.target_offset, elements, decoding);
    }
    json_.end_array();
  }

  std::int64_t decoding_of(std::uint32_t index) {
    const std::size_t number = decodings_.of(index);
    if (number == decoded_.size()) {
      const Decoding& decoding = plan_.decodings[index];
      std::vector<std::size_t> sources;
      for (const std::uint32_t source : decoding.sources) sources.push_back(sources_.of(source));
      decoded_.emplace_back(decoding.kernel, std::move(sources));
    }
    return static_cast<std::int64_t>(number);
  }

  void write_terms(const Merge& merge) {
    json_.begin_array();
    for (const Term& term : merge.terms) {
      std::vector<std::size_t> sources;
      const auto add = [&](const std::vector<Box>& boxes) {
        if (boxes.empty() || sources.size() == boxes_shown_max) return;
        sources.push_back(sources_.of(boxes.front().source));
      };
      add(term.boxes);
      if (term.low_rank) {
        add(term.low_rank->left);
        add(term.low_rank->right);
        add(term.low_rank->magnitudes);
      }
      json_.array(term.factor, sources);
    }
    json_.end_array();
  }

  void write_sources() {
    json_.key("sources");
    json_.begin_array();
    for (const std::uint32_t index : sources_.keys()) {
      const TensorInfo& source = plan_.catalog->tensors()[index];
      json_.array(printable(source.name, name_length_max), source.shard,
                  words_.of(std::string(source.encoding.name())), source.shape.text(),
                  source.offset_begin, source.offset_end);
    }
    json_.end_array();
  }

  template <typename Sizes>
  void write_sizes(std::string_view key, const Sizes& sizes) {
    json_.key(key);
    json_.begin_object();
    for (const auto& [device, bytes] : sizes) json_.member(printable(device), bytes);
    json_.end_object();
  }

  const Plan& plan_;
  JsonWriter json_;
  std::vector<std::uint64_t> shard_begins_;
  Numbering<std::string> words_;
  Numbering<std::uint32_t> sources_;    // keys are indices into Catalog::tensors()
  Numbering<std::uint32_t> decodings_;  // keys are indices into Plan::decodings
  std::vector<std::pair<std::string, std::vector<std::size_t>>> decoded_;
};

}  // namespace

std::map<std::string, std::uint64_t> peaks_of(const Plan& plan, const PageOptions& options) {
  std::map<std::string, std::uint64_t> peaks = plan.peak_bytes;
  for (const auto& [device, bytes] : options.held_bytes) peaks[device] += bytes;
  return peaks;
}

std::string page_data(const Plan& plan, const PageOptions& options) {
  const std::string json = DataWriter(plan).write(options);
  std::string text;
  text.reserve(json.size());
  for (const char character : json) {  // in JSON, '<' occurs only inside strings
    if (character == '<') {
      text += "\\u003c";
    } else {
      text += character;
    }
  }
  return text;
}

}  // namespace loadstone

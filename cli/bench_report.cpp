#include "cli/bench_report.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/json_writer.h"
#include "base/named.h"
#include "base/text.h"

namespace loadstone::cli {

namespace {

// A limit is the bottleneck of a load that reaches this share of it.
constexpr double near_share = 0.85;

double median_of(std::vector<double> values) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

double rate(std::uint64_t bytes, double seconds) {
  return seconds > 0 ? static_cast<double>(bytes) / seconds : 0;
}

// At most 1: the median of a load may exceed that of its limit, because both vary.
double share_of_limit(double rate, double limit) {
  return limit > 0 ? std::min(1.0, rate / limit) : 0;
}

struct Row {
  std::string name;   // in JSON
  std::string title;  // for people
  const Series& series;
  std::string note;  // text behind the rates or, for an empty series, the reason
};

std::vector<Row> limits_of(const BenchFigures& figures) {
  const std::string disk_note = figures.disk.seconds.empty()
                                    ? figures.no_disk
                                    : fmt::format("{} reads at once", figures.disk_readers);
  std::vector<Row> rows = {{"new_memory", "new memory", figures.new_memory, {}},
                           {"memory_copy", "copy from memory to memory", figures.memory_copy, {}},
                           {"page_cache", "page cache to existing memory", figures.page_cache, {}},
                           {"page_cache_to_new_memory",
                            "page cache to new memory",
                            figures.page_cache_to_new_memory,
                            {}},
                           {"disk", "disk, bypassing the page cache", figures.disk, disk_note},
                           {"write", "write to a new file", figures.write, figures.no_write}};
  for (const auto& [encoding, series] : figures.encode) {
    rows.push_back({"encode_" + encoding, "encode BF16 to " + encoding, series, {}});
  }
  return rows;
}

std::string row_text(std::string_view title, const Series& series, const std::string& last) {
  if (series.seconds.empty()) return fmt::format("{:<30} not measured: {}\n", title, last);
  std::string text = fmt::format("{:<30} {:>6.2f}   {:.2f} to {:.2f}", title, series.median() / 1e9,
                                 series.lowest() / 1e9, series.highest() / 1e9);
  if (!last.empty()) text = fmt::format("{:<56} {}", text, last);
  return text + '\n';
}

std::string percent(double share) { return fmt::format("{:.0f} %", share * 100); }

std::string bound_text(const BenchFigures& figures, const LoadSeries& load, Bound bound) {
  switch (bound) {
    case Bound::page_cache_to_new_memory:
      return "limited by reads from the page cache into new memory";
    case Bound::disk:
      return "limited by the disk";
    case Bound::processor:
      return fmt::format("limited by the processor ({})", counted(figures.cores, "core"));
    case Bound::waiting:
      break;
  }
  return fmt::format("its {} wait for data: compare with --threads {}",
                     counted(load.readers, "reader"), 2 * load.readers);
}

std::string verdict_line(const BenchFigures& figures, const LoadSeries& load,
                         std::string_view source, const LoadVerdict& verdict) {
  return fmt::format("a load from the {} reaches {} of the limit: {}", source,
                     percent(verdict.of_limit), bound_text(figures, load, verdict.bound));
}

}  // namespace

void visit_fields(JsonWriter& json, Like<Series> auto& series) {
  json.member("bytes_per_second", series.median());
  json.member("lowest", series.lowest());
  json.member("highest", series.highest());
}

static void write_load(JsonWriter& json, std::string_view name, const LoadSeries& load,
                       const std::optional<LoadVerdict>& verdict, std::string_view limit) {
  json.key(name);
  if (load.series.seconds.empty()) return json.null();
  json.begin_object();
  visit_fields(json, load.series);
  json.member("processor_share", load.processor_share());
  json.member("readers", load.readers);
  json.member("limit", limit);
  if (verdict) {
    json.member("of_limit", verdict->of_limit);
    json.member("bound_by", cli::name(verdict->bound));
  }
  json.end_object();
}

double Series::lowest() const {
  return seconds.empty() ? 0 : rate(bytes, *std::ranges::max_element(seconds));
}
double Series::median() const { return rate(bytes, median_of(seconds)); }
double Series::highest() const {
  return seconds.empty() ? 0 : rate(bytes, *std::ranges::min_element(seconds));
}

double LoadSeries::processor_share() const { return median_of(processor_shares); }

std::string_view name(Bound bound) noexcept {
  return name_among({"page_cache_to_new_memory", "disk", "processor", "waiting"}, bound);
}

LoadVerdict page_cache_verdict(const BenchFigures& figures) {
  const LoadSeries& load = figures.load_from_page_cache;
  LoadVerdict verdict;
  verdict.of_limit =
      share_of_limit(load.series.median(), figures.page_cache_to_new_memory.median());
  if (verdict.of_limit >= near_share) {
    verdict.bound = Bound::page_cache_to_new_memory;
  } else if (load.processor_share() >= near_share) {
    verdict.bound = Bound::processor;
  }
  return verdict;
}

std::optional<LoadVerdict> disk_verdict(const BenchFigures& figures) {
  const LoadSeries& load = figures.load_from_disk;
  if (load.series.seconds.empty() || figures.disk.seconds.empty()) return std::nullopt;
  LoadVerdict verdict;
  verdict.of_limit = share_of_limit(load.series.median(), figures.disk.median());
  if (verdict.of_limit >= near_share) {
    verdict.bound = Bound::disk;
  } else if (load.series.median() >= near_share * figures.load_from_page_cache.series.median()) {
    // Reading from the disk is not the bottleneck: a load from the page cache is not much faster.
    verdict.bound = page_cache_verdict(figures).bound;
  } else if (load.processor_share() >= near_share) {
    verdict.bound = Bound::processor;
  }
  return verdict;
}

std::string to_text(const BenchFigures& figures, const TextStyle& style) {
  const LoadVerdict warm = page_cache_verdict(figures);
  const std::optional<LoadVerdict> cold = disk_verdict(figures);
  const LoadSeries& from_cache = figures.load_from_page_cache;
  const LoadSeries& from_disk = figures.load_from_disk;
  std::string text = style.strong(verdict_line(figures, from_cache, "page cache", warm)) + '\n';
  if (cold) text += style.strong(verdict_line(figures, from_disk, "disk", *cold)) + '\n';
  text += fmt::format("\ncheckpoint  {}: {}, {}\nmeasured    {} of {}, medians of {}; {} on {}\n\n",
                      printable(figures.checkpoint), human_bytes(figures.total_bytes),
                      counted(figures.total_targets, "target"), human_bytes(figures.sample_bytes),
                      counted(figures.sample_targets, "target"),
                      counted(from_cache.series.seconds.size(), "round"),
                      counted(figures.threads, "thread"), counted(figures.cores, "core"));
  text += fmt::format("{:<30} {:>6}   {}\n", "limits", "GB/s", "lowest to highest");
  for (const Row& row : limits_of(figures)) text += row_text(row.title, row.series, row.note);
  text += "\nloads\n";
  const auto note = [](const LoadVerdict& verdict, std::string_view limit, const LoadSeries& load) {
    return fmt::format("{} of {}; {}", percent(verdict.of_limit), limit,
                       counted(load.readers, "reader"));
  };
  text += row_text("from the page cache", from_cache.series,
                   note(warm, "page cache to new memory", from_cache));
  text += row_text("from the disk", from_disk.series,
                   cold                               ? note(*cold, "the disk", from_disk)
                   : from_disk.series.seconds.empty() ? figures.no_disk_load
                                                      : std::string());
  return text;
}

std::string to_json(const BenchFigures& figures) {
  JsonWriter json(2);
  json.begin_object();
  json.member("checkpoint", figures.checkpoint);
  json.member("total_bytes", figures.total_bytes);
  json.member("total_targets", figures.total_targets);
  json.member("sample_bytes", figures.sample_bytes);
  json.member("sample_targets", figures.sample_targets);
  json.member("threads", figures.threads);
  json.member("disk_readers", figures.disk_readers);
  json.member("rounds", figures.load_from_page_cache.series.seconds.size());
  json.key("limits");
  json.begin_object();
  for (const Row& row : limits_of(figures)) {
    json.member(row.name, row.series.seconds.empty() ? nullptr : &row.series);
  }
  json.end_object();
  json.key("loads");
  json.begin_object();
  write_load(json, "page_cache", figures.load_from_page_cache, page_cache_verdict(figures),
             "page_cache_to_new_memory");
  write_load(json, "disk", figures.load_from_disk, disk_verdict(figures), "disk");
  json.end_object();
  json.key("not_measured");
  json.begin_object();
  if (!figures.no_disk.empty()) json.member("limits.disk", figures.no_disk);
  if (!figures.no_disk_load.empty()) json.member("loads.disk", figures.no_disk_load);
  if (!figures.no_write.empty()) json.member("limits.write", figures.no_write);
  json.member("limits.devices", "this version of loadstone does not measure links to GPUs");
  json.end_object();
  json.end_object();
  return json.take();
}

}  // namespace loadstone::cli

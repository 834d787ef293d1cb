#include "engine/run.h"

#include <atomic>
#include <utility>

#include "codec/tensor_table.h"
#include "engine/box_read.h"
#include "engine/job_queue.h"
#include "engine/pages.h"
#include "engine/read_ahead.h"
#include "engine/reader.h"
#include "engine/run_team.h"
#include "engine/windows.h"
#include "engine/worker.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

std::vector<std::uint32_t> all_values(const Run& run) {
  std::vector<std::uint32_t> all = run.groups.numbers;
  for (std::uint32_t i = 0; i < run.whole.size(); ++i) {
    if (run.whole[i] != nullptr) all.push_back(i);
  }
  return all;
}

// Processes jobs until the queue is empty, and then frees the reader's slot.
void run_jobs(ReadContext& context, JobQueue& queue) {
  Reader reader(context);
  Job job;
  while (!context.stop && queue.next(job)) reader.run(job);
}

}  // namespace

std::vector<PreparedDecoder> prepare_decodings(const ValueSet& values) {
  std::vector<PreparedDecoder> forms(values.decodings.size());
  for (std::size_t i = 0; i < forms.size(); ++i) {
    const auto problem = check_decoding(values.tensors(), values.decodings[i], forms[i]);
    if (!problem) continue;
    throw Error("plan.box", problem->message,
                {.field = "decodings", .found = problem->found, .expected = problem->expected});
  }
  return forms;
}

RunReport run(const Run& run, ReaderGrowth growth) {
  const Budget& budget = run.budget;
  JobQueue jobs(run.values, run.whole, window_limits(budget.whole.bytes, budget.chunk_bytes));
  ReadAhead ahead(planned_reads(run.values, all_values(run)), run.shards, run.read_ahead_bytes);
  std::atomic<bool> own_stop = false;
  std::atomic<bool>& stop = run.stop != nullptr ? *run.stop : own_stop;
  ReadContext reads = {.values = run.values,
                       .places = run.whole,
                       .shards = ahead.sources(),
                       .forms = run.forms,
                       .chunk_bytes = budget.chunk_bytes,
                       .slot_bytes = budget.whole.bytes,
                       .memory = run.memory,
                       .stop = stop,
                       .written = std::vector<std::atomic<std::uint64_t>>(run.whole.size()),
                       .populates = run.is_fresh,
                       .sink = &run.sink};
  WindowQueue windows(run);
  WindowWork work = {.run = run, .reads = reads, .queue = windows};
  const std::uint64_t bytes_total = jobs.bytes_total() + windows.bytes_total();
  const auto progress = [&] { return Progress{reads.bytes_done, bytes_total}; };
  std::atomic<bool> is_interleaved = run.interleaves && run.is_fresh;
  run_team(growth, stop, run.observer, progress, [&] {
    if (run.interleaves && !interleave_new_pages()) is_interleaved = false;
    if (!run.whole.empty()) run_jobs(reads, jobs);
    make_windows(work);
  });
  return {.written = {reads.written.begin(), reads.written.end()},
          .bytes_read = reads.bytes_read,
          .bytes_read_ahead = ahead.bytes_asked(),
          .bytes_done = bytes_total,
          .readers = growth.readers(),
          .is_interleaved = is_interleaved,
          .findings = findings_of(work)};
}

}  // namespace loadstone

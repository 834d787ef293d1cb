// Tests teams whose threads cannot be started, and work that fails without memory for a message.
#include "base/team.h"

#include <gmock/gmock.h>

#include <new>
#include <stdexcept>
#include <system_error>

#include "support/errors.h"
#include "support/no_memory.h"

namespace loadstone::test {
namespace {

// Returns a starter that starts `count` threads, then throws.
template <typename Exception>
Team::Starter starts(unsigned count, Exception exception) {
  return [count, exception](Team::Work work) mutable {
    if (count == 0) throw exception;
    --count;
    return std::thread(std::move(work));
  };
}

std::system_error no_thread() {
  return std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
}

class TeamTest : public testing::Test {
 protected:
  // Returns the number of threads that did the work.
  unsigned done_by(unsigned wanted, Team::Starter starter) {
    std::atomic<unsigned> done = 0;
    Team team(stop, std::move(starter));
    const unsigned started = team.start(wanted, [&] { ++done; });
    EXPECT_TRUE(team.wait([] { return true; }));
    EXPECT_EQ(done, started);
    return done;
  }

  std::atomic<bool> stop = false;
};

TEST_F(TeamTest, GoesOnWithFewerThreads) {
  EXPECT_EQ(done_by(4, starts(4, no_thread())), 4u);
  EXPECT_EQ(done_by(4, starts(2, no_thread())), 2u);
  EXPECT_EQ(done_by(4, starts(1, std::bad_alloc())), 1u);
}

TEST_F(TeamTest, SaysHowManyJoined) {
  Team team(stop, starts(3, no_thread()));
  EXPECT_EQ(team.start(1,
                       [&] {
                         while (!stop) std::this_thread::yield();
                       }),
            1u);
  EXPECT_EQ(team.add(5), 2u);
  EXPECT_EQ(team.add(5), 0u);
  stop = true;
  EXPECT_TRUE(team.wait([] { return true; }));
}

TEST_F(TeamTest, NobodyJoinsWorkThatIsDone) {
  Team team(stop);
  EXPECT_EQ(team.start(1, [] {}), 1u);
  EXPECT_TRUE(team.wait([] { return true; }));
  EXPECT_EQ(team.add(1), 0u);
}

// Destroying a started thread that is not in the team's list would end the process.
TEST_F(TeamTest, NobodyJoinsWhereThereIsNoMemory) {
  unsigned added = 1;
  std::thread([&] {
    Team team(stop);
    team.start(1, [&] {
      while (!stop) std::this_thread::yield();
    });
    end_memory_of_this_thread();
    added = team.add(100);
    stop = true;
  }).join();
  EXPECT_EQ(added, 0u);
}

TEST_F(TeamTest, NoThreadAtAllIsAnError) {
  EXPECT_EQ(code_of([&] { (void)done_by(2, starts(0, no_thread())); }), "memory.host");
  EXPECT_EQ(code_of([&] { (void)done_by(2, starts(0, std::bad_alloc())); }), "memory.host");
}

// If every allocation fails, the message of the error cannot be allocated either.
TEST_F(TeamTest, WorkThatFindsNoMemoryIsAnError) {
  Team team(stop);
  team.start(2, [] {
    end_memory_of_this_thread();
    std::vector<int> numbers(1000);
    numbers[1] = 1;
  });
  const auto error = error_of([&] { (void)team.wait([] { return true; }); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), "memory.host");
  EXPECT_TRUE(stop);
}

TEST_F(TeamTest, TheFirstFailureIsToldAndNotThatOfThoseWhoStopForIt) {
  for (int i = 0; i < 200; ++i) {
    stop = false;
    Team team(stop);
    std::atomic<bool> first = true;
    team.start(4, [&] {
      if (first.exchange(false)) throw std::runtime_error("first");
      while (!stop) std::this_thread::yield();
      throw std::runtime_error("second");
    });
    try {
      (void)team.wait([] { return true; });
      FAIL();
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "first");
    }
  }
}

TEST_F(TeamTest, AWatchThatThrowsStopsTheWork) {
  std::atomic<bool> was_stopped = false;
  {
    Team team(stop);
    team.start(2, [&] {
      while (!stop) std::this_thread::yield();
      was_stopped = true;
    });
    EXPECT_THROW((void)team.wait([]() -> bool { throw std::runtime_error("watch"); }),
                 std::runtime_error);
  }
  EXPECT_TRUE(was_stopped);
}

}  // namespace
}  // namespace loadstone::test

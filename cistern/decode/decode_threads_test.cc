#include "cistern/decode/decode_threads.h"

#include <gtest/gtest.h>

#include "cistern/base/parallel.h"
#include "cistern/base/testing_threads.h"

namespace cistern {
namespace {

// What threads take `blocks` blocks, where a token takes so long with all and with one.
int Blocks(ThreadChoice& choice, int blocks, double all, double one, double share) {
  int of_one = 0;
  for (int i = 0; i < blocks; ++i) {
    const bool alone = choice.threads() == 1;
    of_one += alone ? 1 : 0;
    choice.Took(alone ? one : all, share);
  }
  return of_one;
}

TEST(ThreadChoice, AQuietMachineKeepsAllThreads) {
  ThreadChoice choice(2);
  EXPECT_EQ(Blocks(choice, 100, 1.0, 0.5, 0.95), 0);  // one is not even looked at
  EXPECT_FALSE(choice.probing());
}

TEST(ThreadChoice, OnABusyOneThatIsFasterAloneDraws) {
  ThreadChoice choice(2);
  const int of_one = Blocks(choice, 1000, 3.0, 1.0, 0.5);
  EXPECT_GE(of_one, 985);  // looks at all threads again, less and less often
  EXPECT_LT(of_one, 999);
}

TEST(ThreadChoice, AllThreadsStayWhereTheyAreFasterAllTheSame) {
  ThreadChoice choice(4);
  EXPECT_LE(Blocks(choice, 1000, 1.0, 2.0, 0.5), 10);
}

TEST(ThreadChoice, AllThreadsComeBackWhenTheMachineIsQuietAgain) {
  ThreadChoice choice(2);
  Blocks(choice, 40, 3.0, 1.0, 0.5);
  int until = 0;
  for (; choice.threads() == 1 || choice.probing(); ++until)
    choice.Took(choice.threads() == 1 ? 1.0 : 0.6, 0.95);
  EXPECT_LE(until, 70);
  EXPECT_EQ(Blocks(choice, 100, 0.6, 1.0, 0.95), 0);
  EXPECT_GT(Blocks(choice, 20, 3.0, 1.0, 0.5), 15);  // and goes again
}

TEST(DecodeThreads, LeavesTheNumberThatItFound) {
  const testing::Threads two(2);
  {
    DecodeThreads threads(1);
    for (int i = 0; i < 100; ++i) threads.Token(0.01);
  }
  EXPECT_EQ(NumThreads(), 2);
  DecodeThreads many(DecodeThreads::kRows + 1);
  for (int i = 0; i < 100; ++i) many.Token(0.01);
  EXPECT_EQ(NumThreads(), 2);
  EXPECT_EQ(many.of_one(), 0);
}

}  // namespace
}  // namespace cistern

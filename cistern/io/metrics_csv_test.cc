#include "cistern/io/metrics_csv.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

TEST(MetricsCsv, HasALineForEachOfTheLogs) {
  const TestFolder folder;
  WriteMetricsCsv(folder.path());
  EXPECT_EQ(folder.Count(), 0);
  WriteFileAtomically(
      folder / "metrics.jsonl",
      "{\"event\":\"step\",\"step\":1,\"loss\":0.5,\"seconds\":2}\n"
      "{\"event\":\"step\",\"step:2}\n[3]\n\n"  // passed over
      "{\"event\":\"valid\",\"step\":1,\"seconds\":2,\"accuracy\":50.25,\"confusion\":[[1]]}\n"
      "{\"event\":\"test\",\"accuracy\":null,\"r2\":-1e-3}\n");
  WriteMetricsCsv(folder.path());
  std::ifstream in(folder / "metrics.csv");
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}),
            "event,step,seconds,loss,accuracy,r2\n"
            "step,1,2,0.5,,\n"
            "valid,1,2,,50.25,\n"
            "test,,,,,-0.001\n");
}

}  // namespace
}  // namespace cistern

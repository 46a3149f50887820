// SPDX-License-Identifier: Apache-2.0
// All that a unit test needs: TEST(name) { CHECK(...); } and a main() that runs every test of the file.
//
// A failed check prints and ends the test, the others still run. `PD_TEST_FILTER=text` runs the tests whose names have
// the text. No framework: the tests run under sanitizers and under qemu.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace pd::testing {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& all_tests() {
  static std::vector<Test> tests;
  return tests;
}

inline bool register_test(const char* name, void (*body)()) {
  all_tests().push_back({name, body});
  return true;
}

[[noreturn]] inline void fail(const char* file, int line, const std::string& text) {
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + text);
}

template <typename Left, typename Right>
void check_equal(const Left& left, const Right& right, const char* text, const char* file, int line) {
  if (left == right) return;
  std::ostringstream message;
  message << text << ": " << left << " is not " << right;
  fail(file, line, message.str());
}

template <typename Error, typename Body>
void check_throws(Body body, const char* wanted, const char* file, int line) {
  try {
    body();
  } catch (const Error& error) {
    if (std::strstr(error.what(), wanted) != nullptr) return;
    fail(file, line, std::string("\"") + error.what() + "\" does not have \"" + wanted + "\"");
  }
  fail(file, line, std::string("nothing was thrown, expected \"") + wanted + "\"");
}

inline int run_all() {
  const char* filter = std::getenv("PD_TEST_FILTER");
  int num_failed = 0, num_run = 0;
  for (const Test& test : all_tests()) {
    if (filter != nullptr && std::strstr(test.name, filter) == nullptr) continue;
    ++num_run;
    try {
      test.body();
    } catch (const std::exception& error) {
      ++num_failed;
      std::fprintf(stderr, "FAILED %s\n  %s\n", test.name, error.what());
    }
  }
  std::printf("%d tests, %d failed\n", num_run, num_failed);
  return num_failed == 0 && num_run > 0 ? 0 : 1;
}

}  // namespace pd::testing

#define TEST(name)                                                                         \
  static void test_##name();                                                               \
  static const bool registered_##name = ::pd::testing::register_test(#name, &test_##name); \
  static void test_##name()

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) ::pd::testing::fail(__FILE__, __LINE__, #condition); \
  } while (false)

#define CHECK_EQUAL(left, right) ::pd::testing::check_equal((left), (right), #left, __FILE__, __LINE__)

#define CHECK_THROWS(Error, wanted, expression) \
  ::pd::testing::check_throws<Error>([&] { (void)(expression); }, wanted, __FILE__, __LINE__)

int main() { return ::pd::testing::run_all(); }

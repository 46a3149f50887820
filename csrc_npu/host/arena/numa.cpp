// SPDX-License-Identifier: Apache-2.0
// Which NUMA node this thread runs on, from /sys: no library for so little.
#include <dirent.h>
#include <sched.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "pd/arena.h"

namespace pd {
namespace {

std::set<int> parse_cpus(const std::string& list) {  // 0-3,8
  std::set<int> cpus;
  const char* at = list.c_str();
  while (*at >= '0' && *at <= '9') {
    char* end = nullptr;
    const long first = std::strtol(at, &end, 10);
    const long last = *end == '-' ? std::strtol(end + 1, &end, 10) : first;
    for (long cpu = first; cpu <= last && cpu < CPU_SETSIZE; ++cpu) cpus.insert(static_cast<int>(cpu));
    at = *end == ',' ? end + 1 : end;
  }
  return cpus;
}

std::map<int, std::set<int>> read_nodes(const std::string& folder) {
  std::map<int, std::set<int>> nodes;
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(opendir(folder.c_str()), closedir);
  if (entries == nullptr) return nodes;
  while (const dirent* entry = readdir(entries.get())) {
    const std::string name = entry->d_name;
    if (name.rfind("node", 0) != 0 || name.size() < 5 || name[4] < '0' || name[4] > '9') continue;
    std::string cpus;
    std::ifstream(std::filesystem::path(folder) / name / "cpulist") >> cpus;
    nodes[std::atoi(name.c_str() + 4)] = parse_cpus(cpus);
  }
  return nodes;
}

}  // namespace

int find_numa_node(const std::string& root) {
  constexpr int kNone = -1;
  const auto nodes = read_nodes(root + "/sys/devices/system/node");
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (nodes.size() < 2 || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return kNone;
  int found = kNone;
  for (const auto& [node, cpus] : nodes) {
    bool is_used = false;
    for (const int cpu : cpus) is_used = is_used || CPU_ISSET(static_cast<std::size_t>(cpu), &allowed);
    if (!is_used) continue;
    if (found != kNone) return kNone;
    found = node;
  }
  return found;
}

}  // namespace pd

// Free memory as Linux tells it: /proc/meminfo, and the limits of all control groups above this process.
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>

#include "tellin/commit_ahead.h"

namespace tellin {
namespace {

// The number a file begins with; false if there is none ("max" means no limit).
bool read_number(const std::string& path, size_t* value) {
  std::ifstream file(path);
  return static_cast<bool>(file >> *value);
}

size_t machine_memory(const std::string& root) {
  std::ifstream file(root + "/proc/meminfo");
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string key;
    size_t kib = 0;
    if (words >> key >> kib && key == "MemAvailable:") return kib << 10;
  }
  return SIZE_MAX;
}

// What is left in the group at `path` and in every group above it, as far as they can be seen from here.
size_t group_memory(const std::string& base, std::string path, const char* limit_name,
                    const char* used_name) {
  size_t left = SIZE_MAX;
  for (;;) {
    size_t limit = 0, used = 0;
    if (read_number(base + path + "/" + limit_name, &limit) &&
        read_number(base + path + "/" + used_name, &used)) {
      left = std::min(left, limit > used ? limit - used : 0);
    }
    const size_t slash = path.rfind('/');
    if (slash == std::string::npos) return left;
    path.erase(slash);
  }
}

}  // namespace

size_t available_memory(const std::string& root) {
  size_t available = machine_memory(root);
  std::ifstream groups(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {  // hierarchy:controllers:/path
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string base = root + "/sys/fs/cgroup";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") {
      available = std::min(available, group_memory(base, path, "memory.max", "memory.current"));
    } else if (controllers.find(",memory,") != std::string::npos) {
      available = std::min(
          available, group_memory(base + "/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes"));
    }
  }
  return available;
}

}  // namespace tellin

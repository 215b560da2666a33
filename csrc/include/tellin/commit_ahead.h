// Pages of a large region committed ahead of their use, by a thread that takes no time from others.
//
// The first touch of a page makes the system find and clear it: 0.1 ms per huge page on bare metal, several
// milliseconds in a virtual machine whose host takes back free memory. A region whose use grows from its
// start gets that done here, while a processor has nothing else to do.
//
// There is a thread only while there is something to commit. It changes no data, holds no lock while it
// touches a page, and nobody waits for it but stop(). Does nothing where pages cannot be touched without
// holding up the whole process: on other systems than Linux, and before Linux 6.4.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace tellin {

class CommitAhead {
 public:
  // The region must stay mapped until stop(). `root` is where the system's /proc lies; for tests.
  CommitAhead(uint8_t* data, size_t bytes, const std::string& root);
  ~CommitAhead();
  CommitAhead(const CommitAhead&) = delete;
  CommitAhead& operator=(const CommitAhead&) = delete;

  // The first `end` bytes are in use now (or were). Wakes the thread if few committed pages are left; never
  // waits for it. One caller at a time.
  void used(size_t end) noexcept;
  // Returns when the thread touches the region no more, at most one page later; it does not start again.
  void stop() noexcept;
  // End of the range that the thread has committed; 0 before it has.
  size_t committed() const noexcept;

  // How far beyond `used` bytes a region of `bytes` is committed when `available` bytes of memory are free.
  static size_t ahead(size_t used, size_t bytes, size_t available) noexcept;

 private:
  struct Shared;
  static void* thread_main(void* argument);
  void start() noexcept;

  std::shared_ptr<Shared> shared_;
};

// Bytes that this process may still take: what the machine has free, less where a control group of it has
// less left (file pages counted as taken). SIZE_MAX where that is not known. `root` is for tests.
size_t available_memory(const std::string& root);

}  // namespace tellin

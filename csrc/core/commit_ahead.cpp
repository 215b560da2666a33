#include "tellin/commit_ahead.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>

#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdio>
#include <ctime>
#include <utility>
#endif

namespace tellin {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kHugePage = size_t{2} << 20;
// As much again as is in use: a workload finds what the next one like it needs, and a process that uses
// little takes little more.
constexpr size_t kMinAhead = size_t{32} << 20;
constexpr size_t kMaxAhead = size_t{256} << 20;

}  // namespace

size_t CommitAhead::ahead(size_t used, size_t bytes, size_t available) noexcept {
  const size_t wanted = std::clamp(used, kMinAhead, kMaxAhead);
  return std::min({wanted, bytes / 4, available / 8}) / kHugePage * kHugePage;
}

#if defined(__linux__)

namespace {

constexpr size_t kLookPages = 8;  // between two looks at the free memory
constexpr int kMaxRefusals = 7;   // waits of 1, 2, 4, .. ms for a free processor, then the thread ends
constexpr auto kRestartTime = std::chrono::milliseconds(100);
constexpr size_t kStackBytes = size_t{1} << 20;

// Since 6.4 a page fault locks its own mapping alone. Before (and with MADV_POPULATE_WRITE still) it locks
// the address space: a thread of low priority that is taken off its processor then holds up every mmap of the
// process, for seconds on a busy machine.
bool faults_lock_one_mapping() {
  static const bool result = [] {
    utsname system{};
    int major = 0, minor = 0;
    return uname(&system) == 0 && std::sscanf(system.release, "%d.%d", &major, &minor) == 2 &&
           (major > 6 || (major == 6 && minor >= 4));
  }();
  return result;
}

// Whether a processor is idle but for this thread: no more threads want to run than there are processors.
bool processor_is_free(const std::string& root) {
  long running = 0;
  std::FILE* file = std::fopen((root + "/proc/loadavg").c_str(), "re");
  if (file == nullptr) return true;
  const int fields = std::fscanf(file, "%*s %*s %*s %ld", &running);
  std::fclose(file);
  return fields != 1 || running <= sysconf(_SC_NPROCESSORS_ONLN);
}

// Commits a page without changing it, whoever writes there meanwhile: puts a zero in the place of a zero, in
// one step. The sanitizer would see a race with those who write plainly.
__attribute__((no_sanitize("thread"))) void commit_page(uint8_t* page) {
  uint8_t zero = 0;
  __atomic_compare_exchange_n(page, &zero, uint8_t{0}, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

}  // namespace

// Outlives the object if the thread still has to end.
struct CommitAhead::Shared {
  Shared(uint8_t* memory, size_t size, std::string system_root)
      : data(memory), bytes(size), root(std::move(system_root)), process_id(getpid()) {}

  void run();
  void touch(size_t begin, size_t end) noexcept;
  void wait(std::chrono::milliseconds time) noexcept;

  uint8_t* const data;
  const size_t bytes;
  const std::string root;
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  pid_t process_id;  // of the process whose thread this is
  Clock::time_point restart{};
  std::atomic<size_t> used{0};
  std::atomic<size_t> committed{0};
  std::atomic<bool> active{false};  // the last thing the thread clears
  std::atomic<uint32_t> stopped{0};
};

void CommitAhead::Shared::touch(size_t begin, size_t end) noexcept {
  for (size_t at = begin; at < end && stopped.load(std::memory_order_relaxed) == 0; at += page) {
    commit_page(data + at);
  }
}

void CommitAhead::Shared::wait(std::chrono::milliseconds time) noexcept {
  const timespec timeout{0, static_cast<long>(time.count()) * 1000000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&stopped), FUTEX_WAIT_PRIVATE, 0, &timeout, nullptr, 0);
}

void CommitAhead::Shared::run() {
  int refusals = 0;
  size_t available = 0;
  for (size_t pages = 0; stopped.load(std::memory_order_acquire) == 0;) {
    const size_t in_use = used.load(std::memory_order_relaxed);
    const size_t first =
        std::max(committed.load(std::memory_order_relaxed), (in_use + kHugePage - 1) / kHugePage * kHugePage);
    if (pages % kLookPages == 0) available = available_memory(root);
    if (first >= std::min(bytes, in_use + ahead(in_use, bytes, available))) break;
    if (!processor_is_free(root)) {
      if (refusals == kMaxRefusals) break;
      wait(std::chrono::milliseconds(1 << refusals++));
      continue;
    }
    refusals = 0;
    ++pages;
    const size_t end = std::min(bytes, first + kHugePage);
    touch(first, end);
    committed.store(end, std::memory_order_relaxed);
  }
}

void* CommitAhead::thread_main(void* argument) {
  const std::unique_ptr<std::shared_ptr<Shared>> owner(static_cast<std::shared_ptr<Shared>*>(argument));
  Shared& shared = **owner;
  pthread_setname_np(pthread_self(), "kv-ahead");
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), 19);
  try {
    shared.run();
  } catch (const std::bad_alloc&) {  // while looking at the free memory: there is none
  }
  shared.active.store(false, std::memory_order_release);
  return nullptr;
}

CommitAhead::CommitAhead(uint8_t* data, size_t bytes, const std::string& root)
    : shared_(std::make_shared<Shared>(data, bytes, root)) {}

CommitAhead::~CommitAhead() {
  stop();
}

void CommitAhead::used(size_t end) noexcept {
  Shared& shared = *shared_;
  size_t high = shared.used.load(std::memory_order_relaxed);
  if (end > high) shared.used.store(high = end, std::memory_order_relaxed);
  const size_t wanted = ahead(high, shared.bytes, SIZE_MAX);
  const size_t least = std::min(shared.bytes, high + wanted - wanted / 4);
  if (wanted == 0 || shared.committed.load(std::memory_order_relaxed) >= least) return;
  start();
}

void CommitAhead::start() noexcept {
  Shared& shared = *shared_;
  const bool forked = shared.process_id != getpid();  // then its thread is not here
  if (!forked && shared.active.load(std::memory_order_acquire)) return;
  const Clock::time_point now = Clock::now();
  if (now < shared.restart || shared.stopped.load() != 0 || !faults_lock_one_mapping()) return;
  shared.restart = now + kRestartTime;
  auto* owner = new (std::nothrow) std::shared_ptr<Shared>(shared_);
  if (owner == nullptr) return;
  shared.process_id = getpid();
  shared.active.store(true, std::memory_order_relaxed);
  // It takes no signals: those belong to the program that uses us.
  sigset_t all, previous;
  sigfillset(&all);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  pthread_sigmask(SIG_SETMASK, &all, &previous);
  pthread_t thread;
  const int error = pthread_create(&thread, &attributes, thread_main, owner);
  pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  pthread_attr_destroy(&attributes);
  if (error != 0) {  // no thread to be had: pages come as they are used
    shared.active.store(false, std::memory_order_relaxed);
    delete owner;
  }
}

void CommitAhead::stop() noexcept {
  Shared& shared = *shared_;
  shared.stopped.store(1, std::memory_order_release);
  if (shared.process_id != getpid()) return;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&shared.stopped), FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr,
          0);
  while (shared.active.load(std::memory_order_acquire)) usleep(50);
}

size_t CommitAhead::committed() const noexcept {
  return shared_->committed.load(std::memory_order_relaxed);
}

#else

struct CommitAhead::Shared {};
CommitAhead::CommitAhead(uint8_t*, size_t, const std::string&) {}
CommitAhead::~CommitAhead() = default;
void CommitAhead::used(size_t) noexcept {}
void CommitAhead::stop() noexcept {}
size_t CommitAhead::committed() const noexcept {
  return 0;
}

#endif

}  // namespace tellin

#include "tellin/thread_team.h"

#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <new>
#include <system_error>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tellin {
namespace {

constexpr uint64_t kCountShift = 20;
constexpr uint64_t kStageShift = 40;
constexpr uint64_t kFieldMask = (uint64_t{1} << 20) - 1;

inline int64_t next_task(uint64_t ticket) {
  return static_cast<int64_t>(ticket & kFieldMask);
}
inline int64_t task_count(uint64_t ticket) {
  return static_cast<int64_t>((ticket >> kCountShift) & kFieldMask);
}
inline bool has_task(uint64_t ticket) {
  return next_task(ticket) < task_count(ticket);
}
inline uint64_t following_stage(uint64_t ticket, int64_t count) {
  return (((ticket >> kStageShift) + 1) << kStageShift) | (static_cast<uint64_t>(count) << kCountShift);
}

inline void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Denormals cost hundreds of cycles and never matter here. The caller's thread gets its own mode back.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ | (uint64_t{1} << 24)));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#else
  FlushDenormals() {}
#endif
};

// A stage is a few to a few hundred microseconds. Spin for about one of the former, then let others onto the
// core (a partner may be waiting for it), then sleep: a futex round trip costs 50 to 100 us.
constexpr int kPauseSpins = 2000;
constexpr auto kYieldTime = std::chrono::microseconds(200);

#if defined(__linux__)
void futex_wait(std::atomic<uint32_t>* word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}
void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
#else
void futex_wait(std::atomic<uint32_t>*, uint32_t) {
  usleep(50);
}
void futex_wake_all(std::atomic<uint32_t>*) {}
#endif

}  // namespace

ThreadTeam::ThreadTeam(int num_threads)
    : num_threads_(num_threads < 1 ? 1 : (num_threads > kMaxThreads ? kMaxThreads : num_threads)) {}

ThreadTeam::~ThreadTeam() {
  if (threads_.empty() || process_id_.load() != getpid()) return;  // a forked child has no helpers to join
  stop_.store(true, std::memory_order_seq_cst);
  wake_epoch_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(&wake_epoch_);
  for (pthread_t thread : threads_) pthread_join(thread, nullptr);
}

// A forked child has no helpers, and what they were doing is lost with them.
void ThreadTeam::forget_parent() {
  new (&run_mutex_) std::mutex;  // may have been held by a thread that does not exist here
  threads_.clear();
  ticket_.store(0);
  num_sleeping_.store(0);
  process_id_.store(0);
}

void ThreadTeam::start_helpers() {
  if (process_id_.load() != 0) return;
  helpers_.resize(static_cast<size_t>(num_threads_));
  // Helpers take no signals: those belong to the program that uses us.
  sigset_t all, previous;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &previous);
  int error = 0;
  for (int member = 1; member < num_threads_ && error == 0; ++member) {
    Helper& helper = helpers_[static_cast<size_t>(member)];
    helper = {this, member};
    pthread_t thread;
    error = pthread_create(&thread, nullptr, helper_main, &helper);
    if (error == 0) threads_.push_back(thread);
  }
  pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  process_id_.store(getpid());
  if (error != 0) throw std::system_error(error, std::generic_category(), "cannot start kernel threads");
}

void* ThreadTeam::helper_main(void* argument) {
  const auto* helper = static_cast<const Helper*>(argument);
#if defined(__linux__)
  char name[16];
  std::snprintf(name, sizeof name, "tellin-%d", helper->member);
  pthread_setname_np(pthread_self(), name);
#endif
  FlushDenormals mode;
  helper->team->work(helper->member);
  return nullptr;
}

void ThreadTeam::run(Job& job) {
  const int64_t owner = process_id_.load();
  if (owner != 0 && owner != getpid()) forget_parent();
  const std::lock_guard<std::mutex> turn(run_mutex_);
  start_helpers();
  FlushDenormals mode;
  job_over_.store(false, std::memory_order_relaxed);
  job_.store(&job, std::memory_order_relaxed);
  advance(&job, 0);
  work(0);
}

// Takes tasks until the job is over (member 0) or the team ends (helpers).
void ThreadTeam::work(int member) {
  for (;;) {
    if (has_task(ticket_.load(std::memory_order_relaxed))) {
      int64_t finished = 0;
      Job* job = nullptr;
      uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
      while (has_task(ticket)) {
        // Until `finished` is reported the stage cannot end: all these tickets are of one stage.
        job = job_.load(std::memory_order_relaxed);
        job->run_task(next_task(ticket), member);
        ++finished;
        if (!has_task(ticket_.load(std::memory_order_relaxed))) break;
        ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
      }
      if (finished > 0 && remaining_.fetch_sub(finished, std::memory_order_acq_rel) == finished) {
        advance(job, member);
      }
    } else if (member == 0 ? job_over_.load(std::memory_order_acquire)
                           : stop_.load(std::memory_order_acquire)) {
      return;
    } else {
      wait(member);
    }
  }
}

void ThreadTeam::advance(Job* job, int member) {
  for (;;) {
    const int64_t count = job->next_stage();
    if (count == 1) {
      job->run_task(0, member);
      continue;
    }
    if (count > 1) {
      remaining_.store(count, std::memory_order_relaxed);
      // Sequentially consistent with wait(): either we see the sleeper, or it sees the new ticket.
      ticket_.store(following_stage(ticket_.load(std::memory_order_relaxed), count),
                    std::memory_order_seq_cst);
      wake_sleepers();
    } else {
      // From here on the caller may return and open the next job: touch nothing but the wake-up.
      job_over_.store(true, std::memory_order_seq_cst);
      wake_sleepers();
    }
    return;
  }
}

void ThreadTeam::wake_sleepers() {
  if (num_sleeping_.load(std::memory_order_seq_cst) == 0) return;
  wake_epoch_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(&wake_epoch_);
}

bool ThreadTeam::must_wait(int member) const {
  if (has_task(ticket_.load(std::memory_order_seq_cst))) return false;
  return !(member == 0 ? job_over_.load(std::memory_order_seq_cst) : stop_.load(std::memory_order_seq_cst));
}

void ThreadTeam::wait(int member) {
  for (int spin = 0; spin < kPauseSpins; ++spin) {
    if (!must_wait(member)) return;
    cpu_relax();
  }
  const auto deadline = std::chrono::steady_clock::now() + kYieldTime;
  while (std::chrono::steady_clock::now() < deadline) {
    if (!must_wait(member)) return;
    sched_yield();
  }
  const uint32_t epoch = wake_epoch_.load(std::memory_order_seq_cst);
  num_sleeping_.fetch_add(1, std::memory_order_seq_cst);
  if (must_wait(member)) futex_wait(&wake_epoch_, epoch);
  num_sleeping_.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace tellin

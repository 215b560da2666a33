// A persistent team of threads that runs jobs: sequences of stages, each a number of tasks.
//
// The caller of run() is member 0; helpers start with the first job and sleep when there is nothing to do.
// Tasks of a stage are handed out one by one through one atomic word. A stage ends when its tasks are done,
// not when all members have arrived: a member that the system has taken off its core delays the others only
// while it holds a task. The member that finishes the last task picks the next stage.
//
// Invariant: whoever holds a ticket with next < count keeps the stage open, so job data is stable for it.
#pragma once
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace tellin {

class ThreadTeam {
 public:
  // Nothing here may throw.
  class Job {
   public:
    virtual ~Job() = default;
    // Opens the next stage and gives its number of tasks (at most kMaxTasks), 0 when the job is over. Called
    // by one member at a time, after all tasks of the previous stage. A stage of one task is run by the same
    // member.
    virtual int64_t next_stage() noexcept = 0;
    virtual void run_task(int64_t task, int member) noexcept = 0;
  };
  static constexpr int64_t kMaxTasks = (int64_t{1} << 20) - 4096;  // leaves room for late tickets
  static constexpr int kMaxThreads = 1024;

  explicit ThreadTeam(int num_threads);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int num_threads() const { return num_threads_; }

  // Runs a job and returns when it is over. Callers on several threads take turns; a job must not call run().
  // Throws std::system_error if helpers cannot be started. After fork() the child starts helpers of its own.
  void run(Job& job);

  // f(i, member) for each i in [0, n); f must not throw.
  template <class F>
  void parallel_for(int64_t n, F&& f) {
    struct Loop final : Job {
      Loop(int64_t count, F& body) : n(count), f(body) {}
      int64_t next_stage() noexcept override {
        const int64_t tasks = done ? 0 : n;
        done = true;
        return tasks;
      }
      void run_task(int64_t task, int member) noexcept override { f(task, member); }
      int64_t n;
      F& f;
      bool done = false;
    } loop(n, f);
    run(loop);
  }

 private:
  struct Helper {
    ThreadTeam* team;
    int member;
  };

  static void* helper_main(void* argument);
  void forget_parent();
  void start_helpers();
  void work(int member);
  void advance(Job* job, int member);
  void wake_sleepers();
  bool must_wait(int member) const;
  void wait(int member);

  const int num_threads_;
  std::mutex run_mutex_;
  std::vector<pthread_t> threads_;
  std::vector<Helper> helpers_;
  std::atomic<int64_t> process_id_{0};  // of the process whose helpers these are

  // Ticket: stage number (24 bits), number of tasks (20), next task (20). fetch_add(1) takes a task.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> remaining_{0};
  alignas(64) std::atomic<Job*> job_{nullptr};
  std::atomic<bool> job_over_{true};
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<uint32_t> wake_epoch_{0};
  std::atomic<int> num_sleeping_{0};
};

}  // namespace tellin

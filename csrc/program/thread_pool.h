// A few threads that run one function together, with a barrier cheap enough to stand between operations of a model.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

/// `threads` threads, the caller among them. Workers spin for a moment after a job, because the next step of a model
/// comes soon, and then sleep. Works after fork: the child starts its own workers with its first job.
class ThreadPool {
 public:
  using Job = void (*)(void* context, int thread, int threads);

  /// Throws std::invalid_argument for fewer than one thread.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  /// Calls f(thread, threads) on every thread and returns when all have. Jobs must not throw. One job at a time:
  /// other callers wait.
  template <class Function>
  void run(Function&& f) {
    using Plain = std::remove_reference_t<Function>;
    run_job([](void* context, int thread, int threads) { (*static_cast<Plain*>(context))(thread, threads); },
            const_cast<void*>(static_cast<const void*>(&f)));
  }

  /// Inside a job: waits until every thread is here. What they wrote before is visible after.
  void barrier();

 private:
  struct Workers;

  void run_job(Job job, void* context);
  void start_workers();

  const int threads_;
  std::mutex one_job_;
  pid_t owner_ = 0;
  std::unique_ptr<Workers> workers_;
};

}  // namespace octavo

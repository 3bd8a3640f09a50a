#include "program/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <stdexcept>

namespace octavo {

namespace {

constexpr auto kSpin = std::chrono::microseconds(100);

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Spins until done() or until `kSpin` has passed; returns done().
template <class Done>
bool spin(Done done) {
  std::chrono::steady_clock::time_point start, now;
  do {
    for (int i = 0; i < 64; i++) {
      if (done()) return true;
      pause();
    }
    now = std::chrono::steady_clock::now();
    if (start == std::chrono::steady_clock::time_point()) start = now;
  } while (now - start < kSpin);
  return done();
}

/// Waits inside a job, where the others are at work: spin, then let them have the core.
template <class Done>
void wait_busy(Done done) {
  while (!spin(done)) sched_yield();
}

}  // namespace

/// What the threads of one process share.
struct ThreadPool::Workers {
  alignas(64) std::atomic<uint32_t> generation{0};  // raised for every job; workers sleep on it
  alignas(64) std::atomic<int> working{0};          // workers that have not finished the job
  alignas(64) std::atomic<int> arrived{0};          // threads at the barrier
  alignas(64) std::atomic<uint32_t> passed{0};      // barriers passed
  Job job = nullptr;
  void* context = nullptr;
  bool stop = false;
  std::vector<std::thread> threads;

  void serve(int thread, int count) {
    for (uint32_t seen = 0;; seen++) {
      if (!spin([&] { return generation.load(std::memory_order_acquire) != seen; })) {
        generation.wait(seen, std::memory_order_acquire);
      }
      if (stop) return;
      job(context, thread, count);
      working.fetch_sub(1, std::memory_order_release);
    }
  }
};

ThreadPool::ThreadPool(int threads) : threads_(threads) {
  if (threads < 1) throw std::invalid_argument("a thread pool needs at least one thread");
}

ThreadPool::~ThreadPool() {
  if (!workers_) return;
  if (owner_ != getpid()) {  // forked: the threads live in the parent, and may not be joined here
    (void)workers_.release();
    return;
  }
  workers_->stop = true;
  workers_->generation.fetch_add(1, std::memory_order_release);
  workers_->generation.notify_all();
  for (std::thread& thread : workers_->threads) thread.join();
}

void ThreadPool::start_workers() {
  (void)workers_.release();  // null, or the parent's
  workers_ = std::make_unique<Workers>();
  owner_ = getpid();
  sigset_t all, before;  // signals are for the threads of Python
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (int thread = 1; thread < threads_; thread++) {
    workers_->threads.emplace_back([shared = workers_.get(), thread, count = threads_] { shared->serve(thread, count); });
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void ThreadPool::run_job(Job job, void* context) {
  if (threads_ == 1) {
    job(context, 0, 1);
    return;
  }
  const std::lock_guard lock(one_job_);
  if (owner_ != getpid()) start_workers();
  Workers& shared = *workers_;
  shared.job = job;
  shared.context = context;
  shared.working.store(threads_ - 1, std::memory_order_relaxed);
  shared.generation.fetch_add(1, std::memory_order_release);
  shared.generation.notify_all();
  job(context, 0, threads_);
  wait_busy([&] { return shared.working.load(std::memory_order_acquire) == 0; });
}

void ThreadPool::barrier() {
  if (threads_ == 1) return;
  Workers& shared = *workers_;
  const uint32_t before = shared.passed.load(std::memory_order_acquire);
  if (shared.arrived.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
    shared.arrived.store(0, std::memory_order_relaxed);
    shared.passed.store(before + 1, std::memory_order_release);
    return;
  }
  wait_busy([&] { return shared.passed.load(std::memory_order_acquire) != before; });
}

}  // namespace octavo

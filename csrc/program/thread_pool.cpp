#include "program/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <stdexcept>

namespace octavo {

namespace {

using Clock = std::chrono::steady_clock;

// How long to spin before sleeping. Inside a job the others are a matter of microseconds, unless they lost their core:
// then sleeping earns the waiter a quick return from the scheduler, where yielding would send it to the back.
constexpr auto kSpinInJob = std::chrono::microseconds(10);
constexpr auto kSpinBetweenJobs = std::chrono::microseconds(100);

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Waits until `number` is not `old`: spins for a while, then sleeps.
template <class Number>
void wait_change(const std::atomic<Number>& number, Number old, Clock::duration awake) {
  Clock::time_point start, now;
  do {
    for (int i = 0; i < 64; i++) {
      if (number.load(std::memory_order_acquire) != old) return;
      pause();
    }
    now = Clock::now();
    if (start == Clock::time_point()) start = now;
  } while (now - start < awake);
  number.wait(old, std::memory_order_acquire);
}

}  // namespace

/// What the threads of one process share.
struct ThreadPool::Workers {
  alignas(64) std::atomic<uint32_t> generation{0};  // raised for every job; workers sleep on it
  alignas(64) std::atomic<int> working{0};          // workers that have not finished the job
  alignas(64) std::atomic<uint32_t> finished{0};    // jobs that all workers have finished
  alignas(64) std::atomic<int> arrived{0};          // threads at the barrier
  alignas(64) std::atomic<uint32_t> passed{0};      // barriers passed
  Job job = nullptr;
  void* context = nullptr;
  bool stop = false;
  std::vector<std::thread> threads;
  std::vector<std::atomic<int>> cores;  // where each thread began its last job

  explicit Workers(int count) : cores(count) {}

#if defined(__linux__)
  cpu_set_t allowed = {};  // cores of the thread that started the workers

  /// Notes the thread's core, and moves a worker that shares it with a thread before it. Threads of a job mostly wait
  /// in turn, so that the system sees one core's worth of work and would leave them there, at half the speed.
  void step_aside(int thread) {
    const int here = sched_getcpu();
    cores[thread].store(here, std::memory_order_relaxed);
    cpu_set_t free = allowed;
    for (int other = 0; other < thread; other++) CPU_CLR(cores[other].load(std::memory_order_relaxed), &free);
    if (thread == 0 || CPU_ISSET(here, &free) || CPU_COUNT(&free) == 0) return;  // the caller is not ours to move
    sched_setaffinity(0, sizeof free, &free);
  }
#else
  void step_aside(int) {}
#endif

  void serve(int thread, int count) {
    for (uint32_t seen = 0;; seen++) {
      wait_change(generation, seen, kSpinBetweenJobs);
      if (stop) return;
      step_aside(thread);
      job(context, thread, count);
      if (working.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        finished.fetch_add(1, std::memory_order_release);
        finished.notify_one();
      }
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
  workers_ = std::make_unique<Workers>(threads_);
#if defined(__linux__)
  sched_getaffinity(0, sizeof workers_->allowed, &workers_->allowed);
#endif
  owner_ = getpid();
  sigset_t all, before;  // signals are for the threads of Python
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (int thread = 1; thread < threads_; thread++) {
    workers_->threads.emplace_back(
        [shared = workers_.get(), thread, count = threads_] { shared->serve(thread, count); });
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
  shared.step_aside(0);
  shared.job = job;
  shared.context = context;
  shared.working.store(threads_ - 1, std::memory_order_relaxed);
  const uint32_t finished = shared.finished.load(std::memory_order_relaxed);
  shared.generation.fetch_add(1, std::memory_order_release);
  shared.generation.notify_all();
  job(context, 0, threads_);
  wait_change(shared.finished, finished, kSpinInJob);
}

void ThreadPool::barrier() {
  if (threads_ == 1) return;
  Workers& shared = *workers_;
  const uint32_t before = shared.passed.load(std::memory_order_acquire);
  if (shared.arrived.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
    shared.arrived.store(0, std::memory_order_relaxed);
    // Sequentially consistent: a release could be seen only after notify_all() has looked for sleepers, and one be missed.
    shared.passed.store(before + 1, std::memory_order_seq_cst);
    shared.passed.notify_all();
    return;
  }
  wait_change(shared.passed, before, kSpinInJob);
}

}  // namespace octavo

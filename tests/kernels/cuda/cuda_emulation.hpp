// Runs CUDA kernels on the CPU: a block's threads are fibers of one thread, switched at barriers
// and warp shuffles. Included before the generated source; see cuda_emulation.py.

#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

// Not <cmath> and the like: reading them took longer than compiling the kernel.
extern "C" float exp2f(float), log2f(float);

#define __global__
#define __shared__
#define __restrict__
#define __align__(bytes)
#define __launch_bounds__(...)

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }
template <class T> static inline T min(T a, T b) { return b < a ? b : a; }

// What fibers share has external linkage: else the compiler may think that nothing else sees it
// before a jump into another fiber.
struct Index { unsigned x; };
Index threadIdx, blockIdx;

constexpr int THREADS = 256, LANES = 32;
constexpr size_t SHARED = 232448 / sizeof(float);  // what a block may have on compute capability 9.0
constexpr size_t STACK = 256 * 1024;
alignas(64) float panels_ptr[SHARED];

namespace emulation {

enum State { RUNS, AT_BARRIER, AT_SHUFFLE, DONE };
enum Result { FINE = 0, DIVERGED = 1, OUT_OF_BOUNDS = 2, SHARED_OVERFLOW = 3 };

jmp_buf fibers[THREADS], scheduler, fault;
State state[THREADS];
float slots[2][THREADS];
unsigned shuffles[THREADS];
void (*body)();

__attribute__((noinline)) static void yield(State reason) {
  int self = threadIdx.x;
  state[self] = reason;
  if (_setjmp(fibers[self]) == 0) _longjmp(scheduler, 1);
}

static void run_fiber() {
  for (;;) {
    body();
    yield(DONE);
  }
}

__attribute__((noinline)) static void resume(int thread) {
  threadIdx.x = thread;
  state[thread] = RUNS;
  if (_setjmp(scheduler) == 0) _longjmp(fibers[thread], 1);
}

__attribute__((noinline)) static void start_fibers(char* stacks) {
  static ucontext_t home, context;
  for (int thread = 0; thread < THREADS; ++thread) {
    getcontext(&context);
    context.uc_stack = {stacks + thread * STACK, 0, STACK};
    context.uc_link = &home;
    // The first switch enters run_fiber; it comes back when the fiber is to run a block.
    makecontext(&context, +[] { yield(RUNS); run_fiber(); }, 0);
    threadIdx.x = thread;
    if (_setjmp(scheduler) == 0) setcontext(&context);
  }
}

// Lets every waiting thread that may go on run: warps whose lanes all shuffle, or else the block.
static Result release(bool& finished) {
  bool shuffled = false;
  int waiting = 0, done = 0;
  for (int warp = 0; warp < THREADS; warp += LANES) {
    int count = 0;
    for (int lane = 0; lane < LANES; ++lane) count += state[warp + lane] == AT_SHUFFLE;
    if (count != 0 && count != LANES) return DIVERGED;
    if (count == 0) continue;
    shuffled = true;
    for (int lane = 0; lane < LANES; ++lane) state[warp + lane] = RUNS;
  }
  if (shuffled) return FINE;
  for (int thread = 0; thread < THREADS; ++thread) {
    waiting += state[thread] == AT_BARRIER;
    done += state[thread] == DONE;
  }
  if (waiting != 0 && waiting != THREADS) return DIVERGED;
  finished = done == THREADS;
  for (int thread = 0; !finished && thread < THREADS; ++thread) state[thread] = RUNS;
  return FINE;
}

static Result run_block(int order) {
  for (int thread = 0; thread < THREADS; ++thread) state[thread] = RUNS;
  for (bool finished = false; !finished;) {
    for (int turn = 0; turn < THREADS; ++turn) {
      int thread = order == 0 ? turn : THREADS - 1 - turn;
      if (state[thread] == RUNS) resume(thread);
    }
    if (Result result = release(finished)) return result;
  }
  return FINE;
}

static void on_fault(int) { siglongjmp(fault, 1); }

static void poison() {
  for (float& x : panels_ptr) x = __builtin_nanf("");
}

static bool intact(size_t floats) {
  for (size_t i = floats; i < SHARED; ++i)
    if (panels_ptr[i] == panels_ptr[i]) return false;
  return true;
}

// Runs the blocks [first, first + count). Order 0 runs threads upwards between two barriers, 1
// downwards: a race shows as a difference.
__attribute__((noinline)) static int launch(void (*kernel)(), int first, int count, int order, size_t floats) {
  static char* stacks = new char[THREADS * STACK];
  static char signal_stack[64 * 1024];
  stack_t alternate = {signal_stack, 0, sizeof signal_stack}, old_stack;
  struct sigaction action = {}, old_segv, old_bus;
  action.sa_handler = on_fault;
  action.sa_flags = SA_ONSTACK;
  sigaltstack(&alternate, &old_stack);
  sigaction(SIGSEGV, &action, &old_segv);
  sigaction(SIGBUS, &action, &old_bus);
  int result = OUT_OF_BOUNDS;
  if (sigsetjmp(fault, 1) == 0) {
    body = kernel;
    memset(shuffles, 0, sizeof shuffles);
    start_fibers(stacks);
    result = FINE;
    for (int block = first; result == FINE && block < first + count; ++block) {
      blockIdx.x = block;
      poison();
      result = run_block(order);
      if (result == FINE && !intact(floats)) result = SHARED_OVERFLOW;
    }
  }
  sigaction(SIGSEGV, &old_segv, nullptr);
  sigaction(SIGBUS, &old_bus, nullptr);
  sigaltstack(&old_stack, nullptr);
  return result;
}

}  // namespace emulation

static inline void __syncthreads() { emulation::yield(emulation::AT_BARRIER); }
static inline void __syncwarp() { emulation::yield(emulation::AT_SHUFFLE); }
static inline float __shfl_xor_sync(unsigned, float value, int distance, int) {
  int self = threadIdx.x;
  float* slots = emulation::slots[emulation::shuffles[self]++ % 2];
  slots[self] = value;
  emulation::yield(emulation::AT_SHUFFLE);
  return slots[self ^ distance];
}

// An array between two pages that may not be touched, against the upper or the lower one.
extern "C" void* guarded_new(size_t bytes, int upper) {
  size_t page = 4096, inner = (bytes + page - 1) / page * page;
  char* start = (char*)mmap(nullptr, inner + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED || mprotect(start + page, inner, PROT_READ | PROT_WRITE)) return nullptr;
  return start + page + (upper ? inner - bytes : 0);
}

extern "C" void guarded_free(void* array, size_t bytes) {
  size_t page = 4096, inner = (bytes + page - 1) / page * page;
  char* start = (char*)((uintptr_t)array / page * page);
  munmap(start - page, inner + 2 * page);
}

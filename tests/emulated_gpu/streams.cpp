// CUDA's streams and events over FakeGPU, in which device memory is host memory and nothing is asynchronous.
//
// A kernel is finished when its launch returns. Only NCCL's kernels (nccl.cpp) run later: each has a ticket with the
// streams that it is on, and whatever waits for a stream or an event waits for its tickets.
#include "emulated.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <map>

typedef void* Event;
struct Recorded { Tickets tickets; double at = 0; };

std::mutex& mutex = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
static auto& pending = *new std::map<Stream, Tickets>;
static auto& recorded = *new std::map<Event, Recorded>;

extern "C" {
volatile int emu_num_pending = 0;  // 0: nothing can have to be waited for
volatile long emu_counts[5] = {};  // waits for events, streams, the device; asynchronous copies; launches
}
enum { EVENT_WAITS, STREAM_WAITS, DEVICE_WAITS, COPIES, LAUNCHES };
enum { SUCCESS = 0, NO_DEVICE = 100, INVALID_HANDLE = 400, NOT_READY = 600 };

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e3 + time.tv_nsec * 1e-6;
}

void die(const char* format, ...) {
  va_list list;
  va_start(list, format);
  fprintf(stderr, "[emulated] ");
  vfprintf(stderr, format, list);
  fprintf(stderr, "\n");
  fflush(stderr);
  _exit(86);
}

static void remove_done(Tickets& tickets) {
  std::erase_if(tickets, [](const TicketP& ticket) { return ticket->done; });
}

Tickets tickets_of(Stream stream) {
  Tickets& tickets = pending[stream];
  remove_done(tickets);
  return tickets;
}

TicketP new_ticket(const std::vector<Stream>& streams) {
  auto ticket = std::make_shared<Ticket>();
  for (Stream stream : streams) {
    remove_done(pending[stream]);
    pending[stream].push_back(ticket);
  }
  emu_num_pending = emu_num_pending + 1;
  return ticket;
}

void finish(const TicketP& ticket) {
  ticket->done = true;
  ticket->done_at = now();
  emu_num_pending = emu_num_pending - 1;
  changed.notify_all();
}

static void wait_for(std::unique_lock<std::mutex>& lock, const Tickets& tickets) {
  for (auto& ticket : tickets) changed.wait(lock, [&] { return ticket->done; });
}

static void wait_for_stream(Stream stream) {
  if (!emu_num_pending) return;
  std::unique_lock<std::mutex> lock(mutex);
  wait_for(lock, tickets_of(stream));
}

static void wait_for_device() {
  if (!emu_num_pending) return;
  std::unique_lock<std::mutex> lock(mutex);
  Tickets all;
  for (auto& [stream, tickets] : pending) all.insert(all.end(), tickets.begin(), tickets.end());
  wait_for(lock, all);
}

// FakeGPU's function of this name.
template <class F> static F fakegpu(F, const char* name) {
  F function = (F)dlsym(RTLD_NEXT, name);
  if (!function) die("FakeGPU has no %s", name);
  return function;
}
#define FAKEGPU(name) static auto original = fakegpu(&name, #name)

static void count(int what) { emu_counts[what] = emu_counts[what] + 1; }

extern "C" {
int cudaGetDevice(int* device);
int current_device_number() {
  int device;
  cudaGetDevice(&device);
  return device;
}

void emu_wait_stream(Stream stream) { wait_for_stream(stream); }

int cudaEventRecordWithFlags(Event event, Stream stream, unsigned) {
  std::lock_guard<std::mutex> lock(mutex);
  recorded[event] = {tickets_of(stream), now()};
  return SUCCESS;
}
int cudaEventRecord(Event event, Stream stream) { return cudaEventRecordWithFlags(event, stream, 0); }

int cudaEventQuery(Event event) {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& ticket : recorded[event].tickets)
    if (!ticket->done) return NOT_READY;
  return SUCCESS;
}

int cudaEventSynchronize(Event event) {
  std::unique_lock<std::mutex> lock(mutex);
  count(EVENT_WAITS);
  wait_for(lock, Tickets(recorded[event].tickets));
  return SUCCESS;
}

int cudaEventDestroy(Event event) {
  FAKEGPU(cudaEventDestroy);
  {
    std::lock_guard<std::mutex> lock(mutex);
    recorded.erase(event);
  }
  return original(event);
}

int cudaEventElapsedTime(float* milliseconds, Event start, Event end) {
  std::lock_guard<std::mutex> lock(mutex);
  double at[2];
  int number = 0;
  for (Event event : {start, end}) {
    if (!recorded.count(event)) return INVALID_HANDLE;
    double& time = at[number++] = recorded[event].at;
    for (auto& ticket : recorded[event].tickets) {
      if (!ticket->done) return NOT_READY;
      time = std::max(time, ticket->done_at);
    }
  }
  *milliseconds = (float)(at[1] - at[0]);
  return SUCCESS;
}

int cudaStreamWaitEvent(Stream stream, Event event, unsigned) {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& ticket : recorded[event].tickets)
    if (!ticket->done) pending[stream].push_back(ticket);
  return SUCCESS;
}

int cudaStreamSynchronize(Stream stream) {
  count(STREAM_WAITS);
  wait_for_stream(stream);
  return SUCCESS;
}

int cudaStreamQuery(Stream stream) {
  std::lock_guard<std::mutex> lock(mutex);
  return tickets_of(stream).empty() ? SUCCESS : NOT_READY;
}

int cudaDeviceSynchronize() {
  count(DEVICE_WAITS);
  wait_for_device();
  return SUCCESS;
}

int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, Stream stream) {
  FAKEGPU(cudaMemcpyAsync);
  count(COPIES);
  wait_for_stream(stream);
  return original(to, from, bytes, kind, stream);
}

int cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
  FAKEGPU(cudaMemcpy);
  wait_for_device();
  return original(to, from, bytes, kind);
}

int cudaMemsetAsync(void* to, int value, size_t bytes, Stream stream) {
  FAKEGPU(cudaMemsetAsync);
  wait_for_stream(stream);
  return original(to, value, bytes, stream);
}

int cudaGetDeviceCount(int* number) {  // FakeGPU does not read CUDA_VISIBLE_DEVICES
  FAKEGPU(cudaGetDeviceCount);
  int code = original(number), visible = 0;
  const char* devices = getenv("CUDA_VISIBLE_DEVICES");
  if (code || !devices) return code;
  for (const char* at = devices; *at >= '0' && *at <= '9'; at += strspn(at, ",")) {
    visible++;
    at += strspn(at, "0123456789");
  }
  *number = std::min(visible, *number);
  return *number ? SUCCESS : NO_DEVICE;
}

int cudaMalloc(void** memory, size_t bytes) {
  FAKEGPU(cudaMalloc);
  static const bool poisons = getenv("EMU_POISON");
  int code = original(memory, bytes);
  if (!code && poisons) memset(*memory, 0xff, bytes);
  return code;
}

int cudaFree(void* memory) {
  FAKEGPU(cudaFree);
  wait_for_device();
  return original(memory);
}

// Kernels are replaced in kernels.py; one that is not does nothing, so EMU_LAUNCHES=1 ends the process.
int cudaLaunchKernel(const void*, ...) {
  static const bool ends = getenv("EMU_LAUNCHES");
  if (ends) die("a CUDA kernel that has no replacement was launched");
  count(LAUNCHES);
  return SUCCESS;
}
int cudaLaunchKernelExC(const void* config, const void* kernel, void**) { return cudaLaunchKernel(kernel); }
int __cudaLaunchKernel(const void* kernel, ...) { return cudaLaunchKernel(kernel); }
}

int current_device() { return current_device_number(); }

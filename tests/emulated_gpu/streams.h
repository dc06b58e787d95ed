// CUDA's streams and events over FakeGPU, in which device memory is host memory and nothing is asynchronous.
//
// A kernel is finished when its launch returns. Only NCCL's kernels (nccl.cpp, which alone includes this) run later: each
// has a ticket with the streams that it is on, and whatever waits for a stream or an event waits for its tickets.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

typedef void* Stream;
typedef void* Event;
struct Ticket { double done_at = 0; };  // milliseconds; 0: not done
typedef std::vector<std::shared_ptr<Ticket>> Tickets;
struct Recorded { Tickets tickets; double at = 0; };
enum { SUCCESS = 0, NO_DEVICE = 100, NOT_READY = 600 };

// Never destroyed: worker threads outlive main(). The mutex guards all of them, and all tickets.
static std::mutex& mutex = *new std::mutex;
static std::condition_variable& changed = *new std::condition_variable;
static auto& pending = *new std::map<Stream, Tickets>;
static auto& recorded = *new std::map<Event, Recorded>;

static double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static bool is_late() {
  static const bool is_set = getenv("EMU_LATE");
  return is_set;
}

static Tickets not_done(Tickets tickets) {
  std::erase_if(tickets, [](auto& ticket) { return ticket->done_at > 0; });
  return tickets;
}

static Tickets tickets_of(Stream stream) { return pending[stream] = not_done(pending[stream]); }

static int wait_for(std::unique_lock<std::mutex>& lock, const Tickets& tickets) {
  changed.wait(lock, [&] { return not_done(tickets).empty(); });
  return SUCCESS;
}

// FakeGPU's function of this name.
#define FAKEGPU(name) static auto original = (decltype(&name))dlsym(RTLD_NEXT, #name)

extern "C" {
int cudaEventRecordWithFlags(Event event, Stream stream, unsigned) {
  std::lock_guard lock(mutex);
  recorded[event] = {tickets_of(stream), now()};
  return SUCCESS;
}
int cudaEventRecord(Event event, Stream stream) { return cudaEventRecordWithFlags(event, stream, 0); }

int cudaEventQuery(Event event) {
  std::lock_guard lock(mutex);
  return not_done(recorded[event].tickets).empty() ? SUCCESS : NOT_READY;
}

int cudaEventSynchronize(Event event) {
  std::unique_lock lock(mutex);
  return wait_for(lock, Tickets(recorded[event].tickets));
}

int cudaEventElapsedTime(float* milliseconds, Event start, Event end) {
  std::lock_guard lock(mutex);
  auto done_at = [](const Recorded& event) {
    double time = event.at;
    for (auto& ticket : event.tickets) time = std::max(time, ticket->done_at);
    return time;
  };
  *milliseconds = (float)(done_at(recorded[end]) - done_at(recorded[start]));
  return SUCCESS;
}

int cudaStreamWaitEvent(Stream stream, Event event, unsigned) {
  std::lock_guard lock(mutex);
  for (auto& ticket : not_done(recorded[event].tickets)) pending[stream].push_back(ticket);
  return SUCCESS;
}

int cudaStreamSynchronize(Stream stream) {
  std::unique_lock lock(mutex);
  return wait_for(lock, tickets_of(stream));
}

int cudaStreamQuery(Stream stream) {
  std::lock_guard lock(mutex);
  return tickets_of(stream).empty() ? SUCCESS : NOT_READY;
}

int cudaDeviceSynchronize() {
  std::unique_lock lock(mutex);
  Tickets all;
  for (auto& [stream, tickets] : pending) all.insert(all.end(), tickets.begin(), tickets.end());
  return wait_for(lock, all);
}

int cudaMalloc(void** memory, size_t bytes) {
  FAKEGPU(cudaMalloc);
  const int code = original(memory, bytes);
  if (!code && is_late()) memset(*memory, 0xff, bytes);  // NaN
  return code;
}

int cudaFree(void* memory) {
  FAKEGPU(cudaFree);
  cudaDeviceSynchronize();
  return original(memory);
}

int cudaGetDeviceCount(int* number) {  // FakeGPU does not read CUDA_VISIBLE_DEVICES; "" hides all
  FAKEGPU(cudaGetDeviceCount);
  const char* devices = getenv("CUDA_VISIBLE_DEVICES");
  return devices && !*devices ? (*number = 0, NO_DEVICE) : original(number);
}
}

// libnccl.so.2 over Unix sockets, for torch's own ProcessGroupNCCL.
//
// As with NCCL, a communicator runs its operations one after the other in the order of their issue, apart from the
// program (on a thread), after what their streams were given before; creating a communicator blocks until all its ranks
// have come; and a send ends when its receiver has taken it. Where two ends disagree about a message, NCCL hangs or
// corrupts memory: here the process ends with exit code 86 and the line "NCCL MISMATCH".
//
// EMU_LATE=1      operations start late by random times up to 3 ms; those of all communicators of a rank run one at a
//                 time, in the order of their issue, but for communicators with a limit of at most 4 thread blocks, which
//                 leave room for others
// EMU_TRACE=FILE  every operation, a line each, in FILE.PID
#include "streams.h"

#include <c10/util/BFloat16.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <deque>
#include <functional>
#include <future>
#include <set>
#include <string>
#include <thread>

enum Kind { SEND, RECEIVE, ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER };
static const char* const kind_names[] = {"send", "receive", "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"};
static const size_t type_bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // by ncclDataType_t
enum { SUM = 0, MAX = 2, MIN = 3 };

struct UniqueId { char text[128]; };
struct Config { size_t size; unsigned magic, version; int blocking, cluster_size, min_blocks, max_blocks; };  // the beginning
struct Operation { Kind kind; const void* in; void* out; size_t count; int type, reduction, peer; };
struct Batch {  // a group's operations on one communicator
  struct Communicator* communicator;
  std::vector<Operation> operations;
  std::set<Stream> streams;
  Tickets after;
  std::shared_ptr<Ticket> ticket = std::make_shared<Ticket>();
  long turn = -1;
};
struct Communicator {
  std::string id;
  int rank, size, max_blocks;
  std::vector<int> to, from;  // sockets by rank, its own too
  std::deque<Batch> queue;
  bool is_ended = false;
  std::thread thread;
};

static long turns_given = 0, turns_done = 0;
static thread_local int group_depth = 0;
static thread_local std::vector<Batch> group;

template <class... Values>
[[noreturn]] static void die(const char* format, Values... values) {
  fprintf(stderr, format, values...);
  _exit(86);
}

// ---- messages; false if the other end is gone

struct Text { char text[96]; };  // what both ends must agree about

static Text text_of(const Operation& o) {
  const bool is_message = o.kind == SEND || o.kind == RECEIVE;
  Text result{};
  snprintf(result.text, sizeof result.text, "%s type %d count %zu reduction %d root %d",
           is_message ? "message" : kind_names[o.kind], o.type, o.count, o.reduction, is_message ? 0 : o.peer);
  return result;
}

static bool send_all(int socket, const void* data, ssize_t bytes) {
  return !bytes || send(socket, data, bytes, MSG_NOSIGNAL) == bytes;
}
static bool receive_all(int socket, void* data, ssize_t bytes) {
  return !bytes || recv(socket, data, bytes, MSG_WAITALL) == bytes;
}

static bool put(Communicator* c, int peer, const Text& mine, const void* data, size_t bytes) {
  const int socket = c->to[peer];
  char taken;
  return send_all(socket, &mine, sizeof mine) && send_all(socket, data, bytes) && receive_all(socket, &taken, 1);
}

static bool take(Communicator* c, int peer, const Text& mine, void* data, size_t bytes) {
  const int socket = c->from[peer];
  Text theirs;
  if (!receive_all(socket, &theirs, sizeof theirs)) return false;
  if (strcmp(mine.text, theirs.text))
    die("NCCL MISMATCH in %s: rank %d: %s; rank %d: %s\n", c->id.c_str(), c->rank, mine.text, peer, theirs.text);
  return receive_all(socket, data, bytes) && send_all(socket, "", 1);
}

// ---- arithmetic: in order of the ranks, of 16-bit numbers in fp32

typedef std::vector<std::vector<char>> Parts;  // every rank's input

template <class Stored, class Number>
static void reduce_as(const Operation& o, const Parts& parts, size_t first) {
  for (size_t i = 0; i < o.count; i++) {
    Number value = ((const Stored*)parts[0].data())[first + i];
    for (size_t rank = 1; rank < parts.size(); rank++) {
      const Number other = ((const Stored*)parts[rank].data())[first + i];
      if (o.reduction == SUM) value += other;
      else if (other != other || (o.reduction == MAX ? other > value : other < value)) value = other;
    }
    ((Stored*)o.out)[i] = Stored(value);
  }
}

static void reduce(const Operation& o, const Parts& parts, size_t first) {
  if (o.reduction == SUM || o.reduction == MAX || o.reduction == MIN) switch (o.type) {
    case 1: return reduce_as<uint8_t, uint8_t>(o, parts, first);
    case 2: return reduce_as<int32_t, int32_t>(o, parts, first);
    case 4: return reduce_as<int64_t, int64_t>(o, parts, first);
    case 6: return reduce_as<_Float16, float>(o, parts, first);
    case 7: return reduce_as<float, float>(o, parts, first);
    case 8: return reduce_as<double, double>(o, parts, first);
    case 9: return reduce_as<c10::BFloat16, float>(o, parts, first);
  }
  die("NCCL: reduction %d of type %d is not emulated\n", o.reduction, o.type);
}

static void combine(const Communicator* c, const Operation& o, const Parts& parts) {
  const size_t bytes = o.count * type_bytes[o.type];
  if (o.kind == ALL_REDUCE || (o.kind == REDUCE && c->rank == o.peer)) reduce(o, parts, 0);
  if (o.kind == REDUCE_SCATTER) reduce(o, parts, c->rank * o.count);
  if (o.kind == BROADCAST) memcpy(o.out, parts[o.peer].data(), bytes);
  if (o.kind == ALL_GATHER)
    for (int rank = 0; rank < c->size; rank++) memcpy((char*)o.out + rank * bytes, parts[rank].data(), bytes);
}

// ---- operations

// In a collective every rank sends its whole input to every rank. With one peer in one direction a batch's messages are
// in order; all others go at the same time.
static bool run(Communicator* c, const Batch& batch) {
  std::map<std::pair<int, Kind>, std::vector<std::function<bool()>>> messages;
  std::map<const Operation*, Parts> inputs;
  for (auto& o : batch.operations) {
    const size_t bytes = o.count * type_bytes[o.type] * (o.kind == REDUCE_SCATTER ? c->size : 1);
    auto sends = [&](int to) { messages[{to, SEND}].push_back([=, &o] { return put(c, to, text_of(o), o.in, bytes); }); };
    auto receives = [&](int from, void* out) {
      messages[{from, RECEIVE}].push_back([=, &o] { return take(c, from, text_of(o), out, bytes); });
    };
    if (o.kind == SEND) sends(o.peer);
    else if (o.kind == RECEIVE) receives(o.peer, o.out);
    else {
      inputs[&o].resize(c->size, std::vector<char>(bytes));
      for (int rank = 0; rank < c->size; rank++) sends(rank), receives(rank, inputs[&o][rank].data());
    }
  }
  std::vector<std::future<bool>> sides;
  for (auto& [side, in_order] : messages)
    sides.push_back(std::async(std::launch::async, [&in_order = in_order] {
      return std::all_of(in_order.begin(), in_order.end(), [](auto& message) { return message(); });
    }));
  bool is_good = true;
  for (auto& side : sides) is_good &= side.get();
  if (is_good) for (auto& [operation, parts] : inputs) combine(c, *operation, parts);
  return is_good;
}

static void work(Communicator* c) {
  unsigned seed = getpid() * 31 + c->rank;
  for (;;) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] {
      if (c->is_ended || c->queue.empty()) return c->is_ended;
      const Batch& next = c->queue.front();
      return (next.turn < 0 || next.turn == turns_done) && not_done(next.after).empty();
    });
    if (c->is_ended) return;
    const Batch batch = std::move(c->queue.front());
    c->queue.pop_front();
    lock.unlock();
    if (is_late()) usleep(rand_r(&seed) % 3000);
    const bool is_done = run(c, batch);
    lock.lock();
    if (!is_done && !c->is_ended) fprintf(stderr, "NCCL: a peer of rank %d in %s is gone\n", c->rank, c->id.c_str());
    if (!is_done) return;  // its ticket stays, as a kernel of NCCL would spin
    turns_done += batch.turn >= 0;
    batch.ticket->done_at = now();
    changed.notify_all();
  }
}

static void submit() {
  std::lock_guard lock(mutex);
  for (auto& batch : group) {
    Communicator* c = batch.communicator;
    for (Stream stream : batch.streams) {
      for (auto& ticket : tickets_of(stream)) batch.after.push_back(ticket);
      pending[stream].push_back(batch.ticket);
    }
    if (is_late() && !(c->max_blocks > 0 && c->max_blocks <= 4)) batch.turn = turns_given++;
    c->queue.push_back(std::move(batch));
  }
  group.clear();
  changed.notify_all();
}

static int issue(Communicator* c, Stream stream, Operation o) {
  static const char* path = getenv("EMU_TRACE");
  static FILE* trace = path ? fopen((path + ("." + std::to_string(getpid()))).c_str(), "w") : nullptr;
  if (trace)
    fprintf(trace, "%s comm %s rank %d/%d type %d count %zu op %d peer %d blocks %d\n", kind_names[o.kind],
            c->id.c_str(), c->rank, c->size, o.type, o.count, o.reduction, o.peer, c->max_blocks), fflush(trace);
  auto batch = std::find_if(group.begin(), group.end(), [c](const Batch& each) { return each.communicator == c; });
  if (batch == group.end()) batch = group.insert(group.end(), Batch{c});
  batch->operations.push_back(o);
  batch->streams.insert(stream);
  if (!group_depth) submit();
  return SUCCESS;
}

// ---- NCCL's functions, with its types as integers and pointers

static socklen_t name_socket(sockaddr_un& address, const std::string& id, int rank) {  // in Linux's abstract name space
  const std::string name = "emulated-nccl-" + id + "-" + std::to_string(rank);
  address = {.sun_family = AF_UNIX};
  memcpy(address.sun_path + 1, name.data(), name.size());
  return offsetof(sockaddr_un, sun_path) + 1 + name.size();
}

extern "C" {
typedef Communicator* C;
int cudaGetDevice(int* device);
int ncclCommInitRankConfig(C* result, int size, UniqueId id, int rank, const Config* config) {  // a socket to each rank
  const std::vector<int> sockets(size);
  C c = *result = new Communicator{id.text, rank, size, config ? config->max_blocks : 0, sockets, sockets};
  int me[] = {rank, 0};
  cudaGetDevice(&me[1]);
  sockaddr_un address;
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  socklen_t length = name_socket(address, c->id, rank);
  if (bind(listener, (sockaddr*)&address, length) || listen(listener, 64)) die("NCCL: rank %d twice in %s\n", rank, id.text);
  for (int peer = 0; peer < size; peer++) {
    length = name_socket(address, c->id, peer);
    c->to[peer] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    while (connect(c->to[peer], (sockaddr*)&address, length)) usleep(2000);
    send_all(c->to[peer], me, sizeof me);
  }
  for (int number = 0; number < size; number++) {
    int peer[2];
    const int accepted = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (!receive_all(accepted, peer, sizeof peer)) die("NCCL: a rank of %s ended while it was created\n", id.text);
    if (peer[0] != rank && peer[1] == me[1]) die("NCCL: ranks %d and %d on the same GPU\n", rank, peer[0]);
    c->from[peer[0]] = accepted;
  }
  close(listener);
  c->thread = std::thread(work, c);
  return SUCCESS;
}
int ncclCommAbort(C c) {
  { std::lock_guard lock(mutex); c->is_ended = true; }
  changed.notify_all();
  c->to.insert(c->to.end(), c->from.begin(), c->from.end());
  for (int socket : c->to) shutdown(socket, SHUT_RDWR);
  c->thread.join();
  for (int socket : c->to) close(socket);
  return SUCCESS;
}
int ncclCommDestroy(C c) { return ncclCommAbort(c); }
int ncclCommCount(C c, int* size) { return *size = c->size, SUCCESS; }
int ncclCommUserRank(C c, int* rank) { return *rank = c->rank, SUCCESS; }
int ncclCommFinalize(C) { return SUCCESS; }
int ncclCommGetAsyncError(C, int* code) { return *code = SUCCESS; }
int ncclGetVersion(int* version) { return *version = 22907, SUCCESS; }
int ncclGetUniqueId(UniqueId* id) { return snprintf(id->text, sizeof id->text, "%d-%f", getpid(), now()), SUCCESS; }
const char* ncclGetErrorString(int code) { return code ? "emulated error" : "no error"; }
const char* ncclGetLastError(C) { return ""; }
int ncclGroupStart() { return group_depth++, SUCCESS; }
int ncclGroupEnd() { return --group_depth || (submit(), SUCCESS), SUCCESS; }
int ncclAllReduce(const void* in, void* out, size_t n, int type, int op, C c, Stream s) { return issue(c, s, {ALL_REDUCE, in, out, n, type, op, 0}); }
int ncclReduce(const void* in, void* out, size_t n, int type, int op, int root, C c, Stream s) { return issue(c, s, {REDUCE, in, out, n, type, op, root}); }
int ncclBroadcast(const void* in, void* out, size_t n, int type, int root, C c, Stream s) { return issue(c, s, {BROADCAST, in, out, n, type, 0, root}); }
int ncclBcast(void* data, size_t n, int type, int root, C c, Stream s) { return ncclBroadcast(data, data, n, type, root, c, s); }
int ncclAllGather(const void* in, void* out, size_t n, int type, C c, Stream s) { return issue(c, s, {ALL_GATHER, in, out, n, type, 0, 0}); }
int ncclReduceScatter(const void* in, void* out, size_t n, int type, int op, C c, Stream s) { return issue(c, s, {REDUCE_SCATTER, in, out, n, type, op, 0}); }
int ncclSend(const void* data, size_t n, int type, int peer, C c, Stream s) { return issue(c, s, {SEND, data, nullptr, n, type, 0, peer}); }
int ncclRecv(void* data, size_t n, int type, int peer, C c, Stream s) { return issue(c, s, {RECEIVE, nullptr, data, n, type, 0, peer}); }

// All others that torch links to:
#define NOT_EMULATED(name) int name() { die(#name " is not emulated\n"); }
NOT_EMULATED(ncclCommInitAll) NOT_EMULATED(ncclCommInitRank) NOT_EMULATED(ncclCommInitRankScalable)
NOT_EMULATED(ncclCommSplit) NOT_EMULATED(ncclCommShrink) NOT_EMULATED(ncclCommMemStats) NOT_EMULATED(ncclCommResume)
NOT_EMULATED(ncclCommSuspend) NOT_EMULATED(ncclCommRegister) NOT_EMULATED(ncclCommDeregister)
NOT_EMULATED(ncclCommWindowRegister) NOT_EMULATED(ncclCommWindowDeregister) NOT_EMULATED(ncclDevCommCreate)
NOT_EMULATED(ncclDevCommDestroy) NOT_EMULATED(ncclGetLsaMultimemDevicePointer) NOT_EMULATED(ncclGetPeerDevicePointer)
NOT_EMULATED(ncclMemAlloc) NOT_EMULATED(ncclMemFree) NOT_EMULATED(ncclAlltoAll) NOT_EMULATED(ncclGroupSimulateEnd)
NOT_EMULATED(ncclPutSignal) NOT_EMULATED(ncclSignal) NOT_EMULATED(ncclWaitSignal) NOT_EMULATED(ncclRedOpCreatePreMulSum)
NOT_EMULATED(ncclRedOpDestroy)
}

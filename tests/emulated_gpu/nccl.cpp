// libnccl.so.2 over Unix sockets, for torch's own ProcessGroupNCCL.
//
// As with NCCL, a communicator runs its operations one after the other in the order of their issue, apart from the
// program (on a thread), after what their streams were given before; creating a communicator blocks until all its ranks
// have come; and a send ends when its receiver has taken it. Where two ends disagree about a message, NCCL hangs or
// corrupts memory: here the process ends with exit code 86 and the line "NCCL MISMATCH".
//
// EMU_NCCL_DELAY_MS=N   operations start late by random times up to N ms
// EMU_NCCL_SERIAL=1     operations of all communicators of a rank run one at a time, in the order of their issue, but for
//                       communicators with a limit of at most 4 thread blocks, which leave room for others
// EMU_TRACE=FILE        every operation, a line each, in FILE.PID
#include "emulated.h"

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <future>
#include <map>
#include <set>
#include <string>
#include <thread>

enum Kind : uint32_t { SEND, RECEIVE, ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER };
static const char* const kind_names[] = {"send", "receive", "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"};
enum { SUCCESS = 0, INVALID_USAGE = 5 };
enum { SUM, PROD, MAX, MIN, AVG };
static const size_t type_bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // by ncclDataType_t

struct Operation { Kind kind; const void* in; void* out; size_t count; int type, reduction, peer; };
struct Batch { std::vector<Operation> operations; Tickets after; TicketP ticket; long turn; };
struct Header { Kind kind; uint32_t type; uint64_t count; int32_t reduction, root; uint64_t bytes; };
struct UniqueId { char text[128]; };
struct Config { size_t size; unsigned magic, version; int blocking, cluster_size, min_blocks, max_blocks; };  // the beginning

struct Communicator {
  std::string id;
  int rank, size, max_blocks;
  std::vector<int> to, from;  // sockets by rank
  std::deque<Batch> queue;
  bool is_ended = false, is_aborted = false;
  std::thread thread;
};
struct Issued { Communicator* communicator; Operation operation; Stream stream; };

static long turns_given = 0, turns_done = 0;
static thread_local int group_depth = 0;
static thread_local std::vector<Issued> issued;

static FILE* trace() {
  static FILE* file = [] {
    const char* path = getenv("EMU_TRACE");
    FILE* opened = path ? fopen((path + ("." + std::to_string(getpid()))).c_str(), "w") : nullptr;
    if (opened) setvbuf(opened, nullptr, _IOLBF, 0);
    return opened;
  }();
  return file;
}

// ---- messages; false if the other end is gone

static bool send_all(int socket, const void* data, size_t bytes) {
  for (ssize_t sent; bytes; data = (const char*)data + sent, bytes -= sent)
    if ((sent = send(socket, data, bytes, MSG_NOSIGNAL)) <= 0 && !(errno == EINTR && !(sent = 0))) return false;
  return true;
}

static bool receive_all(int socket, void* data, size_t bytes) {
  for (ssize_t got; bytes; data = (char*)data + got, bytes -= got)
    if ((got = recv(socket, data, bytes, 0)) == 0 || (got < 0 && !(errno == EINTR && !(got = 0)))) return false;
  return true;
}

static bool put(Communicator* c, int peer, Header header, const void* data, size_t bytes) {
  char taken;
  header.bytes = bytes;
  return send_all(c->to[peer], &header, sizeof header) && send_all(c->to[peer], data, bytes) &&
         receive_all(c->to[peer], &taken, 1);
}

static bool take(Communicator* c, int peer, Header mine, void* data, size_t bytes) {
  Header theirs;
  mine.bytes = bytes;
  if (!receive_all(c->from[peer], &theirs, sizeof theirs)) return false;
  if (memcmp(&mine, &theirs, sizeof mine))
    die("NCCL MISMATCH: rank %d of %d in %s: %s type %u count %lu reduction %d root %d; rank %d: %s type %u count %lu "
        "reduction %d root %d",
        c->rank, c->size, c->id.c_str(), kind_names[mine.kind], mine.type, mine.count, mine.reduction, mine.root, peer,
        kind_names[theirs.kind], theirs.type, theirs.count, theirs.reduction, theirs.root);
  return receive_all(c->from[peer], data, bytes) && send_all(c->from[peer], "", 1);
}

// ---- arithmetic: in order of the ranks, of 16-bit numbers in fp32

struct BFloat16 {
  uint16_t bits;
  operator float() const {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
  BFloat16(float value) {  // to nearest, ties to even
    uint32_t wide;
    memcpy(&wide, &value, 4);
    bits = value != value ? 0x7fc0 : (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  }
};

template <class Stored, class Number>
static void reduce_as(void* result, const std::vector<std::vector<char>>& parts, size_t count, int reduction) {
  for (size_t i = 0; i < count; i++) {
    Number value = ((const Stored*)parts[0].data())[i];
    for (size_t rank = 1; rank < parts.size(); rank++) {
      Number other = ((const Stored*)parts[rank].data())[i];
      if (reduction == SUM || reduction == AVG) value += other;
      else if (reduction == PROD) value *= other;
      else if (other != other || (reduction == MAX ? other > value : other < value)) value = other;
    }
    ((Stored*)result)[i] = Stored(reduction == AVG ? value / (Number)parts.size() : value);
  }
}

static void reduce(void* result, const std::vector<std::vector<char>>& parts, size_t count, int type, int reduction) {
  switch (type) {
    case 0: return reduce_as<int8_t, int8_t>(result, parts, count, reduction);
    case 1: return reduce_as<uint8_t, uint8_t>(result, parts, count, reduction);
    case 2: return reduce_as<int32_t, int32_t>(result, parts, count, reduction);
    case 4: return reduce_as<int64_t, int64_t>(result, parts, count, reduction);
    case 6: return reduce_as<_Float16, float>(result, parts, count, reduction);
    case 7: return reduce_as<float, float>(result, parts, count, reduction);
    case 8: return reduce_as<double, double>(result, parts, count, reduction);
    case 9: return reduce_as<BFloat16, float>(result, parts, count, reduction);
  }
  die("NCCL: a reduction of type %d is not emulated", type);
}

// ---- operations

// Rank 0 takes every rank's part and gives every rank its result.
static bool collective(Communicator* c, const Operation& o) {
  const size_t bytes = o.count * type_bytes[o.type], size = c->size;
  const Header header{o.kind, (uint32_t)o.type, o.count, o.reduction, o.peer, 0};
  auto gives = [&](int rank) { return o.kind == BROADCAST && rank != o.peer ? 0 : o.kind == REDUCE_SCATTER ? bytes * size : bytes; };
  auto gets = [&](int rank) { return o.kind == REDUCE && rank != o.peer ? 0 : o.kind == ALL_GATHER ? bytes * size : bytes; };
  if (c->rank) return put(c, 0, header, o.in, gives(c->rank)) && take(c, 0, header, o.out, gets(c->rank));
  std::vector<std::vector<char>> parts(size);
  parts[0].assign((const char*)o.in, (const char*)o.in + gives(0));
  for (size_t rank = 1; rank < size; rank++) {
    parts[rank].resize(gives(rank));
    if (!take(c, rank, header, parts[rank].data(), gives(rank))) return false;
  }
  std::vector<char> result;
  if (o.kind == BROADCAST) result = parts[o.peer];
  else if (o.kind == ALL_GATHER) for (auto& part : parts) result.insert(result.end(), part.begin(), part.end());
  else {
    result.resize(gives(0));
    reduce(result.data(), parts, result.size() / type_bytes[o.type], o.type, o.reduction);
  }
  auto of = [&](int rank) { return result.data() + (o.kind == REDUCE_SCATTER ? bytes * rank : 0); };
  for (size_t rank = 1; rank < size; rank++)
    if (!put(c, rank, header, of(rank), gets(rank))) return false;
  memmove(o.out, of(0), gets(0));
  return true;
}

// The messages of a batch with one peer in one direction are in order; all others go at the same time.
static bool run(Communicator* c, const Batch& batch) {
  std::map<std::pair<int, Kind>, std::vector<Operation>> messages;
  for (auto& o : batch.operations) {
    if (o.kind == SEND || o.kind == RECEIVE) messages[{o.peer, o.kind}].push_back(o);
    else if (!collective(c, o)) return false;
  }
  auto& to_self = messages[{c->rank, SEND}];
  auto& from_self = messages[{c->rank, RECEIVE}];
  if (to_self.size() != from_self.size()) die("NCCL MISMATCH: a message of rank %d to itself", c->rank);
  for (size_t i = 0; i < to_self.size(); i++)
    memmove(from_self[i].out, to_self[i].in, to_self[i].count * type_bytes[to_self[i].type]);
  std::vector<std::future<bool>> sides;
  for (auto& [side, operations] : messages) {
    if (side.first == c->rank) continue;
    sides.push_back(std::async(std::launch::async, [c, &operations = operations] {
      return std::all_of(operations.begin(), operations.end(), [c](const Operation& o) {
        const Header header{SEND, (uint32_t)o.type, o.count, 0, 0, 0};
        const size_t bytes = o.count * type_bytes[o.type];
        return o.kind == SEND ? put(c, o.peer, header, o.in, bytes) : take(c, o.peer, header, o.out, bytes);
      });
    }));
  }
  bool is_good = true;
  for (auto& side : sides) is_good &= side.get();
  return is_good;
}

static void work(Communicator* c) {
  static const double delay = getenv("EMU_NCCL_DELAY_MS") ? atof(getenv("EMU_NCCL_DELAY_MS")) : 0;
  unsigned seed = getpid() * 31 + c->rank;
  for (;;) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return c->is_ended || !c->queue.empty(); });
    if (c->is_aborted || c->queue.empty()) return;
    Batch batch = std::move(c->queue.front());
    c->queue.pop_front();
    auto may_start = [&] {
      return std::all_of(batch.after.begin(), batch.after.end(), [](const TicketP& t) { return t->done; }) &&
             (batch.turn < 0 || batch.turn == turns_done);
    };
    changed.wait(lock, [&] { return c->is_aborted || may_start(); });
    if (c->is_aborted) return;
    lock.unlock();
    if (delay > 0) usleep((useconds_t)(rand_r(&seed) / (double)RAND_MAX * delay * 1e3));
    const bool is_done = run(c, batch);
    lock.lock();
    if (!is_done && !c->is_aborted) fprintf(stderr, "[emulated] NCCL: a peer of rank %d in %s is gone\n", c->rank, c->id.c_str());
    if (!is_done) return;  // its ticket stays, as a kernel of NCCL would spin
    turns_done += batch.turn >= 0;
    finish(batch.ticket);
  }
}

static void submit() {
  static const bool is_serial = getenv("EMU_NCCL_SERIAL");
  std::lock_guard<std::mutex> lock(mutex);
  while (!issued.empty()) {
    Communicator* c = issued.front().communicator;
    Batch batch;
    std::set<Stream> streams;
    for (auto& each : issued) {
      if (each.communicator != c) continue;
      batch.operations.push_back(each.operation);
      streams.insert(each.stream);
    }
    std::erase_if(issued, [c](const Issued& each) { return each.communicator == c; });
    for (Stream stream : streams)
      for (auto& ticket : tickets_of(stream)) batch.after.push_back(ticket);
    batch.ticket = new_ticket({streams.begin(), streams.end()});
    batch.turn = is_serial && !(c->max_blocks > 0 && c->max_blocks <= 4) ? turns_given++ : -1;
    c->queue.push_back(std::move(batch));
  }
  changed.notify_all();
}

static int issue(Communicator* c, Stream stream, Operation o) {
  if (trace())
    fprintf(trace(), "%s comm %s rank %d/%d type %d count %zu op %d peer %d blocks %d\n", kind_names[o.kind], c->id.c_str(),
            c->rank, c->size, o.type, o.count, o.reduction, o.peer, c->max_blocks);
  issued.push_back({c, o, stream});
  if (!group_depth) submit();
  return SUCCESS;
}

// ---- communicators: a socket from each rank to each other, in Linux's abstract name space

static socklen_t name_socket(sockaddr_un& address, const std::string& id, int rank) {
  const std::string name = "emulated-nccl-" + id + "-" + std::to_string(rank);
  address = {.sun_family = AF_UNIX};
  memcpy(address.sun_path + 1, name.data(), name.size());
  return offsetof(sockaddr_un, sun_path) + 1 + name.size();
}

static Communicator* create(const UniqueId& id, int size, int rank, const Config* config) {
  auto* c = new Communicator{id.text, rank, size, config ? config->max_blocks : 0};
  c->to.assign(size, -1);
  c->from.assign(size, -1);
  const int device = current_device();
  if (trace()) fprintf(trace(), "init comm %s rank %d/%d device %d\n", id.text, rank, size, device);
  sockaddr_un address;
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  socklen_t length = name_socket(address, c->id, rank);
  if (bind(listener, (sockaddr*)&address, length) || listen(listener, 64)) die("NCCL: rank %d twice in %s", rank, id.text);
  for (int peer = 0; peer < size; peer++) {
    if (peer == rank) continue;
    length = name_socket(address, c->id, peer);
    c->to[peer] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    while (connect(c->to[peer], (sockaddr*)&address, length)) usleep(2000);
    const int me[] = {rank, size, device};
    send_all(c->to[peer], me, sizeof me);
  }
  for (int number = 1; number < size; number++) {
    int peer[3] = {};
    const int accepted = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (!receive_all(accepted, peer, sizeof peer)) die("NCCL: a rank of %s ended while it was created", id.text);
    if (peer[1] != size) die("NCCL MISMATCH: sizes %d and %d of communicator %s", size, peer[1], id.text);
    if (peer[2] == device) die("NCCL: ranks %d and %d of %s both on GPU %d", rank, peer[0], id.text, device);
    c->from[peer[0]] = accepted;
  }
  close(listener);
  c->thread = std::thread(work, c);
  return c;
}

static int end(Communicator* c, bool aborts) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    c->is_ended = true;
    c->is_aborted |= aborts;
    changed.notify_all();
  }
  std::vector<int> sockets(c->to);
  sockets.insert(sockets.end(), c->from.begin(), c->from.end());
  for (int socket : sockets)
    if (aborts && socket >= 0) shutdown(socket, SHUT_RDWR);
  if (c->thread.joinable()) c->thread.join();
  for (int socket : sockets)
    if (socket >= 0) close(socket);
  c->to.clear();
  c->from.clear();
  return SUCCESS;
}

// ---- NCCL's functions, with its types as integers and pointers

#define NOT_EMULATED(name) int name() { die(#name " is not emulated"); }
extern "C" {
typedef Communicator* C;
int ncclGetVersion(int* version) { return *version = 22907, SUCCESS; }
int ncclGetUniqueId(UniqueId* id) {
  static std::atomic<int> number{0};
  *id = {};
  snprintf(id->text, sizeof id->text, "%d-%d-%ld", getpid(), number++, (long)(now() * 1e3));
  return SUCCESS;
}
int ncclCommInitRankConfig(C* c, int size, UniqueId id, int rank, Config* config) { return *c = create(id, size, rank, config), SUCCESS; }
int ncclCommInitRank(C* c, int size, UniqueId id, int rank) { return *c = create(id, size, rank, nullptr), SUCCESS; }
int ncclCommInitRankScalable(C* c, int size, int rank, int, UniqueId* id, Config* config) { return *c = create(*id, size, rank, config), SUCCESS; }
int ncclCommCount(C c, int* size) { return *size = c->size, SUCCESS; }
int ncclCommUserRank(C c, int* rank) { return *rank = c->rank, SUCCESS; }
int ncclCommGetAsyncError(C, int* code) { return *code = SUCCESS; }
int ncclCommDestroy(C c) { return end(c, false); }
int ncclCommAbort(C c) { return end(c, true); }
int ncclCommFinalize(C) { return SUCCESS; }
int ncclCommRegister(C, void*, size_t, void** handle) { return *handle = handle, SUCCESS; }
int ncclCommDeregister(C, void*) { return SUCCESS; }
const char* ncclGetErrorString(int code) { return code ? "emulated error" : "no error"; }
const char* ncclGetLastError(C) { return ""; }
int ncclGroupStart() { return group_depth++, SUCCESS; }
int ncclGroupEnd() {
  if (!group_depth) return INVALID_USAGE;
  if (!--group_depth) submit();
  return SUCCESS;
}
int ncclAllReduce(const void* in, void* out, size_t n, int type, int op, C c, Stream s) { return issue(c, s, {ALL_REDUCE, in, out, n, type, op, 0}); }
int ncclReduce(const void* in, void* out, size_t n, int type, int op, int root, C c, Stream s) { return issue(c, s, {REDUCE, in, out, n, type, op, root}); }
int ncclBroadcast(const void* in, void* out, size_t n, int type, int root, C c, Stream s) { return issue(c, s, {BROADCAST, in, out, n, type, 0, root}); }
int ncclBcast(void* data, size_t n, int type, int root, C c, Stream s) { return ncclBroadcast(data, data, n, type, root, c, s); }
int ncclAllGather(const void* in, void* out, size_t n, int type, C c, Stream s) { return issue(c, s, {ALL_GATHER, in, out, n, type, 0, 0}); }
int ncclReduceScatter(const void* in, void* out, size_t n, int type, int op, C c, Stream s) { return issue(c, s, {REDUCE_SCATTER, in, out, n, type, op, 0}); }
int ncclSend(const void* data, size_t n, int type, int peer, C c, Stream s) { return issue(c, s, {SEND, data, nullptr, n, type, 0, peer}); }
int ncclRecv(void* data, size_t n, int type, int peer, C c, Stream s) { return issue(c, s, {RECEIVE, nullptr, data, n, type, 0, peer}); }
int ncclAlltoAll(const void* in, void* out, size_t n, int type, C c, Stream s) {
  ncclGroupStart();
  for (int peer = 0; peer < c->size; peer++) {
    const size_t start = peer * n * type_bytes[type];
    ncclSend((const char*)in + start, n, type, peer, c, s);
    ncclRecv((char*)out + start, n, type, peer, c, s);
  }
  return ncclGroupEnd();
}
NOT_EMULATED(ncclCommInitAll) NOT_EMULATED(ncclCommSplit) NOT_EMULATED(ncclCommShrink) NOT_EMULATED(ncclCommMemStats)
NOT_EMULATED(ncclCommResume) NOT_EMULATED(ncclCommSuspend) NOT_EMULATED(ncclCommWindowRegister)
NOT_EMULATED(ncclCommWindowDeregister) NOT_EMULATED(ncclDevCommCreate) NOT_EMULATED(ncclDevCommDestroy)
NOT_EMULATED(ncclGetLsaMultimemDevicePointer) NOT_EMULATED(ncclGetPeerDevicePointer) NOT_EMULATED(ncclMemAlloc)
NOT_EMULATED(ncclGroupSimulateEnd) NOT_EMULATED(ncclMemFree) NOT_EMULATED(ncclPutSignal) NOT_EMULATED(ncclSignal)
NOT_EMULATED(ncclWaitSignal) NOT_EMULATED(ncclRedOpCreatePreMulSum) NOT_EMULATED(ncclRedOpDestroy)
NOT_EMULATED(ncclGetLsaDevicePointer) NOT_EMULATED(ncclCommQueryProperties) NOT_EMULATED(ncclCommGrow)
NOT_EMULATED(ncclCommRevoke) NOT_EMULATED(ncclCommCuDevice)
}

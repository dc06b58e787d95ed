// What streams.cpp and nccl.cpp share: work that a stream has been given and that is not done.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

typedef void* Stream;
struct Ticket { bool done = false; double done_at = 0; };
typedef std::shared_ptr<Ticket> TicketP;
typedef std::vector<TicketP> Tickets;

// Never destroyed: worker threads outlive main().
extern std::mutex& mutex;
extern std::condition_variable& changed;

double now();  // milliseconds
[[noreturn]] void die(const char* format, ...);  // ends the process with exit code 86
int current_device();
// With the mutex held:
Tickets tickets_of(Stream stream);  // not done yet
TicketP new_ticket(const std::vector<Stream>& streams);
void finish(const TicketP& ticket);

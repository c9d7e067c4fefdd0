// Judges the order of all work on the device by vector clocks: a stream's clock says, for each stream, how much of that
// one's work lies behind it. Operations run at once; what counts is in which order a GPU would have to run them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fake_gpu::clocks {

// Events are numbers that are used once: `block(stream, record(other))` makes `stream` wait for `other`.
int64_t record(int64_t stream);
void block(int64_t stream, int64_t event);
// The host waits for an event: what it queues from now on, on whatever stream, is behind that.
void wait_on_host(int64_t event);
int64_t host_waits();
// Whether the host knows that the work before an event has ended: as late as it may, which is when it has waited.
bool has_ended(int64_t event);

// Memory belongs to the stream that was current when it was allocated, and goes back to it, as in CUDA's allocator.
void allocated(int64_t stream, const void* first, size_t nbytes);
void freed(const void* first);
void record_stream(const void* first, int64_t stream);
void access(int64_t stream, const void* first, size_t nbytes, bool writes, const std::string& what);

// Pinned memory of the host, which a stream copies to or from. The host must not look at it, or write to it, before it
// has waited: a target holds NaN until then, and a source must not have changed.
void will_copy_out(int64_t stream, const void* target, size_t nbytes);
void copies_out(int64_t stream, void* target, size_t nbytes);
void copies_in(int64_t stream, const void* source, size_t nbytes);
void unpinned(const void* first, size_t nbytes);

// Begin to judge. `place`: says where a program stands; may be null.
void start(std::string (*place)());
// The problems since the last call.
std::vector<std::string> take_problems();

} // namespace fake_gpu::clocks

#include "clocks.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace fake_gpu::clocks {
namespace {

using Clock = std::map<int64_t, int64_t>; // of a stream: how many of each stream's operations are behind it

struct Access {
  int64_t stream, time;
  const char *first, *last;
  bool writes;
  std::string what;
};

struct Block {
  int64_t stream;
  const char* last;
  std::string made_at, first_use;
  std::vector<Access> accesses;
  std::set<int64_t> recorded;
};

struct GivenBack {
  Block block;
  std::string freed_at;
};

struct HostCopy {
  int64_t stream, time;
  char* memory;
  bool is_target;
  std::vector<char> bytes;
};

std::mutex mutex;
std::map<int64_t, Clock> streams, events;
Clock host;
std::map<const char*, Block> blocks; // by where they begin
std::map<int64_t, std::vector<GivenBack>> given_back; // to a stream, which has not allocated since
std::vector<HostCopy> host_copies;
std::vector<std::string> problems;
bool is_judging = false;
std::string (*place_of)() = nullptr;
int64_t next_event = 1, waits = 0;

void merge(Clock& clock, const Clock& other) {
  for (auto [stream, time] : other)
    clock[stream] = std::max(clock[stream], time);
}

// A stream begins behind all that the host has waited for.
Clock& clock_of(int64_t stream) {
  return streams.try_emplace(stream, host).first->second;
}

bool is_behind(Clock& clock, int64_t stream, int64_t time) {
  return clock[stream] >= time;
}

std::string place() {
  return is_judging && place_of ? " (" + place_of() + ")" : "";
}

std::string described(const Access& access) {
  return (access.writes ? "written by " : "read by ") + access.what + " on stream " + std::to_string(access.stream);
}

std::string described(const Block& block) {
  auto stream = std::to_string(block.stream);
  auto use = block.first_use.empty() ? "" : ", which was first " + block.first_use + ",";
  return "memory of stream " + stream + block.made_at + use;
}

void deliver_to_host() {
  std::vector<HostCopy> waiting;
  for (auto& copy : host_copies) {
    if (!is_behind(host, copy.stream, copy.time))
      waiting.push_back(std::move(copy));
    else if (copy.is_target)
      std::memcpy(copy.memory, copy.bytes.data(), copy.bytes.size());
    else if (std::memcmp(copy.memory, copy.bytes.data(), copy.bytes.size()))
      problems.push_back("pinned memory was written to while stream " + std::to_string(copy.stream) + " may read it");
  }
  host_copies = std::move(waiting);
}

// What a stream allocates next may be memory that was given back to it, and be used from then on.
void check_given_back(int64_t stream) {
  for (auto& [block, freed_at] : given_back[stream])
    for (auto& access : block.accesses)
      if (!is_behind(clock_of(stream), access.stream, access.time) && !block.recorded.count(access.stream))
        problems.push_back("early free" + freed_at + ": " + described(block) + " may still be " + described(access));
  given_back[stream].clear();
}

int64_t tick(int64_t stream) {
  return ++clock_of(stream)[stream];
}

} // namespace

int64_t record(int64_t stream) {
  std::lock_guard<std::mutex> lock(mutex);
  events[next_event] = clock_of(stream);
  return next_event++;
}

void block(int64_t stream, int64_t event) {
  std::lock_guard<std::mutex> lock(mutex);
  merge(clock_of(stream), events[event]);
}

void wait_on_host(int64_t event) {
  std::lock_guard<std::mutex> lock(mutex);
  ++waits;
  merge(host, events[event]);
  for (auto& [stream, clock] : streams)
    merge(clock, host);
  deliver_to_host();
}

int64_t host_waits() {
  std::lock_guard<std::mutex> lock(mutex);
  return waits;
}

bool has_ended(int64_t event) {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto [stream, time] : events[event])
    if (!is_behind(host, stream, time))
      return false;
  return true;
}

void allocated(int64_t stream, const void* first, size_t nbytes) {
  auto at = place(); // may call Python, which must not wait for the lock
  std::lock_guard<std::mutex> lock(mutex);
  check_given_back(stream);
  auto* begin = static_cast<const char*>(first);
  // The stream may have had this memory before, and work that it was given then may still use it.
  Access earlier{stream, tick(stream), begin, begin + nbytes, true, "work before it was allocated"};
  blocks[begin] = {stream, begin + nbytes, at, "", {std::move(earlier)}, {}};
}

void freed(const void* first) {
  auto at = place();
  std::lock_guard<std::mutex> lock(mutex);
  auto found = blocks.find(static_cast<const char*>(first));
  if (found == blocks.end())
    return;
  if (is_judging)
    given_back[found->second.stream].push_back({std::move(found->second), at});
  blocks.erase(found);
}

void record_stream(const void* first, int64_t stream) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = blocks.find(static_cast<const char*>(first));
  if (found != blocks.end())
    found->second.recorded.insert(stream);
}

void access(int64_t stream, const void* first, size_t nbytes, bool writes, const std::string& what) {
  auto at = place();
  std::lock_guard<std::mutex> lock(mutex);
  auto* begin = static_cast<const char*>(first);
  auto found = blocks.upper_bound(begin);
  if (!is_judging || found == blocks.begin() || begin >= std::prev(found)->second.last)
    return;
  auto& block = std::prev(found)->second;
  Access now{stream, tick(stream), begin, begin + nbytes, writes, what + at};
  std::vector<Access> kept;
  for (auto& old : block.accesses) {
    bool overlap = old.first < now.last && now.first < old.last;
    if (overlap && (old.writes || writes) && !is_behind(clock_of(stream), old.stream, old.time))
      problems.push_back(
          "race: " + described(block) + " is " + described(now) + ", and not ordered with: " + described(old));
    // Whoever is behind this access is behind an older one of the same stream.
    bool covers = now.first <= old.first && old.last <= now.last;
    bool is_needless = old.stream == stream && covers && (writes || !old.writes);
    if (!is_needless)
      kept.push_back(std::move(old));
  }
  if (block.first_use.empty())
    block.first_use = described(now);
  kept.push_back(std::move(now));
  block.accesses = std::move(kept);
}

void will_copy_out(int64_t stream, const void* target, size_t nbytes) {
  // A copy from this memory that the stream is behind has read it: from now on it may change.
  std::lock_guard<std::mutex> lock(mutex);
  auto* memory = static_cast<const char*>(target);
  std::vector<HostCopy> waiting;
  for (auto& copy : host_copies) {
    bool overlaps = copy.memory < memory + nbytes && memory < copy.memory + copy.bytes.size();
    if (!overlaps || copy.is_target || !is_behind(clock_of(stream), copy.stream, copy.time))
      waiting.push_back(std::move(copy));
    else if (std::memcmp(copy.memory, copy.bytes.data(), copy.bytes.size()))
      problems.push_back("pinned memory was written to while stream " + std::to_string(copy.stream) + " may read it");
  }
  host_copies = std::move(waiting);
}

void copies_out(int64_t stream, void* target, size_t nbytes) {
  std::lock_guard<std::mutex> lock(mutex);
  auto* memory = static_cast<char*>(target);
  host_copies.push_back({stream, tick(stream), memory, true, {memory, memory + nbytes}});
  std::memset(target, 0xFF, nbytes);
}

void copies_in(int64_t stream, const void* source, size_t nbytes) {
  std::lock_guard<std::mutex> lock(mutex);
  auto* memory = static_cast<char*>(const_cast<void*>(source));
  // A copy on a stream that is behind an unfinished copy to this memory finds there what that one writes.
  std::vector<HostCopy> waiting;
  for (auto& copy : host_copies) {
    bool overlaps = copy.memory < memory + nbytes && memory < copy.memory + copy.bytes.size();
    if (overlaps && copy.is_target && is_behind(clock_of(stream), copy.stream, copy.time))
      std::memcpy(copy.memory, copy.bytes.data(), copy.bytes.size());
    else
      waiting.push_back(std::move(copy));
  }
  host_copies = std::move(waiting);
  host_copies.push_back({stream, tick(stream), memory, false, {memory, memory + nbytes}});
}

void unpinned(const void* first, size_t nbytes) {
  // As CUDA's allocator of pinned memory does: it is not used again before copies have ended.
  std::lock_guard<std::mutex> lock(mutex);
  auto* begin = static_cast<const char*>(first);
  std::vector<HostCopy> waiting;
  for (auto& copy : host_copies)
    if (copy.memory + copy.bytes.size() <= begin || begin + nbytes <= copy.memory)
      waiting.push_back(std::move(copy));
  host_copies = std::move(waiting);
}

void start(std::string (*place)()) {
  std::lock_guard<std::mutex> lock(mutex);
  is_judging = true;
  place_of = place;
}

std::vector<std::string> take_problems() {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& [stream, _] : given_back)
    check_given_back(stream);
  return std::exchange(problems, {});
}

} // namespace fake_gpu::clocks

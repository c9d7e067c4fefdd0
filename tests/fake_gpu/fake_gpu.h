// What device.cpp offers to process_group.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

namespace fake_gpu {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;

// A CPU tensor over the memory of a tensor of the device.
at::Tensor host(const at::Tensor& tensor);

// Fills a tensor's elements with bytes of ones, which are NaN in each floating-point dtype.
void poison(const at::Tensor& tensor);

c10::Stream current_stream();

// The log, which is empty until it is switched on. Each entry: what happens, on which stream, to which bytes.
enum Kind : int64_t { kAllocate, kFree, kRead, kWrite, kRecord, kBlock, kHostWaits, kUse };
void log(Kind kind, int64_t stream, int64_t first, int64_t last, const std::string& name);
void log_access(Kind kind, int64_t stream, const at::Tensor& tensor, const std::string& name);

// Events are numbers that are used once: `block(stream, record(other))` makes `stream` wait for `other`.
int64_t record(int64_t stream);
void block(int64_t stream, int64_t event);
// The host waits for all that a stream was given.
void wait_on_host(int64_t stream, const std::string& name);

struct Entry {
  int64_t kind, stream, first, last;
  std::string name;
};
void start_log();
std::vector<Entry> take_log();
int64_t host_waits();
void set_device(int64_t index);
int64_t current_device();

} // namespace fake_gpu

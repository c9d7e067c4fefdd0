// What the files of the device offer to each other.
#pragma once

#include "clocks.h"

#include <ATen/core/Tensor.h>

namespace fake_gpu {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;

// A CPU tensor over the memory of a tensor of the device.
at::Tensor host(const at::Tensor& tensor);

// Fills a contiguous tensor with bytes of ones, which are NaN in each floating-point dtype.
void poison(const at::Tensor& tensor);

// Tells the clocks that an operation on `stream` uses a tensor, if that is on the device.
void access(int64_t stream, const at::Tensor& tensor, bool writes, const std::string& name);

// New memory of the device holds NaN.
c10::Allocator* allocator();
bool is_pinned(const void* data);

// Of this thread.
int64_t current_stream(int64_t device);
void set_device(int64_t index);
int64_t current_device();

} // namespace fake_gpu

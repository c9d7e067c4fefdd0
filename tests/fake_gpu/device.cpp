// A device whose memory is the host's, and whose operations run at once, by the CPU's kernels. What a GPU has and a CPU
// lacks is real: a type and an index of its own, a current device and current streams for each thread, events, pinned
// memory, an allocator, and autograd's thread for each device. See README.md.
#include "fake_gpu.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

namespace fake_gpu {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

namespace {
std::atomic<int64_t> next_stream{kDevices};
} // namespace

// ---- devices, streams and events

namespace {

thread_local DeviceIndex device_of_thread = 0;
thread_local int64_t streams_of_thread[kDevices] = {0, 1}; // at first the default ones

struct Event {
  int64_t number;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  Device getDevice() const override {
    return Device(kType, device_of_thread);
  }
  void setDevice(Device device) const override {
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    device_of_thread = device.index();
  }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Stream getStream(Device device) const override {
    return Stream(Stream::UNSAFE, device, streams_of_thread[device.index()]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, device, device.index());
  }
  Stream getNewStream(Device device, int) const override {
    return Stream(Stream::UNSAFE, device.has_index() ? device : getDevice(), next_stream++);
  }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    streams_of_thread[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr)
      *event = new Event();
    static_cast<Event*>(*event)->number = clocks::record(stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr)
      clocks::block(stream.id(), static_cast<Event*>(event)->number);
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || clocks::has_ended(static_cast<Event*>(event)->number);
  }
  bool queryStream(const Stream& stream) const override {
    return clocks::has_ended(clocks::record(stream.id()));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr)
      clocks::wait_on_host(static_cast<Event*>(event)->number);
  }
  void synchronizeStream(const Stream& stream) const override {
    clocks::wait_on_host(clocks::record(stream.id()));
  }
  void synchronizeDevice(DeviceIndex) const override {
    for (int64_t stream = 0; stream < next_stream; ++stream)
      clocks::wait_on_host(clocks::record(stream));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    clocks::record_stream(data.get(), stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

} // namespace

int64_t current_stream(int64_t device) {
  return streams_of_thread[device];
}

void set_device(int64_t index) {
  TORCH_CHECK(0 <= index && index < kDevices, "expected a device below ", kDevices, ", got ", index);
  device_of_thread = DeviceIndex(index);
}

int64_t current_device() {
  return device_of_thread;
}

// ---- memory

namespace {

constexpr size_t kAlignment = 512;

void* new_poisoned(size_t nbytes) {
  void* data = nbytes ? std::aligned_alloc(kAlignment, (nbytes + kAlignment - 1) / kAlignment * kAlignment) : nullptr;
  if (data)
    std::memset(data, 0xFF, nbytes);
  return data;
}

struct DeviceAllocator final : c10::Allocator {
  static void free_logged(void* data) {
    if (data)
      clocks::freed(data);
    std::free(data);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = new_poisoned(nbytes);
    if (data)
      clocks::allocated(current_stream(device_of_thread), data, nbytes);
    return {data, data, &free_logged, Guard().getDevice()};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_logged;
  }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kType, &device_allocator);

std::map<const char*, size_t> pinned; // by where it begins
std::mutex pinned_mutex;

struct PinnedAllocator final : c10::Allocator {
  static void free_pinned(void* data) {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    auto found = pinned.find(static_cast<const char*>(data));
    if (found != pinned.end()) {
      clocks::unpinned(data, found->second);
      pinned.erase(found);
    }
    std::free(data);
  }
  static bool owns(const void* data) {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    auto after = pinned.upper_bound(static_cast<const char*>(data));
    if (after == pinned.begin())
      return false;
    auto [first, nbytes] = *--after;
    return static_cast<const char*>(data) < first + nbytes;
  }
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = new_poisoned(nbytes);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    if (data)
      pinned[static_cast<const char*>(data)] = nbytes;
    return {data, data, &free_pinned, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
};
PinnedAllocator pinned_allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return kDevices;
  }
  DeviceIndex getCurrentDevice() const override {
    return device_of_thread;
  }
  void setCurrentDevice(DeviceIndex index) const override {
    set_device(index);
  }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    DeviceIndex before = device_of_thread;
    set_device(index);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  Device getDeviceFromPtr(void*) const override {
    return Guard().getDevice();
  }
  bool isPinnedPtr(const void* data) const override {
    return PinnedAllocator::owns(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(impl->device());
    auto data = device_allocator.allocate(nbytes);
    if (size_t kept = std::min(nbytes, impl->nbytes()))
      std::memcpy(data.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(nbytes);
  }
};
[[maybe_unused]] const bool hooks_are_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

} // namespace

c10::Allocator* allocator() {
  return &device_allocator;
}

bool is_pinned(const void* data) {
  return PinnedAllocator::owns(data);
}

} // namespace fake_gpu

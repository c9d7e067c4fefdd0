// The device's operations: those that make, view and copy tensors are here, all others run on the CPU's kernels, on the
// same memory. Each tells the clocks what it reads and writes.
#include "fake_gpu.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

namespace fake_gpu {

using at::Tensor;
using c10::Device;

namespace {
// The number of elements from a tensor's first to its last one.
int64_t extent_of(const Tensor& tensor) {
  if (tensor.numel() == 0)
    return 0;
  int64_t extent = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    extent += (tensor.size(dim) - 1) * tensor.stride(dim);
  return extent;
}
} // namespace

void access(int64_t stream, const Tensor& tensor, bool writes, const std::string& name) {
  if (tensor.device().type() == kType && tensor.numel())
    clocks::access(stream, tensor.const_data_ptr(), extent_of(tensor) * tensor.element_size(), writes, name);
}

Tensor host(const Tensor& tensor) {
  if (tensor.device().type() != kType)
    return tensor;
  const auto& storage = tensor.storage();
  TORCH_CHECK(
      tensor.numel() == 0 || (extent_of(tensor) + tensor.storage_offset()) * tensor.element_size() <= storage.nbytes(),
      "use of memory that was freed: a tensor of ",
      tensor.sizes(),
      " in ",
      storage.nbytes(),
      " bytes");
  auto alias = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      storage.nbytes(),
      c10::DataPtr(storage.mutable_data(), Device(c10::kCPU)),
      c10::GetCPUAllocator(),
      /*resizable=*/true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(alias)), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  impl->set_storage_offset(tensor.storage_offset());
  return result;
}

void poison(const Tensor& tensor) {
  if (tensor.numel())
    std::memset(tensor.mutable_data_ptr(), 0xFF, tensor.nbytes());
}

namespace {

Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device && device->has_index() ? device : std::nullopt);
  return at::detail::empty_generic(
      size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype.value_or(at::kFloat), format);
}

Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device && device->has_index() ? device : std::nullopt);
  return at::detail::empty_strided_generic(
      size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype.value_or(at::kFloat));
}

// A copy to or from the CPU makes the host wait, unless the CPU's side is pinned, and the caller said not to.
Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  bool is_in = target.device().type() == kType;
  const Tensor& on_device = is_in ? target : source;
  const Tensor& other = is_in ? source : target;
  int64_t stream = current_stream(on_device.device().index());
  access(stream, source, false, "copy_");
  access(stream, target, true, "copy_");
  bool crosses = other.device().is_cpu() && other.numel();
  bool is_behind = crosses && non_blocking && other.is_contiguous() && is_pinned(other.const_data_ptr());
  if (is_behind && is_in)
    clocks::copies_in(stream, source.const_data_ptr(), source.nbytes());
  if (is_behind && !is_in)
    clocks::will_copy_out(stream, target.const_data_ptr(), target.nbytes());
  auto view = host(target);
  view.copy_(host(source));
  if (is_behind && !is_in)
    clocks::copies_out(stream, target.mutable_data_ptr(), target.nbytes());
  if (crosses && !is_behind)
    clocks::wait_on_host(clocks::record(stream));
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  at::native::resize_(target, source.sizes());
  return copy_from(source, target, false);
}

c10::Scalar local_scalar_dense(const Tensor& tensor) {
  int64_t stream = current_stream(tensor.device().index());
  access(stream, tensor, false, "item");
  clocks::wait_on_host(clocks::record(stream));
  return host(tensor).item();
}

Tensor as_strided(
    const Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto from = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(
      tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), from);
}

const Tensor& resize_(const Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor reshape_alias(const Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor view(const Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return at::native::set_tensor_(tensor, source);
}

Tensor& set_storage(Tensor& tensor, c10::Storage source) {
  return at::native::set_(tensor, std::move(source));
}

Tensor& set_storage_at(
    Tensor& tensor, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(
      tensor, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

void record_stream(Tensor& tensor, c10::Stream stream) {
  clocks::record_stream(tensor.storage().data(), stream.id());
}

// ---- every other operation: the CPU's kernel on the same memory

// Operations whose result's shape, or value, the host must know: they wait for the device.
bool makes_the_host_wait(const std::string& name) {
  static const std::vector<std::string> names = {
      "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"};
  return std::find(names.begin(), names.end(), name) != names.end();
}

class Call {
 public:
  Call(const c10::OperatorHandle& op) : op_(op), name_(op.schema().name().substr(6)) {}

  void run(torch::jit::Stack* stack) {
    const auto& arguments = op_.schema().arguments();
    size_t first = stack->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto* alias = arguments[i].alias_info();
      take((*stack)[first + i], alias && alias->isWrite());
    }
    TORCH_CHECK(device_, name_, ": expected a tensor or a device of this type");
    c10::DeviceGuard guard(*device_);
    stream_ = current_stream(device_->index());
    for (auto& [tensor, alias] : reads_)
      access(stream_, tensor, false, name_);
    op_.callBoxed(stack);
    for (auto& [tensor, alias] : writes_)
      finish_write(tensor, alias);
    const auto& returns = op_.schema().returns();
    first = stack->size() - returns.size();
    for (size_t i = 0; i < returns.size(); ++i)
      give((*stack)[first + i]);
    if (makes_the_host_wait(name_))
      clocks::wait_on_host(clocks::record(stream_));
  }

 private:
  using Pairs = std::vector<std::pair<Tensor, Tensor>>; // (on the device, its alias on the CPU)

  // Replaces what is on the device by what is on the CPU.
  void take(c10::IValue& value, bool is_written) {
    if (value.isTensor()) {
      value = taken(value.toTensor(), is_written);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (Tensor tensor : value.toTensorList())
        list.push_back(taken(tensor, is_written));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::optional<Tensor>(taken(*tensor, is_written)) : std::nullopt);
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == kType) {
      note(value.toDevice());
      value = Device(c10::kCPU);
    }
  }

  Tensor taken(const Tensor& tensor, bool is_written) {
    if (!tensor.defined() || tensor.device().type() != kType)
      return tensor;
    note(tensor.device());
    for (auto* pairs : {&reads_, &writes_})
      for (auto& [known, alias] : *pairs)
        if (known.is_same(tensor)) {
          if (is_written && pairs == &reads_)
            writes_.emplace_back(known, alias);
          return alias;
        }
    Tensor alias = host(tensor);
    (is_written ? writes_ : reads_).emplace_back(tensor, alias);
    return alias;
  }

  void note(Device device) {
    if (!device.has_index())
      device = Device(kType, c10::DeviceIndex(current_device()));
    TORCH_CHECK(!device_ || *device_ == device, name_, ": expected all tensors on ", *device_, ", got one on ", device);
    device_ = device;
  }

  // A kernel may have given an output another size, which needs other memory.
  void finish_write(const Tensor& tensor, const Tensor& alias) {
    if (alias.sizes() != tensor.sizes() || (tensor.numel() && alias.const_data_ptr() != tensor.const_data_ptr())) {
      at::native::resize_(tensor, alias.sizes());
      host(tensor).copy_(alias);
    }
    access(stream_, tensor, true, name_);
  }

  // Replaces a result on the CPU by one on the device.
  void give(c10::IValue& value) {
    if (value.isTensor()) {
      value = given(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (Tensor tensor : value.toTensorList())
        list.push_back(given(tensor));
      value = list;
    }
  }

  Tensor given(const Tensor& result) {
    if (!result.defined() || result.device().type() == kType)
      return result;
    for (auto* pairs : {&writes_, &reads_})
      for (auto& [tensor, alias] : *pairs) {
        if (alias.is_same(result))
          return tensor;
        bool is_view = result.has_storage() && result.numel() && result.is_alias_of(alias);
        TORCH_CHECK(!is_view, name_, ": this view is not supported");
      }
    Tensor own = empty_strided(result.sizes(), result.strides(), result.scalar_type(), {}, *device_, {});
    host(own).copy_(result);
    access(stream_, own, true, name_);
    return own;
  }

  const c10::OperatorHandle& op_;
  std::string name_;
  std::optional<Device> device_;
  int64_t stream_ = 0;
  Pairs reads_, writes_;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op).run(stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("as_strided", as_strided);
  library.impl("record_stream", record_stream);
  library.impl("resize_", resize_);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("view", view);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage_at);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

} // namespace
} // namespace fake_gpu

// A backend for process groups that moves the device's tensors over gloo, with what NCCL has and gloo lacks:
// collectives run on a stream of the group's own, and `wait` makes the current stream wait, not the host. Outputs hold NaN until
// then: whoever reads them earlier sees it.
#include "fake_gpu.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace fake_gpu {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Pending = c10::intrusive_ptr<c10d::Work>;

struct Delivery {
  Tensor target, source;
};

class FakeWork final : public c10d::Work {
 public:
  FakeWork(
      int64_t device,
      std::vector<Pending> works,
      std::vector<Delivery> deliveries,
      Tensors inputs,
      double divisor,
      int64_t done)
      : device_(device),
        works_(std::move(works)),
        deliveries_(std::move(deliveries)),
        inputs_(std::move(inputs)),
        divisor_(divisor),
        done_(done) {}

  bool isCompleted() override {
    return works_.empty();
  }

  bool wait(std::chrono::milliseconds) override {
    auto works = std::move(works_);
    works_.clear();
    for (auto& work : works)
      work->wait();
    for (auto& [target, source] : deliveries_) {
      if (divisor_ != 1)
        source.div_(divisor_);
      host(target).copy_(source.view(target.sizes()));
    }
    clocks::block(current_stream(device_), done_);
    deliveries_.clear(); // which may free memory: behind the line above
    inputs_.clear();
    return true;
  }

  void synchronize() override {
    wait(kNoTimeout);
  }

 private:
  int64_t device_;
  std::vector<Pending> works_;
  std::vector<Delivery> deliveries_;
  Tensors inputs_;
  double divisor_;
  int64_t done_;
};

class FakeBackend final : public c10d::Backend {
 public:
  FakeBackend(c10::intrusive_ptr<c10d::Backend> gloo, int64_t device, int64_t stream)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), device_(device), stream_(stream) {}

  const std::string getBackendName() const override {
    return "fakeccl";
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return 0;
  }

  Pending _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  Pending allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run("all_gather", outputs, inputs, 1, [&](Tensor& output, Tensor& input) {
      return gloo_->_allgather_base(output, input, options);
    });
  }
  Pending allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto flat = on_host(inputs);
    std::vector<Tensors> of_ranks{{}};
    for (auto& output : outputs.at(0))
      of_ranks[0].push_back(at::empty_like(host(output)));
    auto work = gloo_->allgather(of_ranks, flat, options);
    return issued("all_gather", {work}, outputs[0], of_ranks[0], inputs, 1);
  }

  Pending _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  Pending reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    auto sums = options;
    double divisor = take_mean(sums.reduceOp);
    return run("reduce_scatter", outputs, inputs, divisor, [&](Tensor& output, Tensor& input) {
      return gloo_->_reduce_scatter_base(output, input, sums);
    });
  }
  Pending reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    Tensors whole{at::cat(on_host(inputs.at(0)))};
    auto sums = options;
    double divisor = take_mean(sums.reduceOp);
    Tensors results{at::empty_like(host(outputs.at(0)))};
    auto work = gloo_->_reduce_scatter_base(results[0], whole[0], sums);
    return issued("reduce_scatter", {work}, outputs, results, inputs[0], divisor);
  }

  Pending allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto sums = options;
    double divisor = take_mean(sums.reduceOp);
    return in_place("all_reduce", tensors, divisor, [&](Tensors& values) { return gloo_->allreduce(values, sums); });
  }
  Pending broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return in_place("broadcast", tensors, 1, [&](Tensors& values) { return gloo_->broadcast(values, options); });
  }
  Pending alltoall_base(
      Tensor& output,
      Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return run("all_to_all", outputs, inputs, 1, [&](Tensor& theirs, Tensor& mine) {
      return gloo_->alltoall_base(theirs, mine, output_sizes, input_sizes, options);
    });
  }
  Pending barrier(const c10d::BarrierOptions& options) override {
    return gloo_->barrier(options);
  }

 private:
  // Copies: what a caller writes to its tensors while a collective is under way must not reach gloo.
  static Tensors on_host(const Tensors& tensors) {
    Tensors copies;
    for (auto& tensor : tensors)
      copies.push_back(host(tensor).contiguous().clone());
    return copies;
  }

  // gloo has no mean.
  double take_mean(c10d::ReduceOp& op) const {
    if (op != c10d::ReduceOp::AVG)
      return 1;
    op = c10d::ReduceOp::SUM;
    return getSize();
  }

  template <typename Start>
  Pending run(const char* name, Tensors& outputs, Tensors& inputs, double divisor, const Start& start) {
    auto sources = on_host(inputs);
    Tensors results;
    std::vector<Pending> works;
    for (size_t i = 0; i < outputs.size(); ++i) {
      TORCH_CHECK(outputs[i].is_contiguous() && inputs[i].is_contiguous(), name, ": expected contiguous tensors");
      results.push_back(at::empty_like(host(outputs[i])));
      works.push_back(start(results[i], sources[i]));
    }
    return issued(name, std::move(works), outputs, results, inputs, divisor, sources);
  }

  template <typename Start>
  Pending in_place(const char* name, Tensors& tensors, double divisor, const Start& start) {
    auto values = on_host(tensors);
    auto work = start(values);
    return issued(name, {work}, tensors, values, tensors, divisor);
  }

  // `sources`: copies of the inputs, some of which may be parts of an output, which then keep their values.
  Pending issued(
      const char* name,
      std::vector<Pending> works,
      const Tensors& outputs,
      const Tensors& results,
      const Tensors& inputs,
      double divisor,
      const Tensors& sources = {}) {
    clocks::block(stream_, clocks::record(current_stream(device_)));
    std::vector<Delivery> deliveries;
    for (auto& input : inputs)
      access(stream_, input, false, name);
    for (size_t i = 0; i < outputs.size(); ++i) {
      access(stream_, outputs[i], true, name);
      poison(outputs[i]);
      deliveries.push_back({outputs[i], results[i]});
    }
    for (size_t i = 0; i < sources.size(); ++i)
      host(inputs[i]).copy_(sources[i]);
    return c10::make_intrusive<FakeWork>(
        device_, std::move(works), std::move(deliveries), inputs, divisor, clocks::record(stream_));
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  int64_t device_, stream_;
};

PyObject* place_function = nullptr; // see place() in __init__.py

// Called in any thread, also while an exception is raised, and in destructors.
std::string place_in_python() {
  pybind11::gil_scoped_acquire gil;
  pybind11::error_scope error;
  PyObject* place = PyObject_CallNoArgs(place_function);
  const char* text = place ? PyUnicode_AsUTF8(place) : nullptr;
  std::string result = text ? text : "?";
  PyErr_Clear();
  Py_XDECREF(place);
  return result;
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  py::module_::import("torch.distributed"); // has the classes that those below derive from
  py::class_<FakeBackend, c10d::Backend, c10::intrusive_ptr<FakeBackend>>(module, "FakeBackend")
      .def(py::init([](const c10::intrusive_ptr<c10d::Backend>& gloo, int64_t device, int64_t stream) {
        return c10::make_intrusive<FakeBackend>(gloo, device, stream);
      }));
  module.def("start_clocks", [](py::object place) {
    place_function = place.release().ptr();
    clocks::start(&place_in_python);
  });
  module.def("take_problems", [] {
    py::list result;
    for (auto& problem : clocks::take_problems())
      result.append(problem);
    return result;
  });
  module.def("host_waits", &clocks::host_waits);
  module.def("set_device", &set_device);
  module.def("current_device", &current_device);
}

} // namespace fake_gpu

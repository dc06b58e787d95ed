// Emulated kernels of the operators that only compute: as emulated_kernels.py, which names them, but a tenth of its time.
//
// An operator's CPU kernel runs on views of the same memory, because device memory is host memory here. A tensor that it
// writes is the result; a new one is copied to memory of the device.
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/GPUTrace.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <sstream>
#include <string>
#include <vector>

using c10::IValue;
using torch::jit::Stack;

static at::Tensor cpu_view(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

static at::Tensor on_device(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined()) return tensor;
  auto result = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  if (tensor.numel() > 0) cpu_view(result).copy_(tensor);
  return result;
}

// Apply a function to a value's tensors; other values stay.
template <class Function>
static IValue map(const IValue& value, Function function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isDevice()) return c10::Device(at::kCPU);
  if (value.isTensorList()) {
    c10::List<at::Tensor> results;
    for (const at::Tensor& tensor : value.toTensorVector()) results.push_back(function(tensor));
    return results;
  }
  if (value.isList()) {
    c10::List<IValue> items = value.toList();
    c10::impl::GenericList results(items.elementType());
    for (size_t i = 0; i < items.size(); i++) results.push_back(map(items.get(i), function));
    return results;
  }
  return value;
}

struct PlainKernel : c10::OperatorKernel {
  std::string name;
  std::vector<int> returned;  // for each result, the argument that it is; -1 for a new tensor

  explicit PlainKernel(const c10::FunctionSchema& schema) : name(schema.name()) {
    for (const auto& result : schema.returns()) {
      returned.push_back(-1);
      for (size_t place = 0; result.alias_info() && place < schema.arguments().size(); place++) {
        const auto* argument = schema.arguments()[place].alias_info();
        if (argument && argument->isWrite() && argument->beforeSets() == result.alias_info()->beforeSets())
          returned.back() = place;
      }
    }
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    size_t num_arguments = op.schema().arguments().size();
    std::vector<IValue> arguments(stack->end() - num_arguments, stack->end());
    std::vector<at::Tensor> tensors;
    for (const IValue& argument : arguments) map(argument, [&](const at::Tensor& t) { if (t.defined()) tensors.push_back(t); return t; });
    c10::Device device = check_devices(tensors);
    // NCCL kernels that the stream waits for run now
    static auto synchronize = (int (*)(void*))dlsym(RTLD_DEFAULT, "cudaStreamSynchronize");
    synchronize(c10::impl::getDeviceGuardImpl(at::kCUDA)->getStream(device).native_handle());
    for (size_t i = 0; i < num_arguments; i++) (*stack)[stack->size() - num_arguments + i] = map(arguments[i], cpu_view);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    for (size_t i = 0; i < returned.size(); i++) {
      IValue& result = (*stack)[stack->size() - returned.size() + i];
      result = returned[i] >= 0 ? arguments[returned[i]] : map(result, [&](const at::Tensor& t) { return on_device(t, device); });
    }
  }

  c10::Device check_devices(const std::vector<at::Tensor>& tensors) const {
    c10::optional<c10::Device> gpu;
    bool is_mixed = false, has_host = false;
    for (const auto& tensor : tensors) {
      is_mixed |= tensor.is_cuda() && gpu && *gpu != tensor.device();
      if (tensor.is_cuda() && !gpu) gpu = tensor.device();
      has_host |= tensor.is_cpu() && (tensor.dim() > 0 || name.rfind("aten::_fused_", 0) == 0);
    }
    if (is_mixed || (gpu && has_host)) {
      std::ostringstream each;
      for (const auto& tensor : tensors) each << " " << tensor.device() << tensor.sizes();
      TORCH_CHECK(false, "[emulated] Expected all tensors to be on the same device: ", name, " of", each.str());
    }
    return gpu ? *gpu : c10::impl::getDeviceGuardImpl(at::kCUDA)->getDevice();
  }
};

static std::unique_ptr<torch::Library> library;

// Replace the CUDA kernels of these operators, whose names are separated by spaces. Nobody listens to streams then.
extern "C" void emulate(const char* names) {
  c10::impl::GPUTrace::haveState = false;
  library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  std::istringstream words(names);
  for (std::string word; words >> word;) {
    size_t dot = word.find('.');
    std::string overload = dot == std::string::npos ? "" : word.substr(dot + 1);
    auto op = c10::Dispatcher::singleton().findSchema({"aten::" + word.substr(0, dot), overload});
    if (op) library->impl(word.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<PlainKernel>(op->schema())));
  }
}

// Give the operators back to the kernels that `emulate` replaced, and let emulated_order.py listen.
extern "C" void stop() {
  library = nullptr;
  c10::impl::GPUTrace::haveState = c10::impl::GPUTrace::gpuTraceState.load() != nullptr;
}

// The plain case of capture in C++: a measurement, not part of torchotel.
//
// Done as in capture: both ends of each forward, shapes and type of its tensors compared by value with those of
// the module's last call, the path from the output's node to the lowest node of the call, and a hook on both nodes, which
// runs without Python. Not done: names, several tensors, in-place operations, threads, failures, records for the worker.

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <ctime>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

constexpr int kLongestWay = 64;

struct Site {
  std::vector<int64_t> input_sizes, output_sizes;
  c10::ScalarType dtype;
  bool training;
};

struct Call {
  const Site* site;
  int64_t start_ns, end_ns;
};

struct Stamp {
  size_t call;
  int64_t time_ns;
};

std::vector<std::pair<PyObject*, int64_t>> open_calls;
std::vector<Call> calls;
std::vector<Stamp> stamps;
std::vector<int64_t> step_stamps_ns;
std::unordered_map<PyObject*, std::unique_ptr<Site>> sites;
int depth = 0;
PyObject* engine = nullptr;
PyObject* training_name = nullptr;

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

struct BackwardBegins : torch::autograd::FunctionPreHook {
  explicit BackwardBegins(size_t call) : call(call) {}
  variable_list operator()(const variable_list& gradients) override {
    stamps.push_back({call, now_ns()});
    return gradients;
  }
  size_t call;
};

struct BackwardEnds : torch::autograd::FunctionPostHook {
  explicit BackwardEnds(size_t call) : call(call) {}
  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    stamps.push_back({call, now_ns()});
    return outputs;
  }
  size_t call;
};

// Nodes of the call are those made after the input's.
Node* lowest_node(Node* node, const Node* input) {
  for (int step = 0; step < kLongestWay; ++step) {
    Node* next = nullptr;
    for (const auto& edge : node->next_edges()) {
      Node* below = edge.function.get();
      const bool accumulates = below != nullptr && below->sequence_nr() == UINT64_MAX;
      if (below == nullptr || below == input || accumulates) continue;
      if (input == nullptr || below->sequence_nr() > input->sequence_nr()) {
        next = below;
        break;
      }
    }
    if (next == nullptr) return node;
    node = next;
  }
  return node;
}

const Site* site_of(PyObject* module, const at::Tensor& input, const at::Tensor& output) {
  PyObject* flag = PyObject_GetAttr(module, training_name);
  const bool training = flag == Py_True;
  Py_XDECREF(flag);
  auto& site = sites[module];
  if (site == nullptr || site->training != training || site->dtype != output.scalar_type() ||
      input.sizes() != site->input_sizes || output.sizes() != site->output_sizes) {
    site = std::make_unique<Site>(Site{input.sizes().vec(), output.sizes().vec(), output.scalar_type(), training});
  }
  return site.get();
}

PyObject* call_begins(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  open_calls.emplace_back(arguments[0], now_ns());
  Py_RETURN_NONE;
}

PyObject* call_ends(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  const int64_t end_ns = now_ns();
  auto [module, start_ns] = open_calls.back();
  open_calls.pop_back();
  PyObject* first = PyTuple_GET_SIZE(arguments[1]) > 0 ? PyTuple_GET_ITEM(arguments[1], 0) : nullptr;
  const Site* site = nullptr;
  if (first != nullptr && THPVariable_Check(first) && THPVariable_Check(arguments[2])) {
    const at::Tensor& input = THPVariable_Unpack(first);
    const at::Tensor& output = THPVariable_Unpack(arguments[2]);
    site = site_of(module, input, output);
    const auto top = output.requires_grad() ? output.grad_fn() : nullptr;
    if (top != nullptr) {
      const Node* below = input.requires_grad() ? input.grad_fn().get() : nullptr;
      top->add_pre_hook(std::make_unique<BackwardBegins>(calls.size()));
      lowest_node(top.get(), below)->add_post_hook(std::make_unique<BackwardEnds>(calls.size()));
    }
  }
  calls.push_back({site, start_ns, end_ns});
  Py_RETURN_NONE;
}

PyObject* stamp_step(PyObject*, PyObject* const*, Py_ssize_t, PyObject*) {
  step_stamps_ns.push_back(now_ns());
  Py_RETURN_NONE;
}

PyObject* outermost_begins(PyObject*, PyObject* const*, Py_ssize_t) {
  if (depth++ == 0) step_stamps_ns.push_back(now_ns());
  Py_RETURN_NONE;
}

PyObject* outermost_ends(PyObject*, PyObject* const*, Py_ssize_t) {
  if (--depth == 0) step_stamps_ns.push_back(now_ns());
  Py_RETURN_NONE;
}

PyObject* wrap_engine(PyObject*, PyObject* function) {
  Py_XSETREF(engine, Py_NewRef(function));
  Py_RETURN_NONE;
}

PyObject* run_backward(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  step_stamps_ns.push_back(now_ns());
  PyObject* result = PyObject_Vectorcall(engine, arguments, count, names);
  step_stamps_ns.push_back(now_ns());
  return result;
}

PyObject* take(PyObject*, PyObject*) {
  PyObject* counts = Py_BuildValue(
      "nnn", Py_ssize_t(calls.size()), Py_ssize_t(stamps.size()), Py_ssize_t(step_stamps_ns.size()));
  calls.clear();
  stamps.clear();
  step_stamps_ns.clear();
  return counts;
}

template <typename Function>
PyCFunction as_method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"call_begins", as_method(call_begins), METH_FASTCALL, nullptr},
    {"call_ends", as_method(call_ends), METH_FASTCALL, nullptr},
    {"stamp_step", as_method(stamp_step), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"outermost_begins", as_method(outermost_begins), METH_FASTCALL, nullptr},
    {"outermost_ends", as_method(outermost_ends), METH_FASTCALL, nullptr},
    {"wrap_engine", as_method(wrap_engine), METH_O, nullptr},
    {"run_backward", as_method(run_backward), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"take", as_method(take), METH_NOARGS, "Return how many calls, their stamps and a step's there are, and forget them."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "native_hooks", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_native_hooks() {
  training_name = PyUnicode_InternFromString("training");
  return PyModule_Create(&definition);
}

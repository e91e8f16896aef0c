// Kernels that misbehave, each as a Python module of its own in one library: what a worker must survive.
#include <Python.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

struct Call {
  float* query;
  float* out;
  float* lse;
  long long rows;
  long long head_dim;
};

// Argument order: generator/abi.py. Tensors are contiguous or padded; only the first row is touched where it matters.
Call read(PyObject* const* args) {
  Call call;
  call.query = static_cast<float*>(PyLong_AsVoidPtr(args[0]));
  call.out = static_cast<float*>(PyLong_AsVoidPtr(args[3]));
  call.lse = static_cast<float*>(PyLong_AsVoidPtr(args[4]));
  call.rows = PyLong_AsLongLong(args[5]) * PyLong_AsLongLong(args[6]) * PyLong_AsLongLong(args[8]);
  call.head_dim = 32;
  return call;
}

PyObject* segfault(PyObject*, PyObject* const*, Py_ssize_t) {
  *reinterpret_cast<volatile int*>(8) = 1;
  return PyLong_FromLong(0);
}

PyObject* hang(PyObject*, PyObject* const*, Py_ssize_t) {
  for (volatile bool forever = true; forever;) {
  }
  return PyLong_FromLong(0);
}

PyObject* exits(PyObject*, PyObject* const*, Py_ssize_t) { std::_Exit(3); }

PyObject* killed(PyObject*, PyObject* const*, Py_ssize_t) {
  std::raise(SIGKILL);
  return PyLong_FromLong(0);
}

PyObject* out_of_memory(PyObject*, PyObject* const*, Py_ssize_t) { return PyLong_FromLong(2); }

PyObject* refuses(PyObject*, PyObject* const*, Py_ssize_t) { return PyLong_FromLong(9); }

PyObject* raises(PyObject*, PyObject* const*, Py_ssize_t) {
  PyErr_SetString(PyExc_ValueError, "not the right number of arguments");
  return nullptr;
}

PyObject* does_nothing(PyObject*, PyObject* const*, Py_ssize_t) { return PyLong_FromLong(0); }

PyObject* writes_zeros(PyObject*, PyObject* const* args, Py_ssize_t) {
  const Call call = read(args);
  std::memset(call.lse, 0, call.rows * sizeof(float));
  std::memset(call.out, 0, call.head_dim * sizeof(float));
  return PyLong_FromLong(0);
}

PyObject* changes_inputs(PyObject*, PyObject* const* args, Py_ssize_t) {
  read(args).query[0] = 1e9f;
  return PyLong_FromLong(0);
}

PyObject* error_name(PyObject*, PyObject* code) { return PyUnicode_FromFormat("error %ld", PyLong_AsLong(code)); }

PyObject* info(PyObject*, PyObject*) { return PyDict_New(); }

}  // namespace

#define MODULE(NAME)                                                                                                  \
  static PyMethodDef methods_##NAME[] = {                                                                             \
      {"launch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)(void)>(NAME)), METH_FASTCALL, ""},           \
      {"error_name", error_name, METH_O, ""},                                                                         \
      {"info", info, METH_NOARGS, ""},                                                                                \
      {nullptr, nullptr, 0, nullptr}};                                                                                \
  static PyModuleDef definition_##NAME = {PyModuleDef_HEAD_INIT, "faulty_" #NAME, nullptr, -1, methods_##NAME};       \
  PyMODINIT_FUNC PyInit_faulty_##NAME() { return PyModule_Create(&definition_##NAME); }

MODULE(segfault)
MODULE(hang)
MODULE(exits)
MODULE(killed)
MODULE(out_of_memory)
MODULE(refuses)
MODULE(raises)
MODULE(does_nothing)
MODULE(writes_zeros)
MODULE(changes_inputs)

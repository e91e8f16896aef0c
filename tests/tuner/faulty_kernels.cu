// GPU kernels that misbehave, each as a Python module of its own in one library: what a worker must survive.
#include <Python.h>
#include <cuda_runtime.h>

namespace {

__global__ void write_nowhere() { *reinterpret_cast<volatile int*>(16) = 1; }

// A volatile variable alone does not keep the loop: the compiler may end what has no effect. Sleeping is one.
__global__ void spin() {
  for (;;) __nanosleep(1000000);
}

PyObject* illegal_address(PyObject*, PyObject* const*, Py_ssize_t) {
  write_nowhere<<<1, 1>>>();
  return PyLong_FromLong(cudaGetLastError());
}

PyObject* hang(PyObject*, PyObject* const*, Py_ssize_t) {
  spin<<<1, 1>>>();
  return PyLong_FromLong(cudaGetLastError());
}

PyObject* too_many_threads(PyObject*, PyObject* const*, Py_ssize_t) {
  write_nowhere<<<1, 4096>>>();
  return PyLong_FromLong(cudaGetLastError());
}

PyObject* does_nothing(PyObject*, PyObject* const*, Py_ssize_t) { return PyLong_FromLong(0); }

PyObject* error_name(PyObject*, PyObject* code) {
  return PyUnicode_FromString(cudaGetErrorName(static_cast<cudaError_t>(PyLong_AsLong(code))));
}

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

MODULE(illegal_address)
MODULE(hang)
MODULE(too_many_threads)
MODULE(does_nothing)

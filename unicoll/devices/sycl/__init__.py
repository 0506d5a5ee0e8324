"""SYCL devices, such as Intel's GPUs: the device runtimes of ``xpu`` arrays, by torch and by
dpctl."""

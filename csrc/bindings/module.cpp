// The extension module tellin.kernels._C. Each bind_*.cpp file owns one part of the API.
#include "bindings.h"

NB_MODULE(_C, m) {
  m.doc() = "Native kernels and plan executor of tellin.";
  tellin::bind_runtime(m);
  tellin::bind_linear(m);
  tellin::bind_sampler(m);
  tellin::bind_drafting(m);
}

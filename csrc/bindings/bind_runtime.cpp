#include "bindings.h"

namespace tellin {

void bind_runtime(nanobind::module_& m) {
  m.def("num_isa_variants", [] { return 0; });
}

}  // namespace tellin

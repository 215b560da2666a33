#pragma once
#include <nanobind/nanobind.h>

namespace tellin {

void bind_runtime(nanobind::module_& m);  // cpu features, program, kv cache   (bind_runtime.cpp)

}  // namespace tellin

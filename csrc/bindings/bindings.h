#pragma once
#include <nanobind/nanobind.h>

#include <string>

#include "tellin/linear.h"

namespace tellin {

// int8, int16 or float32; throws std::invalid_argument for another name (bind_linear.cpp)
ActPrecision act_precision_named(const std::string& name);

void bind_runtime(nanobind::module_& m);   // cpu features, program, kv cache   (bind_runtime.cpp)
void bind_linear(nanobind::module_& m);    // packing and linear kernels, for tests (bind_linear.cpp)
void bind_drafting(nanobind::module_& m);  // drafts from token ids alone        (bind_drafting.cpp)
void bind_sampler(nanobind::module_& m);   // logits to tokens                   (bind_sampler.cpp)

}  // namespace tellin

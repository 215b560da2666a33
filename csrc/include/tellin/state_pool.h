// What recurrences keep of requests: a lazily committed region of slots, one per request.
//
// A slot holds the state of every recurrent layer, one after the other, each from a cache line on. A state is
// zero at a request's first position whatever the slot held, so slots are never cleared.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "tellin/mapped_memory.h"

namespace tellin {

class StatePool {
 public:
  // Returns the layer's number.
  int add_layer(int64_t num_values);
  // Replaces the pool by an empty one. Throws std::bad_alloc.
  void allocate(int64_t num_slots);
  void free();
  void copy_slot(int64_t source, int64_t target);

  int64_t slot_bytes() const { return slot_bytes_; }
  int64_t num_slots() const { return num_slots_; }
  int num_layers() const { return static_cast<int>(layers_.size()); }
  int64_t num_values(int layer) const { return layers_[static_cast<size_t>(layer)].num_values; }

  float* state(int layer, int64_t slot) const {
    return reinterpret_cast<float*>(memory_.data() + slot * slot_bytes_ +
                                    layers_[static_cast<size_t>(layer)].offset);
  }

 private:
  struct Layer {
    int64_t num_values;
    int64_t offset;  // bytes from the start of a slot
  };
  std::vector<Layer> layers_;
  int64_t slot_bytes_ = 0;
  int64_t num_slots_ = 0;
  MappedMemory memory_;
};

}  // namespace tellin

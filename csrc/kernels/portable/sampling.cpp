// Vector loops of the sampler, baseline instruction set.
#define TELLIN_SAMPLING_ISA "portable"
#define TELLIN_SAMPLING_TABLE kSamplingPortable
#define TELLIN_SAMPLING_WIDTH 4
#include "sampling_vector.h"

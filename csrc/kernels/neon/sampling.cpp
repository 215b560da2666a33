// Vector loops of the sampler, NEON.
#define TELLIN_SAMPLING_ISA "neon"
#define TELLIN_SAMPLING_TABLE kSamplingNeon
#define TELLIN_SAMPLING_WIDTH 4
#include "sampling_vector.h"

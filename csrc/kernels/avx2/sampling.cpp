// Vector loops of the sampler, avx2.
#define TELLIN_SAMPLING_ISA "avx2"
#define TELLIN_SAMPLING_TABLE kSamplingAvx2
#define TELLIN_SAMPLING_WIDTH 8
#include "sampling_vector.h"

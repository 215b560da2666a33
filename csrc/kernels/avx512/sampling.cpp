// Vector loops of the sampler, avx512.
#define TELLIN_SAMPLING_ISA "avx512"
#define TELLIN_SAMPLING_TABLE kSamplingAvx512
#define TELLIN_SAMPLING_WIDTH 16
#include "sampling_vector.h"

// SPDX-License-Identifier: Apache-2.0
#include "crc32c_shift.h"

namespace pd {

const LaneShift kLaneShift;  // made when the library is loaded: 32 columns of 4096 steps, well below a millisecond

}  // namespace pd

// SPDX-License-Identifier: Apache-2.0
// Handles of the C ABI that more than one file of bind/ looks into.
#pragma once

#include "pd/copy_engine.h"

struct pd_pool {
  pd::CopyPool pool;
};

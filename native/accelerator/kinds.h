// The kinds of accelerators that there are.
#pragma once

#include "tierload/accelerator.h"

namespace tierload::cuda {

// Throws AcceleratorError, which says why it cannot be used.
std::unique_ptr<Accelerator> open_device(int ordinal);

}  // namespace tierload::cuda

namespace tierload {

// The fake one of this number, or nullptr.
Accelerator* find_fake(uint8_t number);

}  // namespace tierload

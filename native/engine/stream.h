// Copying past the caches: what is copied is read much later, and the training loop needs its caches itself.
#pragma once

#include <cstddef>

namespace tierload {

// Like memcpy.
void stream_copy(std::byte* to, const std::byte* from, size_t bytes);

}  // namespace tierload

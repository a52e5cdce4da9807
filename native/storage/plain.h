// Reading through the page cache, for every fetch.
#pragma once

#include <memory>
#include <string>

#include "tierload/storage.h"

namespace tierload {

// A file to be read; null, and `problem` says why for a person, when there is none that can be. Throws IoError for what
// has nothing to do with the file.
std::unique_ptr<File> open_readable(Storage& storage, const std::string& path, std::string& problem);

}  // namespace tierload

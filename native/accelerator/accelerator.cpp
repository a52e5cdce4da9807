#include "tierload/accelerator.h"

#include <array>
#include <mutex>

#include "accelerator/kinds.h"
#include "tierload/error.h"

namespace tierload {
namespace {

struct Found {
  std::once_flag once;
  std::unique_ptr<Accelerator> accelerator;
  std::string refusal;
};

// As long as the process.
Found& found(uint8_t number) {
  static auto* const all = new std::array<Found, first_fake>;
  Found& one = (*all)[number];
  std::call_once(one.once, [&] {
    try {
      one.accelerator = cuda::open_device(number - 1);
    } catch (const AcceleratorError& error) {
      one.refusal = error.what();
    }
  });
  return one;
}

}  // namespace

Accelerator* find_accelerator(uint8_t number) {
  if (number == 0) return nullptr;
  return number >= first_fake ? find_fake(number) : found(number).accelerator.get();
}

std::string accelerator_refusal(uint8_t number) {
  if (number == 0) return "the processor is no accelerator";
  if (number < first_fake) return found(number).refusal;
  return find_fake(number) ? "" : "there is no such accelerator";
}

Accelerator& accelerator(uint8_t number) {
  Accelerator* const known = find_accelerator(number);
  if (known == nullptr) {
    throw AcceleratorError("accelerator " + std::to_string(number) + ": " + accelerator_refusal(number));
  }
  return *known;
}

}  // namespace tierload

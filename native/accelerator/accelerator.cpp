#include "tierload/accelerator.h"

#include <algorithm>
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

class AllOf : public Moment {
 public:
  explicit AllOf(std::vector<std::shared_ptr<Moment>> moments) : moments_(std::move(moments)) {}
  bool passed() override {
    return std::ranges::all_of(moments_, [](const auto& moment) { return moment->passed(); });
  }
  void wait() override {
    for (const auto& moment : moments_) moment->wait();
  }

 private:
  const std::vector<std::shared_ptr<Moment>> moments_;
};

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

Moments moments_of(std::span<const DeviceStream> streams) {
  Moments moments;
  for (const DeviceStream& one : streams) {
    moments[one.device] = accelerator(one.device).lane_of(one.stream)->moment();
  }
  return moments;
}

Lane& Lanes::of(uint8_t device) {
  std::unique_ptr<Lane>& lane = lanes_[device];
  if (!lane) {
    lane = accelerator(device).lane();
    const auto moment = after_.find(device);
    if (moment != after_.end()) lane->after(moment->second);
  }
  return *lane;
}

std::shared_ptr<Moment> Lanes::moment() {
  std::vector<std::shared_ptr<Moment>> moments;
  for (const auto& [device, lane] : lanes_) moments.push_back(lane->moment());
  return std::make_shared<AllOf>(std::move(moments));
}

void Lanes::wait() {
  for (const auto& [device, lane] : lanes_) lane->wait();
}

}  // namespace tierload

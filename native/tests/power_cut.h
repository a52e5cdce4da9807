// What a power cut may leave of the calls that were made on the simulated file system (tests/simulated.h has the
// model).
#pragma once

#include <random>
#include <vector>

#include "tests/simulated.h"

namespace tierload {

// Walks a history call by call and builds what a power cut at that point may leave.
class PowerCut {
 public:
  explicit PowerCut(Image durable) : durable_(std::move(durable)) {}
  // The next call was made.
  void advance(const Call& call);
  // Images after the calls so far: nothing pending, everything, every prefix, all but one, only one, `torn` random ones
  // with torn writes, and after a write one that is aimed at what stands beside it. Calls `visit(image)` for each; many
  // are equal.
  template <typename Visit>
  void visit(unsigned torn, std::mt19937_64& random, Visit visit_image) const;
  const std::vector<Call>& pending() const { return pending_; }
  const Image& durable() const { return durable_; }

 private:
  Image with(const std::vector<bool>& kept) const;
  Image torn(std::mt19937_64& random) const;
  Image torn_ends(std::mt19937_64& random) const;
  Image durable_;
  std::vector<Call> pending_;
};

template <typename Visit>
void PowerCut::visit(unsigned torn_images, std::mt19937_64& random, Visit visit_image) const {
  const size_t count = pending_.size();
  std::vector<bool> kept(count, false);
  visit_image(with(kept));
  for (size_t i = 0; i < count; ++i) {  // prefixes, the last one is everything
    kept[i] = true;
    visit_image(with(kept));
  }
  for (size_t i = 0; i + 1 < count; ++i) {  // all but one
    kept[i] = false;
    visit_image(with(kept));
    kept[i] = true;
  }
  kept.assign(count, false);
  for (size_t i = 1; i < count; ++i) {  // only one; the first alone is a prefix
    kept[i] = true;
    visit_image(with(kept));
    kept[i] = false;
  }
  for (unsigned i = 0; i < torn_images && count > 0; ++i) visit_image(torn(random));
  if (count > 0 && pending_.back().kind == Call::Kind::write) visit_image(torn_ends(random));
}

}  // namespace tierload

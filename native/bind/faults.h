// Faults that a test puts under a store.
#pragma once

#include "bind/bind.h"

namespace tierload {

class Faults {
 public:
  // Wraps `inner`; the plan that was armed before counts from here.
  std::shared_ptr<Storage> over(std::shared_ptr<Storage> inner) {
    storage_ = faulty_storage(std::move(inner));
    if (plan_) storage_->arm(*plan_);
    return storage_;
  }
  void arm(const Fault& fault) {
    plan_ = fault;
    if (storage_) storage_->arm(fault);
  }
  void disarm() {
    plan_.reset();
    if (storage_) storage_->disarm();
  }
  uint64_t calls() const { return storage_ ? storage_->calls() : 0; }
  bool hit() const { return storage_ && storage_->hit(); }

 private:
  std::optional<Fault> plan_;
  std::shared_ptr<FaultyStorage> storage_;
};

}  // namespace tierload

// What state_dict() and named_parameters() of a torch module give, found without calling them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bind/identities.h"
#include "bind/torch.h"

namespace tierload {

// The tensors of a module in the order of its state_dict(), whose keys are plain text (bind/texts.h). Wrappers in it
// are seen through: names and metadata are those of the module without them.
class ModuleState {
 public:
  struct Member {
    nb::object tensor;  // as the module has it: state_dict() would detach it
    size_t name_at;
    size_t name_bytes;
    bool parameter;
  };

  const std::vector<Member>& members() const { return members_; }
  std::string_view name(const Member& member) const { return {names_.data() + member.name_at, member.name_bytes}; }
  // The pairs of its _metadata, as text of the document.
  const std::string& metadata() const { return metadata_; }
  // How many modules it has, itself included; _metadata has a dict for each.
  int64_t modules() const { return modules_; }
  // What ModuleRules was told of the wrappers that were seen through, each kind once.
  const std::vector<nb::object>& wrappers() const { return wrappers_; }

 private:
  friend class ModuleWalk;

  std::vector<Member> members_;
  std::string names_;
  std::string metadata_;
  int64_t modules_ = 0;
  std::vector<nb::object> wrappers_;
};

// What torch.nn.Module does itself. A module is ordinary when it and all modules below take these functions from there,
// have no hooks on them, and hold plain tensors and parameters: then what the functions give is known beforehand.
class ModuleRules {
 public:
  // `functions` are those of torch.nn.Module, by name. `wrapper_of` says of a type which child its modules are wrappers
  // of, as a tuple that begins with the child's name; None where they are none.
  ModuleRules(const Torch& torch, const nb::dict& functions, nb::object wrapper_of);

  // None unless the module is ordinary at this moment: classes, too, may have been changed since the last time.
  // Asks no code of the user's.
  std::optional<ModuleState> state_of(nb::handle module) const;

 private:
  friend class ModuleWalk;

  // Attributes that the functions read, in the order of `names`; all but the version are those of each module itself.
  enum Attribute : uint32_t { version, parameters, buffers, modules, transient, hooks, pre_hooks, attributes };

  struct Function {
    nb::str name;
    nb::object own;
  };

  const Torch& torch_;
  nb::object wrapper_of_;
  std::vector<Function> functions_;
  std::vector<nb::str> names_;  // of the attributes
  nb::str extra_;
  Identities slots_;  // attribute, or `attributes` for a function that an attribute of the module itself would hide
};

void bind_modules(nb::module_& module);

}  // namespace tierload

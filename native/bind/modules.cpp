#include "bind/modules.h"

#include <array>

#include "bind/texts.h"

namespace tierload {
namespace {

constexpr int depth_max = 200;  // of modules in modules; where state_dict() raises for a deeper one, it shall

nb::str interned(const char* text) {
  PyObject* made = PyUnicode_InternFromString(text);
  if (made == nullptr) throw nb::python_error();
  return nb::steal<nb::str>(made);
}

// What a dict has at a key; null for nothing.
PyObject* entry(nb::handle dict, nb::handle key) {
  PyObject* found = PyDict_GetItemWithError(dict.ptr(), key.ptr());
  if (found == nullptr && PyErr_Occurred()) throw nb::python_error();
  return found;
}

nb::object dict_of(PyTypeObject* type) {
#if PY_VERSION_HEX >= 0x030C0000
  return nb::steal(PyType_GetDict(type));
#else
  return nb::borrow(type->tp_dict);
#endif
}

// What the instances of a type have by it under a name; null for nothing. No metaclass is asked.
PyObject* inherited(PyTypeObject* type, nb::handle name) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(type->tp_mro); ++i) {
    const nb::object members = dict_of(reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(type->tp_mro, i)));
    if (PyObject* found = entry(members, name)) return found;
  }
  return nullptr;
}

bool is_name(PyObject* key) {
  if (!PyUnicode_CheckExact(key) || !is_plain_text(key)) return false;
  const auto text = ascii_of(key);
  return !text.empty() && text.find('.') == std::string_view::npos;  // else two paths may have one key
}

bool is_empty_dict(PyObject* value) {
  return value != nullptr && (PyODict_CheckExact(value) || PyDict_CheckExact(value)) && PyDict_GET_SIZE(value) == 0;
}

bool is_version(PyObject* value) { return value == Py_None || small_integer(value).has_value(); }

}  // namespace

// One look at a module and those below it. Nothing changes meanwhile, so each class is looked at once.
class ModuleWalk {
 public:
  ModuleWalk(const ModuleRules& rules, ModuleState& out) : rules_(rules), out_(out) {}

  // False when the module is not ordinary.
  bool visit(PyObject* module, std::string& prefix, int depth);

 private:
  struct Class {
    PyTypeObject* type;
    bool ordinary;
    PyObject* version;
    nb::object wrapper;  // what ModuleRules was told of it; None for a type that is no wrapper
  };

  Class judge(PyTypeObject* type) const;
  const Class& class_of(PyTypeObject* type);
  bool look(nb::handle own, std::array<PyObject*, ModuleRules::attributes>& found) const;
  bool take(PyObject* tensors, PyObject* without, const std::string& prefix, bool parameters);
  void see_through(const nb::object& wrapper);

  const ModuleRules& rules_;
  ModuleState& out_;
  std::vector<Class> classes_;
};

ModuleWalk::Class ModuleWalk::judge(PyTypeObject* type) const {
  Class found{type, false, inherited(type, rules_.names_[ModuleRules::version]), nb::none()};
  PyTypeObject* meta = Py_TYPE(type);
  // get_extra_state is asked of the class itself.
  if (meta->tp_getattro != PyType_Type.tp_getattro || inherited(meta, rules_.extra_) != nullptr) return found;
  for (const auto& function : rules_.functions_) {
    if (inherited(type, function.name) != function.own.ptr()) return found;
  }
  for (uint32_t i = ModuleRules::parameters; i < ModuleRules::attributes; ++i) {
    if (inherited(type, rules_.names_[i]) != nullptr) return found;
  }
  found.ordinary = found.version != nullptr && is_version(found.version);
  if (found.ordinary) found.wrapper = rules_.wrapper_of_(nb::handle(reinterpret_cast<PyObject*>(type)));
  return found;
}

const ModuleWalk::Class& ModuleWalk::class_of(PyTypeObject* type) {
  for (const Class& known : classes_) {
    if (known.type == type) return known;
  }
  return classes_.emplace_back(judge(type));
}

bool ModuleWalk::take(PyObject* tensors, PyObject* without, const std::string& prefix, bool parameters) {
  Py_ssize_t at = 0;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  while (PyDict_Next(tensors, &at, &key, &value)) {
    if (!is_name(key)) return false;
    if (value == Py_None) continue;
    if (without != nullptr) {
      const int left_out = PySet_Contains(without, key);
      if (left_out < 0) throw nb::python_error();
      if (left_out != 0) continue;
    }
    if (!rules_.torch_.is_tensor(value)) return false;
    const size_t name_at = out_.names_.size();
    out_.names_ += prefix;
    out_.names_ += ascii_of(key);
    out_.members_.push_back({nb::borrow(value), name_at, out_.names_.size() - name_at, parameters});
  }
  return true;
}

// The attributes of a module itself. One pass takes a third of the time of a search for each.
bool ModuleWalk::look(nb::handle own, std::array<PyObject*, ModuleRules::attributes>& found) const {
  Py_ssize_t at = 0;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  while (PyDict_Next(own.ptr(), &at, &key, &value)) {
    if (!PyUnicode_CheckExact(key)) return false;
    nb::object name = nb::borrow(key);
    if (!PyUnicode_CHECK_INTERNED(key)) {  // then it may be equal to one of ours, and another object
      PyObject* same = name.release().ptr();
      PyUnicode_InternInPlace(&same);
      name = nb::steal(same);
    }
    const uint32_t* slot = rules_.slots_.number_of(name.ptr());
    if (slot == nullptr) continue;
    if (*slot == ModuleRules::attributes) return false;
    found[*slot] = value;
  }
  return true;
}

void ModuleWalk::see_through(const nb::object& wrapper) {
  for (const nb::object& known : out_.wrappers_) {
    if (known.is(wrapper)) return;
  }
  out_.wrappers_.push_back(wrapper);
}

bool ModuleWalk::visit(PyObject* module, std::string& prefix, int depth) {
  if (depth > depth_max) return false;
  const Class& kind = class_of(Py_TYPE(module));
  if (!kind.ordinary) return false;
  const nb::object own = nb::steal(PyObject_GenericGetDict(module, nullptr));
  if (!own.is_valid()) throw nb::python_error();
  std::array<PyObject*, ModuleRules::attributes> found{};
  found[ModuleRules::version] = kind.version;
  const nb::object wrapper = kind.wrapper;
  if (!look(own, found)) return false;
  const auto [version, parameters, buffers, modules, transient, hooks, pre_hooks] = found;
  for (PyObject* dict : {parameters, buffers, modules}) {
    if (dict == nullptr || !PyDict_CheckExact(dict)) return false;
  }
  if (transient == nullptr || !PySet_CheckExact(transient) || !is_version(version)) return false;
  if (!is_empty_dict(hooks) || !is_empty_dict(pre_hooks)) return false;
  if (!wrapper.is_none() && is_empty_dict(parameters) && is_empty_dict(buffers) && PyDict_GET_SIZE(modules) == 1) {
    PyObject* inner = entry(modules, wrapper[0]);
    if (inner != nullptr && inner != Py_None) {
      see_through(wrapper);
      return visit(inner, prefix, depth + 1);
    }
  }

  std::string& text = out_.metadata_;
  text += out_.modules_++ == 0 ? "[\"" : ",[\"";
  text.append(prefix, 0, prefix.empty() ? 0 : prefix.size() - 1);
  text += "\",{\"d\":{\"version\":";
  text += version == Py_None ? "null" : std::to_string(*small_integer(version));
  text += "}}]";

  Py_ssize_t at = 0;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  if (PyDict_GET_SIZE(parameters) != 0) {
    while (PyDict_Next(buffers, &at, &key, &value)) {
      if (entry(parameters, key) != nullptr) return false;
    }
  }
  if (!take(parameters, nullptr, prefix, true)) return false;
  if (!take(buffers, PySet_GET_SIZE(transient) != 0 ? transient : nullptr, prefix, false)) return false;
  at = 0;
  while (PyDict_Next(modules, &at, &key, &value)) {
    if (!is_name(key)) return false;
    if (value == Py_None) continue;
    const size_t length = prefix.size();
    prefix += ascii_of(key);
    prefix += '.';
    if (!visit(value, prefix, depth + 1)) return false;
    prefix.resize(length);
  }
  return true;
}

ModuleRules::ModuleRules(const Torch& torch, const nb::dict& functions, nb::object wrapper_of)
    : torch_(torch), wrapper_of_(std::move(wrapper_of)), extra_(interned("get_extra_state")) {
  for (const char* name : {"_version", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set",
                           "_state_dict_hooks", "_state_dict_pre_hooks"}) {
    names_.push_back(interned(name));
    slots_.add(names_.back().ptr(), static_cast<uint32_t>(names_.size() - 1));
  }
  for (const auto& [key, function] : functions) {
    const nb::str name = interned(nb::cast<nb::str>(key).c_str());
    functions_.push_back({name, nb::borrow(function)});
    if (name.ptr() != extra_.ptr()) slots_.add(name.ptr(), attributes);
  }
  for (const char* name : {"__getattribute__", "__class__"}) {  // where those are others, nothing is known
    const nb::str text = interned(name);
    functions_.push_back({text, nb::borrow(inherited(&PyBaseObject_Type, text))});
  }
}

std::optional<ModuleState> ModuleRules::state_of(nb::handle module) const {
  ModuleState found;
  std::string prefix;
  if (!ModuleWalk(*this, found).visit(module.ptr(), prefix, 0)) return std::nullopt;
  return found;
}

void bind_modules(nb::module_& module) {
  nb::class_<ModuleState>(module, "ModuleState", "What state_dict() of a module gives; stands for it in a state.")
      .def_prop_ro(
          "wrappers",
          [](const ModuleState& self) {
            nb::list found;
            for (const nb::object& wrapper : self.wrappers()) found.append(wrapper);
            return found;
          },
          nb::sig("def wrappers(self) -> list[tuple[str, str]]"));
  nb::class_<ModuleRules>(module, "ModuleRules", "Knows the state of ordinary modules; see native/bind/modules.h.")
      .def(nb::init<const Torch&, const nb::dict&, nb::object>(), nb::arg("torch"), nb::arg("functions"),
           nb::arg("wrapper_of"), nb::keep_alive<1, 2>(),
           nb::sig("def __init__(self, torch: Torch, functions: dict[str, object], wrapper_of: "
                   "collections.abc.Callable[[type], tuple[str, str] | None]) -> None"))
      .def("state_of", &ModuleRules::state_of, nb::arg("module"));
}

}  // namespace tierload

// C++ errors become the classes of tierload/errors.py, with what they carry.
#include <cstring>

#include "bind/bind.h"
#include "tierload/error.h"

namespace tierload {
namespace {

nb::object error_class(const char* name) { return nb::module_::import_("tierload.errors").attr(name); }

void raise(const char* name, const std::exception& error) {
  const nb::object type = error_class(name);
  PyErr_SetObject(type.ptr(), nb::str(error.what()).ptr());
}

void raise_io(const IoError& error) {
  // OSError(errno, text, filename): `errno` and `filename` are set, and the text keeps the operation.
  const std::string text = error.op + ": " + std::strerror(error.code);
  const nb::object type = error_class("StoreIOError");
  const nb::object value = type(error.code, text, error.path);
  PyErr_SetObject(type.ptr(), value.ptr());
}

void raise_busy(const BusyError& error) {
  const nb::object type = error_class("StoreBusy");
  nb::dict more;
  // Anybody may have written into LOCK.
  const Py_ssize_t length = static_cast<Py_ssize_t>(error.holder.size());
  more["holder"] = nb::steal<nb::str>(PyUnicode_DecodeUTF8(error.holder.data(), length, "replace"));
  const nb::object value = type(nb::str(error.what()), **more);
  PyErr_SetObject(type.ptr(), value.ptr());
}

void raise_page(const CorruptPageError& error) {
  const nb::object type = error_class("CorruptPage");
  nb::dict where;
  where["page"] = error.row;
  where["path"] = error.path;
  where["offset"] = error.offset;
  const nb::object value = type(nb::str(error.what()), **where);
  PyErr_SetObject(type.ptr(), value.ptr());
}

}  // namespace

void bind_errors() {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const CorruptPageError& error) {
      raise_page(error);
    } catch (const CorruptError& error) {
      raise("CorruptStore", error);
    } catch (const UnsupportedError& error) {
      raise("UnsupportedFormat", error);
    } catch (const BusyError& error) {
      raise_busy(error);
    } catch (const FencedError& error) {
      raise("StoreFenced", error);
    } catch (const PoisonedError& error) {
      raise("StorePoisoned", error);
    } catch (const CancelledError& error) {
      raise("SaveCancelled", error);
    } catch (const AcceleratorError& error) {
      raise("AcceleratorError", error);
    } catch (const UsageError& error) {
      raise("InvalidRequest", error);
    } catch (const IoError& error) {
      raise_io(error);
    }
  });
}

}  // namespace tierload

// Converts strings between Python and the core. The core's strings are bytes, because a path need
// not be UTF-8. Like os.fsdecode(), Python represents bytes that are not UTF-8 as lone surrogates,
// which are converted back unchanged.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <string_view>

namespace loadstone::python {

// Sets `text` to the bytes of a Python string. `owner` keeps them alive if the string does not.
// Returns false if `source` is not a string.
inline bool text_from_python(nanobind::handle source, std::string_view& text,
                             nanobind::object& owner) noexcept {
  if (PyUnicode_Check(source.ptr()) == 0) return false;
  Py_ssize_t size = 0;
  if (const char* const utf8 = PyUnicode_AsUTF8AndSize(source.ptr(), &size)) {
    text = {utf8, static_cast<std::size_t>(size)};
    return true;
  }
  // A surrogate that represents no byte becomes three bytes of invalid UTF-8, which match no name.
  for (const char* const errors : {"surrogateescape", "surrogatepass"}) {
    PyErr_Clear();
    owner = nanobind::steal(PyUnicode_AsEncodedString(source.ptr(), "utf-8", errors));
    char* bytes = nullptr;
    if (owner.is_valid() && PyBytes_AsStringAndSize(owner.ptr(), &bytes, &size) == 0) {
      text = {bytes, static_cast<std::size_t>(size)};
      return true;
    }
  }
  PyErr_Clear();
  return false;
}

inline nanobind::handle text_to_python(std::string_view text) noexcept {
  return PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogateescape");
}

}  // namespace loadstone::python

// Replaces nanobind's casters, which support only UTF-8.
namespace nanobind::detail {

template <>
struct type_caster<std::string_view> {
  NB_TYPE_CASTER(std::string_view, const_name("str"))

  bool from_python(handle source, uint32_t /*flags*/, cleanup_list* /*cleanup*/) noexcept {
    return loadstone::python::text_from_python(source, value, owner_);
  }
  static handle from_cpp(std::string_view text, rv_policy /*policy*/,
                         cleanup_list* /*cleanup*/) noexcept {
    return loadstone::python::text_to_python(text);
  }

 private:
  object owner_;
};

template <>
struct type_caster<std::string> {
  NB_TYPE_CASTER(std::string, const_name("str"))

  bool from_python(handle source, uint32_t /*flags*/, cleanup_list* /*cleanup*/) noexcept {
    object owner;
    std::string_view text;
    if (!loadstone::python::text_from_python(source, text, owner)) return false;
    value = text;
    return true;
  }
  static handle from_cpp(const std::string& text, rv_policy /*policy*/,
                         cleanup_list* /*cleanup*/) noexcept {
    return loadstone::python::text_to_python(text);
  }
};

}  // namespace nanobind::detail
